"""Meshes of boxes, which each rank makes for itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.fem.cells import check_cell_type, reference_cell
from mpigrad.fem.mesh import FacetTags, Mesh
from mpigrad.fem.piece import Piece, build_mesh

__all__ = ["box"]

_SIDES = ("xmin", "xmax", "ymin", "ymax", "zmin", "zmax")


def box(
    shape: Sequence[int],
    lengths: Sequence[float] | None = None,
    cell_type: str | None = None,
    origin: Sequence[float] | None = None,
    comm: Communicator | None = None,
) -> Mesh:
    """Make a mesh of a rectangle or a box (collective).

    The box is divided into equal bricks. Each rank gets a block of bricks and makes its own cells:
    no rank has the whole mesh. Bricks are numbered with x fastest, then y, then z, and so are the
    vertices. With triangles each brick has two cells, with tetrahedra six: cell c of brick b has
    the number 2 b + c, or 6 b + c.

    The sides have the tags 1 to 6 and the names "xmin", "xmax", "ymin", "ymax", "zmin" and "zmax".

    Parameters
    ----------
    shape
        The number of bricks along each axis: (nx, ny) or (nx, ny, nz).
    lengths
        The lengths of the box along each axis, in the user's unit of length. Default: 1 along each.
    cell_type
        "triangle" or "quadrilateral" for two axes, "tetrahedron" or "hexahedron" for three.
        Default: quadrilaterals or hexahedra.
    origin
        The corner of the box with the smallest coordinates. Default: zeros.
    comm
        The communicator of the ranks that share the mesh. Default: the communicator of the
        enclosing `with`, or all ranks.

    Returns
    -------
    Mesh

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument is not valid or differs between ranks, or there are more ranks
        than bricks.

    Examples
    --------
    >>> from mpigrad import fem
    >>> mesh = fem.box((4, 3, 2), (2.0, 1.0, 1.0), cell_type="tetrahedron")
    >>> mesh.n_cells_global, mesh.vertices.n_global
    (144, 60)
    """
    comm = resolve(comm)
    checked: Any = None
    with raise_on_all_ranks(comm):
        checked = _check(shape, lengths, cell_type, origin, comm.size)
    assert_same_on_all_ranks(comm, checked, "fem.box: its arguments")
    counts, spacing, kind, corner = checked
    cell = reference_cell(kind)
    block = _blocks(counts, comm.size)[comm.rank]
    piece = _piece(counts, block, spacing, corner, kind)
    per_brick = len(_bricks(kind))
    return build_mesh(
        "fem.box",
        comm,
        kind,
        piece,
        n_vertices=math.prod(n + 1 for n in counts),
        n_cells=math.prod(counts) * per_brick,
        method="blocks",
        cell_groups={},
        facet_groups={name: tag + 1 for tag, name in enumerate(_SIDES[: 2 * cell.dim])},
        check=False,
    )


def _check(shape: Any, lengths: Any, cell_type: Any, origin: Any, size: int) -> tuple[Any, ...]:
    try:
        counts = tuple(int(n.__index__()) for n in shape)
    except (AttributeError, TypeError):
        raise TypeError(
            f"fem.box: shape must be integers, got {shape!r}. Give the number of bricks along each "
            "axis."
        ) from None
    if len(counts) not in (2, 3) or min(counts) < 1:
        raise ValueError(
            f"fem.box: shape must be two or three positive integers, got {counts}. Give the number "
            "of bricks along each axis."
        )
    dim = len(counts)
    ends = np.ones(dim) if lengths is None else np.asarray(lengths, float)
    if ends.shape != (dim,) or not np.all(np.isfinite(ends)) or ends.min() <= 0:
        raise ValueError(
            f"fem.box: lengths must be {dim} positive numbers, as shape has {dim} axes, got "
            f"{lengths!r}. Give the length of the box along each axis."
        )
    corner = np.zeros(dim) if origin is None else np.asarray(origin, float)
    if corner.shape != (dim,) or not np.all(np.isfinite(corner)):
        raise ValueError(
            f"fem.box: origin must be {dim} finite numbers, got {origin!r}. Give the smallest "
            "coordinate along each axis."
        )
    default = "quadrilateral" if dim == 2 else "hexahedron"
    kind = check_cell_type("fem.box", default if cell_type is None else cell_type)
    if reference_cell(kind).dim != dim:
        raise ValueError(
            f"fem.box: expected cells with {dim} dimensions for the shape {counts}, got {kind}. "
            "Change shape or cell_type."
        )
    if size > math.prod(counts):
        raise ValueError(
            f"fem.box: expected at least one brick for each of the {size} ranks, got "
            f"{math.prod(counts)} bricks. Start fewer ranks or refine the mesh."
        )
    spacing = tuple(float(end) / n for end, n in zip(ends, counts, strict=True))
    return counts, spacing, kind, tuple(corner.tolist())


def _blocks(counts: tuple[int, ...], size: int) -> list[tuple[slice, ...]]:
    """Divide bricks into one block for each rank, by cuts across the longest axis."""

    def divide(block: tuple[slice, ...], ranks: int) -> list[tuple[slice, ...]]:
        if ranks == 1:
            return [block]
        widths = [part.stop - part.start for part in block]
        axis = max(range(len(widths)), key=widths.__getitem__)
        n, layer = widths[axis], math.prod(widths) // widths[axis]
        left = ranks // 2
        cut = min(max(round(n * left / ranks), 1), n - 1)
        # Each rank needs a brick.
        left = min(max(left, ranks - (n - cut) * layer, 1), cut * layer, ranks - 1)
        part = block[axis]
        middle = part.start + cut
        low = (*block[:axis], slice(part.start, middle), *block[axis + 1 :])
        high = (*block[:axis], slice(middle, part.stop), *block[axis + 1 :])
        return divide(low, left) + divide(high, ranks - left)

    return divide(tuple(slice(0, n) for n in counts), size)


def _bricks(kind: str) -> NDArray[np.intp]:
    """Return the corners of a brick that each cell in it has, shape (cells, n_corners).

    Corner i of the brick is at the binary digits of i: x is the lowest. A tetrahedron goes from the
    first to the last corner along the axes in one of six orders.
    """
    cell = reference_cell(kind)
    if not cell.is_simplex:
        return np.arange(cell.n_corners)[None, :]
    rows = []
    for axes in itertools.permutations(range(cell.dim)):
        path = [0, *itertools.accumulate(1 << axis for axis in axes)]
        turns = sum(a > b for a, b in itertools.combinations(axes, 2))
        if turns % 2:  # the Jacobian is positive in all cells
            path[-2:] = path[:-3:-1]
        rows.append(path)
    return np.asarray(rows)


def _piece(
    counts: tuple[int, ...],
    block: tuple[slice, ...],
    spacing: tuple[float, ...],
    origin: tuple[float, ...],
    kind: str,
) -> Piece:
    """Return the cells in a block of bricks. The axis x is the first one, and it runs fastest."""
    dim = len(counts)
    widths = [part.stop - part.start for part in block]
    bricks = _lattice([np.arange(part.start, part.stop) for part in block])
    nodes = _lattice([np.arange(part.start, part.stop + 1) for part in block])
    brick_ids = _ravel(bricks, counts)
    vertex_ids = _ravel(nodes, [n + 1 for n in counts])
    points = np.stack([x0 + h * i for x0, h, i in zip(origin, spacing, nodes, strict=True)], axis=1)
    inside = [i - part.start for i, part in zip(bricks, block, strict=True)]
    first = _ravel(inside, [n + 1 for n in widths])
    strides = [math.prod(n + 1 for n in widths[:axis]) for axis in range(dim)]
    steps = np.array([sum(strides[a] for a in range(dim) if i >> a & 1) for i in range(1 << dim)])
    pattern = _bricks(kind)
    corners = first[:, None, None] + steps[pattern]
    per_brick = len(pattern)

    # The longest axis runs slowest, so that the matrix has a small bandwidth.
    axes = sorted(range(dim), key=lambda axis: widths[axis])
    from_start = [i - part.start for i, part in zip(nodes, block, strict=True)]
    keys = _ravel([from_start[a] for a in axes], [widths[a] + 1 for a in axes])

    facets = [
        _side(bricks[axis] == (counts[axis] - 1 if end else 0), pattern, axis, end, kind)
        for axis in range(dim)
        for end in (0, 1)
    ]
    rows = [np.concatenate(column) for column in zip(*facets, strict=True)]
    cell_ids = (brick_ids[:, None] * per_brick + np.arange(per_brick)).reshape(-1)
    return Piece(
        corners=corners.reshape(-1, pattern.shape[1]),
        cell_ids=cell_ids.astype(np.int64),
        cell_tags=np.zeros(len(cell_ids), np.int32),
        further_cell_tags=np.zeros((0, 2), np.int32),
        vertex_ids=vertex_ids.astype(np.int64),
        points=points,
        vertex_keys=keys,
        facets=FacetTags(
            rows[0].astype(np.int32), rows[1].astype(np.int8), rows[2].astype(np.int32)
        ),
    )


def _lattice(along: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the indices along each axis of all points of a lattice, x fastest."""
    grids = np.meshgrid(*reversed(along), indexing="ij")
    return [grid.reshape(-1) for grid in reversed(grids)]


def _ravel(indices: Sequence[NDArray[Any]], counts: Sequence[int]) -> NDArray[np.int64]:
    """Number points of a lattice with x fastest."""
    number = np.zeros(len(indices[0]), np.int64)
    for index, n in zip(reversed(indices), reversed(counts), strict=True):
        number = number * n + index
    return number


def _side(
    bricks: NDArray[np.bool_], pattern: NDArray[np.intp], axis: int, end: int, kind: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return cells, local facets and tags on a side of the box."""
    at_side = (pattern >> axis & 1) == end  # (cells of a brick, corners)
    facets = at_side[:, reference_cell(kind).facets].all(axis=2)
    cell, local = np.nonzero(facets)
    chosen = np.flatnonzero(bricks)
    cells = (chosen[:, None] * len(pattern) + cell).reshape(-1)
    local_facets = np.tile(local, len(chosen))
    return cells, local_facets, np.full(len(cells), 2 * axis + end + 1)
