"""How the programs of scaling_programs.py scale: what a rank sends, and what that takes.

One formula, for the rank that sends most:

    T = W + r α + b/β + C ⌈log2 P⌉ α + 2 B/β

W is the time to compute, processor seconds of one rank. r are the rounds in which it exchanges
messages with its neighbours: all of a round are under way together, so that it waits once, α. b are
its bytes, C its collectives, each a tree of ⌈log2 P⌉ latencies, B the bytes of their operands,
which travel twice (reduce-scatter, allgather). Two bounds stand around it:

    fast   the halos of waves travel while the middle of a tile is computed: they cost nothing
    slow   every message waits by itself, and all ranks of a node share its network card

What is sent follows from the programs (`sent`); bench/scaling.py compares it with what MPI counts.

    python bench/scaling_model.py bench/record/fft-amd-epyc.json [--cells 1024] [--dims 64 64]

prints the times of a Fourier transform in pencils, forward and back, by the formula. W is the time
of 256³ cells on one rank in this record of bench/transforms.py, in proportion to n log n.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Mapping

from mpigrad.fft.layout import Division, Exchange, Transform, make_plan

__all__ = [
    "INTERCONNECTS",
    "LAYERS",
    "PROBLEMS",
    "axes_of",
    "busiest",
    "pencils",
    "sent",
    "tiles",
    "time_of",
]

PROBLEMS = ("transposition", "poisson", "acoustic", "elastic", "acoustic3d")
LAYERS = {2: 20, 3: 10}  # absorbing cells around a wave's model, by the number of axes
REACH = 2  # cells that the stencils of waves reach
WEIGHTS = 921  # of the network (2, 20, 20, 20, 1)


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """A network as its users have measured it, from one node to another.

    Attributes
    ----------
    latency
        Of a message of 8 bytes, s.
    bandwidth
        Of large messages one way, bytes/s.
    source
        Who says so.
    """

    name: str
    latency: float
    bandwidth: float
    source: str


INTERCONNECTS = (
    Interconnect(
        "Cray Aries", 1.20e-6, 9.6e9,
        "osu_latency on Trinity, https://gist.github.com/hppritcha/6a3acd0c192fcfd082bd543fc98e6fe6",
    ),
    Interconnect(
        "40 Gb/s Ethernet, usNIC", 1.93e-6, 4.65e9,
        "https://news-blogs.cisco.com/performance/mpi-over-40gb-ethernet",
    ),
    Interconnect(
        "Gigabit Ethernet, TCP", 23.6e-6, 0.118e9, "http://www.nw-grid.ac.uk/LivMPI",
    ),
)  # fmt: skip
RANKS_PER_NODE = 32  # that share a network card, in the slow bound


@dataclasses.dataclass(frozen=True)
class Sent:
    """The messages that a rank sends in one evaluation. `rounds` cannot be counted from outside."""

    messages: int = 0
    bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    rounds: int = 0

    def __add__(self, other: Sent) -> Sent:
        mine, its = dataclasses.astuple(self), dataclasses.astuple(other)
        return Sent(*(a + b for a, b in zip(mine, its, strict=True)))

    def __mul__(self, times: int) -> Sent:
        return Sent(*(times * a for a in dataclasses.astuple(self)))


def axes_of(problem: str) -> int:
    """How many axes the grid of a problem has."""
    return 3 if problem == "acoustic3d" else 2


def tiles(ranks: int, axes: int = 2) -> tuple[int, ...]:
    """How many tiles along each axis: as near to a square or a cube as `ranks` allows."""
    if axes == 1:
        return (ranks,)
    largest = int(ranks ** (1 / axes) + 1e-9)
    short = next(n for n in range(largest, 0, -1) if ranks % n == 0)
    return (*tiles(ranks // short, axes - 1), short)


# ---- what is sent ----


@dataclasses.dataclass(frozen=True)
class Tile:
    """A rank's place among the tiles, each of `side` cells along each axis."""

    side: int
    dims: tuple[int, ...]
    place: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of all tiles."""
        return math.prod(self.dims)

    def ends(self, axis: int) -> int:
        """On how many of the two sides along an axis no neighbour is."""
        return (self.place[axis] == 0) + (self.place[axis] == self.dims[axis] - 1)

    @property
    def faces(self) -> tuple[int, ...]:
        """Neighbours along each axis."""
        return tuple(2 - self.ends(axis) for axis in range(len(self.dims)))

    def across(self, per_cell: float, layers: int = 0, per_layer_cell: float = 0) -> Sent:
        """One exchange across faces: words for each cell of a face, and of its layers."""
        words = 0.0
        for axis, neighbours in enumerate(self.faces):
            others = [a for a in range(len(self.dims)) if a != axis]
            cells = math.prod(self.side + layers * self.ends(a) for a in others)
            beside = cells - self.side ** len(others)
            words += neighbours * (per_cell * cells + per_layer_cell * beside)
        return Sent(sum(self.faces), round(words), rounds=int(sum(self.faces) > 0))

    def halo(self, words: int) -> Sent:
        """`halo_exchange` of width 1 on two axes: faces and corners, `words` for each cell."""
        corners = self.faces[0] * self.faces[1]
        size = sum(self.faces) * self.side + corners
        return Sent(sum(self.faces) + corners, words * size, rounds=int(sum(self.faces) > 0))


def sized(sent: Sent, word: int) -> Sent:
    """Words into bytes."""
    return dataclasses.replace(sent, bytes=word * sent.bytes)


def collective(ranks: int, *sizes: int) -> Sent:
    """Collectives with operands of these many bytes."""
    return Sent(collectives=len(sizes), collective_bytes=sum(sizes)) if ranks > 1 else Sent()


def _transposition(tile: Tile, gradient: bool) -> Sent:
    # One entry of each row beside the face; there and back.
    return sized(tile.across(1), 8) * (2 if gradient else 1)


def _acoustic(tile: Tile, gradient: bool, steps: int) -> Sent:
    # The pressure; on two axes, in the layers that run across a face, also phi or psi. First state
    # and steps.
    ranks, axes = tile.ranks, len(tile.dims)
    step = tile.across(REACH, LAYERS[axes], REACH if axes == 2 else 0)
    run = sized(step, 4) * (steps + 1) + collective(ranks, 9 * 8)
    return run * 2 + collective(ranks, 4, 4) if gradient else run + collective(ranks, 4)


def _elastic(tile: Tile, gradient: bool, steps: int) -> Sent:
    # Velocities, then stresses: two and three fields; the media once; five extremes of the model.
    ranks = tile.ranks
    velocities, stresses, state = (
        sized(tile.across(fields * REACH, LAYERS[2]), 4) for fields in (2, 3, 5)
    )
    media = sized(tile.halo(3), 4)
    run = (velocities + stresses) * steps + state + media + collective(ranks, 6 * 8)
    stable = collective(ranks, 5 * 4)
    if gradient:
        return run * 2 + stable * 3 + collective(ranks, 4, 4)
    return run + stable + collective(ranks, 4)


def _cycle(tile: Tile) -> Sent:
    """One V-cycle of PFMG, which halves the axes in turn.

    At each pair of levels: 3 exchanges across all faces (before the first sweep of the relaxation,
    of the residual, and between the colours of the last sweep; the rest has what it needs), and two
    across those along the axis that is halved, each for two axes. Where fewer cells than tiles are
    left along an axis, they lie on as many ranks.
    """
    total, cells = Sent(), [tile.side * n for n in tile.dims]
    halvings = max(math.ceil(math.log2(n)) for n in cells)
    for k in range(halvings):
        left = [math.ceil(n / 2**k) for n in cells]
        faces = [
            min(mine, max(0, min(n, of) - 1))
            for mine, n, of in zip(tile.faces, left, tile.dims, strict=True)
        ]
        length = math.ceil(tile.side / 2**k)
        if sum(faces):
            rounds = 3 + 2 * sum(n > 0 for n in faces)
            total += Sent(5 * sum(faces), round(38 * sum(faces) * length), rounds=rounds)
    return total


def _set_up(tile: Tile) -> Sent:
    """PFMG's set-up: counted on 4 and 9 ranks, not derived; it grows with the levels.

    Up to 4 ranks hypre knows all boxes; with more, each level asks for its neighbours.
    """
    ranks, faces = tile.ranks, sum(tile.faces)
    halvings = math.ceil(math.log2(tile.side * max(tile.dims)))
    known = max(0, faces * (6 * halvings - 8))
    messages, asked = known, 0
    if ranks > 4:
        messages = max(known, round(faces / 4 * (142 * halvings - 536)))
        asked = max(0, 20 * halvings - 82)
    size = faces * (124 * tile.side + 400 * halvings - 500) + 27 * (messages - known)
    return Sent(messages, max(0, size), asked, 8 * asked, -(-messages // max(1, faces)))


def _solve(tile: Tile, iterations: int) -> Sent:
    """PCG: a product, a cycle and three dot products in each iteration.

    After it: the residual, and six collectives with those before (the ranks agree about what is
    given and what hypre has said; norms).
    """
    ranks = tile.ranks
    product = sized(tile.across(1), 8)
    dots = collective(ranks, *[8] * (3 * iterations + 6))
    return _cycle(tile) * iterations + product * (iterations + 1) + dots


def _poisson(tile: Tile, gradient: bool, iterations: int) -> Sent:
    ranks = tile.ranks
    kappa = sized(tile.halo(1), 8)
    # Nine more agreements make sure of new values and of the hierarchy.
    new = _set_up(tile) + collective(ranks, *[8] * 9)
    forward = kappa + new + _solve(tile, iterations)
    if not gradient:
        return forward + collective(ranks, 8)
    # The ghosts of u for the product λ uᵀ; value and gradient are reduced to a root, and back.
    ghosts = sized(tile.across(1), 8)
    both = collective(ranks, *[8 * (WEIGHTS + 1)] * 2)
    return forward + kappa + ghosts + _solve(tile, iterations) + both


def sent(problem: str, tile: Tile, gradient: bool, *, steps: int = 0, iterations: int = 0) -> Sent:
    """Compute the messages that the rank of a tile sends in one evaluation."""
    if problem == "transposition":
        return _transposition(tile, gradient)
    if problem == "poisson":
        return _poisson(tile, gradient, iterations)
    return (_elastic if problem == "elastic" else _acoustic)(tile, gradient, steps)


def some_tiles(ranks: int, side: int, axes: int) -> list[Tile]:
    """One tile of each kind: those in corners, along sides and in the middle."""
    dims = tiles(ranks, axes)
    places = [sorted({0, min(1, n - 1), n - 1}) for n in dims]
    return [Tile(side, dims, place) for place in itertools.product(*places)]


def busiest(
    problem: str, ranks: int, side: int, gradient: bool, *, steps: int = 0, iterations: int = 0
) -> Sent:
    """The most that any rank sends, of each kind."""
    found = [
        dataclasses.astuple(sent(problem, tile, gradient, steps=steps, iterations=iterations))
        for tile in some_tiles(ranks, side, axes_of(problem))
    ]
    return Sent(*map(max, zip(*found, strict=True)))


def pencils(cells: int, dims: tuple[int, int], gradient: bool, word: int = 8) -> Sent:
    """The most that any rank sends in `rfftn` and `irfftn` of cells³ real values in pencils.

    An exchange is one round: all of its messages are under way together. A spectrum has two words.
    """
    shape, mesh = (cells,) * 3, (*dims, 1)
    by = tuple((axis,) if n > 1 else () for axis, n in enumerate(mesh))
    plan = make_plan(Division(shape, mesh, by), (0, 1, 2), ("fft", "fft", "rfft"))
    places = [sorted({0, min(1, n - 1), n - 1}) for n in dims]
    most = Sent()
    for i, j in itertools.product(*places):
        rank, total, size = i * dims[1] + j, Sent(), word
        for step in plan.steps:
            if isinstance(step, Transform):
                size = 2 * word
            if isinstance(step, Exchange):
                messages, values = step.sent(rank)
                total += Sent(messages, size * values, rounds=1)
        pairs = zip(dataclasses.astuple(most), dataclasses.astuple(total), strict=True)
        most = Sent(*(max(a, b) for a, b in pairs))
    return most * (4 if gradient else 2)


# ---- what it takes ----


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of one evaluation on one rank, measured at some sizes.

    Attributes
    ----------
    measured
        (points, shortest, median, longest, of it in iterations of the linear solver); points with
        the layers.
    iterations
        Of the linear solver in these evaluations, or 0.
    """

    measured: tuple[tuple[float, float, float, float, float], ...]
    iterations: tuple[int, ...]

    def at(self, points: float, iterations: int = 0) -> tuple[float, float, float]:
        """(shortest, median, longest) for so many points: straight lines between logarithms."""
        rows = sorted(zip(self.measured, self.iterations, strict=True))
        above = next((k for k, row in enumerate(rows) if row[0][0] >= points), len(rows) - 1)
        (a, ka), (b, kb) = rows[max(0, above - 1)], rows[max(above, min(1, len(rows) - 1))]
        share = math.log(points / a[0]) / math.log(b[0] / a[0]) if a[0] != b[0] else 0.0
        between = lambda x, y: math.exp((1 - share) * math.log(x) + share * math.log(y))
        more = 0.0
        if iterations:  # the solver's part goes with the iterations
            its = (1 - share) * ka + share * kb
            more = between(a[4], b[4]) * (iterations / its - 1)
        fast, middle, slow = (between(a[k], b[k]) + more for k in (1, 2, 3))
        return fast, middle, slow


@dataclasses.dataclass(frozen=True)
class Parts:
    """Seconds of one evaluation, by what they are spent on."""

    compute: float
    latency: float  # of messages
    bandwidth: float
    collectives: float  # their latency
    operands: float  # of collectives

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def time_of(
    problem: str,
    ranks: int,
    what: Sent,
    work: tuple[float, float, float],
    net: Interconnect,
) -> dict[str, Parts]:
    """The formula and its two bounds: "fast", "model", "slow"."""
    shared = net.bandwidth / RANKS_PER_NODE
    deep = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    trees = what.collectives * deep * net.latency
    hidden = problem in ("acoustic", "elastic", "acoustic3d")
    return {
        "fast": Parts(
            work[0],
            0.0 if hidden else what.rounds * net.latency,
            0.0 if hidden else what.bytes / net.bandwidth,
            trees,
            2 * what.collective_bytes / net.bandwidth,
        ),
        "model": Parts(
            work[1],
            what.rounds * net.latency,
            what.bytes / net.bandwidth,
            trees,
            2 * what.collective_bytes / net.bandwidth,
        ),
        "slow": Parts(
            work[2],
            what.messages * net.latency,
            what.bytes / shared,
            2 * trees,
            2 * what.collective_bytes / shared,
        ),
    }


def work_of(rows: list[Mapping[str, object]], problem: str, what: str, steps: int) -> Work:
    """From the results of `bench/scaling.py time`."""
    measured, iterations = [], []
    for row in rows:
        if row["problem"] != problem or (steps and row["steps"] != steps):
            continue
        found = row[what]
        assert isinstance(found, Mapping)
        taken = sorted(found["seconds"])
        axes = axes_of(problem)
        layers = 2 * LAYERS[axes] if steps else 0
        points = float((int(str(row["side"])) + layers) ** axes)
        measured.append(
            (points, taken[0], taken[len(taken) // 2], taken[-1], max(found["solving"], 1e-12))
        )
        iterations.append(int(found["iterations"]))
    if not measured:
        raise ValueError(f"scaling_model: {problem} was not measured with {steps} steps.")
    return Work(tuple(measured), tuple(iterations))


def print_pencils(record: pathlib.Path, cells: int, dims: tuple[int, int]) -> None:
    """Print the times of forward and inverse transform, and of their gradient, on each network."""
    (row,) = (
        row
        for row in json.loads(record.read_text())
        if row["ranks"] == 1 and row["dtype"] == "float64"
    )
    ranks = math.prod(dims)
    share = (cells / row["cells"]) ** 3 / ranks * math.log(cells) / math.log(row["cells"])
    for what, name in (("forward and inverse", "mpigrad"), ("gradient", "value and gradient")):
        gradient = what == "gradient"
        most = pencils(cells, dims, gradient)
        work = row["milliseconds"][name] / 1e3 * share
        print(
            f"{what} of {cells}³ on {dims[0]} x {dims[1]} ranks: {most.messages} messages, "
            f"{most.bytes / 1e6:.1f} MB, {most.rounds} rounds; computing {work * 1e3:.1f} ms"
        )
        for net in INTERCONNECTS:
            times = time_of("fft", ranks, most, (work,) * 3, net)
            middle = times["model"]
            print(
                f"  {net.name}: {middle.total * 1e3:.1f} ms, at the slow bound "
                f"{times['slow'].total * 1e3:.0f} ms, bytes {middle.bandwidth * 1e3:.1f} ms, "
                f"latency {middle.latency * 1e3:.2f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="times of transforms in pencils")
    parser.add_argument("record", type=pathlib.Path, help="results of bench/transforms.py")
    parser.add_argument("--cells", type=int, default=1024)
    parser.add_argument("--dims", type=int, nargs=2, default=(64, 64))
    given = parser.parse_args()
    print_pencils(given.record, given.cells, tuple(given.dims))


if __name__ == "__main__":
    main()
