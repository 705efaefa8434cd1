"""The page of `python bench`: pictures of the ratios in its results, the machine, what is missing.

    python bench/report_page.py DIRECTORY

Reads NAME.json of each table of tables.toml that is there, and writes report.html and a picture for
each table that compares with another library.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import pathlib
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from mpigrad_apps.report import Picture, Table, versions, write_report

HERE = pathlib.Path(__file__).resolve().parent
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


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


def operations(results: Any) -> Iterator[Ratio]:
    for row in results["rows"]:
        for other, (low, middle, high) in row["ratio"].items():
            yield Ratio(row["label"], other, middle, low, high)


def poisson(results: Any) -> Iterator[Ratio]:
    for row in results:
        label = f"{row['what']} {row['cells'][0]}², {row['ranks']} ranks"
        yield Ratio(label, "C and hypre", row["ratio"], *row["ratio_quartiles"])


def sparse(results: Any) -> Iterator[Ratio]:
    for row in results:
        label = f"{row['what']} of {row['rows']:,} rows, {row['ranks']} ranks"
        for other in ("scipy", "hypre"):
            if f"ratio_{other}" in row:
                yield Ratio(label, other, row[f"ratio_{other}"], *row[f"quartiles_{other}"])


def waves(results: Any) -> Iterator[Ratio]:
    for row in results:
        ours, separator, theirs = row["what"].partition(" / ")
        if separator and "ratio" in row:
            other, _, rest = theirs.partition(" ")
            label = f"{ours} ({rest})" if rest else ours
            yield Ratio(label.replace("mpigrad ", ""), other, row["ratio"], *row["quartiles"])


def optimize(results: Any) -> Iterator[Ratio]:
    for row in results:
        for name, times in row["seconds"].items():
            if name.startswith("mpigrad"):
                for other in ("SciPy", "optax"):
                    kind = name.partition(", ")[2]
                    label = f"{row['unknowns']:,} unknowns, {row['ranks']} ranks, {kind}"
                    yield of_times(label, other, times, row["seconds"][other])


def population(results: Any) -> Iterator[Ratio]:
    plain = results["plain, 1 process"]["gradient"]
    for name, row in results.items():
        if name.startswith("mpigrad"):
            ratio = row["gradient"] / plain
            yield Ratio(f"gradient, {name.partition(', ')[2]}", "blackjax", ratio, ratio, ratio)


def shallow_water(results: Any) -> Iterator[Ratio]:
    for row in results:
        yield Ratio(f"{row['ranks']} ranks", "mpi4jax", row["ratio"], *row["quartiles"])


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
}


def picture(name: str, about: str, ratios: list[Ratio]) -> Picture:
    """Each ratio a point with its spread; left of the line mpigrad is faster."""
    labels = list(dict.fromkeys(r.label for r in ratios))
    others = list(dict.fromkeys(r.other for r in ratios))
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.3 * len(labels)), layout="constrained")
    for k, other in enumerate(others):
        some = [r for r in ratios if r.other == other]
        axes.errorbar(
            [r.middle for r in some],
            [labels.index(r.label) + 0.12 * (k - (len(others) - 1) / 2) for r in some],
            xerr=[
                [max(0, r.middle - r.low) for r in some],
                [max(0, r.high - r.middle) for r in some],
            ],
            fmt="o", ms=4, lw=1, color=COLOURS[k % len(COLOURS)], label=other,
        )  # fmt: skip
    axes.axvline(1, color="#888888", lw=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time of mpigrad over that of the other")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    return Picture(name, f"{about}. All numbers: {name}.json, {name}.txt.", buffer.getvalue())


def installed(names: tuple[str, ...], site: pathlib.Path) -> dict[str, str]:
    """Versions of the peers in their environment, or here."""
    here = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    there = {d.name.lower(): d.version for d in importlib.metadata.distributions(path=[str(site)])}
    return {n: (here | there)[n] for n in names if n in here | there}


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    pictures, printed = [], {}
    for name, table in tomllib.loads((HERE / "tables.toml").read_text()).items():
        drawn, results = out / f"{name}.png", out / f"{name}.json"
        if name in READERS and results.exists():
            ratios = list(READERS[name](json.loads(results.read_text())))
            if ratios:
                pictures.append(picture(name, table["about"], ratios))
        elif drawn.exists():  # the program has drawn it itself
            pictures.append(Picture(name, table["about"], drawn.read_bytes()))
        if (out / f"{name}.txt").exists():
            printed[name] = f"{name}.txt"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = HERE.parent / "build" / "peers" / "lib" / version / "site-packages"
    others = ("mpi4jax", "torch", "deepwave", "devito", "scipy", "optax", "blackjax")
    tables = [
        Table("Machine", json.loads((out / "machine.json").read_text())),
        Table("Versions", versions() | installed(others, site)),
        Table("What the programs printed", printed),
    ]
    missing = json.loads((out / "missing.json").read_text())
    if missing:
        tables.append(Table("Not measured", missing))
    write_report(
        out,
        "mpigrad beside other libraries",
        "Programs of one table take turns on one machine, so that its slow phases meet all of "
        "them: trust the ratios. Points are medians, bars the spread.",
        pictures,
        tables,
    )


if __name__ == "__main__":
    main()
