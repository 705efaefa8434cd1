"""The derivatives of eigenpairs: one bordered linear system, and functions of equal eigenvalues.

The wanted vectors X, of one group of equal eigenvalues or of several, satisfy A X = B X Λ and
Xᵀ B X = 1. Λ is diagonal at the solution, but its derivative has entries within each group. So
every derivative of the groups is the derivative of one smooth frame, and derivatives of functions
that do not depend on the choice of vectors within a group are exact to any order. All of them are
solves of one bordered system, `bordered_p`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import (
    CARRIER,
    Activity,
    describe,
    opaque_zero,
    primitive,
    set_carrier,
    without_carriers,
)
from mpigrad.operations import allreduce, require
from mpigrad.solution import Result
from mpigrad.sparse.lobpcg import (
    Eigenproblem,
    inner_products,
    multiply_rows,
    preconditioned,
    solve_on_complement,
)
from mpigrad.sparse.matrix.matrix import apply
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["bordered_p", "eigenproblem", "frame_p", "with_ghosts"]


def eigenproblem(params: dict[str, Any], a: Any, b: Any, shifted: Any) -> Eigenproblem:
    pattern, mass, site = params["pattern"], params["mass"], params["site"]
    apply_method = preconditioned(params["method"], params["inverted"], shifted, site)
    free = np.frombuffer(params["free"], bool) if params["free"] else None

    def precondition(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        z, fault = apply_method(rows)  # which may lead into fixed rows
        return problem.in_free_rows(z), fault

    problem = Eigenproblem(
        product=lambda rows: multiply_rows(pattern, a, rows),
        mass=None if mass is None else lambda rows: multiply_rows(mass, b, rows),
        precondition=precondition,
        n=pattern.n_local,
        first=pattern.offset,
        rtol=params["rtol"],
        shift=params["shift"],
        comm=pattern.comm,
        free=free,
    )
    return problem


def with_ghosts(pattern: Pattern, rows: jax.Array, link: Any) -> jax.Array:
    """Return own and ghost entries, shape (n_local + n_ghosts, k)."""
    with set_carrier(link):  # active on every rank on which the result is
        return pattern.ghosts.local_and_ghost(rows.T)


# ---- groups of equal eigenvalues ----


def _groups(values: jax.Array, info: jax.Array, rtol: float, shift: float) -> tuple[Any, Any, Any]:
    """Return which values are equal (k, k), which belong to a group cut by k, and the tolerance."""
    tolerance = max(100 * rtol, float(jnp.finfo(values.dtype).eps) ** 0.5)
    gaps = jnp.diff(values, append=info[2])
    splits = ~(gaps <= tolerance * (jnp.abs(values) + abs(shift)))
    labels = jnp.concatenate([jnp.zeros(1, "int32"), jnp.cumsum(splits[:-1].astype("int32"))])
    return labels[:, None] == labels, ~splits[-1] & (labels == labels[-1]), tolerance


# ---- the bordered system: A Z - B Z Λ - B X Θ = R + B V, and Xᵀ B Z = H within each group.
# (A values, B values, values for the preconditioner, Λ, X, B X, info, R, V, H, carrier) -> Z, B Z,
# Θ. H is the sum of what all ranks give, and Θ is the same on all ranks. With the sign of H changed
# the system is its own transpose, and its derivative is another one with the same matrix ----


def _bordered_shapes(a: Any, *operands: Any, **_: Any) -> list[Any]:
    r, h = operands[-4], operands[-2]
    return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (r, r, h)]


def _run_bordered(
    a: Any, b: Any, shifted: Any, lam: Any, x: Any, bx: Any, info: Any, r: Any, v: Any, h: Any,
    _: Any, **params: Any,
) -> list[Any]:  # fmt: skip
    comm, values = params["pattern"].comm, jnp.diagonal(lam)
    equal, cut, _ = _groups(values, info, params["rtol"], params["shift"])
    with without_carriers():
        problem = eigenproblem(params, a, b, shifted)
        r = problem.in_free_rows(r + problem.massed(v))  # nothing depends on fixed rows
        parts, h = allreduce(jnp.stack([inner_products(x, r), h]), comm=comm)
        differences = values[:, None] - values
        along = jnp.where(equal, h, parts / jnp.where(equal, 1, differences))
        theta = jnp.where(equal, differences * h - parts, 0)
        outside = r - parts.T @ bx
        sizes = allreduce(jnp.stack([jnp.sum(u * u, axis=1) for u in (outside, r)]), comm=comm)
        eps = jnp.finfo(values.dtype).eps
        apart = sizes[0] <= (100 * eps) ** 2 * sizes[1]
        head = f"eigh, {describe(abs(params['site']))}: "
        require(jnp.all(apart | ~cut), head + _CUT, len(values), comm=comm)
        # A right-hand side in the span of the vectors is nothing but rounding here.
        outside = jnp.where(apart[:, None], 0, outside)
        steps = 10 * params["max_steps"]
        y, relative, taken, state = solve_on_complement(problem, x, bx, values, outside, steps)
        require(
            (state == Result.SUCCESSFUL) | (state == Result.NOT_FINITE),
            f"{head}expected the derivatives of the vectors, got a solve that failed: the relative "
            f"residual is {{}} after {{}} steps (rtol={params['rtol']:.3g}). The largest value is "
            "{}, and the next one is {}. If they are close, take another k. Otherwise loosen rtol, "
            "or take a better preconditioner.",
            jnp.max(relative), taken, values[-1], info[2], comm=comm,
        )  # fmt: skip
        y = jnp.where(state == Result.SUCCESSFUL, y, jnp.nan)
        return [along.T @ x + y, along.T @ bx + problem.massed(y), theta]


_CUT = (
    "eigenvalue k={} and the next one are equal within the tolerance, so that the function of this "
    "group of values or vectors has no derivative. Take k larger or smaller, so that the "
    "group is complete or left out."
)


def _differentiate_bordered(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., Any]]:
    a, b, shifted, lam, x, bx, info, _, _, _, c = operands
    z, bz, theta = bordered_p.bind(*operands, **params)
    pattern, mass = params["pattern"], params["mass"]
    link = c + opaque_zero(z, CARRIER)
    all_z = with_ghosts(pattern, z, link)
    both = None  # own and ghost entries of Z and X
    if mass is not None:
        both = with_ghosts(mass, jnp.concatenate([z, x]), link)

    def tangent(saved: Any, tangents: Sequence[Any]) -> list[Any]:
        a, b, shifted, lam, x, bx, info, z, bz, theta, all_z, both, link = saved
        ta, tb, _, tlam, tx, _, _, r, v, h, tc = tangents
        if r is None:
            r = jnp.zeros_like(z) if tc is None else opaque_zero(tc, jax.typeof(z))
        v = jnp.zeros_like(z) if v is None else v
        h = jnp.zeros_like(theta) if h is None else h
        if ta is not None:
            r = r - apply(pattern, ta, all_z).T
        mz = None
        if tb is not None and mass is not None:
            mz, mx = jnp.split(apply(mass, tb, both).T, 2)
            r, h = r + lam.T @ mz + theta.T @ mx, h - inner_products(x, mz)
        if tlam is not None:
            v = v + tlam.T @ z
        if tx is not None:
            v, h = v + theta.T @ tx, h - inner_products(tx, bz)
        tz, tbz, ttheta = bordered_p.bind(a, b, shifted, lam, x, bx, info, r, v, h, link, **params)
        return [tz, tbz if mz is None else tbz + mz, ttheta]

    saved = (a, b, shifted, lam, x, bx, info, z, bz, theta, all_z, both, link)
    return [z, bz, theta], saved, tangent


def _transpose_bordered(
    cotangents: Sequence[Any], operands: Sequence[Any], linear: Any, params: dict[str, Any]
) -> list[Any]:
    a, b, shifted, lam, x, bx, info, _, _, _, c = operands
    ct, ct_mass, ct_theta = cotangents
    w, bw, psi = bordered_p.bind(
        a, b, shifted, lam.T, x, bx, info, ct, ct_mass, -ct_theta, c, **params
    )
    return [*[None] * 7, w, bw, -psi, None]


bordered_p = primitive(
    "eigh_derivative",
    shapes=_bordered_shapes,
    run=_run_bordered,
    programs=lambda params: params["pattern"].derived,
    differentiate=_differentiate_bordered,
    transpose=_transpose_bordered,
    batch="map",
)


# ---- the derivatives of values and vectors that exist: (tangents of values and X, values, X, info,
# carrier) -> tangents. The transpose checks that a function does not depend on a group's basis ----


def _run_frame(t: Any, tx: Any, values: Any, x: Any, info: Any, _: Any, **params: Any) -> list[Any]:
    equal, _, _ = _groups(values, info, params["rtol"], params["shift"])
    return [(equal / jnp.sum(equal, axis=1)).astype(t.dtype) @ t, tx]


def _transpose_frame(
    cotangents: Sequence[Any], operands: Sequence[Any], linear: Any, params: dict[str, Any]
) -> list[Any]:
    _, _, values, x, info, c = operands
    (ct, ctx), comm = cotangents, params["pattern"].comm
    equal, cut, tolerance = _groups(values, info, params["rtol"], params["shift"])
    head = f"eigh, {describe(abs(params['site']))}: "
    with set_carrier(c):
        k = len(values)
        sums = allreduce(
            jnp.concatenate(
                [
                    inner_products(x, ctx),
                    jnp.stack([jnp.sum(u * u, axis=1) for u in (x, ctx)]),
                    ct[None],
                ]
            ),
            comm=comm,
        )
        turn, (xx, cc), total = sums[:k], sums[k : k + 2], sums[k + 2]
        rounding = tolerance**0.5
        differs = jnp.abs(total[:, None] - total) > rounding * jnp.max(jnp.abs(total))
        turned = jnp.abs(turn - turn.T) > rounding * jnp.sqrt(jnp.max(xx) * jnp.max(cc))
        depends = jnp.any(cut & ((total != 0) | (cc != 0)))
        require(~depends, head + _CUT, k, comm=comm)
        for wrong, what, advice in (
            (differs, "values", "the sum of their values"),
            (turned, "vectors", "X Xᵀ over the group"),
        ):
            pair = jnp.argmax(jnp.where(equal & wrong, 1, 0))
            require(
                ~jnp.any(equal & wrong),
                f"{head}eigenvalues {{}} and {{}} are equal within the tolerance, and the function "
                f"treats their {what} differently, so that it has no derivative. Use {advice}, "
                "which is the same for every basis of the group.",
                pair // k, pair % k, comm=comm,
            )  # fmt: skip
        back = frame_p.bind(ct, ctx, values, x, info, c, **params)
    return [*back, None, None, None, None]


def _differentiate_frame(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., Any]]:
    t, tx, values, x, info, c = operands
    results = frame_p.bind(*operands, **params)
    link = c + opaque_zero(results[1], CARRIER)
    shapes = jax.typeof(t), jax.typeof(tx)

    def tangent(saved: Any, tangents: Sequence[Any]) -> list[Any]:
        (values, x, info, link), tc = saved, tangents[-1]
        given = [
            t if t is not None
            else jnp.zeros(s.shape, s.dtype) if tc is None
            else opaque_zero(tc, s)
            for t, s in zip(tangents[:2], shapes, strict=True)
        ]  # fmt: skip
        return list(frame_p.bind(*given, values, x, info, link, **params))

    return results, (values, x, info, link), tangent


frame_p = primitive(
    "eigh_frame",
    shapes=lambda t, tx, *_, **__: [t, tx],
    run=_run_frame,
    programs=lambda params: params["pattern"].derived,
    differentiate=_differentiate_frame,
    transpose=_transpose_frame,
    batch="map",
)
