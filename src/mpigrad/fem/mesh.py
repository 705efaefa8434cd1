"""Meshes whose cells and vertices are distributed over ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import raise_error, raise_on_all_ranks
from mpigrad.communicator import Communicator, check_rank
from mpigrad.extend import index_array, take
from mpigrad.fem.cells import reference_cell
from mpigrad.fem.numbering import Numbering, Route, group_rows
from mpigrad.fem.write import Grid, write_grid
from mpigrad.operations import neighbor_alltoallv

__all__ = [
    "FacetTable",
    "FacetTags",
    "Facets",
    "FileOrder",
    "Mesh",
    "PartitionReport",
    "make_facet_table",
    "make_report",
    "match_facets",
]

# ---- Values in the order of a file on one rank, and in the order of the ranks: differentiable


@dataclass(frozen=True)
class _Orders:
    """On the root: the ids of all ranks in a row, and the position of each id in it."""

    counts: tuple[int, ...]
    ids: jax.Array
    places: jax.Array


class FileOrder:
    """Translate between the numbers of a file, on one rank, and entries of all ranks.

    Parameters
    ----------
    comm
        The communicator.
    ids
        The number in the file of each entry of this rank, shape (n_local,), int64.
    """

    def __init__(self, comm: Communicator, ids: NDArray[np.int64]) -> None:
        self.comm = comm
        self.ids = ids
        self._orders: dict[int, _Orders] = {}

    def scatter(self, x: Any, root: int, function: str) -> jax.Array:
        """Return this rank's rows of the root's array (collective)."""
        root = check_rank(root, self.comm, f"{function}: root")
        orders = self._of(root)
        x = jnp.asarray(x)
        n = sum(orders.counts)
        if x.ndim == 0 or (self.comm.rank == root and x.shape[0] != n):
            raise ValueError(
                f"{function}: x must have {n} rows on the root, got shape {x.shape} on rank "
                f"{self.comm.rank}. Give one row for each entry of the file."
            )
        counts = (len(self.ids),)
        if self.comm.rank == root:
            received = [n if rank == root else 0 for rank, n in enumerate(orders.counts)]
            neighbors = range(self.comm.size)
            return neighbor_alltoallv(
                take(x, orders.ids, unique=True), neighbors, orders.counts, received, self.comm
            )
        return neighbor_alltoallv(x[:0], (root,), (0,), counts, self.comm)

    def gather(self, x: Any, root: int, function: str) -> jax.Array:
        """Return the rows of all ranks in the order of the file on the root (collective)."""
        root = check_rank(root, self.comm, f"{function}: root")
        orders = self._of(root)
        x = jnp.asarray(x)
        n_local = len(self.ids)
        if x.ndim == 0 or x.shape[0] != n_local:
            raise ValueError(
                f"{function}: x must have {n_local} rows, got shape {x.shape} on rank "
                f"{self.comm.rank}. Give one row for each entry of this rank."
            )
        if self.comm.rank == root:
            sent = [n_local if rank == root else 0 for rank in range(self.comm.size)]
            rows = neighbor_alltoallv(x, range(self.comm.size), sent, orders.counts, self.comm)
            return take(rows, orders.places, unique=True)
        return neighbor_alltoallv(x, (root,), (n_local,), (0,), self.comm)

    def _of(self, root: int) -> _Orders:
        """Gather the ids of all ranks on the root at the first use (collective)."""
        if root not in self._orders:
            parts = self.comm.mpi.gather(self.ids, root)
            if parts is None:
                empty = index_array(np.zeros(0, np.int64))
                self._orders[root] = _Orders((), empty, empty)
            else:
                ids = np.concatenate(parts)
                self._orders[root] = _Orders(
                    tuple(map(len, parts)), index_array(ids), index_array(np.argsort(ids))
                )
        return self._orders[root]


# ---- Count what a division of a mesh gives to each rank ----


@dataclass(frozen=True)
class PartitionReport:
    """Numbers of a divided mesh, the same on all ranks. Printing it shows a table.

    Attributes
    ----------
    method
        The method that has divided the cells.
    cells, vertices, ghosts, neighbors
        For each rank: its cells, its own vertices, its ghosts, and the ranks with which it
        exchanges values of vertices, shape (size,).
    n_cut
        The number of facets between cells of different ranks.

    Examples
    --------
    >>> from mpigrad import fem
    >>> report = fem.box((4, 4), (1.0, 1.0)).partition_report()
    >>> report.cells.tolist(), report.n_cut, report.imbalance
    ([16], 0, 1.0)
    """

    method: str
    cells: NDArray[np.int64]
    vertices: NDArray[np.int64]
    ghosts: NDArray[np.int64]
    neighbors: NDArray[np.int64]
    n_cut: int

    @property
    def imbalance(self) -> float:
        """The largest number of cells of a rank, divided by the mean."""
        return float(self.cells.max() / self.cells.mean())

    def __str__(self) -> str:
        lines = [
            f"partition by {self.method}: {self.cells.sum()} cells, {self.n_cut} cut facets, "
            f"imbalance {self.imbalance:.3f}",
            f"{'rank':>6} {'cells':>10} {'vertices':>10} {'ghosts':>10} {'neighbours':>10}",
        ]
        rows = zip(self.cells, self.vertices, self.ghosts, self.neighbors, strict=True)
        lines += [f"{rank:>6} {c:>10} {v:>10} {g:>10} {n:>10}" for rank, (c, v, g, n) in
                  enumerate(rows)]  # fmt: skip
        return "\n".join(lines)


def make_report(
    comm: Communicator, method: str, n_cells: int, vertices: Numbering, n_cut: int
) -> PartitionReport:
    """Gather the numbers of all ranks (collective)."""
    row = (n_cells, vertices.n_local, vertices.n_ghosts, len(vertices.exchange.neighbors), n_cut)
    table = np.asarray(comm.mpi.allgather(row), np.int64)
    cells, n_local, ghosts, neighbors, cut = table.T
    return PartitionReport(method, cells, n_local, ghosts, neighbors, int(cut.sum()) // 2)


# ---- All facets of a rank's cells, and on how many cells of all ranks each of them lies ----


def match_facets(
    corners: NDArray[np.integer], n: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Find equal facets among facets that are given by their corners.

    Parameters
    ----------
    corners
        Corners of shape (m, k), in any order within a row: integers from 0 to n - 1.

    Returns
    -------
    first, second, count
        For each different facet two rows that have it, or the same row twice, and the number of
        rows.
    """
    # Three corners of a quadrilateral say which one it is.
    order, starts = group_rows(np.sort(corners, axis=1)[:, :3], n)
    return order[starts[:-1]], order[starts[1:] - 1], np.diff(starts)


@dataclass(frozen=True)
class FacetTable:
    """The different facets of a rank's cells.

    Attributes
    ----------
    cells, local_facets
        For each facet the cell that it belongs to, or the cell of this rank that has it, and its
        number in that cell, shape (k,).
    is_boundary
        True for each facet that is on one cell only, among the cells of all ranks, shape (k,).
    is_local
        True for each facet that belongs to a cell of this rank. A facet between two cells belongs
        to the cell with the lower number in the file.
    n_cut
        The number of facets between a cell of this rank and a cell of another one.
    """

    cells: NDArray[np.int32]
    local_facets: NDArray[np.int8]
    is_boundary: NDArray[np.bool_]
    is_local: NDArray[np.bool_]
    n_cut: int


def make_facet_table(
    cells: NDArray[np.int32],
    cell_ids: NDArray[np.int64],
    vertices: Numbering,
    cell_type: str,
) -> FacetTable:
    """Make the table of the facets of this rank's cells (collective)."""
    comm = vertices.comm
    table = reference_cell(cell_type).facets
    n_facets = len(table)
    corners = cells[:, table].reshape(-1, table.shape[1])
    n = vertices.n_local + vertices.n_ghosts
    first, second, count = match_facets(corners, n)
    # The facet belongs to the cell with the lower number.
    swap = cell_ids[second // n_facets] < cell_ids[first // n_facets]
    row = np.where(swap, second, first)
    cell = row // n_facets

    # A facet whose corners are all shared may lie on cells of other ranks. The owner of its first
    # vertex hears of it from all of them.
    shared = np.zeros(n, bool)
    shared[vertices.n_local :] = True
    shared[np.asarray(vertices.exchange.send_index)] = True
    near = np.flatnonzero(shared[corners[row]].all(axis=1))
    numbers = np.sort(vertices.numbers[corners[row[near]]], axis=1)[:, :3]
    route = Route(comm, vertices.owners(numbers[:, 0]))
    heard = route.forward(np.column_stack([numbers, count[near], cell_ids[cell[near]]]))
    order, starts = group_rows(heard[:, :-2], max(vertices.n_global, 1))
    answer = np.empty((len(heard), 2), np.int64)
    if len(heard):
        sizes = np.diff(starts)
        answer[order, 0] = np.repeat(np.add.reduceat(heard[order, -2], starts[:-1]), sizes)
        answer[order, 1] = np.repeat(np.minimum.reduceat(heard[order, -1], starts[:-1]), sizes)
    answer = route.back(answer)

    error = None
    total = count.copy()
    total[near] = answer[:, 0]
    if np.any(total > 2):
        wrong = int(np.flatnonzero(total > 2)[0])
        error = ValueError(
            f"Mesh.facets: a facet must lie on one or two cells, got a facet of cell "
            f"{cell_ids[cell[wrong]]} that lies on {total[wrong]} cells. Repair the mesh."
        )
    raise_error(comm, error)
    is_local = np.ones(len(row), bool)
    is_local[near] = answer[:, 1] == cell_ids[cell[near]]
    return FacetTable(
        cells=cell.astype(np.int32),
        local_facets=(row % n_facets).astype(np.int8),
        is_boundary=total == 1,
        is_local=is_local,
        n_cut=int(np.count_nonzero((total == 2) & (count == 1))),
    )


# ---- Meshes whose cells and vertices are distributed over ranks ----


@dataclass(frozen=True, eq=False)
class FacetTags:
    """Tags of facets of this rank's cells, as rows of three arrays of shape (k,)."""

    cells: NDArray[np.int32]
    local_facets: NDArray[np.int8]
    tags: NDArray[np.int32]

    def sorted(self) -> FacetTags:
        """Return the rows in the order of cells, without repetition."""
        rows = np.column_stack([self.cells, self.local_facets, self.tags]).astype(np.int32)
        rows = np.unique(rows, axis=0)
        return FacetTags(rows[:, 0].copy(), rows[:, 1].astype(np.int8), rows[:, 2].copy())


@dataclass(frozen=True, eq=False)
class Facets:
    """The facets of this rank in a set of facets of the whole mesh.

    Each facet of the set is on one rank only: the rank of its cell. A facet between two cells
    belongs to the cell with the lower number in the file, on any number of ranks.

    Attributes
    ----------
    mesh
        The mesh.
    cells
        The cell of each facet, shape (k,), int32.
    local_facets
        The number of the facet in the reference cell of basix, shape (k,), int8.

    Examples
    --------
    >>> from mpigrad import fem
    >>> mesh = fem.box((4, 2), (1.0, 1.0))
    >>> mesh.boundary_facets().n_global, mesh.facets("xmin").n_global
    (12, 2)
    """

    mesh: Mesh
    cells: NDArray[np.int32]
    local_facets: NDArray[np.int8]

    @property
    def n_local(self) -> int:
        """The number of facets of this rank."""
        return len(self.cells)

    @property
    def n_global(self) -> int:
        """The number of facets of all ranks (collective)."""
        return int(self.mesh.comm.mpi.allreduce(self.n_local))

    @property
    def corners(self) -> NDArray[np.int32]:
        """The local indices of the corners of each facet, shape (k, corners of a facet)."""
        table = reference_cell(self.mesh.cell_type).facets
        return self.mesh.cells[self.cells[:, None], table[self.local_facets]]

    def centers(self) -> NDArray[np.float64]:
        """Return the mean of the corners of each facet, shape (k, dim)."""
        return self.mesh.points[self.corners].mean(axis=1)

    def __repr__(self) -> str:
        return f"Facets(n_local={self.n_local})"


@dataclass(frozen=True, eq=False)
class Mesh:
    """Cells of one type, each on one rank, and vertices, each owned by one rank.

    `fem.box`, `fem.read_mesh` and `fem.distribute_mesh` make it. Two meshes are equal only if they
    are the same object. The arrays are NumPy arrays of this rank and must not be changed.

    A rank has the vertices of its cells: those that it owns, then the *ghosts*, which other ranks
    own. A rank's numbers differ from those of the file: `cell_ids` and `vertex_ids` translate.

    Attributes
    ----------
    comm
        The communicator of the ranks that share the mesh.
    cell_type
        "triangle", "quadrilateral", "tetrahedron" or "hexahedron".
    points
        Coordinates of the vertices, own then ghosts, shape (n_local + n_ghosts, dim), float64.
    cells
        The corners of each cell as rows of `points`, shape (n_cells, n_corners), int32. They are in
        the order of basix: for quadrilaterals and hexahedra x runs fastest, then y, then z.
    vertices
        The global numbers of the vertices.
    cell_ids
        The number of each cell in the file, or in the order of `fem.box`, shape (n_cells,), int64.
    vertex_ids
        The same for this rank's own vertices, shape (n_local,), int64.
    cell_tags
        The first tag of each cell, shape (n_cells,), int32. It is 0 for cells without a tag.
    further_cell_tags
        The other tags of cells that have several: rows of a cell and a tag, shape (k, 2), int32.
    facet_tags
        The facets with tags.
    cell_groups, facet_groups
        The tags of cells and facets by name, the same on all ranks. A tag without a name in the
        file has its number as a name.
    unused_groups
        The other names of the file, and why no cell and no facet has them: groups without members,
        and groups of points or of edges in space.
    n_cells_global
        The number of cells on all ranks.
    partition_method
        The method that has divided the cells: "metis", "coordinates", "blocks" or "given".

    Examples
    --------
    >>> from mpigrad import fem
    >>> mesh = fem.box((3, 2), (1.5, 1.0), cell_type="triangle")
    >>> mesh.n_cells_global, mesh.vertices.n_global, mesh.dim
    (12, 12, 2)
    >>> mesh.facets("xmin").n_global
    2
    """

    comm: Communicator
    cell_type: str
    points: NDArray[np.float64]
    cells: NDArray[np.int32]
    vertices: Numbering
    cell_ids: NDArray[np.int64]
    vertex_ids: NDArray[np.int64]
    cell_tags: NDArray[np.int32]
    further_cell_tags: NDArray[np.int32]
    facet_tags: FacetTags
    cell_groups: Mapping[str, int]
    facet_groups: Mapping[str, int]
    unused_groups: Mapping[str, str]
    n_cells_global: int
    partition_method: str

    @property
    def dim(self) -> int:
        """The dimension of cells and coordinates: 2 or 3."""
        return self.points.shape[1]

    @property
    def n_cells(self) -> int:
        """The number of cells of this rank."""
        return len(self.cells)

    def centers(self) -> NDArray[np.float64]:
        """Return the mean of the corners of each cell of this rank, shape (n_cells, dim)."""
        return self.points[self.cells].mean(axis=1)

    # --- tags and facets ---

    def cells_with(self, tag: int | str) -> NDArray[np.bool_]:
        """Return True for each cell of this rank that has a tag, shape (n_cells,).

        A cell that has several tags is chosen by each of them.

        Parameters
        ----------
        tag
            A value or a name of `cell_groups`.

        Raises
        ------
        ValueError
            On all ranks: if no cell of the file has the tag.
        """
        value = self._tag(tag, "cells")
        chosen = self.cell_tags == value
        chosen[self.further_cell_tags[self.further_cell_tags[:, 1] == value, 0]] = True
        return chosen

    def boundary_facets(self) -> Facets:
        """Return the facets that lie on only one cell of all ranks (collective)."""
        table = self.facet_table
        return self._facets(table.is_boundary)

    def facets(
        self,
        where: int | str | ArrayLike | Callable[[NDArray[np.float64]], ArrayLike],
        inner: bool = False,
    ) -> Facets:
        """Return the facets that have a tag, or whose corners are all chosen (collective).

        Parameters
        ----------
        where
            One of three. A tag: an integer, or a name of `facet_groups`. A function of the
            coordinates, of shape (n, dim), that returns True for each chosen vertex, shape (n,). A
            mask of this rank's own vertices, shape (n_local,), of dtype bool. A mask in the numbers
            of the file is `mask[mesh.vertex_ids]` here.
        inner
            True if facets between two cells are chosen too, by a function or a mask. A tag chooses
            all facets that have it.

        Returns
        -------
        Facets
            Each chosen facet is on one rank.

        Raises
        ------
        TypeError, ValueError
            On all ranks: if no facet of the file has the tag, or the mask does not fit.
        """
        if isinstance(where, str | int | np.integer) and not isinstance(where, bool):
            tag = self._tag(where, "facets")
            rows = self.facet_tags.tags == tag
            return Facets(self, self.facet_tags.cells[rows], self.facet_tags.local_facets[rows])
        chosen = self.vertices_where(where, "Mesh.facets: where")
        table = self.facet_table
        corners = reference_cell(self.cell_type).facets[table.local_facets]
        rows: NDArray[np.bool_] = np.all(chosen[self.cells[table.cells[:, None], corners]], axis=1)
        return self._facets(rows if inner else np.logical_and(rows, table.is_boundary))

    def vertices_where(
        self, where: ArrayLike | Callable[..., Any], name: str = "Mesh.vertices_where: where"
    ) -> NDArray[np.bool_]:
        """Return True for each chosen vertex of this rank, own and ghosts (collective).

        Parameters
        ----------
        where
            A function of the coordinates or a mask of the own vertices, as for `facets`.
        name
            The argument that an error names.
        """
        chosen = np.zeros(0, bool)
        n_local = self.vertices.n_local
        with raise_on_all_ranks(self.comm):
            chosen = np.asarray(where(self.points[:n_local]) if callable(where) else where)
            if chosen.shape != (n_local,) or chosen.dtype != bool:
                raise TypeError(
                    f"{name} must be a tag, or give one bool for each of the {n_local} vertices of "
                    f"rank {self.comm.rank}, got dtype {chosen.dtype} and shape {chosen.shape}. "
                    "Give a mask of shape (n_local,) or a function of points of shape (n, dim)."
                )
        return self.vertices.append_ghosts(chosen)

    @functools.cached_property
    def facet_table(self) -> FacetTable:
        """All facets of this rank's cells (collective at its first use)."""
        return make_facet_table(self.cells, self.cell_ids, self.vertices, self.cell_type)

    def _facets(self, rows: NDArray[np.bool_]) -> Facets:
        table = self.facet_table
        rows = rows & table.is_local
        order = np.lexsort([table.local_facets[rows], table.cells[rows]])
        return Facets(self, table.cells[rows][order], table.local_facets[rows][order])

    def _tag(self, tag: int | str | np.integer, kind: Literal["cells", "facets"]) -> int:
        """Return the integer of a tag, or raise an error if no cell or facet has it."""
        functions = {"cells": "Mesh.cells_with", "facets": "Mesh.facets"}
        tags = {"cells": self.cell_groups, "facets": self.facet_groups}
        groups = tags.pop(kind)
        if isinstance(tag, str):
            if tag in groups:
                return groups[tag]
        elif int(tag) in groups.values():
            return int(tag)
        listed = ", ".join(f"{name!r} ({number})" for name, number in groups.items()) or "none"
        reason, remedy = "", "Choose one of them."
        ((other, others),) = tags.items()
        if tag in self.unused_groups:
            reason = f" {tag!r} is {self.unused_groups[str(tag)]}."
        elif tag in others:
            reason = f" It is a tag of {other}."
            remedy = f"Choose one of them, or use {functions[other]}."
        raise ValueError(
            f"{functions[kind]}: no {kind} of this mesh have the tag {tag!r}.{reason} Its tags "
            f"are: {listed}. {remedy}"
        )

    # --- fields in the order of the file ---

    def scatter_cells(self, x: Any, root: int = 0) -> jax.Array:
        """Distribute one value for each cell from the order of the file to this rank's cells.

        It is collective and differentiable. Its adjoint is `gather_cells`.

        Parameters
        ----------
        x
            Values of all cells on the root, shape (n_cells_global, ...). On other ranks an array
            with the same dtype and the same further axes, of which no value is read: its first axis
            may have any length, also 0.
        root
            The rank that has the values.

        Returns
        -------
        Values of this rank's cells, shape (n_cells, ...).

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from mpigrad import fem
        >>> mesh = fem.box((2, 1), (1.0, 1.0))
        >>> mesh.gather_cells(2 * mesh.scatter_cells(jnp.array([1.0, 5.0])))
        Array([ 2., 10.], dtype=float32)
        """
        return self._cell_order.scatter(x, root, "Mesh.scatter_cells")

    def gather_cells(self, x: Any, root: int = 0) -> jax.Array:
        """Gather one value for each cell on the root, in the order of the file.

        It is collective and differentiable. Its adjoint is `scatter_cells`.

        Parameters
        ----------
        x
            Values of this rank's cells, shape (n_cells, ...).
        root
            The rank that receives the values.

        Returns
        -------
        Values of all cells on the root, shape (n_cells_global, ...). Shape (0, ...) on other ranks.
        """
        return self._cell_order.gather(x, root, "Mesh.gather_cells")

    def scatter_vertices(self, x: Any, root: int = 0) -> jax.Array:
        """Distribute one value for each vertex from the order of the file to own vertices.

        As `scatter_cells`, with shapes (vertices.n_global, ...) and (vertices.n_local, ...).
        """
        return self._vertex_order.scatter(x, root, "Mesh.scatter_vertices")

    def gather_vertices(self, x: Any, root: int = 0) -> jax.Array:
        """Gather one value for each own vertex on the root, in the order of the file.

        As `gather_cells`, with shapes (vertices.n_local, ...) and (vertices.n_global, ...).
        """
        return self._vertex_order.gather(x, root, "Mesh.gather_vertices")

    @functools.cached_property
    def _cache(self) -> dict[Any, Any]:
        return {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` has returned for this key at its first use."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @functools.cached_property
    def _cell_order(self) -> FileOrder:
        return FileOrder(self.comm, self.cell_ids)

    @functools.cached_property
    def _vertex_order(self) -> FileOrder:
        return FileOrder(self.comm, self.vertex_ids)

    # --- reports and files ---

    def partition_report(self) -> PartitionReport:
        """Count cells, vertices, ghosts and neighbours of each rank, and the cut (collective)."""
        return make_report(
            self.comm,
            self.partition_method,
            self.n_cells,
            self.vertices,
            self.facet_table.n_cut,
        )

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        points: Mapping[str, Any] | None = None,
        cells: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Write the mesh and fields as `.pvtu`, which ParaView opens (collective).

        Each rank writes its piece, a `.vtu` file in the directory `u.vtu-pieces-0` next to
        `u.pvtu`. `fem.Space.write` writes fields of any space.

        Parameters
        ----------
        path
            The index file, with the suffix `.pvtu`. Its directory must exist.
        points
            Fields by name with one value for each own vertex, shape (n_local,) or (n_local,
            components).
        cells
            Fields by name with one value for each cell, shape (n_cells,) or (n_cells, components).
        fields
            Fields of either kind. Their shape says which one.

        Raises
        ------
        TypeError, ValueError
            On all ranks, before anything is written: if an argument is not valid, or the shape of a
            field fits both kinds on all ranks.
        OSError
            On all ranks: if a file cannot be written.

        Examples
        --------
        >>> from mpigrad import fem
        >>> mesh = fem.box((4, 3), (1.0, 1.0))
        >>> mesh.write("mesh.pvtu", x=mesh.points[:, 0], cells={"tag": mesh.cell_tags})
        """
        write_grid(
            "Mesh.write",
            path,
            Grid(self.cell_type, 1, self.vertices, self.points, self.cells),
            points=points or {},
            cells=cells or {},
            either=fields,
        )

    def __repr__(self) -> str:
        return (
            f"Mesh({self.cell_type}, n_cells={self.n_cells} of {self.n_cells_global}, "
            f"n_vertices={self.vertices.n_local} of {self.vertices.n_global})"
        )
