"""Solve equations of several fields: one linear solve with blocks, or Newton's method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.extend import as_array, two_norms
from mpigrad.fem.equation import Equation
from mpigrad.fem.mixed import Mixed
from mpigrad.operations import require
from mpigrad.solution import Solution
from mpigrad.sparse import (
    GMRES,
    Blocks,
    BlockTriangular,
    BoomerAMG,
    Jacobi,
    LinearSolver,
    Matrix,
    NullSpace,
    hypre_available,
    newton,
)
from mpigrad.sparse import solve as solve_linear

__all__ = ["solve_fields"]


def solve_fields(
    equation: Equation,
    fixed: Any,
    values: Any,
    u0: Any,
    *,
    solver: LinearSolver | None,
    linear: bool,
    rtol: float | None,
    atol: float,
    max_steps: int | None,
    nullspace: Any,
    schur: Equation | None,
    throw: bool,
) -> Solution:
    """Find the fields whose residual is zero (collective): `fem.solve` for `Mixed` spaces."""
    space = equation.space
    assert isinstance(space, Mixed)
    masks = space.masks(fixed)
    given = _given(space, values)
    start = [jnp.zeros(s.shape) for s in space.fields]
    if u0 is not None:
        start = [jax.lax.stop_gradient(as_array(v)) for v in space.unwrapped(u0)]
    start = [jnp.where(m, g, v) for m, g, v in zip(masks, given, start, strict=True)]
    rtol = 1e-8 if rtol is None else rtol
    complement = _complement(space, schur)
    if solver is None:
        solver = _default_solver(space, complement, rtol)
    flat_masks = [m.reshape(-1) for m in masks]
    null = None if nullspace is None else _null_space(space, masks, nullspace)

    def jacobian(u: list[Any], check: bool) -> Blocks:
        K = Blocks(equation.jacobian(space.wrapped(u)).blocks, complement)
        if check:
            _check_degrees(space, K)
        b = [jnp.zeros(m.size, v.dtype) for m, v in zip(masks, u, strict=True)]
        K = K.at_boundary(flat_masks, b)[0]
        if check:
            _require_unique(space, K, masks, null)
        return K

    if linear:
        r = equation.residual(space.wrapped(start))
        b = tuple(jnp.where(m, 0, -v).reshape(-1) for m, v in zip(masks, r, strict=True))
        solution = solve_linear(jacobian(start, True), b, solver, nullspace=null, throw=throw)
        found = [v + x.reshape(v.shape) for v, x in zip(start, solution.value, strict=True)]
        return dataclasses.replace(solution, value=space.wrapped(found))

    ends = np.cumsum([m.size for m in masks])[:-1]

    def apart(x: jax.Array) -> list[jax.Array]:
        parts = jnp.split(x, ends)
        return [v.reshape(s.shape) for v, s in zip(parts, space.fields, strict=True)]

    def joined(fields: Any) -> jax.Array:
        return jnp.concatenate([jnp.reshape(v, -1) for v in fields])

    def inserted(x: jax.Array) -> list[jax.Array]:
        return [jnp.where(m, g, v) for m, g, v in zip(masks, given, apart(x), strict=True)]

    def residual(x: jax.Array) -> jax.Array:
        r = equation.residual(space.wrapped(inserted(x)))
        parts = zip(masks, apart(x), given, r, strict=True)
        return joined([jnp.where(m, v - g, f) for m, v, g, f in parts])

    jacobian(start, True)
    flat_null = None
    if null is not None:
        left = null.left and [joined(z) for z in null.left]
        flat_null = NullSpace([joined(z) for z in null.vectors], left, null.project)
    solution = newton(
        residual, jax.lax.stop_gradient(joined(start)), solver,
        jacobian=lambda x: jacobian(inserted(x), False), rtol=rtol, atol=atol,
        max_steps=50 if max_steps is None else max_steps, nullspace=flat_null, throw=throw,
    )  # fmt: skip
    return dataclasses.replace(solution, value=space.wrapped(apart(solution.value)))


def _given(space: Mixed, values: Any) -> list[jax.Array]:
    """Return the prescribed values as fields."""
    scalar = not isinstance(values, Mapping | tuple) and jnp.ndim(values) == 0
    each = (values,) * len(space.fields) if scalar else space.by_name(values, 0.0, _VALUES)
    for name, s, v in zip(space.names, space.fields, each, strict=True):
        if np.shape(v) not in ((), s.shape):
            raise ValueError(
                f"{_VALUES} of {name} must be a number or a field of shape {s.shape} on rank "
                f"{space.mesh.comm.rank}, got shape {np.shape(v)}. Make it by interpolate(...)."
            )
    return [
        jnp.broadcast_to(jnp.asarray(v, float), s.shape)
        for s, v in zip(space.fields, each, strict=True)
    ]


_VALUES = "fem.solve: values"


def _complement(space: Mixed, schur: Equation | None) -> Matrix | None:
    if schur is None:
        return None
    if not isinstance(schur, Equation) or schur.space is not space.fields[-1]:
        raise TypeError(
            f"fem.solve: schur must be an Equation of the last field, {space.names[-1]}, got "
            f"{schur!r}. Write fem.Energy(pressure_space, lambda p, k: 0.5 * k * p.u**2)(1 / eta)."
        )
    return jax.lax.stop_gradient(schur.jacobian())


def _default_solver(space: Mixed, complement: Matrix | None, rtol: float) -> LinearSolver:
    if complement is None or not hypre_available():
        raise ValueError(
            "fem.solve: equations of several fields have no default solver without hypre and "
            "schur=. Give schur=, or solver=PETSc(...), or GMRES(preconditioner=BlockTriangular("
            "...))."
        )
    cycles = [BoomerAMG(unknowns_per_cell=s.components) for s in space.fields[:-1]]
    return GMRES(rtol=rtol, restart=100, preconditioner=BlockTriangular(*cycles, Jacobi()))


def _null_space(space: Mixed, masks: tuple[NDArray[np.bool_], ...], nullspace: Any) -> NullSpace:
    """Return the null space as tuples of flat fields."""
    given = nullspace if isinstance(nullspace, NullSpace) else NullSpace(nullspace)

    def flat(fields: Any) -> tuple[jax.Array, ...]:
        return tuple(as_array(v).reshape(-1) for v in fields)

    def vectors(each: Any) -> Any:
        if each is None or not isinstance(each, Mapping):
            return each and [flat(v) for v in (each if isinstance(each, list) else [each])]
        found = []
        for k, what in enumerate(space.by_name(each, None, "fem.solve: nullspace")):
            if what is None:
                continue
            if not isinstance(what, str) or what != "constants":
                raise ValueError(
                    f"fem.solve: nullspace of {space.names[k]} must be 'constants', got {what!r}. "
                    "Give tuples of fields for others."
                )
            for c in range(space.fields[k].components):
                found.append(flat(_constant(space, k, c)))
        return found

    return NullSpace(vectors(given.vectors), vectors(given.left), given.project)


def _constant(space: Mixed, field: int, component: int) -> list[NDArray[np.float64]]:
    """Return fields that are 1 in one component of one field."""
    fields = [np.zeros(s.shape) for s in space.fields]
    fields[field].reshape(-1, space.fields[field].components)[:, component] = 1
    return fields


def _check_degrees(space: Mixed, K: Blocks) -> None:
    """Raise an error if a field without a block of its own has partners of no higher degree."""
    for k, name in enumerate(space.names):
        if K.blocks[k][k] is not None:
            continue
        partners = [j for j in range(len(space.names)) if K.blocks[k][j] is not None]
        degree = space.fields[k].degree
        if all(space.fields[j].degree <= degree for j in partners):
            listed = ", ".join(space.names[j] for j in partners) or "no other field"
            raise ValueError(
                f"fem.solve: {name} has degree {degree} and appears without a block of its own, "
                f"so the spaces of {listed} need a higher degree (Taylor-Hood), or it oscillates "
                "(Babuska, Brezzi). Take degree 2 for them, or add a stabilisation: a term with "
                f"p.{name}.grad."
            )


def _require_unique(
    space: Mixed, K: Blocks, masks: tuple[NDArray[np.bool_], ...], null: NullSpace | None
) -> None:
    """Raise an error on all ranks if a constant of a field without fixed unknowns is free."""
    comm = space.mesh.comm
    if null is not None:
        return
    whole = jax.lax.stop_gradient(K.merged())
    sizes = Matrix(whole.pattern, jnp.abs(whole.values))
    for k, (name, s) in enumerate(zip(space.names, space.fields, strict=True)):
        columns = masks[k].reshape(-1, s.components).any(axis=0)
        free = comm.mpi.allreduce(columns.astype(int)) == 0
        for c in np.flatnonzero(free):
            z = jnp.concatenate([v.reshape(-1) for v in _constant(space, k, int(c))])
            change, size = two_norms(whole @ z, sizes @ z, comm=comm)
            require(
                change > 1e-10 * size,
                f"fem.solve: the equation has no unique solution: a constant can be added to "
                f"{name}, which is fixed nowhere. Fix it at a boundary, or give "
                f'nullspace={{"{name}": "constants"}} for the solution whose mean over the nodes '
                "is zero.",
                comm=comm,
            )
