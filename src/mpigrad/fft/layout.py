"""How arrays are divided among the ranks, the steps of a transform, and the spectrum of a grid."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid

__all__ = [
    "Division",
    "Exchange",
    "Kind",
    "Layout",
    "Plan",
    "Reorder",
    "Transform",
]

# ---- How the axes of an array are divided among the ranks ----


@dataclasses.dataclass(frozen=True)
class Division:
    """A division of an array into one block per rank.

    The ranks form a mesh, in C order. Each axis of the mesh divides one axis of the array. Several
    of them may divide the same axis: the first into parts, the next each part into smaller ones.

    Attributes
    ----------
    shape
        The shape of the whole array.
    mesh
        The number of ranks along each axis of the mesh.
    by
        For each axis of the array, the axes of the mesh that divide it.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    by: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_tiles(grid: Grid) -> Division:
        """Return the division of a grid into its tiles."""
        by = tuple((axis,) if tiles > 1 else () for axis, tiles in enumerate(grid.dims))
        return Division(grid.shape, grid.dims, by)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank in the mesh."""
        place = []
        for n in reversed(self.mesh):
            rank, along = divmod(rank, n)
            place.append(along)
        return tuple(reversed(place))

    def bounds(self, axis: int, coords: tuple[int, ...]) -> tuple[int, int]:
        """Return the first index of a rank's block along `axis`, and the one after its last."""
        start, stop = 0, self.shape[axis]
        for m in self.by[axis]:
            parts, k, n = self.mesh[m], coords[m], stop - start
            first = start + k * (n // parts) + min(k, n % parts)
            start, stop = first, first + n // parts + (k < n % parts)
        return start, stop

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """Return a rank's block, as slices of the whole array."""
        coords = self.coords_of(rank)
        return tuple(slice(*self.bounds(axis, coords)) for axis in range(len(self.shape)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's block."""
        return tuple(s.stop - s.start for s in self.slices_of(rank))

    def with_shape(self, axis: int, n: int) -> Division:
        """Return the same division of an array with `n` entries along `axis`."""
        shape = tuple(n if i == axis else old for i, old in enumerate(self.shape))
        return dataclasses.replace(self, shape=shape)

    def moved(self, source: int, target: int) -> Division:
        """Return the division in which `target` is divided instead of `source`."""
        by = list(self.by)
        by[target], by[source] = (*by[target], *by[source]), ()
        return dataclasses.replace(self, by=tuple(by))

    def group(self, rank: int, axis: int) -> list[int]:
        """Return the ranks whose blocks differ from this rank's along `axis` only, in order."""
        coords, among = self.coords_of(rank), self.by[axis]
        others = [i for i in range(len(self.mesh)) if i not in among]
        return sorted(
            (
                r
                for r in range(math.prod(self.mesh))
                if all(self.coords_of(r)[i] == coords[i] for i in others)
            ),
            key=lambda r: tuple(self.coords_of(r)[i] for i in among),
        )

    def communicator(self, comm: Communicator, axis: int) -> Communicator:
        """Return the communicator of `group`, in its order. The first call is collective."""
        return _group_communicator(comm, self.mesh, self.by[axis])


@functools.cache
def _group_communicator(
    comm: Communicator, mesh: tuple[int, ...], among: tuple[int, ...]
) -> Communicator:
    division = Division((), mesh, (among,))
    ranks = division.group(comm.rank, 0)
    if ranks == list(range(comm.size)):
        return comm
    return comm.split(min(ranks), ranks.index(comm.rank))


# ---- The steps of a transform: local transforms, and exchanges that make further axes whole ----


Kind = Literal["fft", "rfft", "dct", "dst"]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A transform of the last axes in memory, which are whole on each rank."""

    kind: Kind
    axes: tuple[int, ...]  # axes of the array, in the order in memory
    n: int  # entries of the last of them in space


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange that makes the axis `gather` whole and divides the axis `split`.

    `order` is the order in memory before and after it.
    """

    gather: int
    split: int
    division: Division  # before
    order: tuple[tuple[int, ...], tuple[int, ...]]

    def sent(self, rank: int) -> tuple[int, int]:
        """Return how many messages a rank sends, and how many values they have together."""
        after = self.division.moved(self.gather, self.split)
        block = self.division.local_shape(rank)
        row = math.prod(n for axis, n in enumerate(block) if axis != self.split)
        others = (r for r in self.division.group(rank, self.gather) if r != rank)
        values = [row * after.local_shape(r)[self.split] for r in others]
        return sum(n > 0 for n in values), sum(values)


@dataclasses.dataclass(frozen=True)
class Reorder:
    """A transpose on each rank: the order of the axes in memory before and after it."""

    order: tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The steps from tiles to a spectrum. The inverse takes them backwards.

    Attributes
    ----------
    steps
        The steps.
    spectrum
        The division of the result.
    """

    steps: tuple[Transform | Exchange | Reorder, ...]
    spectrum: Division

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges among the steps."""
        return tuple(step for step in self.steps if isinstance(step, Exchange))


_MOST = 3  # XLA transforms at most three axes at once


@functools.cache
def make_plan(division: Division, axes: tuple[int, ...], kinds: tuple[Kind, ...]) -> Plan:
    """Plan the transform of `axes`, each of its kind.

    Only the last of the axes may be of the kind "rfft".

    Raises
    ------
    ValueError
        If an axis is divided and there is no other axis that could be divided instead.
    """
    kind_of = dict(zip(axes, kinds, strict=True))
    natural = tuple(range(len(division.shape)))
    order, todo = natural, list(axes)
    steps: list[Transform | Exchange | Reorder] = []
    while todo:
        first = _next_axis(division, todo, kind_of)
        if division.by[first]:
            target = _new_axis(division, first, todo)
            group = (first, target)
            # The axis that is transformed next comes last in memory.
            after = (*(a for a in order if a not in group), target, first)
            steps.append(Exchange(first, target, division, (order, after)))
            division, order = division.moved(first, target), after
        batch = _together(division, first, todo, kind_of)
        if order[-len(batch) :] != batch:
            if set(order[-len(batch) :]) == set(batch) and kind_of[first] == "fft":
                batch = order[-len(batch) :]
            elif order[-1] == first:
                batch = (first,)
            else:
                after = (*(a for a in order if a not in batch), *batch)
                steps.append(Reorder((order, after)))
                order = after
        steps.append(Transform(kind_of[first], batch, division.shape[batch[-1]]))
        if kind_of[first] == "rfft":
            division = division.with_shape(first, division.shape[first] // 2 + 1)
        todo = [a for a in todo if a not in batch]
    if order != natural:
        steps.append(Reorder((order, natural)))
    return Plan(tuple(steps), division)


def _next_axis(division: Division, todo: list[int], kind_of: dict[int, Kind]) -> int:
    """Return the axis that is transformed next.

    Transforms of real arrays come first, the one whose result is complex last of them. Among the
    others axes that are whole come first.
    """
    walls = [a for a in todo if kind_of[a] in ("dct", "dst")]
    real = [a for a in todo if kind_of[a] == "rfft"]
    some = walls or real or todo
    whole = [a for a in some if not division.by[a]]
    return (whole or some)[-1]


def _together(
    division: Division, first: int, todo: list[int], kind_of: dict[int, Kind]
) -> tuple[int, ...]:
    """Return the axes that one call transforms, with `first` as the last of them."""
    if kind_of[first] in ("dct", "dst"):
        return (first,)
    whole = [a for a in todo if a != first and not division.by[a] and kind_of[a] == "fft"]
    return (*whole[1 - _MOST :], first)


def _new_axis(division: Division, axis: int, todo: list[int]) -> int:
    """Choose the axis that is divided instead of `axis`."""
    # An axis that is done and whole needs no further exchange. Among equals the longest.
    others = [a for a in range(len(division.shape)) if a != axis]
    if not others:
        raise ValueError(
            "fft: a transform along the only axis of a grid needs this axis whole on each rank, "
            f"got {division.mesh[division.by[axis][0]]} tiles. Use 1 rank, gather the field, or "
            "use a grid with two or three axes."
        )
    return max(others, key=lambda a: (a not in todo, not division.by[a], division.shape[a]))


# ---- The spectrum of a grid: what each rank has of it ----


class Layout:
    """The layout of the spectrum of a grid's fields: shapes, indices and wave numbers.

    `fftn` and the other transforms return arrays in this layout. The spectrum is usually divided
    along other axes than the grid, because a transform needs each of its axes whole in turn.

    Making a layout is collective: all ranks of the grid make it, with the same arguments. Layouts
    of equal arguments are equal, and their plan is made only once.

    Parameters
    ----------
    grid
        The grid of the fields.
    real
        True for `rfftn`: the spectrum has n // 2 + 1 entries along the last axis of kind "fft".
    axes
        The axes that are transformed. Default: all.
    kinds
        The transform of each of `axes`, or one for all: "fft" along periodic axes, between walls
        "dct" (no flux) or "dst" (zero).

    Attributes
    ----------
    grid
        The grid of the fields.
    axes
        The axes that are transformed, counted from 0.
    kinds
        The transform of each of them. With `real` one of them is "rfft".
    plan
        The steps of the transform.

    Raises
    ------
    ValueError
        If an axis is not one of the grid or is named twice, a kind is unknown, or a divided axis is
        the only axis of the grid. On all ranks: if the arguments differ between ranks.

    Examples
    --------
    >>> from mpigrad import fft
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((8, 6), spacing=(0.1, 0.1), periodic=True)
    >>> layout = fft.Layout(grid, real=True)
    >>> layout.shape, layout.local_shape
    ((8, 4), (8, 4))
    >>> kx, ky = layout.wavenumbers()
    >>> kx.shape, ky.shape
    ((8, 1), (1, 4))
    """

    def __init__(
        self,
        grid: Grid,
        real: bool = False,
        axes: Sequence[int] | None = None,
        kinds: str | Sequence[str] = "fft",
    ) -> None:
        self.grid = grid
        self.axes = _checked_axes(grid, axes)
        self.kinds = _checked_kinds(self.axes, kinds, real)
        settings = bool(real), self.axes, self.kinds
        assert_same_on_all_ranks(grid.comm, settings, "fft.Layout: real, axes and kinds")
        self.plan = _planned(grid, self.axes, self.kinds)

    @property
    def real(self) -> bool:
        """True if the fields are real and their spectrum is complex."""
        return "rfft" in self.kinds

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole spectrum."""
        return self.plan.spectrum.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """This rank's part, as slices of the whole spectrum."""
        return self.plan.spectrum.slices_of(self.grid.comm.rank)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.plan.spectrum.local_shape(self.grid.comm.rank)

    @property
    def scale(self) -> float:
        """The number of cells along the transformed axes: forward and back without norm."""
        return float(math.prod(self.grid.shape[a] for a in self.axes))

    def modes(self) -> tuple[NDArray[np.int64], ...]:
        """Return the numbers of this rank's modes along each of `axes`.

        Along periodic axes they are 0, 1, ..., -2, -1 periods per axis, between walls half periods.
        Each array has the length of this rank's part along its axis and 1 along the others, so that
        they are broadcast together.
        """
        return tuple(
            self._along(a, _modes(self.grid.shape[a], kind))
            for a, kind in zip(self.axes, self.kinds, strict=True)
        )

    def wavenumbers(self) -> tuple[NDArray[np.float64], ...]:
        """Return this rank's wave numbers along each of `axes`, in radians per unit of length.

        They are shaped as `modes`.
        """
        lengths = (self.grid.shape[a] * self.grid.spacing[a] for a in self.axes)
        period = {"fft": 2 * math.pi, "rfft": 2 * math.pi, "dct": math.pi, "dst": math.pi}
        return tuple(
            np.asarray(modes * (period[kind] / length), np.float64)
            for modes, kind, length in zip(self.modes(), self.kinds, lengths, strict=True)
        )

    def _along(self, axis: int, values: NDArray[Any]) -> NDArray[Any]:
        shape = [-1 if a == axis else 1 for a in range(self.grid.ndim)]
        return values[self.slices[axis]].reshape(shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._arguments == other._arguments

    def __hash__(self) -> int:
        return hash(self._arguments)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.grid, self.axes, self.kinds

    def __repr__(self) -> str:
        return f"Layout(shape={self.shape}, axes={self.axes}, kinds={self.kinds})"


@functools.cache
def _planned(grid: Grid, axes: tuple[int, ...], kinds: tuple[Kind, ...]) -> Plan:
    """Return the plan. The first call is collective."""
    plan = make_plan(Division.of_tiles(grid), axes, kinds)
    for step in plan.exchanges:
        step.division.communicator(grid.comm, step.gather)
    return plan


@functools.cache
def known_layout(grid: Grid, real: bool, axes: tuple[int, ...] | None, kinds: str) -> Layout:
    """Return the layout of these arguments, which the ranks compare at the first call only."""
    return Layout(grid, real, axes, kinds)


def _modes(n: int, kind: Kind) -> NDArray[np.int64]:
    if kind == "fft":
        return np.rint(np.fft.fftfreq(n) * n).astype(np.int64)
    return np.arange(n // 2 + 1) if kind == "rfft" else np.arange(n) + (kind == "dst")


def _checked_axes(grid: Grid, axes: Sequence[int] | None) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(grid.ndim))
    wrong = [a for a in axes if not -grid.ndim <= a < grid.ndim]
    numbers = tuple(a % grid.ndim for a in axes)
    if wrong or not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"fft: axes must be different axes of a grid with {grid.ndim} axes, got {tuple(axes)}. "
            f"Give numbers from {-grid.ndim} to {grid.ndim - 1}."
        )
    return numbers


def _checked_kinds(
    axes: tuple[int, ...], kinds: str | Sequence[str], real: bool
) -> tuple[Kind, ...]:
    names = (kinds,) * len(axes) if isinstance(kinds, str) else tuple(kinds)
    if len(names) != len(axes) or not set(names) <= {"fft", "dct", "dst"}:
        raise ValueError(
            f'fft: kinds must be "fft", "dct" or "dst" for each of {len(axes)} axes, got {kinds!r}.'
        )
    transforms: list[Any] = list(names)
    if real:
        if "fft" not in transforms:
            raise ValueError(
                "fft: real=True is for transforms along at least one periodic axis, got only "
                f"{names}. Leave real out: the spectrum of walls is real."
            )
        transforms[len(transforms) - 1 - transforms[::-1].index("fft")] = "rfft"
    return tuple(transforms)
