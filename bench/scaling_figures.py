"""The figures of bench/scaling.py: what the model says, beside the points that ADCME published.

ADCME: Xu, Zhu & Darve, "Distributed machine learning for computational engineering using MPI"
(2020), and its documentation (kailaix.github.io/ADCME.jl, MPI benchmarks): times and efficiencies
read off the figures. Its ranks had 1 core each for Poisson and 32 each for waves.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from scaling_model import (
    INTERCONNECTS,
    LAYERS,
    Interconnect,
    Parts,
    axes_of,
    busiest,
    time_of,
    work_of,
)

COLOURS = {"forward": "#4477aa", "gradient": "#ee6677"}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One panel: a problem whose size is a rank's (weak) or the whole's (strong).

    `published` has ADCME's points: (ranks, seconds), or efficiencies where `efficiency` is drawn.
    """

    title: str
    problem: str
    weak: bool
    side: int  # of a rank's tile, or of the whole
    steps: int
    published: dict[str, tuple[tuple[int, float], ...]]
    efficiency: bool = False

    def side_of(self, ranks: int) -> int:
        return self.side if self.weak else round(self.side / ranks ** (1 / axes_of(self.problem)))


def throughput(rate: float) -> tuple[tuple[int, float], ...]:
    """The time of 100 steps of 1000² cells at so many cells and steps a second, on 100 ranks."""
    return ((100, 1000**2 * 100 / rate),)


FIGURES = (
    Figure("transposition, 300² rows a rank", "transposition", True, 300, 0, {}),
    Figure(
        "Poisson, 300² cells a rank", "poisson", True, 300, 0,
        {"forward": ((1, 0.8), (3600, 21.0)), "gradient": ((1, 1.4), (3600, 43.0))},
    ),
    Figure(
        "acoustic, 100² cells a rank, 2000 steps", "acoustic", True, 100, 2000,
        {"forward": ((1, 1.0), (100, 0.56)), "gradient": ((1, 1.0), (100, 0.48))}, True,
    ),
    Figure(
        "elastic, 100² cells a rank, 2000 steps", "elastic", True, 100, 2000,
        {"gradient": ((1, 1.0), (100, 0.49))}, True,
    ),
    Figure("transposition, 25 million rows", "transposition", False, 5000, 0, {}),
    Figure("Poisson, 1800² cells", "poisson", False, 1800, 0, {}),
    Figure(
        "acoustic, 1000² cells, 100 steps", "acoustic", False, 1000, 100,
        {"forward": throughput(894e6), "gradient": throughput(217e6)},
    ),
    Figure("elastic, 1000² cells, 100 steps", "elastic", False, 1000, 100, {}),
)  # fmt: skip
# In the tables, not in the pictures: ADCME published no volumes.
VOLUMES = (
    Figure("acoustic, 100³ cells a rank, 100 steps", "acoustic3d", True, 100, 100, {}),
    Figure("acoustic, 400³ cells, 100 steps", "acoustic3d", False, 400, 100, {}),
)
RANKS = (1, 4, 16, 64, 256, 1024, 4096)


class Model:
    """The measured times, and the times by the formula for any number of ranks."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.times = kept["times"]

    def iterations(self, figure: Figure, ranks: int) -> int:
        """As on one rank with so many cells; along a line in their logarithm."""
        if figure.problem != "poisson":
            return 0
        cells = (figure.side_of(ranks) * ranks**0.5) ** 2
        rows = [r for r in self.times if r["problem"] == "poisson"]
        known = {r["side"] ** 2: r["gradient"]["iterations"] for r in rows}
        nearest = min(known, key=lambda n: abs(math.log(n / cells)))
        if nearest == round(cells):
            return known[nearest]
        logs = {n: math.log2(n) for n in known}
        slope, start = statistics.linear_regression(list(logs.values()), list(known.values()))
        return max(1, round(start + slope * math.log2(cells)))

    def at(self, figure: Figure, what: str, ranks: int, net: Interconnect) -> dict[str, Parts]:
        """The formula and its bounds."""
        side, iterations = figure.side_of(ranks), self.iterations(figure, ranks)
        sent = busiest(
            figure.problem, ranks, side, what == "gradient",
            steps=figure.steps, iterations=iterations,
        )  # fmt: skip
        # The largest tile, in a corner, has layers on two sides.
        axes = axes_of(figure.problem)
        layers = 0 if not figure.steps else LAYERS[axes] * (2 if ranks == 1 else 1)
        work = work_of(self.times, figure.problem, what, figure.steps)
        points = (side + layers) ** axes
        return time_of(figure.problem, ranks, sent, work.at(points, iterations), net)


def draw(kept: dict[str, Any], path: pathlib.Path) -> None:
    """Draw all figures, and print what the time goes into."""
    model = Model(kept)
    fast, slow = INTERCONNECTS[0], INTERCONNECTS[1]
    plane, axes = plt.subplots(2, 4, figsize=(17, 8), layout="constrained")
    for figure, ax in zip(FIGURES, axes.flat, strict=True):
        _panel(model, figure, ax, fast)
    plane.suptitle(
        f"Model, not measurement: computing time measured on one rank here, messages over "
        f"{fast.name}; bands from the fast to the slow bound. Crosses: ADCME, published.",
        fontsize=10,
    )
    plane.savefig(path, dpi=110)
    plt.close(plane)
    print(f"drawn: {path}\n")
    for net in (fast, slow):
        _table(model, net)


def _panel(model: Model, figure: Figure, ax: Any, net: Interconnect) -> None:
    for what, colour in COLOURS.items():
        found = {n: model.at(figure, what, n, net) for n in RANKS}
        lines: dict[str, list[float]] = {}
        for bound in ("fast", "model", "slow"):
            seconds = [found[n][bound].total for n in RANKS]
            alone = [found[n]["model"].compute for n in RANKS]
            lines[bound] = (
                [a / t for a, t in zip(alone, seconds, strict=True)]
                if figure.efficiency
                else seconds
            )
        ax.plot(RANKS, lines["model"], "o-", ms=3, color=colour, label=f"{what}, model")
        ax.fill_between(RANKS, lines["fast"], lines["slow"], color=colour, alpha=0.15, lw=0)
        points = figure.published.get(what, ())
        if points:
            ax.plot(*zip(*points, strict=True), "x", color=colour, label=f"{what}, ADCME")
    ax.set_xscale("log", base=2)
    ax.set_title(figure.title, fontsize=10)
    ax.set_xlabel("ranks")
    if figure.efficiency:
        ax.set_ylabel("efficiency")
        ax.set_ylim(0, 1.1)
    else:
        ax.set_yscale("log")
        ax.set_ylabel("s")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)


def _table(model: Model, net: Interconnect) -> None:
    """Print the parts of the time of a gradient in the model."""
    print(
        f"### {net.name}\n\n| gradient | ranks | s (fast to slow) | computing | messages: latency "
        "| bandwidth | collectives: latency | operands |\n|---|---|---|---|---|---|---|---|"
    )
    measured = {row["problem"] for row in model.times}
    for figure in (f for f in FIGURES + VOLUMES if f.problem in measured):
        for ranks in (64, 4096):
            found = model.at(figure, "gradient", ranks, net)
            parts = found["model"]
            shares = " | ".join(f"{p / parts.total:.1%}" for p in dataclasses.astuple(parts))
            bounds = f"{found['fast'].total:.3g} to {found['slow'].total:.3g}"
            print(f"| {figure.title} | {ranks} | {parts.total:.3g} ({bounds}) | {shares} |")
    print()
