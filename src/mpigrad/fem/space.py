"""Lagrange spaces on distributed meshes, and the numbers of their nodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial import KDTree

from mpigrad.collective_errors import assert_same_settings, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.extend import as_array
from mpigrad.fem.cells import lagrange_element, reference_cell
from mpigrad.fem.mesh import Facets, Mesh
from mpigrad.fem.numbering import Numbering, Route, group_rows, merge_numbers, row_groups
from mpigrad.fem.write import Grid, write_grid
from mpigrad.sparse import Pattern

__all__ = [
    "Nodes",
    "Space",
    "make_nodes",
]

# ---- Number the nodes of elements of degree 2: vertices, and the middles of edges, faces and
# cells


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a space: their numbers, the nodes of each cell, and their coordinates."""

    nodes: Numbering
    cell_nodes: NDArray[np.int32]
    points: NDArray[np.float64]


@dataclass(frozen=True)
class _Entities:
    """The different edges, faces or interiors of this rank's cells.

    Attributes
    ----------
    keys
        The vertices with the three lowest local indices, shape (k, 3). For an edge the last one is
        -1.
    global_keys
        The vertices with the three lowest global numbers, in the same form. If this rank owns the
        first of them, they are the same vertices in the same order: this rank has no vertices of
        lower ranks there.
    of_cells
        The entities of each cell, shape (n_cells, entities of a cell).
    points
        Their middles, shape (k, dim).
    """

    keys: NDArray[np.int64]
    global_keys: NDArray[np.int64]
    of_cells: NDArray[np.intp]
    points: NDArray[np.float64]


def make_nodes(mesh: Mesh) -> Nodes:
    """Number the nodes of degree 2 (collective).

    An entity belongs to the owner of its vertex with the lowest global number. Any rank that has
    the entity knows this owner, and asks it for the number of the node. A rank numbers its nodes in
    the order of their first vertices, so neighbours in the mesh are neighbours in memory. The
    interior of a cell belongs to the rank of the cell.
    """
    comm, vertices = mesh.comm, mesh.vertices
    n_vertices, n_points = vertices.n_local, len(mesh.points)
    cell = reference_cell(mesh.cell_type)
    # Simplices have nodes on edges only, other cells on faces too, and one inside.
    corners = cell.entities[1:2] if cell.is_simplex else cell.entities[1:-1]
    numbers = vertices.numbers
    groups = [_entities(mesh, numbers, each) for each in corners]
    if not cell.is_simplex:
        groups.append(_interiors(mesh, numbers))
    keys = np.concatenate([group.keys for group in groups])
    global_keys = np.concatenate([group.global_keys for group in groups])
    points = np.concatenate([group.points for group in groups])
    kinds = np.repeat(np.arange(len(groups)), [len(group.keys) for group in groups])
    owners = vertices.owners(global_keys[:, 0])
    if not cell.is_simplex:
        owners[kinds == len(groups) - 1] = comm.rank

    # Ask the owners of entities on the boundary of this rank's part. An owner may not have the
    # entity itself: then it adds a node that none of its cells has.
    local, foreign = np.flatnonzero(owners == comm.rank), np.flatnonzero(owners != comm.rank)
    route = Route(comm, owners[foreign])
    asked = route.forward(np.column_stack([kinds, global_keys])[foreign])
    asked_points = route.forward(points[foreign])
    place = _find(vertices, kinds[local], keys[local], asked)
    missing = np.flatnonzero(place < 0)
    order, starts = group_rows(asked[missing] + 1, vertices.n_global + 1)
    extra = missing[order[starts[:-1]]]
    place[missing[order]] = len(local) + np.repeat(np.arange(len(extra)), np.diff(starts))

    # Own nodes are the vertices, the own entities and those of other ranks. They are numbered by
    # their first vertex, then by their second one.
    first = [np.arange(n_vertices), keys[local, 0], asked[extra, 1] - vertices.offset]
    second = [np.full(n_vertices, -1), keys[local, 1], np.full(len(extra), n_points)]
    by_key = np.argsort(
        np.concatenate(first) * (n_points + 2) + np.concatenate(second), kind="stable"
    )
    number = np.empty(len(by_key), np.int64)
    number[by_key] = np.arange(len(by_key)) + (int(comm.mpi.scan(len(by_key))) - len(by_key))
    answers = route.back(number[n_vertices + place])

    vertex_numbers = vertices.append_ghosts(number[:n_vertices])
    entity_numbers = np.empty(len(keys), np.int64)
    entity_numbers[local] = number[n_vertices : n_vertices + len(local)]
    entity_numbers[foreign] = answers
    ghosts = np.concatenate([vertex_numbers[n_vertices:], answers])
    nodes = Numbering(len(by_key), ghosts, comm)

    columns = [nodes.local_index(vertex_numbers)[mesh.cells]]
    index = nodes.local_index(entity_numbers)
    begin = 0
    for group in groups:
        columns.append(index[begin + group.of_cells])
        begin += len(group.keys)
    own_points = np.concatenate([mesh.points[:n_vertices], points[local], asked_points[extra]])
    return Nodes(nodes, np.concatenate(columns, axis=1), nodes.append_ghosts(own_points[by_key]))


def _entities(mesh: Mesh, numbers: NDArray[np.int64], corners: NDArray[np.intp]) -> _Entities:
    """Return the different entities of a kind, which have these corners in a cell."""
    rows = mesh.cells[:, corners].reshape(-1, corners.shape[1])
    rows = np.sort(rows, axis=1)
    # Three vertices of a quadrilateral say which one it is.
    order, starts = group_rows(rows[:, :3], max(len(mesh.points), 1))
    first = order[starts[:-1]]
    group_of = np.empty(len(rows), np.intp)
    group_of[order] = np.repeat(np.arange(len(first)), np.diff(starts))
    rows = rows[first]
    width = min(3, rows.shape[1])
    keys = np.full((2, len(first), 3), -1, np.int64)
    keys[0, :, :width] = rows[:, :width]
    keys[1, :, :width] = np.sort(numbers[rows], axis=1)[:, :width]
    of_cells = group_of.reshape(len(mesh.cells), -1)
    return _Entities(keys[0], keys[1], of_cells, _middles(mesh.points, rows))


def _interiors(mesh: Mesh, numbers: NDArray[np.int64]) -> _Entities:
    """Return the interiors of the cells, each of one cell only."""
    keys = np.sort(mesh.cells, axis=1)[:, :3].astype(np.int64)
    of_cells = np.arange(len(keys))[:, None]
    return _Entities(
        keys, np.sort(numbers[keys], axis=1), of_cells, _middles(mesh.points, mesh.cells)
    )


def _middles(points: NDArray[np.float64], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the mean of 2, 4 or 8 points in each row.

    Halves are added first, so the mean of equal coordinates is equal to them.
    """
    corners = points[rows]
    while corners.shape[1] > 1:
        corners = 0.5 * (corners[:, ::2] + corners[:, 1::2])
    return corners[:, 0]


def _find(
    vertices: Numbering,
    kinds: NDArray[np.intp],
    keys: NDArray[np.int64],
    asked: NDArray[np.int64],
) -> NDArray[np.intp]:
    """Return the position of each entity that other ranks ask for among own ones, or -1.

    Parameters
    ----------
    kinds, keys
        The own entities, with the local indices of their vertices.
    asked
        Rows of a kind and three global numbers. This rank owns the first one.
    """
    place = np.full(len(asked), -1, np.intp)
    absent = asked[:, 1:] < 0  # the third vertex of an edge
    index, known = vertices.find(asked[:, 1:])
    rows = np.flatnonzero((known | absent).all(axis=1))
    wanted = np.where(absent, -1, index)[rows]
    # Only entities with the same first vertex can be among them.
    shared = np.zeros(vertices.n_local + vertices.n_ghosts, bool)
    shared[wanted[:, 0]] = True
    candidates = np.flatnonzero(shared[keys[:, 0]])
    table = np.column_stack([kinds[candidates], keys[candidates]])
    both = np.concatenate([table, np.column_stack([asked[rows, 0], wanted])]) + 1
    group, n_groups = row_groups(both, len(shared) + 3)
    candidate_of = np.full(n_groups, -1, np.intp)
    candidate_of[group[: len(table)]] = candidates
    place[rows] = candidate_of[group[len(table) :]]
    return place


# ---- Lagrange spaces on distributed meshes ----


class Space:
    """Continuous piecewise polynomials of degree 1 or 2 on a mesh (collective).

    The nodes are the vertices for degree 1. For degree 2 they are the vertices, the middles of
    edges and, on quadrilaterals and hexahedra, the centres of faces and cells. A field is an array
    of this rank's own nodes: shape (nodes.n_local,), or (nodes.n_local, components). Component c at
    node n is the unknown n * components + c.

    Parameters
    ----------
    mesh
        The mesh.
    degree
        The degree of the polynomials: 1 or 2.
    components
        The number of components of a field: 1 for scalars, mesh.dim for displacements.
    periodic
        Pairs of tags of opposite sides, such as {"xmin": "xmax"}. A node of the second side is the
        same as the node of the first one at the same place, up to one translation for each pair.
        Its coordinates are those on the first side.

    Attributes
    ----------
    mesh, degree, components
        The parameters.
    nodes
        The global numbers of the nodes. For degree 1 it is `mesh.vertices`, if nothing is periodic.
    cell_nodes
        The local indices of the nodes of each cell, in the order of basix, shape (n_cells,
        n_basis), int32.
    node_points
        Coordinates of the nodes, own then ghosts, shape (n_local + n_ghosts, dim).

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument is not valid.
    ImportError
        If basix is not installed.

    Examples
    --------
    >>> from mpigrad import fem
    >>> mesh = fem.box((2, 2), (1.0, 1.0), cell_type="triangle")
    >>> fem.Space(mesh, degree=2).nodes.n_global
    25
    """

    def __init__(
        self,
        mesh: Mesh,
        degree: int = 1,
        components: int = 1,
        periodic: Mapping[Any, Any] | None = None,
    ) -> None:
        if isinstance(components, np.integer):
            components = int(components)
        with raise_on_all_ranks(mesh.comm):
            if degree not in (1, 2) or isinstance(degree, bool):
                raise ValueError(
                    f"fem.Space: degree must be 1 or 2, got {degree!r} on rank {mesh.comm.rank}. "
                    "Choose one of them."
                )
            if not isinstance(components, int) or isinstance(components, bool) or components < 1:
                raise ValueError(
                    "fem.Space: components must be a positive integer, got "
                    f"{components!r} on rank {mesh.comm.rank}. Give 1 for a scalar field."
                )
            if not isinstance(periodic, Mapping | None):
                raise TypeError(
                    f"fem.Space: periodic must be a dictionary of tags, got {periodic!r}. Write "
                    'periodic={"xmin": "xmax"}.'
                )
        sides = dict(periodic or {})
        settings = {"degree": int(degree), "components": components, "periodic": str(sides)}
        assert_same_settings(mesh.comm, settings, "fem.Space")
        self.mesh = mesh
        self.degree = int(degree)
        self.components = components
        made = _vertex_nodes(mesh) if degree == 1 else make_nodes(mesh)
        self.nodes = made.nodes
        self.cell_nodes: NDArray[np.int32] = made.cell_nodes
        self.node_points: NDArray[np.float64] = made.points
        # Nodes with both sides, and for each of this rank's own ones the local index of its node.
        self._whole, self._node_of = made, None
        self._shifts: list[NDArray[np.float64]] = []  # from each side to its opposite one
        if sides:
            made, self._node_of = self._identified(sides)
            self.nodes, self.cell_nodes, self.node_points = (
                made.nodes, made.cell_nodes, made.points
            )  # fmt: skip
        self._cache: dict[Any, Any] = {}

    def _identified(self, sides: Mapping[Any, Any]) -> tuple[Nodes, NDArray[np.int32]]:
        """Return the nodes of which those of opposite sides are the same."""
        old, comm = self.nodes, self.mesh.comm
        points = self.node_points[: old.n_local]
        removed, partner = np.zeros(old.n_local, bool), np.zeros(old.n_local, np.int64)
        for first, second in sides.items():
            here, there = (self.nodes_on(self.mesh.facets(side)) for side in (first, second))
            with raise_on_all_ranks(comm):
                found, shift = _partners(comm, old.offset, points, here, there, (first, second))
                new = np.flatnonzero(there & ~removed)
                partner[new] = found[new]
                removed |= there
                self._shifts.append(shift)
        read = np.concatenate([old.numbers[self.cell_nodes].ravel(), old.numbers[: old.n_local]])
        own = np.flatnonzero(removed)
        nodes, index = merge_numbers(old, own + old.offset, partner[own], read)
        cell_nodes, node_of = np.split(index, [self.cell_nodes.size])
        made = Nodes(
            nodes, cell_nodes.reshape(self.cell_nodes.shape), nodes.append_ghosts(points[~removed])
        )
        return made, node_of

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` has returned for this key at its first use."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The entries of matrices on this space (collective at its first use).

        The unknown of component c at node n is n * components + c. If there is a component for
        each axis, the pattern has the rotations as `near_null`.
        """
        pattern = Pattern.from_elements(
            self.cell_unknowns, self.nodes.n_local * self.components, self.mesh.comm
        )
        if self.components == self.mesh.dim and self.rotation_planes:
            pattern.near_null = self._rotations()
        return pattern

    @property
    def cell_unknowns(self) -> NDArray[np.int64]:
        """The global numbers of the unknowns of each cell, (n_cells, n_basis * components)."""
        numbers = self.nodes.numbers[self.cell_nodes][:, :, None] * self.components
        unknowns = numbers + np.arange(self.components)
        return unknowns.reshape(len(unknowns), -1)

    @property
    def fields(self) -> tuple[Space, ...]:
        """The spaces of the fields of an equation: this one. `Mixed` has several."""
        return (self,)

    def unwrapped(self, u: Any) -> tuple[Any, ...]:
        """Return an unknown as a tuple of fields."""
        return (u,)

    def wrapped(self, fields: Sequence[Any]) -> Any:
        """Return what `unwrapped` takes."""
        (u,) = fields
        return u

    @functools.cached_property
    def rotation_planes(self) -> list[tuple[int, int]]:
        """The pairs of axes of rotations that are the same on periodic sides."""
        planes = [(0, 1)] if self.mesh.dim == 2 else [(0, 1), (1, 2), (2, 0)]
        shifts = [np.abs(shift) / np.abs(shift).max() for shift in self._shifts]
        return [plane for plane in planes if all(max(s[list(plane)]) < 1e-6 for s in shifts)]

    def _rotations(self) -> NDArray[np.float64]:
        """Return rotations about the origin, shape (unknowns, number of planes)."""
        x, dim = self.node_points[: self.nodes.n_local], self.mesh.dim
        planes = self.rotation_planes
        rotations = np.zeros((len(x), dim, len(planes)))
        for k, (i, j) in enumerate(planes):
            rotations[:, i, k], rotations[:, j, k] = -x[:, j], x[:, i]
        return rotations.reshape(-1, len(planes))

    def fixed(
        self,
        where: Facets | int | str | ArrayLike | Callable[[NDArray[np.float64]], ArrayLike],
        component: int | None = None,
    ) -> NDArray[np.bool_]:
        """Return True for each own unknown at chosen nodes, for Dirichlet conditions (collective).

        Masks are combined by `|`.

        Parameters
        ----------
        where
            Facets, or a tag of facets. A function of the coordinates, or a mask of this rank's own
            nodes of shape (n_local,).
        component
            The component that is chosen. Default: all.

        Returns
        -------
        A mask in the shape of a field.

        Raises
        ------
        TypeError, ValueError
            On all ranks: if an argument is not valid.

        Examples
        --------
        >>> from mpigrad import fem
        >>> space = fem.Space(fem.box((2, 2), (1.0, 1.0)), components=2)
        >>> fixed = space.fixed("xmin") | space.fixed("ymin", component=1)
        >>> int(fixed.sum())
        8
        """
        with raise_on_all_ranks(self.mesh.comm):
            whole = isinstance(component, int) and not isinstance(component, bool)
            if component is not None and not (whole and 0 <= component < self.components):
                raise ValueError(
                    f"Space.fixed: component must be an integer from 0 to {self.components - 1}, "
                    f"got {component!r} on rank {self.mesh.comm.rank}. Leave it out for all."
                )
        if isinstance(where, str | int | np.integer) and not isinstance(where, bool):
            where = self.mesh.facets(where)
        if isinstance(where, Facets):
            nodes = self.nodes_on(where)
        elif callable(where):
            nodes = self.nodes_where(where)
        else:
            nodes = self.nodes_where(lambda _: where)
        if self.components == 1:
            return nodes
        columns = np.full(self.components, component is None)
        if component is not None:
            columns[component] = True
        return nodes[:, None] & columns

    @functools.cached_property
    def vertex_nodes(self) -> NDArray[np.int32]:
        """The node at each of this rank's own vertices, shape (mesh.vertices.n_local,).

        `u[space.vertex_nodes]` has the values of a field at the vertices, for degree 2, too.

        Raises
        ------
        ValueError
            If the space is periodic: the node of a vertex may be that of another rank.
        """
        if self._node_of is not None:
            raise ValueError(
                "Space.vertex_nodes: in a periodic space the node of a vertex may be that of "
                "another rank. Take space.at_vertices(u)."
            )
        return self._vertex_index()

    def _vertex_index(self) -> NDArray[np.int32]:
        nodes = np.empty(len(self.mesh.points), np.int32)
        nodes[self.mesh.cells] = self._whole.cell_nodes[:, : self.mesh.cells.shape[1]]
        own = nodes[: self.mesh.vertices.n_local]
        return own if self._node_of is None else self._node_of[own]

    def at_vertices(self, u: Any) -> jax.Array:
        """Return the values of a field at this rank's own vertices (collective if periodic).

        Parameters
        ----------
        u
            A field, shape (n_local,) or (n_local, components).

        Returns
        -------
        Values of shape (mesh.vertices.n_local,) or (mesh.vertices.n_local, components).

        Examples
        --------
        >>> from mpigrad import fem
        >>> space = fem.Space(fem.box((2, 1), (2.0, 1.0)), 2, periodic={"xmin": "xmax"})
        >>> u = space.interpolate(lambda x: x[:, 0])
        >>> space.shape, [float(v) for v in space.at_vertices(u)]
        ((12,), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
        """
        if self._node_of is not None:
            u = self.nodes.exchange.local_and_ghost(u)
        return as_array(u)[self._vertex_index()]

    @property
    def element(self) -> Any:
        """The scalar element of basix: Lagrange, equispaced. It is made in each call."""
        return lagrange_element(self.mesh.cell_type, self.degree)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a field on this rank."""
        n = self.nodes.n_local
        return (n,) if self.components == 1 else (n, self.components)

    def nodes_on(self, facets: Facets) -> NDArray[np.bool_]:
        """Return True for each own node on a set of facets, shape (n_local,) (collective).

        It is right also for nodes whose facets are on other ranks.

        Parameters
        ----------
        facets
            Facets of this space's mesh.

        Raises
        ------
        ValueError
            If the facets are those of another mesh.
        """
        if facets.mesh is not self.mesh:
            raise ValueError(
                f"Space.nodes_on: expected facets of this space's mesh, {self.mesh}, got facets of "
                f"{facets.mesh}. Choose them by space.mesh.facets(...)."
            )
        closures = _facet_closures(self.element, reference_cell(self.mesh.cell_type).dim)
        chosen = np.zeros(self.nodes.n_local + self.nodes.n_ghosts, bool)
        chosen[self.cell_nodes[facets.cells[:, None], closures[facets.local_facets]]] = True
        return self.nodes.combine_at_owners(chosen)

    def nodes_where(self, function: Callable[[NDArray[np.float64]], ArrayLike]) -> NDArray[Any]:
        """Return True for each own node that a function of the coordinates chooses.

        Parameters
        ----------
        function
            Takes coordinates of shape (n_local, dim), and returns bools of shape (n_local,).

        Raises
        ------
        TypeError
            On all ranks: if the function returns anything else.
        """
        chosen = np.zeros(0, bool)
        with raise_on_all_ranks(self.mesh.comm):
            chosen = np.asarray(function(self.node_points[: self.nodes.n_local]))
            if chosen.shape != (self.nodes.n_local,) or chosen.dtype != bool:
                raise TypeError(
                    "Space.nodes_where: the function must return one bool for each of the "
                    f"{self.nodes.n_local} nodes of rank {self.mesh.comm.rank}, got dtype "
                    f"{chosen.dtype} and shape {chosen.shape}. Compare coordinates, as in "
                    "lambda x: x[:, 0] == 0."
                )
        return chosen

    def interpolate(self, function: Callable[[NDArray[np.float64]], ArrayLike]) -> NDArray[Any]:
        """Return the values of a function at this rank's own nodes.

        Parameters
        ----------
        function
            Takes coordinates of shape (n_local, dim). It returns values of shape (n_local,), or
            (n_local, components) for several components. A single value holds at all nodes.

        Returns
        -------
        A field, shape (n_local,) or (n_local, components).

        Raises
        ------
        ValueError
            On all ranks: if the function returns another shape.

        Examples
        --------
        >>> from mpigrad import fem
        >>> space = fem.Space(fem.box((2, 1), (2.0, 1.0)))
        >>> float(space.interpolate(lambda x: x[:, 0] + x[:, 1]).sum())
        9.0
        """
        values = np.zeros(0)
        with raise_on_all_ranks(self.mesh.comm):
            values = np.asarray(function(self.node_points[: self.nodes.n_local]))
            if values.shape in ((), (self.components,)) and values.shape != self.shape:
                values = np.broadcast_to(values, self.shape).copy()
            if values.shape != self.shape:
                raise ValueError(
                    f"Space.interpolate: the function must return the shape {self.shape} for the "
                    f"nodes of rank {self.mesh.comm.rank}, got {values.shape}. Return one row for "
                    "each point."
                )
        return values

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        cells: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Write fields of this space as `.pvtu`, which ParaView opens (collective).

        Each rank writes its piece. Elements of degree 2 are quadratic cells of VTK.

        Parameters
        ----------
        path
            The index file, with the suffix `.pvtu`. Its directory must exist.
        cells
            Fields by name with one value for each cell, shape (n_cells,) or (n_cells, components).
        fields
            Fields of this space by name, shape (n_local,) or (n_local, components).

        Raises
        ------
        TypeError, ValueError
            On all ranks, before anything is written: if an argument is not valid.
        OSError
            On all ranks: if a file cannot be written.

        Examples
        --------
        >>> from mpigrad import fem
        >>> space = fem.Space(fem.box((4, 3), (1.0, 1.0)), degree=2)
        >>> space.write("u.pvtu", u=space.interpolate(lambda x: x[:, 0] ** 2))
        """
        mesh, whole = self.mesh, self._whole
        if self._node_of is not None:
            every = self.nodes.exchange.local_and_ghost
            fields = {name: np.asarray(every(u))[self._node_of] for name, u in fields.items()}
        write_grid(
            "Space.write",
            path,
            Grid(mesh.cell_type, self.degree, whole.nodes, whole.points, whole.cell_nodes),
            points=fields,
            cells=cells or {},
        )

    def __repr__(self) -> str:
        return (
            f"Space({self.mesh.cell_type}, degree={self.degree}, components={self.components}, "
            f"n_nodes={self.nodes.n_local} of {self.nodes.n_global})"
        )


def _vertex_nodes(mesh: Mesh) -> Nodes:
    return Nodes(mesh.vertices, mesh.cells, mesh.points)


def _partners(
    comm: Communicator,
    offset: int,
    points: NDArray[np.float64],
    here: NDArray[np.bool_],
    there: NDArray[np.bool_],
    names: tuple[Any, Any],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return for each own node of a side its partner on the opposite side, and the translation."""
    rows = [np.flatnonzero(side) for side in (here, there)]
    sides = [np.concatenate(comm.mpi.allgather(points[row])) for row in rows]
    numbers = np.concatenate(comm.mpi.allgather(rows[0] + offset))
    found = np.full(len(points), -1, np.int64)
    if len(sides[0]) != len(sides[1]) or len(sides[0]) == 0:
        raise ValueError(
            f"fem.Space: the periodic sides {names[0]} and {names[1]} must have the same number of "
            f"nodes, got {len(sides[0])} and {len(sides[1])}. Make a mesh whose sides match."
        )
    shift = sides[1].mean(axis=0) - sides[0].mean(axis=0)
    extent = np.ptp(np.concatenate(sides), axis=0).max()
    away, place = map(np.asarray, KDTree(sides[0]).query(points[rows[1]] - shift))
    if np.any(away > 1e-6 * extent) or len(np.unique(place)) < len(place):
        raise ValueError(
            f"fem.Space: a node of the side {names[1]} has no partner on {names[0]}: the nearest "
            f"one is {np.max(away):.3g} away after a translation by {shift}. Make a mesh whose "
            "sides match."
        )
    found[rows[1]] = numbers[place]
    return found, shift


def _facet_closures(element: Any, dim: int) -> NDArray[np.intp]:
    """Return the nodes on each facet of the reference cell, corners first: (n_facets, k)."""
    return np.asarray(element.entity_closure_dofs[dim - 1], np.intp)
