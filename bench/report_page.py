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
import sys
import tomllib

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from ratios import Ratio, read

from mpigrad_apps.report import Picture, Table, versions, write_report

HERE = pathlib.Path(__file__).resolve().parent
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


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
        drawn, ratios = out / f"{name}.png", read(out, name)
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
