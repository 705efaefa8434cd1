"""Solve equations of finite elements: one linear solve, or Newton's method."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from mpi4py import MPI
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.extend import as_array, jit_local, two_norms
from mpigrad.fem.equation import Equation
from mpigrad.fem.field_solving import solve_fields
from mpigrad.fem.mesh import Mesh
from mpigrad.fem.mixed import Mixed
from mpigrad.fem.space import Space
from mpigrad.operations import require
from mpigrad.solution import Solution
from mpigrad.sparse import BoomerAMG, LinearSolver, Matrix, NullSpace, default_solver, newton
from mpigrad.sparse import solve as solve_linear

__all__ = [
    "FreeMode",
    "equation_solver",
    "fixed_mask",
    "free_modes",
    "pieces_of_cells",
    "solve",
]

# ---- The pieces of a mesh that are not connected with each other ----


def pieces_of_cells(mesh: Mesh) -> tuple[int, NDArray[np.int64]]:
    """Return the number of pieces of a mesh, and the piece of each cell of this rank (collective).

    Cells that share a vertex belong to one piece. Only the connections between pieces of ranks
    travel.
    """
    vertices, comm = mesh.vertices, mesh.comm
    n = len(mesh.points)
    corners = mesh.cells.shape[1]
    first = np.repeat(mesh.cells[:, 0], corners)
    count, here = _components(first, mesh.cells.ravel(), n)
    counts = comm.mpi.allgather(count)
    here = here + sum(counts[: comm.rank])
    owners = vertices.append_ghosts(here[: vertices.n_local])
    links = np.unique(np.column_stack([here, owners])[vertices.n_local :], axis=0)
    links = np.concatenate(comm.mpi.allgather(links)).reshape(-1, 2)
    total, number = _components(links[:, 0], links[:, 1], sum(counts))
    return total, number[here[mesh.cells[:, 0]]]


def _components(
    a: NDArray[np.integer], b: NDArray[np.integer], n: int
) -> tuple[int, NDArray[np.int64]]:
    """Return the number of components of a graph of n vertices, and the component of each one."""
    graph = coo_array((np.ones(len(a), np.int8), (a, b)), shape=(n, n))
    count, component = connected_components(graph, directed=False)
    return int(count), component.astype(np.int64)


# ---- Constants and rigid motions that Dirichlet conditions leave free ----


@dataclasses.dataclass(frozen=True)
class FreeMode:
    """A field that is zero at all fixed unknowns.

    Attributes
    ----------
    name
        What it is, for an error.
    values
        A field of this rank, of the order of 1.
    """

    name: str
    values: NDArray[np.float64]


def free_modes(
    space: Space, fixed: NDArray[np.bool_], rotations: bool | None = None
) -> list[FreeMode]:
    """Return constants and rotations that are zero where `fixed` is true (collective).

    Each piece of the mesh is looked at for itself. By default there are rotations for fields with
    as many components as the mesh has dimensions, which may be displacements.
    """
    if rotations is None:
        rotations = space.components == space.mesh.dim
    pieces = space.cached("pieces of nodes", lambda: _pieces_of_nodes(space))
    modes = []
    for nodes in pieces:
        middle, length = _extent(space, nodes)
        names, basis = _motions(space, nodes, (space.node_points - middle) / length, rotations)
        rows = basis[:, fixed.reshape(-1)]
        gram = np.empty((len(basis),) * 2)
        space.mesh.comm.mpi.Allreduce(rows @ rows.T, gram)
        size, vectors = np.linalg.eigh(gram)
        place = ", ".join(f"{x:.3g}" for x in middle)
        where = f" in the piece of the mesh around ({place})" if len(pieces) > 1 else ""
        for vector in vectors.T[size <= 1e-10 * max(float(size[-1]), 1.0)]:
            main = names[int(np.argmax(np.abs(vector)))]
            pure = np.abs(vector).max() > 1 - 1e-8
            name = main if pure else "a rigid motion"
            modes.append(FreeMode(name + where, (vector @ basis).reshape(space.shape)))
    return modes


def _extent(space: Space, nodes: NDArray[np.bool_]) -> tuple[NDArray[np.float64], float]:
    """Return the middle of the box around a piece, and its longest side."""
    points = space.node_points[: space.nodes.n_local][nodes]
    ends = np.stack([np.min(points, 0, initial=np.inf), np.min(-points, 0, initial=np.inf)])
    space.mesh.comm.mpi.Allreduce(MPI.IN_PLACE, ends, MPI.MIN)
    return (ends[0] - ends[1]) / 2, float(np.max(-ends[1] - ends[0]))


def _motions(
    space: Space, nodes: NDArray[np.bool_], x: NDArray[np.float64], rotations: bool
) -> tuple[list[str], NDArray[np.float64]]:
    """Return names and values of the motions of a piece, shape (motions, unknowns)."""
    components, dim = space.components, space.mesh.dim
    names = [f"a constant in component {c}" for c in range(components)]
    basis = [np.outer(nodes, np.eye(components)[c]) for c in range(components)]
    if rotations:
        x = x[: len(nodes)]
        for i, j in space.rotation_planes:
            turn = np.zeros((len(x), dim))
            turn[:, i], turn[:, j] = -x[:, j], x[:, i]
            names.append("a rotation")
            basis.append(turn * nodes[:, None])
    return names, np.stack([each.reshape(-1) for each in basis])


def _pieces_of_nodes(space: Space) -> list[NDArray[np.bool_]]:
    """Return for each piece True at this rank's own nodes in it."""
    count, of_cells = pieces_of_cells(space.mesh)
    if count == 1:
        return [np.ones(space.nodes.n_local, bool)]
    masks = []
    for piece in range(count):
        chosen = np.zeros(space.nodes.n_local + space.nodes.n_ghosts, bool)
        chosen[space.cell_nodes[of_cells == piece]] = True
        masks.append(space.nodes.combine_at_owners(chosen))
    return masks


# ---- Solve equations of finite elements: one linear solve, or Newton's method ----


def solve(
    equation: Equation,
    fixed: Any = None,
    values: Any = 0.0,
    u0: Any = None,
    *,
    solver: LinearSolver | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    max_steps: int | None = None,
    nullspace: Any = None,
    schur: Equation | None = None,
    throw: bool = True,
) -> Solution:
    """Find the field whose residual is zero at all unknowns that are not fixed (collective).

    A linear equation is one linear solve, any other one Newton's method (`sparse.newton`). The
    derivatives are those of the implicit function theorem, in both modes and to any order: in
    `values`, and in all that the parameters of the equation depend on.

    Parameters
    ----------
    equation
        The forms with their parameters.
    fixed
        True for each own unknown with a Dirichlet condition, a mask of NumPy in the shape of a
        field: `space.fixed(...)`. Default: none. With `Mixed` spaces a dictionary by names.
    values
        The values there: a scalar, or a field (read at fixed unknowns only). With `Mixed` spaces a
        dictionary by names.
    u0
        The first guess, a field. No derivative is taken with respect to it. Default: zero.
    solver
        The `LinearSolver` of the linear systems. Default: for energies `PCG`, else `GMRES`, with
        BoomerAMG, or with Jacobi's preconditioner if hypre is missing or the field is in float32.
    rtol, atol, max_steps
        Of Newton's method: |residual| <= max(atol, rtol |first residual|) in at most `max_steps`
        steps, by default 50. The default solver takes `rtol`, too. Default of `rtol`: 1e-8, or 1e-5
        for fields in float32. A linear equation has no Newton steps, so with it `atol` and
        `max_steps` are errors, and so is `rtol` with a `solver`, which has its own.
    nullspace
        What can be added to a solution: "constants" of each component, "rigid motions" of a
        displacement (translations and infinitesimal rotations, made of the coordinates), a field,
        a list of fields, or a `sparse.NullSpace` of them. By name it is what `fixed` leaves free,
        in each piece of the mesh. The solution is orthogonal to it, as a vector of unknowns, and
        the loads must be in balance. Fields must be zero at fixed unknowns. With `Mixed` spaces a
        dictionary, such as {"pressure": "constants"}.
    schur
        For `Mixed` spaces whose last field has no block of its own: an equation of this field,
        whose Jacobian is close to the Schur complement (`sparse.Blocks`): for Stokes flow the mass
        of the pressure divided by the viscosity.
    throw
        Raise an error on every rank if no solution is found.

    Returns
    -------
    A `Solution` whose `value` is the field, as `sparse.solve` or `sparse.newton` returns it.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if `fixed` is not such a mask, `equation` is not an `Equation`, or a tolerance
        has no effect, because the equation is linear.
    jax.errors.JaxRuntimeError
        On all ranks: if no solution is found and `throw` is true. Also if the equation is linear
        and the fixed unknowns leave a constant, or a rigid motion of a displacement, free in a
        piece of the mesh, which is not in `nullspace`. With `nullspace`: if the loads are not in
        balance.

    Examples
    --------
    -u'' = 1, and u = 0 at both ends, has u = x (1 - x) / 2:

    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> mesh = fem.box((8, 1), (1.0, 0.1))
    >>> space = fem.Space(mesh)
    >>> energy = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad - p.u)
    >>> ends = space.fixed("xmin") | space.fixed("xmax")
    >>> u = fem.solve(energy(1.0), ends, rtol=1e-5).value
    >>> x = space.node_points[:, 0]
    >>> bool(jnp.allclose(u, x * (1 - x) / 2, atol=1e-4))
    True
    """
    if not isinstance(equation, Equation):
        raise TypeError(
            f"fem.solve: expected an Equation, got {type(equation).__name__}. Call a form with its "
            "parameters, as in fem.solve(energy(k), fixed)."
        )
    space = equation.space
    linear = equation.is_linear
    if linear:
        _check_linear(solver, rtol=rtol, atol=atol or None, max_steps=max_steps)
    if isinstance(space, Mixed):
        return solve_fields(
            equation, fixed, values, u0, solver=solver, linear=linear, rtol=rtol, atol=atol,
            max_steps=max_steps, nullspace=nullspace, schur=schur, throw=throw,
        )  # fmt: skip
    if schur is not None:
        raise ValueError("fem.solve: schur= is for Mixed spaces, got one field. Leave it out.")
    mask = fixed_mask(space, fixed)
    _check_field(space, "values", values)
    _check_field(space, "u0", u0)
    dtype = jnp.result_type(float if u0 is None else u0, values, *_dtypes(equation))
    if rtol is None:
        rtol = 1e-5 if dtype == np.float32 else 1e-8
    fixed_values = _given(values, shape=space.shape, dtype=dtype)
    start = _start(mask, fixed_values, u0)
    if solver is None:
        solver = equation_solver(equation, dtype, rtol)
    null = None if nullspace is None else _null_space(space, mask, nullspace)

    if linear:
        A = equation.jacobian(start)
        _require_regular(space, A, mask, null, "Fix more unknowns")
        b = _right_hand_side(mask, equation.residual(start))
        A, b = A.at_boundary(mask.reshape(-1), b, 0.0)
        solution = solve_linear(A, b, solver, nullspace=_flattened(null), throw=throw)
        u = _moved(start, solution.value)
        if null is not None and u0 is not None:
            u = null.remove_from(u, space.mesh.comm)
        return dataclasses.replace(solution, value=u)

    if free_modes(space, mask):
        remedy = (
            "Fix more unknowns, or start from another u0 if the Jacobian is singular there alone"
        )
        A = equation.jacobian(jnp.where(mask, fixed_values, start))
        _require_regular(space, A, mask, null, remedy)

    def insert(v: jax.Array) -> jax.Array:
        return jnp.where(mask, fixed_values, v)

    def residual(v: jax.Array) -> jax.Array:
        return jnp.where(mask, v - fixed_values, equation.residual(insert(v)))

    def jacobian(v: jax.Array) -> Matrix:
        A = equation.jacobian(insert(v))
        zeros = jnp.zeros(A.pattern.n_local, A.dtype)
        return A.at_boundary(mask.reshape(-1), zeros, 0.0)[0]

    return newton(
        residual, jax.lax.stop_gradient(start), solver, jacobian=jacobian, rtol=rtol, atol=atol,
        max_steps=50 if max_steps is None else max_steps, nullspace=null, throw=throw,
        comm=space.mesh.comm,
    )  # fmt: skip


def _check_linear(solver: LinearSolver | None, **settings: float | None) -> None:
    """Raise a ValueError if a setting of Newton's method is given for a linear equation."""
    for name, value in settings.items():
        if value is not None and (name != "rtol" or solver is not None):
            raise ValueError(
                f"fem.solve: {name}={value} has no effect, because the equation is linear and is "
                f"solved by {'one linear solve' if solver is None else type(solver).__name__}. "
                "Give the tolerance and the steps to the solver, as in solver=PCG(rtol=1e-10)."
            )


@jit_local(static_argnames=("shape", "dtype"))
def _given(values: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values, dtype), shape)


@jit_local
def _start(mask: Any, fixed_values: jax.Array, u0: Any) -> jax.Array:
    """Return the first guess with the given values where they are fixed."""
    start = jnp.zeros_like(fixed_values) if u0 is None else jnp.asarray(u0, fixed_values.dtype)
    return jnp.where(mask, fixed_values, jax.lax.stop_gradient(start))


@jit_local
def _right_hand_side(mask: Any, residual: jax.Array) -> jax.Array:
    return jnp.where(mask, 0, -residual).reshape(-1)


@jit_local
def _moved(start: jax.Array, change: jax.Array) -> jax.Array:
    return start + change.reshape(start.shape)


def fixed_mask(space: Space, fixed: Any, name: str = "fem.solve") -> np.ndarray:
    """Return `fixed` as an array, or raise an error on all ranks."""
    mask = np.zeros(space.shape, bool)
    with raise_on_all_ranks(space.mesh.comm):
        if fixed is not None:
            if isinstance(fixed, Tracer):
                raise TypeError(
                    f"{name}: fixed must be known before tracing, got a traced array. Make it "
                    "by space.fixed(...) outside of the function."
                )
            mask = np.asarray(fixed)
        if mask.dtype != bool or mask.shape != space.shape:
            raise TypeError(
                f"{name}: fixed must be bools of shape {space.shape} on rank "
                f"{space.mesh.comm.rank}, got dtype {mask.dtype} and shape {mask.shape}. Make it "
                "by space.fixed(...)."
            )
    return mask


def _check_field(space: Space, name: str, field: Any) -> None:
    with raise_on_all_ranks(space.mesh.comm):
        if field is None or (name == "values" and np.ndim(field) == 0 and not callable(field)):
            return
        if callable(field) or np.shape(field) != space.shape:
            description = "a function" if callable(field) else f"shape {np.shape(field)}"
            raise ValueError(
                f"fem.solve: {name} must be a field of shape {space.shape} on rank "
                f"{space.mesh.comm.rank}, got {description}. Make it by space.interpolate(...)."
            )


def _null_space(space: Space, mask: np.ndarray, nullspace: Any) -> NullSpace | None:
    """Return the null space as lists of fields, or None if nothing is free."""
    null = nullspace if isinstance(nullspace, NullSpace) else NullSpace(nullspace)

    def fields(vectors: Any) -> Any:
        if not isinstance(vectors, str):
            vectors = list(vectors) if isinstance(vectors, list | tuple) else [vectors]
            for v in vectors:
                _check_field(space, "a field of nullspace", v)
            return vectors
        if vectors not in ("constants", "rigid motions"):
            raise ValueError(
                "fem.solve: nullspace must be 'constants', 'rigid motions', fields or a "
                f"sparse.NullSpace, got {vectors!r}. Choose one of them."
            )
        if vectors == "rigid motions" and space.components != space.mesh.dim:
            raise ValueError(
                "fem.solve: rigid motions need a displacement with as many components as the mesh "
                f"has dimensions, {space.mesh.dim}, got {space.components}. Give "
                "nullspace='constants'."
            )
        return [m.values for m in free_modes(space, mask, vectors == "rigid motions")]

    vectors = fields(null.vectors)
    left = None if null.left is None else fields(null.left)
    return NullSpace(vectors, left, null.project) if vectors else None


def _flattened(null: NullSpace | None) -> NullSpace | None:
    if null is None:
        return None

    def flat(fields: Any) -> Any:
        return None if fields is None else [as_array(v).reshape(-1) for v in fields]

    return NullSpace(flat(null.vectors), flat(null.left), null.project)


def _dtypes(equation: Equation) -> list[Any]:
    leaves = jax.tree.leaves(([(t.args, t.kwargs) for t in equation.terms], equation.load))
    dtypes = [jnp.result_type(leaf) for leaf in leaves]
    return [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]


def equation_solver(equation: Equation, dtype: Any, rtol: float) -> LinearSolver:
    """Return the default solver of an equation."""
    space = equation.one_field("equation_solver")
    elastic = space.components == space.mesh.dim and space.pattern.near_null is not None
    amg = BoomerAMG(unknowns_per_cell=space.components, near_null=elastic)
    return default_solver(rtol, symmetric=equation.symmetric, dtype=dtype, multigrid=amg)


def _require_regular(
    space: Space, A: Matrix, mask: np.ndarray, null: NullSpace | None, remedy: str
) -> None:
    """Raise an error on all ranks if a constant or a rigid motion is free and changes no residual.

    The conditions are known while the program is traced, so it costs nothing if they leave no such
    field free. Those in the null space may be free.
    """
    comm, modes = space.mesh.comm, free_modes(space, mask)
    null_vectors = [] if null is None else null.vectors
    if len(null_vectors) >= len(modes):  # they are independent
        return
    names = '"constants"'
    if space.components == space.mesh.dim:
        names = '"rigid motions" (elasticity) or "constants"'
    for mode in modes:
        moved = A @ as_array(mode.values.reshape(-1), A.dtype)
        rest = whole = as_array(mode.values, A.dtype)
        if null_vectors:
            rest = NullSpace(null_vectors).remove_from(whole, comm)
        vectors = (moved, A.diagonal(), whole.reshape(-1), rest.reshape(-1))
        change, diagonal, size, outside = two_norms(*jax.lax.stop_gradient(vectors), comm=comm)
        require(
            (change > 100 * jnp.finfo(A.dtype).eps * diagonal) | (outside < 1e-3 * size),
            f"fem.solve: the equation has no unique solution: {mode.name} can be added, which the "
            f"fixed unknowns leave free. {remedy}, or give nullspace={names} for the solution that "
            "is orthogonal to it.",
            comm=comm,
        )
