"""The verb `solve`: one differentiable primitive over all linear solvers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.activity import CARRIER, carrier, nought, without_carriers
from mpigrad.operations.factory import run_eagerly
from mpigrad.operations.neighborhood import neighbor_alltoallv_p
from mpigrad.operations.sites import call_site
from mpigrad.sparse.hypre import PCG, BoomerAMG, hypre_available
from mpigrad.sparse.krylov import CG
from mpigrad.sparse.matrix import Matrix, apply
from mpigrad.sparse.pattern import Pattern
from mpigrad.sparse.strategy import LinearSolver

__all__ = ["Solution", "default_solver", "solve"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Solution:
    """What `solve` returns.

    Attributes
    ----------
    value
        This rank's part of the solution, of the shape of b.
    result
        A `Result` as an integer array: 0 is success, everything else a failure (which raises
        unless `throw=False`).
    stats
        `iterations`, `relative_residual` |b - A x| / |b|, and `setups`, the preconditioner's
        set-ups done so far for this pattern and solver: equal on all ranks.
    """

    value: jax.Array
    result: jax.Array
    stats: dict[str, jax.Array]


def default_solver(rtol: float = 1e-8) -> LinearSolver:
    """`PCG` with multigrid where hypre is available, else `CG` with Jacobi's preconditioner."""
    return PCG(rtol=rtol) if hypre_available() else CG(rtol=rtol)


def solve(A: Matrix, b: Any, solver: LinearSolver | None = None, *, throw: bool = True) -> Solution:
    """Solve A x = b for a symmetric positive definite matrix (collective).

    Differentiable in `A.values` and `b`, in forward and reverse mode and to second order. The
    derivative of a solve is another solve with the same matrix, dx = A⁻¹ (db - dA x), and so is
    its adjoint, λ = A⁻¹ x̄: b̄ = λ, Ā_ij = -λ_i x_j on the pattern. As the adjoint takes A for Aᵀ,
    second derivatives are those along changes of A that keep it symmetric.

    Parameters
    ----------
    A
        The matrix. Symmetric: entries (i, j) and (j, i) hold the same value, which is checked.
    b
        This rank's part of the right-hand side, shape (n_local,), or (n_local, k) for k of them,
        which are solved for one after the other.
    solver
        `PCG(...)` on hypre or the own `CG(...)`; default: `default_solver()`.
    throw
        Raise an error on every rank where the solve fails: no convergence, NaN, a matrix that is
        not symmetric positive definite. With `throw=False`, look at `Solution.result`.

    Examples
    --------
    >>> u = solve(Matrix(pattern, values), b, PCG(rtol=1e-10)).value
    """
    solver = default_solver() if solver is None else solver
    b = jnp.asarray(b)
    _check(A, b, solver)
    pattern = A.pattern
    dtype = jnp.promote_types(A.values.dtype, b.dtype)
    solver.check(pattern, dtype)
    columns = b.reshape(b.shape[0], -1).T if b.ndim == 2 else b[None]
    x, info = solve_p.bind(
        A.values[None].astype(dtype),
        columns.astype(dtype),
        carrier(),
        pattern=pattern,
        solver=solver,
        throw=bool(throw),
        site=call_site(),
    )
    info = info if b.ndim == 2 else info[0]
    return Solution(
        value=x.T if b.ndim == 2 else x[0],
        result=info[..., 0].astype("int32"),
        stats={
            "iterations": info[..., 1].astype("int32"),
            "relative_residual": info[..., 2],
            "setups": info[..., 3].astype("int32"),
        },
    )


def _check(A: Any, b: jax.Array, solver: Any) -> None:
    if not isinstance(A, Matrix):
        raise TypeError(f"solve: A must be a mpigrad.sparse.Matrix, not {type(A).__name__}")
    if isinstance(solver, BoomerAMG):
        raise TypeError(
            "solve: BoomerAMG is a preconditioner; write PCG(preconditioner=BoomerAMG(...))"
        )
    if not isinstance(solver, LinearSolver):
        raise TypeError(f"solve: the solver must be PCG(...) or CG(...), not {solver!r}")
    pattern = A.pattern
    if b.ndim not in (1, 2) or b.shape[0] != pattern.n_local:
        raise ValueError(
            f"solve: b has shape {b.shape} on rank {pattern.comm.rank}, which owns "
            f"{pattern.n_local} rows; give ({pattern.n_local},) or ({pattern.n_local}, k)"
        )
    if pattern.row_without_diagonal >= 0:
        raise ValueError(
            f"solve: row {pattern.row_without_diagonal} has no diagonal entry in the pattern, so "
            "the matrix cannot be positive definite; add the entry (i, i) for every row i"
        )


# ---- the primitive: (values (1 or B, nnz), b (B, n_local), carrier) -> x (B, n_local), info ----

solve_p = Primitive("mpigrad_solve")
_INFO = 4
_Zero: Any = ad.Zero  # pyright: ignore[reportPrivateImportUsage]


def _shapes(values: Any, b: Any, a: Any, **_: Any) -> list[ShapedArray]:
    return [ShapedArray(b.shape, b.dtype), ShapedArray((b.shape[0], _INFO), b.dtype)]


def _run(values: Any, b: Any, a: Any, *, solver: LinearSolver, pattern: Pattern, **how: Any) -> Any:
    with without_carriers():  # differentiation has happened: these messages carry values only
        return solver.run(pattern, values, b, **how)


def _pool(pattern: Pattern, x: jax.Array, link: Any, site: int) -> jax.Array:
    """Own and ghost entries of x (B, n_local), shape (n_local + n_ghosts, B).

    The message is sent wherever the carrier is active, also on ranks whose matrix is constant.
    """
    ghosts = pattern.ghosts
    own = x.T
    if not ghosts.neighbors:
        return own
    (received,) = neighbor_alltoallv_p.bind(
        own.at[ghosts.send_index].get(mode="promise_in_bounds", wrap_negative_indices=False),
        link,
        comm=pattern.comm.slot,
        site=site,
        tag=0,
        neighbors=ghosts.neighbors,
        sendcounts=ghosts.sendcounts,
        recvcounts=ghosts.recvcounts,
    )
    return jnp.concatenate([own, received])


def _product(pattern: Pattern, values: jax.Array, pool: jax.Array) -> jax.Array:
    """(1 or B, nnz), (n_local + n_ghosts, B) -> (B, n_local)."""
    if pool.shape[1] == 1:
        return apply(pattern, values[0], pool[:, 0])[None]
    if values.shape[0] == 1:
        return apply(pattern, values[0], pool).T
    return jax.vmap(lambda v, p: apply(pattern, v, p), in_axes=(0, 1))(values, pool)


def _differentiate(
    values: Any, b: Any, a: Any, params: dict[str, Any]
) -> tuple[list[Any], tuple[Any, ...], Callable[..., Any]]:
    """The primal results, what the tangent map needs of them, and the tangent map."""
    x, info = solve_p.bind(values, b, a, **params)
    pattern = params["pattern"]
    # The tangent's carrier depends on x, so that it is active wherever x is.
    link = a + nought(x, CARRIER)
    pool = _pool(pattern, x, link, params["site"])

    def tangent(residuals: Any, tangents: Any) -> list[Any]:
        (values, link, pool), (tv, tb, ta) = residuals, tangents
        if type(tb) is not _Zero:
            rhs = tb
        elif type(tv) is _Zero:  # inactive here, perhaps active elsewhere: solve all the same
            rhs = nought(ta, jax.typeof(x))
        else:
            rhs = None
        if type(tv) is not _Zero:
            moved = _product(pattern, tv, pool)
            rhs = -moved if rhs is None else rhs - moved
        dx, _ = solve_p.bind(values, rhs, link, **params)
        return [dx, _Zero(compat.tangent_aval(info))]

    return [x, info], (values, link, pool), tangent


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    values, b, a = primals
    results, residuals, tangent = _differentiate(values, b, a, params)
    return results, tangent(residuals, tangents)


def _linearize(is_vjp: Any, nonzeros: Any, values: Any, b: Any, a: Any, **params: Any) -> Any:
    results, residuals, tangent = _differentiate(values, b, a, params)
    return results, [True, False], list(residuals), lambda kept, *ts: tangent(kept, ts)


def _transpose(cotangents: Any, values: Any, b: Any, a: Any, **params: Any) -> list[Any]:
    # Linear in b; the matrix is symmetric, so the adjoint is the same solve.
    ct = ad.instantiate_zeros(cotangents[0])
    params = {**params, "site": -abs(params["site"])}
    back, _ = solve_p.bind(values, ct, a, **params)
    return [None, back, None]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    (values, b, a), (dv, db, da) = args, dims
    n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    # Where b is not batched, another rank's may be: solve for the batch.
    b = jnp.broadcast_to(b, (n, *b.shape)) if db is None else jnp.moveaxis(b, db, 0)
    inner = b.shape[1]
    if dv is not None:
        values = jnp.moveaxis(values, dv, 0)
        values = jnp.broadcast_to(values, (n, inner, values.shape[2])).reshape(n * inner, -1)
    elif values.shape[0] > 1:
        values = jnp.tile(values, (n, 1))
    if da is not None:
        a = jnp.sum(a)
    x, info = solve_p.bind(values, b.reshape(n * inner, -1), a, **params)
    return [x.reshape(n, inner, -1), info.reshape(n, inner, _INFO)], [0, 0]


compat.make_effectful(solve_p, _shapes)
run_eagerly(solve_p)
mlir.register_lowering(solve_p, mlir.lower_fun(_run, multiple_results=True), platform="cpu")
ad.primitive_jvps[solve_p] = _jvp
compat.set_linearization(solve_p, _linearize)
compat.always_stage(solve_p)
ad.primitive_transposes[solve_p] = _transpose
batching.primitive_batchers[solve_p] = _batch
