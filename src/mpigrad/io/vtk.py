"""Write fields as VTK files, which ParaView opens: one piece for each rank, and an index."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import numbers
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid import Grid
from mpigrad.io.files import (
    Slices,
    cells_from_all_ranks,
    check_fields,
    check_name,
    check_origin,
    check_path,
    write_atomically,
    write_pieces,
)

__all__ = [
    "write_pvd",
    "write_vtk",
    "write_vtu",
]

# ---- VTK's XML files: arrays, a piece, and the index of pieces ----
#
# The format is described in "VTK XML Formats" of VTK's documentation.
#
# The values are appended to the XML as little-endian numbers, each array behind its size in
# bytes.


# Raw bytes are smaller. Meshio, which reads unstructured grids only, misreads several raw arrays.
Encoding = Literal["raw", "base64"]


@dataclass(frozen=True)
class DataArray:
    """An array of a piece, shape (n,) or (n, components)."""

    name: str
    values: NDArray[Any]

    @classmethod
    def of(cls, name: str, values: NDArray[Any]) -> DataArray:
        """Return the array of a field. Vectors with two components get a third one, zero."""
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim == 2 and values.shape[1] == 2:
            values = np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
        return cls(name, values.astype(np.uint8) if values.dtype == bool else values)

    @property
    def attributes(self) -> str:
        """The attributes of the element of the array."""
        kind = self.values.dtype.name.capitalize().replace("Uint", "UInt")
        text = f'type="{kind}" Name={quoteattr(self.name)}'
        if self.values.ndim == 2:  # meshio reads one component as an axis of length one
            text += f' NumberOfComponents="{self.values.shape[1]}"'
        return text

    def length(self, encoding: Encoding) -> int:
        """Return the number of bytes that `write` writes."""
        size = 8 + self.values.nbytes
        return size if encoding == "raw" else 4 * -(-size // 3)

    def write(self, file: BinaryIO, encoding: Encoding) -> None:
        """Write the size in bytes and the values."""
        size = self.values.nbytes.to_bytes(8, "little")
        little = np.ascontiguousarray(self.values, self.values.dtype.newbyteorder("<"))
        if encoding == "raw":
            file.write(size)
            file.write(little.reshape(-1).view(np.uint8).data)
        else:
            file.write(base64.b64encode(size + little.tobytes()))


Sections = Mapping[str, Sequence[DataArray]]


def write_piece(
    file: BinaryIO, kind: str, attributes: str, piece: str, sections: Sections, encoding: Encoding
) -> None:
    """Write the file of a piece.

    Parameters
    ----------
    file
        The file.
    kind
        The kind of grid, "ImageData" or "UnstructuredGrid".
    attributes, piece
        The attributes of the elements of the grid and of the piece.
    sections
        The arrays of each section, for example "PointData".
    encoding
        How the values are written.
    """
    arrays = list(itertools.chain.from_iterable(sections.values()))
    offsets = itertools.accumulate((a.length(encoding) for a in arrays), initial=0)
    lines = [_first_line(kind), _element(kind, attributes), _element("Piece", piece)]
    for section, members in sections.items():
        lines.append(f"<{section}>")
        lines += [
            f'<DataArray {array.attributes} format="appended" offset="{next(offsets)}"/>'
            for array in members
        ]
        lines.append(f"</{section}>")
    lines += ["</Piece>", f"</{kind}>", f'<AppendedData encoding="{encoding}">', "_"]
    file.write("\n".join(lines).encode())
    for array in arrays:
        array.write(file, encoding)
    file.write(b"\n</AppendedData>\n</VTKFile>\n")


def index_text(
    kind: str, attributes: str, pieces: Sequence[str], sections: Sections, directory: str
) -> str:
    """Return the text of the index of the pieces `directory`/0, `directory`/1, ...

    `pieces` are the attributes of each piece, in which {} stands for the name of its file. The
    cells of unstructured grids are in the pieces only.
    """
    lines = [_first_line(f"P{kind}"), _element(f"P{kind}", attributes)]
    for section, members in sections.items():
        if section != "Cells":
            lines.append(f"<P{section}>")
            lines += [f"<PDataArray {array.attributes}/>" for array in members]
            lines.append(f"</P{section}>")
    suffix = {"ImageData": ".vti", "UnstructuredGrid": ".vtu"}[kind]
    for rank, piece in enumerate(pieces):
        source = f"Source={quoteattr(f'{directory}/{rank}{suffix}')}"
        lines.append(f"<Piece {piece.format(source)}/>")
    return "\n".join([*lines, f"</P{kind}>", "</VTKFile>", ""])


def _element(name: str, attributes: str) -> str:
    return f"<{name} {attributes}>" if attributes else f"<{name}>"


def _first_line(kind: str) -> str:
    return (
        f'<?xml version="1.0"?>\n<VTKFile type="{kind}" version="1.0" '
        'byte_order="LittleEndian" header_type="UInt64">'
    )


# ---- Write fields as VTK image data, which ParaView opens: one piece for each rank, and an
# index


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


# ---- Write unstructured cells ----


def write_vtu(
    path: str | os.PathLike[str],
    points: Any,
    cells: Any,
    cell_type: int,
    *,
    point_fields: Mapping[str, Any] | None = None,
    cell_fields: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
    function: str = "write_vtu",
) -> None:
    """Write cells of one type, their nodes and fields as a VTK unstructured grid (collective).

    Each rank writes its cells as one piece in the directory `u.vtu-pieces-0` next to the index
    `u.pvtu`, as `write_vtk` does. `fem.Mesh.write` and `fem.Space.write` use this function.

    Parameters
    ----------
    path
        The index file, with the suffix `.pvtu`. Its directory must exist.
    points
        Coordinates of the nodes of this rank's cells, shape (n_points, dim) with dim 1 to 3.
    cells
        The nodes of each cell in VTK's order, as rows of `points`, shape (n_cells, n_nodes).
    cell_type
        VTK's number of the type, for example 5 for triangles and 12 for hexahedra.
    point_fields, cell_fields
        Fields by name, shape (n_points,) or (n_points, components), and (n_cells, ...). Vectors
        with two components get a third one, which is zero. dtype: 32 or 64 bits, or bool.
    comm
        The communicator of the ranks that call it. Default: the communicator of the enclosing
        `with`, or all ranks.
    function
        The public function that errors name.

    Raises
    ------
    TypeError, ValueError
        On all ranks, before anything is written: if an argument is not valid.
    OSError
        On all ranks: if a file cannot be written. The old files stay.

    Examples
    --------
    >>> import numpy as np
    >>> import mpigrad as mg
    >>> points = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> heights = {"height": np.array([0.0, 1.0, 2.0])}
    >>> mg.io.write_vtu("u.pvtu", points, [[0, 1, 2]], 5, point_fields=heights)
    """
    comm = resolve(comm)
    path = check_path(function, path, comm, ".pvtu")
    points, cells = np.asarray(points), np.asarray(cells)
    with raise_on_all_ranks(comm):
        _check_cells(function, comm, points, cells, cell_type)
    assert_same_on_all_ranks(comm, cell_type, f"{function}: cell_type")
    at_points = _check_rows(function, comm, point_fields or {}, len(points), "point")
    at_cells = _check_rows(function, comm, cell_fields or {}, len(cells), "cell")
    n_cells, width = cells.shape
    coordinates = np.zeros((len(points), 3))
    coordinates[:, : points.shape[1]] = points
    sections = {
        "PointData": [DataArray.of(name, field) for name, field in at_points.items()],
        "CellData": [DataArray.of(name, field) for name, field in at_cells.items()],
        "Points": [DataArray("Points", coordinates)],
        "Cells": [
            DataArray("connectivity", cells.astype(np.int64).reshape(-1)),
            DataArray("offsets", width * np.arange(1, n_cells + 1, dtype=np.int64)),
            DataArray("types", np.full(n_cells, cell_type, np.uint8)),
        ],
    }
    piece = f'NumberOfPoints="{len(points)}" NumberOfCells="{n_cells}"'
    write_pieces(
        comm,
        path,
        ".vtu",
        lambda file: write_piece(file, "UnstructuredGrid", "", piece, sections, "base64"),
        lambda directory: index_text(
            "UnstructuredGrid", 'GhostLevel="0"', ["{}"] * comm.size, sections, directory
        ),
        directory="vtu-pieces",
    )


# The nodes of VTK's cells with a fixed number of them, by type.
_NODES = {
    **{1: 1, 3: 2, 5: 3, 8: 4, 9: 4, 10: 4, 11: 8, 12: 8, 13: 6, 14: 5},
    **{21: 3, 22: 6, 23: 8, 24: 10, 25: 20, 26: 15, 27: 13, 28: 9, 29: 27},
}


def _check_cells(function: str, comm: Communicator, points: Any, cells: Any, kind: Any) -> None:
    where = f"on rank {comm.rank}"
    if points.ndim != 2 or not 1 <= points.shape[1] <= 3 or points.dtype.kind not in "iuf":
        raise ValueError(
            f"{function}: expected points as real numbers of shape (n_points, dim) with dim 1 to "
            f"3, got {points.dtype}{list(points.shape)} {where}. Give one row for each point."
        )
    if cells.ndim != 2 or (cells.size and cells.dtype.kind not in "iu"):
        raise ValueError(
            f"{function}: expected cells as integers of shape (n_cells, n_nodes), got "
            f"{cells.dtype}{list(cells.shape)} {where}. Give the nodes of one cell in each row."
        )
    if cells.size and not 0 <= cells.min() <= cells.max() < len(points):
        raise ValueError(
            f"{function}: cells must have nodes from 0 to {len(points) - 1}, the rows of points, "
            f"got {cells.min()} to {cells.max()} {where}. Count from this rank's first point."
        )
    if isinstance(kind, bool) or not isinstance(kind, int | np.integer) or not 0 < kind < 256:
        raise ValueError(
            f"{function}: cell_type must be VTK's number of a type, 1 to 255, got {kind!r}. For "
            "triangles give 5."
        )
    nodes = _NODES.get(int(kind), cells.shape[1])
    if cells.shape[1] != nodes:
        raise ValueError(
            f"{function}: cells of VTK's type {kind} have {nodes} nodes, got {cells.shape[1]} "
            f"{where}. Give the type of these cells."
        )


def _check_rows(
    function: str, comm: Communicator, fields: Mapping[str, Any], rows: int, what: str
) -> dict[str, NDArray[Any]]:
    """Return fields as arrays, or raise an error on all ranks (collective)."""
    arrays: dict[str, NDArray[Any]] = {}
    with raise_on_all_ranks(comm):
        for name, field in fields.items():
            array = np.asarray(field)
            if array.dtype.kind not in "biuf" or array.dtype.itemsize not in (1, 4, 8):
                raise TypeError(
                    f"{function}: expected real numbers of 32 or 64 bits or bools, got dtype "
                    f"{array.dtype} for {name!r} on rank {comm.rank}. Convert the field."
                )
            if array.ndim not in (1, 2) or array.shape[0] != rows or 0 in array.shape[1:]:
                raise ValueError(
                    f"{function}: expected one row for each {what} of rank {comm.rank}, {rows} in "
                    f"all, got shape {array.shape} for {name!r}. Give this rank's part of the "
                    "field, of shape (n,) or (n, components)."
                )
            arrays[check_name(function, name)] = array
    kinds = [(name, str(a.dtype), a.shape[1:]) for name, a in arrays.items()]
    assert_same_on_all_ranks(comm, kinds, f"{function}: names, dtypes and components of fields")
    return arrays


# ---- Write an index of files by time, which ParaView opens as one animation ----


def write_pvd(
    path: str | os.PathLike[str],
    files: Mapping[float, str | os.PathLike[str]],
    comm: Communicator | None = None,
) -> None:
    """Write a ParaView index of files that `write_vtk` has written at several times (collective).

    Call it after each file of a long run: the index is small, and it is replaced in one step.

    Parameters
    ----------
    path
        The index, with the suffix `.pvd`. Its directory must exist.
    files
        The `.pvti` file of each time. Rank 0 reads this argument. The index has the paths relative
        to its own directory.
    comm
        The communicator of the ranks that call it. Default: the communicator of the enclosing
        `with`, or all ranks.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if `files` is not a dict, a time is not finite, or `path` is not valid.
    OSError
        On all ranks: if a file does not exist, or the index cannot be written.

    Examples
    --------
    >>> import mpigrad as mg
    >>> grid = mg.Grid((4, 2), spacing=(0.25, 0.5))
    >>> x, _ = grid.centers()
    >>> files = {}
    >>> for step in range(3):
    ...     time = 0.1 * step
    ...     files[time] = f"u_{step:04d}.pvti"
    ...     mg.io.write_vtk(files[time], grid, {"u": x + time})
    ...     mg.io.write_pvd("u.pvd", files)
    """
    comm = resolve(comm)
    path = check_path("write_pvd", path, comm, ".pvd")
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            index = _index(path, files).encode()
            write_atomically(path, lambda file: file.write(index))


def _index(path: pathlib.Path, files: Mapping[float, str | os.PathLike[str]]) -> str:
    lines = []
    if not isinstance(files, Mapping):
        raise TypeError(
            f"write_pvd: expected a dict of files by time, got {type(files).__name__}. Write "
            "{0.0: 'u_0000.pvti'}."
        )
    for time, file in files.items():
        if not isinstance(time, numbers.Real) or not math.isfinite(time):
            raise ValueError(
                f"write_pvd: expected finite numbers as times, got {time!r} for {file}."
            )
        if not pathlib.Path(file).is_file():
            raise FileNotFoundError(f"write_pvd: {file} does not exist. Write it first.")
        source = quoteattr(os.path.relpath(file, path.parent))
        lines.append(f'<DataSet timestep="{float(time)!r}" file={source}/>')
    return "\n".join(
        [
            '<?xml version="1.0"?>',
            '<VTKFile type="Collection" version="1.0" byte_order="LittleEndian">',
            "<Collection>", *lines, "</Collection>", "</VTKFile>", "",
        ]
    )  # fmt: skip
