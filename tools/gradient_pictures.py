"""Draw the pictures of docs/gradients.md.

    mpigrad launch -n 4 tools/gradient_pictures.py docs/images

The matrices are measured, by `mpigrad.jacobian`, on the four ranks that draw them.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from mpi4py import MPI

import mpigrad as mg

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FORWARD, BACKWARD, GREY = "#4477aa", "#cc6677", "#888888"
ARROW = {"arrowstyle": "-|>", "lw": 1.6, "shrinkA": 20, "shrinkB": 20}


def matrix(f: Callable[[Any], Any]) -> np.ndarray:
    """The whole Jacobian of a map of one number per rank, on every rank: row s is rank s's."""
    row = np.asarray(mg.jacobian(f)(jnp.ones(1))).ravel()
    return np.stack(MPI.COMM_WORLD.allgather(row))


def transpose(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The pull-back of a linear map."""
    return lambda ct: mg.vjp(f, jnp.ones(1))[1](ct)[0]


def adjoints() -> Figure:
    """Matrices of operations above those of their adjoints."""
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    operations: dict[tuple[str, str], Callable[[Any], Any]] = {
        ("bcast", "reduce"): lambda x: mg.bcast(x, root=0),
        ("allreduce", "allreduce"): mg.allreduce,
        ("sendrecv, forward", "sendrecv, backward"): lambda x: mg.sendrecv(x, after, before),
        ("scan", "scan from the last rank"): mg.scan,
    }
    figure = Figure(figsize=(9, 4.9), layout="constrained")
    axes = figure.subplots(2, len(operations))
    for column, ((name, adjoint), f) in enumerate(operations.items()):
        for row, (title, values) in enumerate([(name, matrix(f)), (adjoint, matrix(transpose(f)))]):
            at = axes[row, column]
            at.imshow(values, cmap="Blues" if row == 0 else "Reds", vmin=0, vmax=1.35)
            at.set_title(title, fontsize=11, color=FORWARD if row == 0 else BACKWARD)
            at.set_xticks(range(SIZE), [f"x{r}" if row == 0 else f"ȳ{r}" for r in range(SIZE)])
            at.set_yticks(range(SIZE), [f"y{r}" if row == 0 else f"x̄{r}" for r in range(SIZE)])
            at.set_xticks(np.arange(SIZE + 1) - 0.5, minor=True)
            at.set_yticks(np.arange(SIZE + 1) - 0.5, minor=True)
            at.grid(which="minor", color="white", linewidth=1.5)
            at.tick_params(which="both", length=0)
        np.testing.assert_array_equal(matrix(f).T, matrix(transpose(f)))
    return figure


def node(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    """A value, in a box."""
    box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": colour, "lw": 1.3}
    axes.text(x, y, text, ha="center", va="center", fontsize=10, bbox=box, zorder=3)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draw a dependence, or a message if it leaves its lane."""
    axes.annotate("", end, start, arrowprops={**ARROW, "color": colour})


def lanes(axes: Any, ranks: int, width: float) -> None:
    """A lane for each rank, from top to bottom."""
    for rank in range(ranks):
        axes.axhspan(-rank - 0.36, -rank + 0.36, color="#f3f3f3", zorder=0)
        axes.text(-0.75, -rank, f"rank {rank}", ha="right", va="center", color=GREY)
    axes.set(xlim=(-0.7, width), ylim=(-ranks + 0.5, 0.62))
    axes.axis("off")


def messages() -> Figure:
    """Draw a chain of three ranks and a sum, forwards and backwards."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    forward, backward = figure.subplots(2, 1)
    places = [(0, "x{r}"), (1.5, "u{r}"), (3.6, "y{r}"), (5.1, "l{r}")]
    links = [((0, r), (1, r)) for r in range(3)]
    links += [((1, r), (1, r + 1)) for r in range(2)]  # the chain
    links += [((1, r), (2, s)) for r in range(3) for s in range(3)]  # allreduce
    links += [((2, r), (3, r)) for r in range(3)]
    for axes, colour, bar, title in (
        (
            forward,
            FORWARD,
            "",
            "a program: rank r sends u to rank r + 1; y is the sum of all u",
        ),
        (backward, BACKWARD, "\u0304", "its derivative: the same lines, the other way"),
    ):
        lanes(axes, 3, 5.6)
        for (a, r), (b, s) in links:
            ends = (places[a][0], -r), (places[b][0], -s)
            arrow(axes, *(ends if not bar else ends[::-1]), colour)
        for x, text in places:
            for r in range(3):
                letter = text[0] + bar
                node(axes, x, -r, f"{letter}{'₀₁₂'[r]}", colour)
        sent = "send, recv" if not bar else "recv, send"
        for x, text in ((0.75, "own work"), (1.5, sent), (2.55, "allreduce"), (4.35, "own work")):
            axes.text(x, 0.5, text, ha="center", color=GREY, fontsize=9)
        axes.set_title(title, fontsize=11, color=colour)
    return figure


def seeds() -> Figure:
    """The cotangents of l = allreduce(x)² on two ranks, for the two meanings of a loss."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    panels = figure.subplots(3, 1)
    columns = (0.2, 2.4, 4.6)
    cases = (
        ("forward: y = allreduce(x), l = y²", FORWARD,
         (("x = 1", "y = 3", "l = 9"), ("x = 2", "y = 3", "l = 9"))),
        ('loss="share": both results are seeded, the loss is their sum, 18', BACKWARD,
         (("x̄ = 12", "ȳ = 6", "l̄ = 1"), ("x̄ = 12", "ȳ = 6", "l̄ = 1"))),
        ('loss="replicated": the result counts once, the loss is 9', BACKWARD,
         (("x̄ = 6", "ȳ = 6", "l̄ = 1"), ("x̄ = 6", "ȳ = 0", "l̄ = 0"))),
    )  # fmt: skip
    for axes, (title, colour, values) in zip(panels, cases, strict=True):
        lanes(axes, 2, 5.3)
        for r in range(2):
            for column, text in zip(columns, values[r], strict=True):
                node(axes, column, -r, text, colour)
            for s in range(2):
                ends = (columns[0], -r), (columns[1], -s)
                arrow(axes, *(ends if colour == FORWARD else ends[::-1]), colour)
            ends = (columns[1], -r), (columns[2], -r)
            arrow(axes, *(ends if colour == FORWARD else ends[::-1]), colour)
        axes.set_title(title, fontsize=11, color=colour)
    # The numbers of the picture are those of the program, on the first two ranks.
    pair = mg.Communicator(MPI.COMM_WORLD).split(0 if RANK < 2 else None)
    if pair:
        with pair:
            for loss, expected in (("share", 12.0), ("replicated", 6.0)):
                got = mg.grad(lambda x: mg.allreduce(x) ** 2, loss=loss)(RANK + 1.0)
                assert got == expected, (loss, got)
    return figure


def main() -> None:
    """Draw."""
    pictures = {"adjoints": adjoints(), "messages": messages(), "seeds": seeds()}
    if RANK == 0:
        for name, figure in pictures.items():
            figure.savefig(pathlib.Path(sys.argv[1]) / f"gradient-{name}.png", dpi=120)


if __name__ == "__main__":
    main()
