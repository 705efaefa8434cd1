"""Perfectly matched layers: their widths, their profiles, and the tiles that hold them."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import numpy as np

from mpigrad._shapes import Float
from mpigrad.grid.grid import Grid

__all__ = ["Face", "WaveTile", "Widths", "damping", "widths_of"]

# Cells of the layer before and behind the model along x, then along y.
Widths = tuple[tuple[int, int], tuple[int, int]]


def widths_of(pml: Any) -> Widths:
    """An int, or ((x0, x1), (y0, y1)), as four widths.

    Raises
    ------
    ValueError
        If it is neither, or a width is negative.
    """
    if isinstance(pml, int | np.integer):
        pml = ((pml, pml), (pml, pml))
    try:
        (x0, x1), (y0, y1) = pml
        x0, x1, y0, y1 = map(operator.index, (x0, x1, y0, y1))
        widths = ((x0, x1), (y0, y1))
    except (TypeError, ValueError):
        raise ValueError(
            f"pml: a number of cells, or ((x0, x1), (y0, y1)) of them, not {pml!r}"
        ) from None
    if min(*widths[0], *widths[1]) < 0:
        raise ValueError(f"pml: widths must not be negative, not {pml!r}")
    return widths


class Face(NamedTuple):
    """A side of a tile on which another tile lies: along `axis`, before (-1) or behind (1) it."""

    axis: int
    step: int
    rank: int


@dataclasses.dataclass(frozen=True)
class WaveTile:
    """This rank's tile of a model, extended by the absorbing layers that lie beside it.

    A layer belongs to the tiles on the boundary of the grid, so that extending a model sends no
    message. Cells are numbered like those of the grid, with negative numbers in the layers before
    it.
    """

    grid: Grid
    pml: Widths

    def __post_init__(self) -> None:
        if any(self.grid.periodic):
            raise ValueError(
                "waves have absorbing layers at the grid's sides: make the grid with periodic=False"
            )

    @functools.cached_property
    def extension(self) -> Widths:
        """Cells of the layers that lie beside this rank's tile, as the widths are given."""
        return tuple(  # type: ignore[return-value]
            (before if place == 0 else 0, behind if place == tiles - 1 else 0)
            for (before, behind), place, tiles in zip(
                self.pml, self.grid.coords, self.grid.dims, strict=True
            )
        )

    @functools.cached_property
    def origin(self) -> tuple[int, int]:
        """The number of the first cell along each axis."""
        parts = zip(self.grid.slices, self.extension, strict=True)
        return tuple(part.start - before for part, (before, _) in parts)  # type: ignore[return-value]

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """Cells along each axis."""
        return tuple(  # type: ignore[return-value]
            before + n + behind
            for n, (before, behind) in zip(self.grid.local_shape, self.extension, strict=True)
        )

    @functools.cached_property
    def faces(self) -> tuple[Face, ...]:
        """The neighbouring tiles across faces: x before and behind, then y."""
        found = []
        for neighbor in self.grid.neighbors:
            axes = [axis for axis, step in enumerate(neighbor.step) if step]
            if len(axes) == 1:
                found.append(Face(axes[0], neighbor.step[axes[0]], neighbor.rank))
        return tuple(sorted(found))

    @property
    def interior(self) -> tuple[slice, slice]:
        """Where the model's own tile lies in this one."""
        return tuple(  # type: ignore[return-value]
            slice(before, before + n)
            for n, (before, _) in zip(self.grid.local_shape, self.extension, strict=True)
        )

    def check(self, reach: int) -> None:
        """Raise, on every rank alike, where a message would have to reach past a neighbour.

        Raises
        ------
        ValueError
            If a tile has fewer than `reach` cells along an axis that is divided.
        """
        if self.grid.ndim != 2:
            raise ValueError(f"waves: the grid has {self.grid.ndim} axes; waves here are 2-D")
        for axis, (tiles, cells) in enumerate(
            zip(self.grid.dims, self.grid.smallest_tile, strict=True)
        ):
            if tiles > 1 and cells < reach:
                raise ValueError(
                    f"waves: {self.grid.shape[axis]} cells along axis {axis} in {tiles} tiles "
                    f"leave {cells} to one of them, and the stencil reaches {reach} cells into "
                    "the next tile. Use fewer ranks, other dims, or more cells"
                )


def damping(
    tile: WaveTile, axis: int, velocity: float, reflection: float, offset: float = 0.0
) -> Float[np.ndarray, " n"]:
    """The damping of this rank's cells along an axis, in 1/s.

    sigma(d) = 3 v ln(1/R) / (2 L) (d / L)^2 at the depth d in a layer of thickness L, so that a
    wave of velocity v, at normal incidence, returns with R of its amplitude (Collino and Tsogka
    2001, with a quadratic profile). The layer begins at the face of its first cell.

    Parameters
    ----------
    offset
        Where in a cell the values stand, in cells from its centre.
    """
    h = tile.grid.spacing[axis]
    before, behind = tile.pml[axis]
    place = np.arange(tile.shape[axis]) + tile.origin[axis] + 0.5 + offset
    sigma = np.zeros(tile.shape[axis])
    for width, depth in ((before, -place), (behind, place - tile.grid.shape[axis])):
        if width:
            top = 3 * velocity * math.log(1 / reflection) / (2 * width * h)
            sigma += top * (np.maximum(depth, 0) / width) ** 2
    return sigma
