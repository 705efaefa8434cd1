"""Solve equations of several fields: one linear solve with blocks, or Newton's method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import raise_on_all_ranks
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
    given = _fields(space, "values", values)
    first = [jax.lax.stop_gradient(v) for v in _fields(space, "u0", u0)]
    start = [jnp.where(m, g, v) for m, g, v in zip(masks, given, first, strict=True)]
    if rtol is None:
        rtol = 1e-5 if jnp.result_type(*start) == np.float32 else 1e-8
    complement = _complement(space, schur)
    if solver is None:
        solver = _default_solver(space, complement, rtol)
    flat_masks = [m.reshape(-1) for m in masks]
    null = None if nullspace is None else _null_space(space, masks, nullspace)
    flat_null = null and _joined(null)

    ends = np.cumsum([m.size for m in masks])[:-1]

    def apart(x: jax.Array) -> list[jax.Array]:
        parts = jnp.split(x, ends)
        return [v.reshape(s.shape) for v, s in zip(parts, space.fields, strict=True)]

    def jacobian(u: list[Any], check: bool) -> Blocks:
        K = Blocks(equation.jacobian(space.wrapped(u)).blocks, complement)
        if check:
            _check_degrees(space, K, equation.couplings())
        b = [jnp.zeros(m.size, v.dtype) for m, v in zip(masks, u, strict=True)]
        K = K.at_boundary(flat_masks, b)[0]
        if check:
            _require_unique(space, K, masks, flat_null)
        return K

    if linear:
        r = equation.residual(space.wrapped(start))
        b = tuple(jnp.where(m, 0, -v).reshape(-1) for m, v in zip(masks, r, strict=True))
        solution = solve_linear(jacobian(start, True), b, solver, nullspace=null, throw=throw)
        found = [v + x.reshape(v.shape) for v, x in zip(start, solution.value, strict=True)]
        if flat_null is not None and u0 is not None:
            found = apart(flat_null.remove_from(_flat(found), space.mesh.comm))
        return dataclasses.replace(solution, value=space.wrapped(found))

    def inserted(x: jax.Array) -> list[jax.Array]:
        return [jnp.where(m, g, v) for m, g, v in zip(masks, given, apart(x), strict=True)]

    def residual(x: jax.Array) -> jax.Array:
        r = equation.residual(space.wrapped(inserted(x)))
        parts = zip(masks, apart(x), given, r, strict=True)
        return _flat([jnp.where(m, v - g, f) for m, v, g, f in parts])

    jacobian(start, True)
    solution = newton(
        residual, jax.lax.stop_gradient(_flat(start)), solver,
        jacobian=lambda x: jacobian(inserted(x), False), rtol=rtol, atol=atol,
        max_steps=50 if max_steps is None else max_steps, nullspace=flat_null, throw=throw,
    )  # fmt: skip
    return dataclasses.replace(solution, value=space.wrapped(apart(solution.value)))


def _flat(fields: Any) -> jax.Array:
    return jnp.concatenate([jnp.reshape(v, -1) for v in fields])


def _joined(null: NullSpace) -> NullSpace:
    """Return a null space of tuples as one of vectors, in which the fields follow each other."""
    left = None if null.left is None else [_flat(z) for z in null.left]
    return NullSpace([_flat(z) for z in null.vectors], left, null.project)


def _fields(space: Mixed, what: str, given: Any) -> list[jax.Array]:
    """Return a number, or numbers and fields by name, as fields."""
    arrays = []
    with raise_on_all_ranks(space.mesh.comm):
        each: Any = given
        if given is not None and not isinstance(given, Mapping | tuple) and np.ndim(each) == 0:
            each = (given,) * len(space.fields)
        else:
            each = space.by_name(given, 0.0, f"fem.solve: {what}")
        for name, s, v in zip(space.names, space.fields, each, strict=True):
            if np.shape(v) not in ((), s.shape):
                raise ValueError(
                    f"fem.solve: {what} of {name} must be a number or a field of shape {s.shape} "
                    f"on rank {space.mesh.comm.rank}, got shape {np.shape(v)}. Make it by "
                    "space.interpolate(...)."
                )
            arrays.append(as_array(v))
    dtype = jnp.result_type(float, *arrays)
    pairs = zip(arrays, space.fields, strict=True)
    return [jnp.broadcast_to(v.astype(dtype), s.shape) for v, s in pairs]


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


def _null_space(
    space: Mixed, masks: tuple[NDArray[np.bool_], ...], nullspace: Any
) -> NullSpace | None:
    """Return the null space as tuples of flat fields, or None if nothing is free."""
    given = nullspace if isinstance(nullspace, NullSpace) else NullSpace(nullspace)
    free = _free(space, masks)

    def flat(fields: Any) -> tuple[jax.Array, ...]:
        return tuple(as_array(v).reshape(-1) for v in fields)

    def vectors(each: Any) -> Any:
        if each is None:
            return None
        if isinstance(each, list | tuple):
            return [flat(v) for v in (each if isinstance(each, list) else [each])]
        found = []
        for k, what in enumerate(space.by_name(each, None, "fem.solve: nullspace")):
            if what is None:
                continue
            if not isinstance(what, str) or what != "constants":
                raise ValueError(
                    f"fem.solve: nullspace of {space.names[k]} must be 'constants', got {what!r}. "
                    "Give tuples of fields for others."
                )
            found += [flat(_constant(space, k, c)) for c in free[k]]
        return found

    found = vectors(given.vectors)
    return NullSpace(found, vectors(given.left), given.project) if found else None


def _free(space: Mixed, masks: tuple[NDArray[np.bool_], ...]) -> list[NDArray[np.intp]]:
    """Return for each field the components without fixed unknowns on any rank."""
    pairs = zip(masks, space.fields, strict=True)
    used = [mask.reshape(-1, s.components).any(axis=0) for mask, s in pairs]
    counts = space.mesh.comm.mpi.allreduce(np.concatenate(used).astype(int))
    ends = np.cumsum([s.components for s in space.fields])[:-1]
    return [np.flatnonzero(part == 0) for part in np.split(counts, ends)]


def _constant(space: Mixed, field: int, component: int) -> list[NDArray[np.float64]]:
    """Return fields that are 1 in one component of one field."""
    fields = [np.zeros(s.shape) for s in space.fields]
    fields[field].reshape(-1, space.fields[field].components)[:, component] = 1
    return fields


def _check_degrees(space: Mixed, K: Blocks, couplings: NDArray[np.bool_]) -> None:
    """Raise an error if a field is a multiplier whose partners have no higher degree.

    It has no block of its own, and no partner whose gradient meets that of its test function, as in
    a stiffness, which is stable with equal degrees.
    """
    for k, name in enumerate(space.names):
        partners = [j for j in range(len(space.names)) if K.blocks[k][j] is not None]
        if K.blocks[k][k] is not None or couplings[k, :, 3].any():
            continue
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
    """Raise an error on all ranks if a constant that is not in the null space is a null vector."""
    comm = space.mesh.comm
    whole = jax.lax.stop_gradient(K.merged())
    sizes = Matrix(whole.pattern, jnp.abs(whole.values))
    eps = 100 * jnp.finfo(whole.dtype).eps
    for k, components in enumerate(_free(space, masks)):
        for c in components:
            z = _flat(_constant(space, k, int(c))).astype(whole.dtype)
            rest = z if null is None else null.remove_from(z, comm)
            # Rows of different fields have different units.
            parts = *K.split(whole @ z), *K.split(sizes @ z), z, rest
            *norms, size, outside = two_norms(*parts, comm=comm)
            n = len(norms) // 2
            changes, scales = jnp.stack(norms[:n]), jnp.stack(norms[n:])
            name = space.names[k]
            require(
                ~jnp.all(changes <= eps * scales) | (outside < 1e-3 * size),
                f"fem.solve: the equation has no unique solution: a constant can be added to "
                f"{name}, which is fixed nowhere. Fix it at a boundary, start from another u0 if "
                "the Jacobian is singular there alone, or give "
                f'nullspace={{"{name}": "constants"}} for the solution whose mean over the nodes '
                "is zero.",
                comm=comm,
            )
