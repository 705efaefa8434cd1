"""The verb `solve`: one differentiable primitive over all linear solvers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import derivative_slot
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.carrier import CARRIER, carrier, opaque_zero, set_carrier, without_carriers
from mpigrad.operations.indexing import take
from mpigrad.operations.neighborhood import NEIGHBOR_TAG, neighbor_alltoallv_p
from mpigrad.operations.primitive import run_eagerly
from mpigrad.runtime.call_sites import call_site
from mpigrad.sparse.matrix.matrix import Matrix, apply
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.transpose import transpose_values, transposed
from mpigrad.sparse.solvers import pfmg
from mpigrad.sparse.solvers.base import INFO, LinearSolver
from mpigrad.sparse.solvers.hypre_library import hypre_available
from mpigrad.sparse.solvers.methods import PCG
from mpigrad.sparse.solvers.operator_solve import solve_operator
from mpigrad.sparse.solvers.preconditioners import PFMG, Jacobi, Preconditioner

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


def default_solver(rtol: float = 1e-8, pattern: Pattern | None = None) -> LinearSolver:
    """`PCG` with multigrid where hypre is available, else with Jacobi's preconditioner.

    The multigrid is `PFMG` for patterns of grid stencils that it takes, else `BoomerAMG`.
    """
    if hypre_available():
        if pattern is not None and not pfmg.why_not(pattern):
            return PCG(rtol=rtol, preconditioner=PFMG())
        return PCG(rtol=rtol)
    return PCG(rtol=rtol, max_steps=10_000, preconditioner=Jacobi())


def solve(
    A: Any, b: Any, solver: LinearSolver | None = None, x0: Any = None, *, throw: bool = True
) -> Solution:
    """Solve A x = b (collective).

    Differentiable in `A.values` and `b`, in forward and reverse mode and to any order. The
    derivative of a solve is another solve with the same matrix, dx = A⁻¹ (db - dA x); its adjoint
    is a solve with the transposed matrix, λ = A⁻ᵀ x̄: b̄ = λ, Ā_ij = -λ_i x_j on the pattern (Giles
    2008). `PCG` takes A for Aᵀ, and needs no second set-up for it; its second derivatives are
    those along changes of A that keep it symmetric. The other methods make the transpose, which
    has a hierarchy of its own, and their derivatives are those along any change of A.

    Parameters
    ----------
    A
        The matrix, square. For `PCG` symmetric: entries (i, j) and (j, i) hold the same value,
        which is checked. Or a linear function v -> A v of this rank's part of a vector, or an
        `Operator`, differentiable in whatever it closes over.
    b
        This rank's part of the right-hand side, shape (n_local,), or (n_local, k) for k of them,
        which are solved for one after the other. With a function: an array or pytree of any
        shapes, all of it one right-hand side.
    solver
        `PCG(...)`, `GMRES(...)`, `BiCGStab(...)` or `Multigrid(...)`; default:
        `default_solver(pattern=A.pattern)`. With a function one of the first three with
        `preconditioner=None`; default: GMRES.
    x0
        Where the iterations start, in the shape of b; default: zeros. No derivative is taken with
        respect to it: the solution does not depend on it.
    throw
        Raise an error on every rank where the solve fails: no convergence, a breakdown, NaN, for
        `PCG` a matrix that is not symmetric positive definite. With `throw=False`, look at
        `Solution.result`.

    Examples
    --------
    >>> u = solve(Matrix(pattern, values), b, PCG(rtol=1e-10)).value
    """
    if callable(A):
        return _solution(*solve_operator(A, b, solver, x0=x0, throw=throw))
    b = jnp.asarray(b)
    none = jnp.zeros((0, *b.shape[1:]), b.dtype)
    x0 = none if x0 is None else jax.lax.stop_gradient(jnp.asarray(x0))
    if solver is None and isinstance(A, Matrix):
        solver = default_solver(pattern=A.pattern)
    _check(A, b, b if x0 is none else x0, solver)
    assert solver is not None
    pattern = A.pattern
    dtype = jnp.promote_types(A.values.dtype, b.dtype)
    solver.check(pattern, dtype)

    def columns(v: jax.Array) -> jax.Array:
        return (v.T if v.ndim == 2 else v[None]).astype(dtype)

    x, info = solve_p.bind(
        A.values[None].astype(dtype),
        columns(b),
        columns(x0),
        jnp.zeros(0, np.finfo(dtype).dtype),
        carrier(),
        pattern=pattern,
        solver=solver,
        throw=bool(throw),
        site=call_site(),
    )
    return _solution(x.T, info) if b.ndim == 2 else _solution(x[0], info[0])


def _solution(value: Any, info: jax.Array) -> Solution:
    return Solution(
        value=value,
        result=info[..., 0].astype("int32"),
        stats={
            "iterations": info[..., 1].astype("int32"),
            "relative_residual": info[..., 2],
            "setups": info[..., 3].astype("int32"),
        },
    )


def _check(A: Any, b: jax.Array, x0: jax.Array, solver: Any) -> None:
    if not isinstance(A, Matrix):
        raise TypeError(f"solve: A must be a mpigrad.sparse.Matrix, not {type(A).__name__}")
    if isinstance(solver, Preconditioner):
        name = type(solver).__name__
        raise TypeError(f"solve: {name} is a preconditioner; write PCG(preconditioner={name}(...))")
    if not isinstance(solver, LinearSolver):
        raise TypeError(f"solve: the solver must be one such as PCG(...), not {solver!r}")
    pattern = A.pattern
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"solve: the matrix has shape {A.shape}; it must be square")
    if pattern.n_local != pattern.n_local_columns:
        raise ValueError(
            f"solve: rank {pattern.comm.rank} owns {pattern.n_local} rows but "
            f"{pattern.n_local_columns} columns; give both the same stripes"
        )
    if b.ndim not in (1, 2) or b.shape[0] != pattern.n_local:
        raise ValueError(
            f"solve: b has shape {b.shape} on rank {pattern.comm.rank}, which owns "
            f"{pattern.n_local} rows; give ({pattern.n_local},) or ({pattern.n_local}, k)"
        )
    if b.ndim == 2 and b.shape[1] == 0:
        raise ValueError(f"solve: b has shape {b.shape}, which is no right-hand side at all")
    if x0.shape != b.shape:
        raise ValueError(
            f"solve: x0 has shape {x0.shape} on rank {pattern.comm.rank}; give that of b, {b.shape}"
        )


# ---- the primitive: (values (1 or B, nnz), b, x0, known, carrier) -> x, info; shapes as in
# LinearSolver.run ----

solve_p = Primitive("mpigrad_solve")
_Zero: Any = ad.Zero  # pyright: ignore[reportPrivateImportUsage]


def _shapes(values: Any, b: Any, x0: Any, known: Any, a: Any, **_: Any) -> list[ShapedArray]:
    real = np.finfo(b.dtype).dtype
    return [ShapedArray(b.shape, b.dtype), ShapedArray((b.shape[0], INFO), real)]


def _run(
    values: Any,
    b: Any,
    x0: Any,
    known: Any,
    a: Any,
    *,
    solver: LinearSolver,
    pattern: Pattern,
    **how: Any,
) -> Any:
    with without_carriers():  # differentiation has happened: these messages carry values only
        return solver.run(pattern, values, b, x0, known, **how)


def _pool(pattern: Pattern, x: jax.Array, link: Any, site: int) -> jax.Array:
    """Own and ghost entries of x (B, n_local), shape (n_local + n_ghosts, B).

    The message is sent wherever the carrier is active, also on ranks whose matrix is constant.
    """
    ghosts = pattern.ghosts
    own = x.T
    if not ghosts.neighbors:
        return own
    (received,) = neighbor_alltoallv_p.bind(
        take(own, ghosts.send_index),
        link,
        comm=derivative_slot(pattern.comm.slot),  # as `neighbor_alltoallv` does
        site=site,
        tag=NEIGHBOR_TAG,
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
    primals: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], tuple[Any, ...], Callable[..., Any]]:
    """The primal results, what the tangent map needs of them, and the tangent map."""
    values, b, x0, known, a = primals
    x, info = solve_p.bind(values, b, x0, known, a, **params)
    pattern = params["pattern"]
    # The tangent's carrier depends on x, so that it is active wherever x is.
    link = a + opaque_zero(x, CARRIER)
    pool = _pool(pattern, x, link, params["site"])

    def tangent(residuals: Any, tangents: Any) -> list[Any]:
        (values, link, pool, known), (tv, tb, _, _, ta) = residuals, tangents
        if type(tb) is not _Zero:
            rhs = tb
        elif type(tv) is _Zero:  # inactive here, perhaps active elsewhere: solve all the same
            rhs = opaque_zero(ta, jax.typeof(x))
        else:
            rhs = None
        if type(tv) is not _Zero:
            moved = _product(pattern, tv, pool)
            rhs = -moved if rhs is None else rhs - moved
        dx, _ = solve_p.bind(values, rhs, np.zeros((len(x), 0), x.dtype), known, link, **params)
        return [dx, _Zero(compat.tangent_aval(info))]

    return [x, info], (values, link, pool, info[0, -1:]), tangent


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    results, residuals, tangent = _differentiate(primals, params)
    return results, tangent(residuals, tangents)


def _linearize(is_vjp: Any, nonzeros: Any, *primals: Any, **params: Any) -> Any:
    results, residuals, tangent = _differentiate(primals, params)
    return results, [True, False], list(residuals), lambda kept, *ts: tangent(kept, ts)


def _transpose(
    cotangents: Any, values: Any, b: Any, x0: Any, known: Any, a: Any, **params: Any
) -> list[Any]:
    # Linear in b: the adjoint is a solve with the transposed matrix.
    ct = ad.instantiate_zeros(cotangents[0])
    params = {**params, "site": -abs(params["site"])}
    pattern, solver = params["pattern"], params["solver"]
    if not solver.symmetric:
        params |= {"pattern": transposed(pattern), "solver": solver.transposed}
        with set_carrier(a):
            values = transpose_values(pattern, values.T).T
        known = known[:0]  # of another matrix
    back, _ = solve_p.bind(values, ct, x0, known, a, **params)
    return [None, back, None, None, None]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    (values, b, x0, known, a), (dv, db, dx, dk, da) = args, dims
    n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    # Where b is not batched, another rank's may be: solve for the batch.
    b, x0 = (
        jnp.broadcast_to(v, (n, *v.shape)) if d is None else jnp.moveaxis(v, d, 0)
        for v, d in ((b, db), (x0, dx))
    )
    inner = b.shape[1]
    if dv is not None:
        values = jnp.moveaxis(values, dv, 0)
        values = jnp.broadcast_to(values, (n, inner, values.shape[2])).reshape(n * inner, -1)
    elif values.shape[0] > 1:
        values = jnp.tile(values, (n, 1))
    if dk is not None:
        known = jnp.moveaxis(known, dk, 0)[0]  # of one solve for the batch
    if da is not None:
        a = jnp.sum(a)
    b, x0 = (v.reshape(n * inner, -1) for v in (b, x0))
    x, info = solve_p.bind(values, b, x0, known, a, **params)
    return [x.reshape(n, inner, -1), info.reshape(n, inner, INFO)], [0, 0]


compat.make_effectful(solve_p, _shapes)
run_eagerly(solve_p, lambda params: params["pattern"].derived)  # they go with their pattern
mlir.register_lowering(solve_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[solve_p] = _jvp
compat.set_linearization(solve_p, _linearize)
repairs.always_stage(solve_p)
ad.primitive_transposes[solve_p] = _transpose
batching.primitive_batchers[solve_p] = _batch
