"""Write fields as VTK image data, which ParaView opens: one piece for each rank, and an index."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.grid import Grid
from mpigrad.io.paths import check_path
from mpigrad.io.pieces import write_pieces
from mpigrad.io.tiles import Slices, cells_from_all_ranks, check_fields, check_origin
from mpigrad.io.vtk_xml import DataArray, index_text, write_piece

__all__ = ["write_vtk"]


def write_vtk(
    path: str | os.PathLike[str],
    grid: Grid,
    fields: Mapping[str, Any],
    *,
    origin: Sequence[float] | None = None,
    at: Literal["cells", "points"] = "cells",
) -> None:
    """Write fields as VTK image data. Each rank writes its tile (collective).

    ParaView, VisIt and PyVista open the index file `path`. The pieces are in the directory
    `u.pieces-0` next to `u.pvti`. They are written first, and the index is then replaced in one
    step. So a reader finds the complete old or the complete new fields at any time. The pieces of
    the old fields are removed.

    Parameters
    ----------
    path
        The index file, with the suffix `.pvti`. Its directory must exist.
    grid
        The grid of the fields, with one to three axes.
    fields
        This rank's tile of each field, shape (lx, ly), or (lx, ly, components) for vectors. Vectors
        with two components get a third one, which is zero. dtype: float32, float64, integers or
        bool. The names are the same on every rank.
    origin
        Coordinates of the grid's first corner. Default: zeros.
    at
        "cells" writes one value for each cell. "points" writes the same values at the centres of
        the cells, between which VTK interpolates. Then each rank receives a layer of its
        neighbours' cells.

    Raises
    ------
    TypeError, ValueError
        On all ranks, before anything is written: if an argument is not valid.
    OSError
        On all ranks: if the directory does not exist, or a file cannot be written. It names the
        file. The old fields stay.

    Examples
    --------
    >>> import mpigrad as mg
    >>> grid = mg.Grid((4, 2), spacing=(0.25, 0.5))
    >>> x, y = grid.centers()
    >>> mg.io.write_vtk("u.pvti", grid, {"u": x * y})
    """
    comm, path = grid.comm, check_path("write_vtk", path, grid.comm, ".pvti")
    assert_same_on_all_ranks(comm, at, "write_vtk: at")
    if at not in ("cells", "points"):
        raise ValueError(f"write_vtk: expected at='cells' or at='points', got {at!r}.")
    image = _Image(grid, check_origin("write_vtk", grid, origin), at)
    arrays = check_fields("write_vtk", grid, fields)
    if at == "points":
        arrays = {
            name: cells_from_all_ranks(grid, tile, image.slices) for name, tile in arrays.items()
        }
    data = {image.data: [_in_order(name, x, grid.ndim) for name, x in arrays.items()]}
    whole = tuple(slice(0, n) for n in grid.shape)
    extents = [f'Extent="{image.extent(image.slices(rank))}"' for rank in range(comm.size)]
    attributes = image.attributes(image.slices(comm.rank))
    write_pieces(
        comm,
        path,
        ".vti",
        lambda file: write_piece(file, "ImageData", attributes, extents[comm.rank], data, "raw"),
        lambda directory: index_text(
            "ImageData",
            f'{image.attributes(whole)} GhostLevel="0"',
            [f"{extent} {{}}" for extent in extents],
            data,
            directory,
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Image:
    """The image of a grid: VTK counts points, and cells lie between two points."""

    grid: Grid
    origin: tuple[float, ...]
    at: Literal["cells", "points"]

    def slices(self, rank: int) -> Slices:
        """Return the values that the piece of a rank has, as slices of the whole grid."""
        tile = self.grid.slices_of(rank)
        if self.at == "cells":
            return tile
        return tuple(
            slice(part.start, min(part.stop + 1, n))
            for part, n in zip(tile, self.grid.shape, strict=True)
        )

    def extent(self, slices: Slices) -> str:
        """Return the first and the last point along x, y and z."""
        last = 0 if self.at == "cells" else 1
        ends = [(part.start, part.stop - last) for part in slices]
        ends += [(0, 0)] * (3 - len(ends))
        return " ".join(f"{first} {stop}" for first, stop in ends)

    def attributes(self, slices: Slices) -> str:
        """Return the attributes of an image that has these cells."""
        shift = 0.0 if self.at == "cells" else 0.5
        spacing = (*self.grid.spacing, 1.0, 1.0)[:3]
        corner = (x + shift * h for x, h in zip(self.origin, self.grid.spacing, strict=True))
        origin = (*corner, 0.0, 0.0)[:3]
        return (
            f'WholeExtent="{self.extent(slices)}" Origin="{" ".join(map(repr, origin))}" '
            f'Spacing="{" ".join(map(repr, spacing))}"'
        )

    @property
    def data(self) -> str:
        """The element of the values."""
        return "CellData" if self.at == "cells" else "PointData"


def _in_order(name: str, values: NDArray[Any], ndim: int) -> DataArray:
    """Return a tile, with or without components, in VTK's order: x varies fastest."""
    components = values.shape[ndim:] or (1,)
    axes = (*reversed(range(ndim)), *range(ndim, values.ndim))
    return DataArray.of(name, values.transpose(axes).reshape(-1, *components))
