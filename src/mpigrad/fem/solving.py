"""Solve equations of finite elements: one linear solve, or Newton's method."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.fem.equation import Equation
from mpigrad.fem.free_modes import free_modes
from mpigrad.fem.space import Space
from mpigrad.operations import require
from mpigrad.operations.local_programs import as_array, jit_local
from mpigrad.operations.norms import two_norms
from mpigrad.solution import Solution
from mpigrad.sparse import GMRES, PCG, BoomerAMG, Jacobi, Matrix, NullSpace, newton
from mpigrad.sparse import solve as solve_linear
from mpigrad.sparse.solvers.base import LinearSolver
from mpigrad.sparse.solvers.hypre_library import hypre_available
from mpigrad.sparse.solvers.nullspace import as_nullspace, orthogonal

__all__ = ["solve"]


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
        field: `space.fixed(...)`. Default: none.
    values
        The values there: a scalar, or a field (read at fixed unknowns only).
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
        the loads must be in balance. Fields must be zero at fixed unknowns.
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
    mask = _mask(space, fixed)
    _check_field(space, "values", values)
    _check_field(space, "u0", u0)
    dtype = jnp.result_type(float if u0 is None else u0, values, *_dtypes(equation))
    if rtol is None:
        rtol = 1e-5 if dtype == np.float32 else 1e-8
    given = _given(values, shape=space.shape, dtype=dtype)
    start = _start(mask, given, u0)
    if solver is None:
        solver = _default_solver(equation, dtype, rtol)
    null = None if nullspace is None else _null_space(space, mask, nullspace)

    if linear:
        A = equation.jacobian(start)
        _require_regular(space, A, mask, null, "Fix more unknowns")
        b = _right_hand_side(mask, equation.residual(start))
        A, b = A.at_boundary(mask.reshape(-1), b, 0.0)
        found = solve_linear(A, b, solver, nullspace=_flattened(null), throw=throw)
        u = _moved(start, found.value)
        if null is not None and u0 is not None:
            u = orthogonal(null.vectors, u, space.mesh.comm)
        return dataclasses.replace(found, value=u)

    if free_modes(space, mask):
        remedy = (
            "Fix more unknowns, or start from another u0 if the Jacobian is singular there alone"
        )
        A = equation.jacobian(jnp.where(mask, given, start))
        _require_regular(space, A, mask, null, remedy)

    def insert(v: jax.Array) -> jax.Array:
        return jnp.where(mask, given, v)

    def residual(v: jax.Array) -> jax.Array:
        return jnp.where(mask, v - given, equation.residual(insert(v)))

    def jacobian(v: jax.Array) -> Matrix:
        A = equation.jacobian(insert(v))
        zeros = jnp.zeros(A.pattern.n_local, A.dtype)
        return A.at_boundary(mask.reshape(-1), zeros, 0.0)[0]

    return newton(
        residual, jax.lax.stop_gradient(start), solver, jacobian=jacobian, rtol=rtol, atol=atol,
        max_steps=50 if max_steps is None else max_steps, nullspace=null, throw=throw,
        comm=space.mesh.comm,
    )  # fmt: skip


def _check_linear(solver: LinearSolver | None, **given: float | None) -> None:
    """Raise a ValueError if a setting of Newton's method is given for a linear equation."""
    for name, value in given.items():
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
def _start(mask: Any, given: jax.Array, u0: Any) -> jax.Array:
    """Return the first guess with the given values where they are fixed."""
    start = jnp.zeros_like(given) if u0 is None else jnp.asarray(u0, given.dtype)
    return jnp.where(mask, given, jax.lax.stop_gradient(start))


@jit_local
def _right_hand_side(mask: Any, residual: jax.Array) -> jax.Array:
    return jnp.where(mask, 0, -residual).reshape(-1)


@jit_local
def _moved(start: jax.Array, change: jax.Array) -> jax.Array:
    return start + change.reshape(start.shape)


def _mask(space: Space, fixed: Any) -> np.ndarray:
    mask = np.zeros(space.shape, bool)
    with raise_on_all_ranks(space.mesh.comm):
        if fixed is not None:
            if isinstance(fixed, Tracer):
                raise TypeError(
                    "fem.solve: fixed must be known before tracing, got a traced array. Make it "
                    "by space.fixed(...) outside of the function."
                )
            mask = np.asarray(fixed)
        if mask.dtype != bool or mask.shape != space.shape:
            raise TypeError(
                f"fem.solve: fixed must be bools of shape {space.shape} on rank "
                f"{space.mesh.comm.rank}, got dtype {mask.dtype} and shape {mask.shape}. Make it "
                "by space.fixed(...)."
            )
    return mask


def _check_field(space: Space, name: str, field: Any) -> None:
    with raise_on_all_ranks(space.mesh.comm):
        if field is None or (name == "values" and np.ndim(field) == 0 and not callable(field)):
            return
        if callable(field) or np.shape(field) != space.shape:
            given = "a function" if callable(field) else f"shape {np.shape(field)}"
            raise ValueError(
                f"fem.solve: {name} must be a field of shape {space.shape} on rank "
                f"{space.mesh.comm.rank}, got {given}. Make it by space.interpolate(...)."
            )


def _null_space(space: Space, mask: np.ndarray, given: Any) -> NullSpace | None:
    """Return the null space as lists of fields, or None if nothing is free."""
    null = as_nullspace(given)

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


def _default_solver(equation: Equation, dtype: Any, rtol: float) -> LinearSolver:
    method = PCG if equation.symmetric else GMRES
    if hypre_available() and dtype == np.float64:
        space = equation.space
        elastic = space.components == space.mesh.dim
        amg = BoomerAMG(unknowns_per_cell=space.components, near_null=elastic)
        return method(rtol=rtol, preconditioner=amg)
    return method(rtol=rtol, preconditioner=Jacobi(), max_steps=10_000)


def _require_regular(
    space: Space, A: Matrix, mask: np.ndarray, null: NullSpace | None, remedy: str
) -> None:
    """Raise an error on all ranks if a constant or a rigid motion is free and changes no residual.

    The conditions are known while the program is traced, so it costs nothing if they leave no such
    field free. Those in the null space may be free.
    """
    comm, modes = space.mesh.comm, free_modes(space, mask)
    given = [] if null is None else null.vectors
    if len(given) >= len(modes):  # they are independent
        return
    names = '"constants"'
    if space.components == space.mesh.dim:
        names = '"rigid motions" (elasticity) or "constants"'
    for mode in modes:
        moved = A @ as_array(mode.values.reshape(-1), A.dtype)
        rest = whole = as_array(mode.values, A.dtype)
        if given:
            rest = orthogonal(given, whole, comm)
        vectors = (moved, A.diagonal(), whole.reshape(-1), rest.reshape(-1))
        change, diagonal, size, outside = two_norms(*jax.lax.stop_gradient(vectors), comm=comm)
        require(
            (change > 100 * jnp.finfo(A.dtype).eps * diagonal) | (outside < 1e-3 * size),
            f"fem.solve: the equation has no unique solution: {mode.name} can be added, which the "
            f"fixed unknowns leave free. {remedy}, or give nullspace={names} for the solution that "
            "is orthogonal to it.",
            comm=comm,
        )
