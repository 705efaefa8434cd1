"""The ratios in the results of `python bench`: mpigrad's time over another library's.

    python bench/ratios.py DIRECTORY [...]

Prints, as Markdown, the best and the worst ratio of each table and library, for each directory of
results. A directory is the record of one machine.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """mpigrad's time over another library's, with the ends of its spread."""

    label: str
    other: str
    middle: float
    low: float
    high: float


def of_times(label: str, other: str, ours: list[float], theirs: list[float]) -> Ratio:
    """The ratio of two programs that took turns."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return Ratio(label, other, statistics.median(ratios), ratios[0], ratios[-1])


def _ranks(row: Any) -> str:
    return f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}"


def operations(results: Any) -> Iterator[Ratio]:
    for row in results["rows"]:
        single = row["label"].startswith(("eager", "dispatch"))
        for other, (low, middle, high) in row["ratio"].items():
            name = f"{other}, one call at a time" if single else other
            yield Ratio(row["label"], name, middle, low, high)


def poisson(results: Any) -> Iterator[Ratio]:
    for row in results:
        label = f"{row['what']} {row['cells'][0]}², {_ranks(row)}"
        yield Ratio(label, "C and hypre", row["ratio"], *row["ratio_quartiles"])


def sparse(results: Any) -> Iterator[Ratio]:
    for row in results:
        label = f"{row['what']} of {row['rows']:,} rows, {_ranks(row)}"
        for other in ("scipy", "hypre"):
            if f"ratio_{other}" in row:
                yield Ratio(label, other, row[f"ratio_{other}"], *row[f"quartiles_{other}"])


def waves(results: Any) -> Iterator[Ratio]:
    for row in results:
        ours, separator, theirs = row["what"].partition(" / ")
        if separator and "ratio" in row and not theirs.startswith("mpigrad"):
            other, _, rest = theirs.partition(" ")
            label = f"{ours} ({rest})" if rest else ours
            yield Ratio(label.replace("mpigrad ", ""), other, row["ratio"], *row["quartiles"])


def optimize(results: Any) -> Iterator[Ratio]:
    for row in results:
        for name, times in row["seconds"].items():
            if name.startswith("mpigrad"):
                for other in ("SciPy", "optax"):
                    kind = name.partition(", ")[2]
                    label = f"{row['unknowns']:,} unknowns, {_ranks(row)}, {kind}"
                    yield of_times(label, other, times, row["seconds"][other])


def population(results: Any) -> Iterator[Ratio]:
    plain = results["plain, 1 process"]["gradient"]
    for name, row in results.items():
        if name.startswith("mpigrad"):
            ratio = row["gradient"] / plain
            yield Ratio(f"gradient, {name.partition(', ')[2]}", "blackjax", ratio, ratio, ratio)


def shallow_water(results: Any) -> Iterator[Ratio]:
    for row in results:
        yield Ratio(_ranks(row), "mpi4jax", row["ratio"], *row["quartiles"])


def transforms(results: Any) -> Iterator[Ratio]:
    for row in results:
        for name, (low, middle, high) in row["ratios"].items():
            ours, _, other = name.partition(" / ")
            if ours == "mpigrad":
                yield Ratio(f"{row['dtype']}, {_ranks(row)}", other, middle, low, high)


READERS: dict[str, Callable[[Any], Iterator[Ratio]]] = {
    "operations": operations,
    "sizes": operations,
    "poisson": poisson,
    "poisson-boomeramg": poisson,
    "sparse": sparse,
    "waves": waves,
    "optimize": optimize,
    "population": population,
    "shallow-water": shallow_water,
    "fft": transforms,
}


def read(directory: pathlib.Path, name: str) -> list[Ratio]:
    """Return the ratios of a table in a directory of results, none without its file."""
    file = directory / f"{name}.json"
    if name not in READERS or not file.exists():
        return []
    return list(READERS[name](json.loads(file.read_text())))


def ranges(directory: pathlib.Path) -> Iterator[tuple[str, str, Ratio, Ratio]]:
    """Yield the table, the other library, and the best and the worst ratio to it."""
    for name in READERS:
        ratios = read(directory, name)
        for other in dict.fromkeys(r.other for r in ratios):
            to_other = [r for r in ratios if r.other == other]
            best = min(to_other, key=lambda r: r.middle)
            worst = max(to_other, key=lambda r: r.middle)
            yield name, other, best, worst


def _number(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"


def main() -> None:
    for directory in map(pathlib.Path, sys.argv[1:]):
        machine = json.loads((directory / "machine.json").read_text())
        print(f"\n{machine['processor']}, {machine['cores']} cores, {machine['date']}\n")
        print("| table | compared with | best | worst |\n|---|---|---|---|")
        for name, other, best, worst in ranges(directory):
            ends = " | ".join(f"{_number(r.middle)} ({r.label})" for r in (best, worst))
            print(f"| {name} | {other} | {ends} |")


if __name__ == "__main__":
    main()
