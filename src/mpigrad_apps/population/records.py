"""What is known of patients: doses and measured concentrations, read from and written to CSV."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

__all__ = ["Cohort", "PatientRecord", "make_patient_record", "read_patients", "write_patients"]

_COLUMNS = ("id", "time", "amt", "dv")
# Where these are not 0, or 1 in the second group, the rows are another model's.
_OTHER_MODELS = ("rate", "dur", "tinf", "ss", "ii", "addl", "cens", "blq", "bloq", "ltbs")
_OTHER_KINDS = ("dvid", "ytype", "adm")
_ABSENT = ("", ".", "na", "nan")
_SHORTEST = 16  # concentrations


class PatientRecord(NamedTuple):
    """A patient's doses and concentrations.

    Attributes
    ----------
    weight
        Shape (): the body weight in kg.
    dose_times, doses
        Shape (k,): when (h, ascending) and how much (mg). 0: no dose, there for the length alone.
    times, concentrations
        Shape (n,): when (h, ascending, after the first dose) and what was measured (mg/L). NaN: no
        measurement, there for the length alone.
    """

    weight: Float[Array | np.ndarray, ""]
    dose_times: Float[Array | np.ndarray, " k"]
    doses: Float[Array | np.ndarray, " k"]
    times: Float[Array | np.ndarray, " n"]
    concentrations: Float[Array | np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Cohort:
    """Patients by their names.

    Records have few different shapes, so that few programs are compiled: concentrations are padded
    with NaN at the last time, doses with 0.
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
    """A record of (time in h, dose in mg) and (time in h, concentration in mg/L), padded.

    Each in ascending order of times; the weight is in kg.
    """
    dose_times, amounts = _padded(doses, 1, 0.0)
    times, concentrations = _padded(measured, _SHORTEST, math.nan)
    return PatientRecord(np.asarray(float(weight)), dose_times, amounts, times, concentrations)


def _padded(pairs: Iterable[Pair], shortest: int, value: float) -> tuple[np.ndarray, np.ndarray]:
    """Times and values, as long as a power of two."""
    times, values = np.array(list(pairs), float).T
    more = max(shortest, 1 << (len(times) - 1).bit_length()) - len(times)
    return np.pad(times, (0, more), mode="edge"), np.pad(values, (0, more), constant_values=value)


def read_patients(path: str | os.PathLike[str]) -> Cohort:
    """Read a table of events: a row for each dose and each measurement.

    The columns, in any order and in upper or lower case, have the names that population modellers
    use: `id`, the patient; `time` in h; `amt`, a dose in mg into the gut; `dv`, a concentration in
    mg/L; and, if there is one, `wt`, the body weight in kg, in one row of each patient at least (70
    without the column). A row has a dose or a concentration; the other is empty, "." or, for amt,
    0. Of `evid` 0, a measurement, and 1, a dose, are understood, of `mdv` 0 and 1; `cmt` of a dose
    is 1, the gut, of a concentration 1 or 2. Other columns are not looked at, but for those that
    stand for another model than this one: rate, dur, tinf, ss, ii, addl, cens, blq, bloq, ltbs must
    be 0, and dvid, ytype, adm 0 or 1.

    Raises
    ------
    ValueError
        With the file and the line: a column that is missing or there twice, no number, a time that
        is not finite, a concentration that is not positive or not after the first dose, a weight
        that changes, a patient without dose, concentration or weight, a row that contradicts
        itself, an event that the model does not have; what is no CSV in UTF-8.
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
        if weight is None:  # another row of the patient says it
            continue
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"{where}: wt: a positive weight in kg, not {weight:g}")
        if weights.setdefault(name, weight) != weight:
            raise ValueError(
                f"{where}: the weight of patient {name} changes from {weights[name]:g} to "
                f"{weight:g}: the model has one for each patient"
            )
    if not events:
        raise ValueError(f"{path}: no patients")
    records = [_patient(f"{path}: patient {n}", weights.get(n), events[n]) for n in events]
    return Cohort(tuple(events), tuple(records))


def _rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Of each row that is not empty, where it stands and its values by their columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, strict=True)
            header = [name.strip().lower() for name in next(rows, [])]
            missing = [name for name in _COLUMNS if name not in header]
            if missing:
                raise ValueError(f"{path}: no column {', '.join(missing)}; there are {header}")
            for name in header:
                if name and header.count(name) > 1:
                    raise ValueError(f"{path}: there are {header.count(name)} columns {name}")
            for values in rows:
                if not any(value.strip() for value in values):
                    continue
                where = f"{path}, line {rows.line_num}"
                if len(values) != len(header):
                    raise ValueError(f"{where}: {len(values)} values for {len(header)} columns")
                yield where, dict(zip(header, (value.strip() for value in values), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: this is no CSV file in UTF-8: {error}") from None


def _event(row: Mapping[str, str], where: str) -> tuple[float, float, float] | None:
    """(time, dose, concentration) of a row; None where nothing happens."""
    kind, unmeasured = _number(row, "evid", where), _number(row, "mdv", where)
    if kind not in (None, 0.0, 1.0):
        raise ValueError(f"{where}: evid = {kind:g}: it is 0, a measurement, or 1, a dose")
    if unmeasured not in (None, 0.0, 1.0):
        raise ValueError(f"{where}: mdv = {unmeasured:g}: it is 0, or 1 where dv is none")
    time = _number(row, "time", where)
    if time is None or not math.isfinite(time):
        raise ValueError(f"{where}: time: a time in h, not {row['time']!r}")
    dose, concentration = _number(row, "amt", where), _number(row, "dv", where)
    # A dose goes into the first compartment, what is measured is in the second.
    places = ("cmt",) if dose or (concentration and not unmeasured) else ()
    for columns, most in ((_OTHER_MODELS, 0), (_OTHER_KINDS, 1), (places, 1 if dose else 2)):
        for column in columns:
            if _number(row, column, where) not in (None, *range(most + 1)):
                raise ValueError(
                    f"{where}: {column} = {row[column]}: the model has single doses into the gut "
                    "and plain concentrations"
                )
    if kind is not None and bool(kind) != bool(dose):
        raise ValueError(
            f"{where}: evid = {kind:g} and amt = {row['amt']!r}: a dose has both, a measurement "
            "neither"
        )
    if dose:
        if not (dose > 0 and math.isfinite(dose)):
            raise ValueError(f"{where}: amt: a positive dose in mg, not {dose:g}")
        if concentration:
            raise ValueError(f"{where}: a dose and a concentration: give each a row of its own")
        return time, dose, math.nan
    if concentration is None or unmeasured:
        return None
    if not (concentration > 0 and math.isfinite(concentration)):
        raise ValueError(
            f"{where}: dv: a positive concentration in mg/L, not {concentration:g}; errors are "
            "relative to it: leave out what is below the limit of quantification"
        )
    return time, math.nan, concentration


def _number(row: Mapping[str, str], column: str, where: str) -> float | None:
    text = row.get(column, "")
    if text.lower() in _ABSENT:
        return None
    try:
        return float(text.replace("_", "no digit"))  # which Python would read over
    except ValueError:
        raise ValueError(f"{where}: {column}: not a number: {text!r}") from None


def _patient(
    where: str, weight: float | None, events: list[tuple[float, float, float]]
) -> PatientRecord:
    events = sorted(events, key=lambda event: event[0])
    doses = [(time, dose) for time, dose, _ in events if not math.isnan(dose)]
    seen = [(time, value) for time, dose, value in events if math.isnan(dose)]
    if weight is None:
        raise ValueError(f"{where} has no weight: without the column wt it is 70 kg")
    if not doses:
        raise ValueError(f"{where} has no dose")
    if not seen:
        raise ValueError(f"{where} has no concentration")
    if seen[0][0] <= doses[0][0]:
        raise ValueError(
            f"{where}: a concentration at {seen[0][0]:g} h, but the first dose is at "
            f"{doses[0][0]:g} h: the model has none before it"
        )
    return make_patient_record(weight, doses, seen)


def write_patients(path: str | os.PathLike[str], cohort: Cohort) -> None:
    """Write the table that `read_patients` reads."""
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
