"""Patients' doses and measured concentrations, read from and written to CSV files."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

__all__ = ["Cohort", "PatientRecord", "make_patient_record", "read_patients", "write_patients"]

_COLUMNS = ("id", "time", "amt", "dv")
# If one of these is not 0, or not 0 or 1 in the second group, the row needs another model.
_OTHER_MODELS = ("rate", "dur", "tinf", "ss", "ii", "addl", "cens", "blq", "bloq", "ltbs")
_OTHER_KINDS = ("dvid", "ytype", "adm")
_DATES = ("date", "dat1", "dat2", "dat3")
_UNITS = {
    "time": {"h": 1.0, "hr": 1.0, "hour": 1.0, "hours": 1.0, "min": 1 / 60, "d": 24.0, "day": 24.0,
             "days": 24.0},
    "amt": {"mg": 1.0, "g": 1e3, "ug": 1e-3},
    "dv": {"mg/l": 1.0, "ug/ml": 1.0, "ng/ml": 1e-3, "ug/l": 1e-3},
    "wt": {"kg": 1.0, "g": 1e-3},
}  # fmt: skip
_UNIT_COLUMNS = {f"{name}{end}": name for name in _UNITS for end in ("u", "_unit", "_units")}
_ABSENT = ("", ".", "na", "nan")
_BRACKETS = re.compile(r"^(?P<name>.*?)\s*(?:[(\[]\s*(?P<unit>.*?)\s*[)\]])?$", re.DOTALL)
_SHORTEST = 16  # smallest padded number of concentrations


class PatientRecord(NamedTuple):
    """A patient's doses and concentrations.

    Attributes
    ----------
    weight
        Shape (): the body weight in kg.
    dose_times, doses
        Shape (k,): times (h, ascending) and doses (mg). A dose of 0 is padding.
    times, concentrations
        Shape (n,): times (h, ascending, after the first dose) and measured concentrations (mg/L).
        A concentration of NaN is padding.
    """

    weight: Float[Array | np.ndarray, ""]
    dose_times: Float[Array | np.ndarray, " k"]
    doses: Float[Array | np.ndarray, " k"]
    times: Float[Array | np.ndarray, " n"]
    concentrations: Float[Array | np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Cohort:
    """Patients and their names.

    The records are padded to few different shapes, so that few programs are compiled.
    Concentrations are padded with NaN at the last time, doses with 0.
    """

    names: tuple[str, ...]
    records: tuple[PatientRecord, ...]

    @property
    def measurements(self) -> int:
        """Number of concentrations of all patients."""
        return sum(int(np.sum(np.isfinite(r.concentrations))) for r in self.records)


Pair = tuple[float | int, float | int]


def make_patient_record(
    weight: float | int,
    doses: Iterable[Pair],
    measured: Iterable[Pair],
) -> PatientRecord:
    """Make a padded record of one patient.

    Parameters
    ----------
    weight
        Body weight in kg.
    doses
        Pairs (time in h, dose in mg), in ascending order of times.
    measured
        Pairs (time in h, concentration in mg/L), in ascending order of times.

    Examples
    --------
    >>> from mpigrad_apps.population import make_patient_record
    >>> record = make_patient_record(68.0, [(0, 100.0)], [(0.5, 1.2), (2.0, 1.6)])
    >>> record.doses.shape, record.concentrations.shape
    ((1,), (16,))
    """
    dose_times, amounts = _padded(doses, 1, 0.0)
    times, concentrations = _padded(measured, _SHORTEST, math.nan)
    return PatientRecord(np.asarray(float(weight)), dose_times, amounts, times, concentrations)


def _padded(pairs: Iterable[Pair], shortest: int, value: float) -> tuple[np.ndarray, np.ndarray]:
    """Return times and values, padded to a power of two."""
    times, values = np.array(list(pairs), float).T
    more = max(shortest, 1 << (len(times) - 1).bit_length()) - len(times)
    return np.pad(times, (0, more), mode="edge"), np.pad(values, (0, more), constant_values=value)


def read_patients(path: str | os.PathLike[str]) -> Cohort:
    """Read a table of events: a CSV file with a row for each dose and each measurement.

    The columns have the names that population modellers use, in any order and in upper or lower
    case:

    - `id`: the patient.
    - `time`: in h.
    - `amt`: a dose into the gut, in mg.
    - `dv`: a concentration, in mg/L.
    - `wt`: the body weight in kg, in at least one row of each patient. Without this column the
      weight is 70 kg.

    A unit may follow the name of a column in brackets, as in "dv (ng/mL)", or be in a column of its
    own, as `dvu` or `dv_unit`: h, min or day, mg, g or ug, mg/L, ug/mL, ug/L or ng/mL, kg or g.

    A row has a dose or a concentration. The other value is empty, ".", or 0 for `amt`. The columns
    `evid` (0: a measurement, 1: a dose), `mdv` (0 or 1) and `cmt` (1 for a dose, 1 or 2 for a
    concentration) are checked if they are present. Some columns belong to other models: rate, dur,
    tinf, ss, ii, addl, cens, blq, bloq and ltbs must be 0, and dvid, ytype and adm 0 or 1. Dates
    (date, dat1, ...) and rows that the column `c` marks to be left out are errors. Other columns
    are ignored.

    Raises
    ------
    ValueError
        If the file is not CSV in UTF-8, a column is missing or present twice, a unit is unknown, a
        value is not a number, a time is not finite, a concentration is not positive or not after
        the first dose, a weight changes, a patient has no dose, concentration or weight, a row
        contradicts itself, or an event needs another model. The message names the file and the
        line.
    """
    path = pathlib.Path(path)
    events: dict[str, list[tuple[float, float, float]]] = {}  # (time, dose or NaN, concentration)
    weights: dict[str, float] = {}
    for where, row in _rows(path):
        name = row["id"]
        if not name:
            raise ValueError(f"{where}: no id")
        events.setdefault(name, [])
        event = _event(row, where)
        if event is not None:
            events[name].append(event)
        weight = _number(row, "wt", where) if "wt" in row else 70.0
        if weight is None:  # another row of the patient has the weight
            continue
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"{where}: wt: expected a positive weight in kg, got {weight:g}.")
        if weights.setdefault(name, weight) != weight:
            raise ValueError(
                f"{where}: the weight of patient {name} changes from {weights[name]:g} to "
                f"{weight:g}. The model has one weight for each patient."
            )
    if not events:
        raise ValueError(f"{path}: there are no patients.")
    records = [_patient(f"{path}: patient {n}", weights.get(n), events[n]) for n in events]
    return Cohort(tuple(events), tuple(records))


def _rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the values by column of each row that is not empty."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, strict=True)
            parts = [_BRACKETS.match(name.strip().lower()) for name in next(rows, [])]
            header = [part["name"] for part in parts if part]
            units = {f"{p['name']} unit": p["unit"] for p in parts if p and p["unit"]}
            missing = [name for name in _COLUMNS if name not in header]
            if missing:
                commas = " Separate the values by commas." * (len(header) == 1)
                raise ValueError(
                    f"{path}: there is no column {', '.join(missing)}. The header has "
                    f"{', '.join(header) or 'no columns'}.{commas}"
                )
            for name in ("unit", "units"):
                if name in header:
                    raise ValueError(
                        f"{path}: expected units in columns such as dvu, got a column {name}. Name "
                        "it after the column whose unit it has."
                    )
            for name in header:
                if name and header.count(name) > 1:
                    raise ValueError(
                        f"{path}: expected one column {name}, got {header.count(name)}."
                    )
            for values in rows:
                if not any(value.strip() for value in values):
                    continue
                where = f"{path}, line {rows.line_num}"
                if len(values) != len(header):
                    raise ValueError(
                        f"{where}: expected {len(header)} values, one for each column, got "
                        f"{len(values)}."
                    )
                row = dict(zip(header, (value.strip() for value in values), strict=True))
                _check_row(row, where)
                of_row = {
                    f"{name} unit": row[column]
                    for column, name in _UNIT_COLUMNS.items()
                    if row.get(column, "").lower() not in _ABSENT
                }
                yield where, row | units | of_row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}.") from None


def _check_row(row: Mapping[str, str], where: str) -> None:
    """Raise an error if a row has a date, or is one to be left out."""
    for column in _DATES:
        if row.get(column, "").lower() not in _ABSENT:
            raise ValueError(
                f"{where}: {column}: expected times in h since one start in the column time, got "
                f"the date {row[column]}. Convert them, and leave {column} out."
            )
    if row.get("c", "").lower() not in (*_ABSENT, "0"):
        raise ValueError(
            f"{where}: c = {row['c']} marks a row to be left out. Remove the row from the file."
        )


def _event(row: Mapping[str, str], where: str) -> tuple[float, float, float] | None:
    """Return (time, dose, concentration) of a row, or None if it has no event."""
    kind, unmeasured = _number(row, "evid", where), _number(row, "mdv", where)
    if kind not in (None, 0.0, 1.0):
        raise ValueError(f"{where}: evid: expected 0 (a measurement) or 1 (a dose), got {kind:g}.")
    if unmeasured not in (None, 0.0, 1.0):
        raise ValueError(f"{where}: mdv: expected 0, or 1 if dv is missing, got {unmeasured:g}.")
    time = _number(row, "time", where)
    if time is None or not math.isfinite(time):
        raise ValueError(f"{where}: time: expected a finite time in h, got {row['time']!r}.")
    dose, concentration = _number(row, "amt", where), _number(row, "dv", where)
    # A dose goes into the first compartment. Concentrations are measured in the second.
    places = ("cmt",) if dose or (concentration and not unmeasured) else ()
    for columns, most in ((_OTHER_MODELS, 0), (_OTHER_KINDS, 1), (places, 1 if dose else 2)):
        for column in columns:
            if _number(row, column, where) not in (None, *range(most + 1)):
                raise ValueError(
                    f"{where}: {column} = {row[column]} needs another model. This model has single "
                    "doses into the gut and plain concentrations."
                )
    if kind is not None and bool(kind) != bool(dose):
        raise ValueError(
            f"{where}: evid = {kind:g} and amt = {row['amt']!r} contradict each other. A dose has "
            "evid = 1 and an amount, a measurement evid = 0 and no amount."
        )
    if dose:
        if not (dose > 0 and math.isfinite(dose)):
            raise ValueError(f"{where}: amt: expected a positive dose in mg, got {dose:g}.")
        if concentration:
            raise ValueError(
                f"{where}: the row has a dose and a concentration. Give each a row of its own."
            )
        return time, dose, math.nan
    if concentration is None or unmeasured:
        return None
    if not (concentration > 0 and math.isfinite(concentration)):
        raise ValueError(
            f"{where}: dv: expected a positive concentration in mg/L, got {concentration:g}. Leave "
            "out measurements below the limit of quantification, because errors are relative."
        )
    return time, math.nan, concentration


def _number(row: Mapping[str, str], column: str, where: str) -> float | None:
    text = row.get(column, "")
    if text.lower() in _ABSENT:
        return None
    try:
        value = float(text.replace("_", "no digit"))  # Python would ignore an underscore
    except ValueError:
        raise ValueError(f"{where}: {column}: expected a number, got {text!r}.") from None
    unit = row.get(f"{column} unit")
    if unit is None or column not in _UNITS:
        return value
    factor = _UNITS[column].get(unit.lower().replace("µ", "u").replace("μ", "u"))
    if factor is None:
        raise ValueError(
            f"{where}: {column}: expected one of the units {', '.join(_UNITS[column])}, got "
            f"{unit!r}. Convert the column."
        )
    return factor * value


def _patient(
    where: str, weight: float | None, events: list[tuple[float, float, float]]
) -> PatientRecord:
    events = sorted(events, key=lambda event: event[0])
    doses = [(time, dose) for time, dose, _ in events if not math.isnan(dose)]
    seen = [(time, value) for time, dose, value in events if math.isnan(dose)]
    if weight is None:
        raise ValueError(
            f"{where} has no weight. Give it in one row, or leave out the column wt for 70 kg."
        )
    if not doses:
        raise ValueError(f"{where} has no dose.")
    if not seen:
        raise ValueError(f"{where} has no concentration.")
    if seen[0][0] <= doses[0][0]:
        raise ValueError(
            f"{where} has a concentration at {seen[0][0]:g} h, but the first dose is at "
            f"{doses[0][0]:g} h. Leave out concentrations up to the first dose: the model has none."
        )
    return make_patient_record(weight, doses, seen)


def write_patients(path: str | os.PathLike[str], cohort: Cohort) -> None:
    """Write a cohort to a CSV table that `read_patients` reads.

    Examples
    --------
    >>> from mpigrad_apps.population import Cohort, make_patient_record
    >>> from mpigrad_apps.population import read_patients, write_patients
    >>> record = make_patient_record(68.0, [(0, 100.0)], [(0.5, 1.2), (2.0, 1.6)])
    >>> write_patients("patients.csv", Cohort(("a",), (record,)))
    >>> read_patients("patients.csv").measurements
    2
    """
    with pathlib.Path(path).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*_COLUMNS, "wt"])
        for name, known in zip(cohort.names, cohort.records, strict=True):
            doses = [
                (t, d, "") for t, d in zip(known.dose_times, known.doses, strict=True) if d > 0
            ]
            seen = [
                (t, "", c)
                for t, c in zip(known.times, known.concentrations, strict=True)
                if np.isfinite(c)
            ]
            for time, dose, value in sorted(doses + seen, key=lambda event: float(event[0])):
                table.writerow([name, *map(_text, (time, dose, value, known.weight))])


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(float(value))  # type: ignore[arg-type]
