"""Tables of events: what is read from them, and what is refused with its line."""

import numpy as np
import pytest

from mpigrad.problems.population import Kinetics, read, simulate, write

HEADER = "ID,TIME,AMT,DV,WT\n"
DOSE, SAMPLE = "a,0,100,.,70\n", "a,2,0,1.5,70\n"

pytestmark = pytest.mark.ranks(1)


def test_what_is_written_is_read(tmp_path):
    cohort, truth = simulate(4, seed=3, kinetics=Kinetics())
    write(tmp_path / "table.csv", cohort)
    again = read(tmp_path / "table.csv")
    assert again.names == cohort.names
    for a, b in zip(again.records, cohort.records, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    assert cohort.measurements == sum(len(np.unique(r.times)) for r in cohort.records)
    assert truth.individual.shape == (4, 5)
    np.testing.assert_array_equal(cohort.records[1].doses, [50, 50, 50, 0])


def test_columns_in_any_order_and_events_that_mean_nothing(tmp_path):
    (tmp_path / "table.csv").write_text(
        "dv,age,id,amt,mdv,evid,time\n"
        ".,51,b,80,1,1,1\n2.5,51,b,.,0,0,3\n1.5,51,b,,0,0,2\n,,,,,,\n9,51,b,,1,0,4\n"
    )
    (record,) = read(tmp_path / "table.csv").records
    assert record.weight == 70
    np.testing.assert_array_equal(record.doses, [80])
    np.testing.assert_array_equal(record.times[:3], [2, 3, 3])
    np.testing.assert_array_equal(record.concentrations[:3], [1.5, 2.5, np.nan])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column id, time, amt, dv"),
        ("id,time,amt\n", "no column dv"),
        (HEADER, "no patients"),
        (HEADER + DOSE, "patient a has no concentration"),
        (HEADER + SAMPLE, "patient a has no dose"),
        (HEADER + DOSE + "a,2,.\n", "line 3: 3 values for 5 columns"),
        (HEADER + DOSE + "a,2,.,high,70\n", "line 3: dv: not a number: 'high'"),
        (HEADER + DOSE + "a,.,.,1,70\n", "line 3: time: a time in h"),
        (HEADER + DOSE + "a,2,.,0,70\n", "line 3: dv: a positive concentration"),
        (HEADER + DOSE + "a,2,.,inf,70\n", "line 3: dv: a positive concentration"),
        (HEADER + DOSE + "a,2,.,1,71\n", "weight of patient a changes from 70 to 71"),
        (HEADER + "a,0,-1,.,70\n", "line 2: amt: a positive dose"),
        (HEADER + "a,0,100,2,70\n", "a dose and a concentration"),
        (HEADER + "a,0,100,.,0\n", "wt: a positive weight"),
        (HEADER + ",0,100,.,70\n", "line 2: no id"),
        (HEADER + DOSE + "a,0,.,1,70\n", "a concentration at 0 h, but the first dose is at 0 h"),
        ("id,time,amt,dv,evid\na,0,100,.,4\n", "evid = 4"),
        ("id,time,amt,dv,rate\na,0,100,.,50\n", "rate = 50: the model has single doses"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(tmp_path, text, said):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ValueError, match=r"table\.csv") as raised:
        read(tmp_path / "table.csv")
    assert said in str(raised.value)
