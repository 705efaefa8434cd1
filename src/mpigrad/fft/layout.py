"""The spectrum of a grid: what each rank has of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.fft.division import Division
from mpigrad.fft.plan import Kind, make_plan
from mpigrad.grid.grid import Grid

__all__ = ["Layout"]

KINDS: dict[str, Kind] = {"fft": "complex", "dct": "cosine", "dst": "sine"}


class Layout:
    """The layout of the spectrum of a grid's fields: shapes, indices and wave numbers.

    `fftn` and the other transforms return arrays in this layout. The spectrum is usually divided
    along other axes than the grid, because a transform needs each of its axes whole in turn.

    Making a layout is collective: all ranks of the grid make it, with the same arguments. Layouts
    of equal arguments are equal, and `of` makes each only once.

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
        The transform of each of them: "complex", "real", "cosine" or "sine".
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
        self.plan = make_plan(Division.of_tiles(grid), self.axes, self.kinds)
        for step in self.plan.exchanges:
            step.division.communicator(grid.comm, step.gather)

    @staticmethod
    def of(
        grid: Grid,
        real: bool = False,
        axes: Sequence[int] | None = None,
        kinds: str | Sequence[str] = "fft",
    ) -> Layout:
        """Return the layout of these arguments, made once."""
        axes = None if axes is None else tuple(axes)
        return _layout(grid, real, axes, kinds if isinstance(kinds, str) else tuple(kinds))

    @property
    def real(self) -> bool:
        """True if the fields are real and their spectrum is complex."""
        return "real" in self.kinds

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
        period = {"complex": 2 * math.pi, "real": 2 * math.pi, "cosine": math.pi, "sine": math.pi}
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
def _layout(grid: Grid, real: bool, axes: Any, kinds: Any) -> Layout:
    return Layout(grid, real, axes, kinds)


def _modes(n: int, kind: Kind) -> NDArray[np.int64]:
    if kind == "complex":
        return np.rint(np.fft.fftfreq(n) * n).astype(np.int64)
    return np.arange(n // 2 + 1) if kind == "real" else np.arange(n) + (kind == "sine")


def _checked_axes(grid: Grid, axes: Sequence[int] | None) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(grid.ndim))
    wrong = [a for a in axes if not -grid.ndim <= a < grid.ndim]
    found = tuple(a % grid.ndim for a in axes)
    if wrong or not found or len(set(found)) < len(found):
        raise ValueError(
            f"fft: axes must be different axes of a grid with {grid.ndim} axes, got {tuple(axes)}. "
            f"Give numbers from {-grid.ndim} to {grid.ndim - 1}."
        )
    return found


def _checked_kinds(
    axes: tuple[int, ...], kinds: str | Sequence[str], real: bool
) -> tuple[Kind, ...]:
    names = (kinds,) * len(axes) if isinstance(kinds, str) else tuple(kinds)
    if len(names) != len(axes) or not set(names) <= set(KINDS):
        raise ValueError(
            f'fft: kinds must be "fft", "dct" or "dst" for each of {len(axes)} axes, got {kinds!r}.'
        )
    found: list[Kind] = [KINDS[name] for name in names]
    if real:
        if "complex" not in found:
            raise ValueError(
                "fft: real=True is for transforms along at least one periodic axis, got only "
                f"{names}. Leave real out: the spectrum of walls is real."
            )
        found[len(found) - 1 - found[::-1].index("complex")] = "real"
    return tuple(found)
