"""Lagrange spaces on distributed meshes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import assert_same_settings, raise_on_all_ranks
from mpigrad.fem.mesh import Facets, Mesh
from mpigrad.fem.nodes import Nodes, make_nodes
from mpigrad.fem.reference import lagrange_element, reference_cell
from mpigrad.fem.write import Grid, write_grid
from mpigrad.sparse import Pattern

__all__ = ["Space"]


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

    Attributes
    ----------
    mesh, degree, components
        The parameters.
    nodes
        The global numbers of the nodes. For degree 1 it is `mesh.vertices`.
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

    def __init__(self, mesh: Mesh, degree: int = 1, components: int = 1) -> None:
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
        settings = {"degree": int(degree), "components": components}
        assert_same_settings(mesh.comm, settings, "fem.Space")
        self.mesh = mesh
        self.degree = int(degree)
        self.components = components
        made = _vertex_nodes(mesh) if degree == 1 else make_nodes(mesh)
        self.nodes = made.nodes
        self.cell_nodes: NDArray[np.int32] = made.cell_nodes
        self.node_points: NDArray[np.float64] = made.points
        self._cache: dict[Any, Any] = {}

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
        numbers = self.nodes.numbers[self.cell_nodes][:, :, None] * self.components
        unknowns = numbers + np.arange(self.components)
        pattern = Pattern.from_elements(
            unknowns.reshape(len(unknowns), -1),
            self.nodes.n_local * self.components,
            self.mesh.comm,
        )
        if self.components == self.mesh.dim:
            pattern.near_null = self._rotations()
        return pattern

    def _rotations(self) -> NDArray[np.float64]:
        """Return rotations about the origin, shape (unknowns, 1 or 3)."""
        x, dim = self.node_points[: self.nodes.n_local], self.mesh.dim
        planes = [(0, 1)] if dim == 2 else [(0, 1), (1, 2), (2, 0)]
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
        """
        nodes = np.empty(len(self.mesh.points), np.int32)
        nodes[self.mesh.cells] = self.cell_nodes[:, : self.mesh.cells.shape[1]]
        return nodes[: self.mesh.vertices.n_local]

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
        mesh = self.mesh
        write_grid(
            "Space.write",
            path,
            Grid(mesh.cell_type, self.degree, self.nodes, self.node_points, self.cell_nodes),
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


def _facet_closures(element: Any, dim: int) -> NDArray[np.intp]:
    """Return the nodes on each facet of the reference cell, corners first: (n_facets, k)."""
    return np.asarray(element.entity_closure_dofs[dim - 1], np.intp)
