"""Tables of events: what is read from them, and what is refused with its line."""

import numpy as np
import pytest

from mpigrad_apps.population import Kinetics, read_patients, simulate, write_patients

HEADER = "ID,TIME,AMT,DV,WT\n"
DOSE, SAMPLE = "a,0,100,.,70\n", "a,2,0,1.5,70\n"

pytestmark = pytest.mark.ranks(1)


def test_written_patients_are_read_back(tmp_path):
    cohort, truth = simulate(4, seed=3, kinetics=Kinetics())
    write_patients(tmp_path / "table.csv", cohort)
    again = read_patients(tmp_path / "table.csv")
    assert again.names == cohort.names
    for a, b in zip(again.records, cohort.records, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    assert cohort.measurements == sum(len(np.unique(r.times)) for r in cohort.records)
    assert truth.individual.shape == (4, 5)
    np.testing.assert_array_equal(cohort.records[1].doses, [50, 50, 50, 0])


def test_columns_in_any_order_and_events_that_mean_nothing(tmp_path):
    (tmp_path / "table.csv").write_text(
        "dv,age,id,amt,mdv,evid,time,cmt\n"
        ".,51,b,80,1,1,1,1\n2.5,51,b,.,0,0,3,2\n1.5,51,b,,0,0,2,1\n,,,,,,,\n9,51,b,,1,0,4,3\n"
    )
    (record,) = read_patients(tmp_path / "table.csv").records
    assert record.weight == 70
    np.testing.assert_array_equal(record.doses, [80])
    np.testing.assert_array_equal(record.times[:3], [2, 3, 3])
    np.testing.assert_array_equal(record.concentrations[:3], [1.5, 2.5, np.nan])


def test_one_row_may_have_the_weight(tmp_path):
    (tmp_path / "table.csv").write_text(HEADER + "a,0,100,.,.\n" + SAMPLE + "a,3,.,1,\n")
    assert read_patients(tmp_path / "table.csv").records[0].weight == 70


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no column id, time, amt, dv"),
        ("id,time,amt\n", "no column dv"),
        (HEADER, "no patients"),
        (HEADER + DOSE, "patient a has no concentration"),
        (HEADER + SAMPLE, "patient a has no dose"),
        (HEADER + DOSE + "a,2,.\n", "line 3: expected 5 values, one for each column, got 3"),
        (HEADER + DOSE + "a,2,.,high,70\n", "line 3: dv: expected a number, got 'high'"),
        (HEADER + DOSE + "a,.,.,1,70\n", "line 3: time: expected a finite time in h"),
        (HEADER + DOSE + "a,2,.,0,70\n", "line 3: dv: expected a positive concentration"),
        (HEADER + DOSE + "a,2,.,inf,70\n", "line 3: dv: expected a positive concentration"),
        (HEADER + DOSE + "a,2,.,1,71\n", "weight of patient a changes from 70 to 71"),
        (HEADER + "a,0,-1,.,70\n", "line 2: amt: expected a positive dose"),
        (HEADER + "a,0,100,2,70\n", "a dose and a concentration"),
        (HEADER + "a,0,100,.,0\n", "wt: expected a positive weight"),
        (HEADER + ",0,100,.,70\n", "line 2: no id"),
        (HEADER + DOSE + "a,0,.,1,70\n", "a concentration at 0 h, but the first dose is at 0 h"),
        (
            "id,time,amt,dv,evid\na,0,100,.,4\n",
            "evid: expected 0 (a measurement) or 1 (a dose), got 4",
        ),
        ("id,time,amt,dv,rate\na,0,100,.,50\n", "rate = 50 needs another model"),
        ("id,time,amt,dv,cmt\na,0,100,.,2\n", "cmt = 2 needs another model"),
        ("id,time,amt,dv,cmt\na,0,100,.,1\na,2,.,88,3\n", "line 3: cmt = 3 needs another model"),
        ("id,time,amt,dv,dvid\na,2,.,88,2\n", "dvid = 2 needs another model"),
        ("id,time,amt,dv,evid\na,0,.,2,1\n", "line 2: evid = 1 and amt = '.'"),
        ("id,time,amt,dv,evid\na,0,100,.,0\n", "line 2: evid = 0 and amt = '100'"),
        (
            "id,time,amt,dv,mdv\na,0,100,.,2\n",
            "line 2: mdv: expected 0, or 1 if dv is missing, got 2",
        ),
        ("id,time,amt,dv,dv\na,2,.,1,3\n", "expected one column dv, got 2"),
        (HEADER + DOSE + "a,1_0,.,1,70\n", "time: expected a number, got '1_0'"),
        (HEADER + "a,0,100,.,.\n", "patient a has no weight"),
        (HEADER + '"a,0,100,.,70\n', "is not a CSV file in UTF-8"),
        (HEADER + "é,0,100,.,70\n", "is not a CSV file in UTF-8"),
    ],
)
def test_errors_name_the_line_of_an_invalid_table(tmp_path, text, said):
    (tmp_path / "table.csv").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"table\.csv") as raised:
        read_patients(tmp_path / "table.csv")
    assert said in str(raised.value)
