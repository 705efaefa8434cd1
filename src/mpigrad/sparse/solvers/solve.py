"""The verb `solve`: one differentiable primitive over all linear solvers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import derivative_slot
from mpigrad.extend import (
    CARRIER,
    NEIGHBOR_TAG,
    Activity,
    as_array,
    call_site,
    carrier,
    describe,
    jit_local,
    mark_common_branch,
    neighbor_alltoallv_p,
    opaque_zero,
    primitive,
    set_carrier,
    take,
    without_carriers,
)
from mpigrad.operations import allreduce
from mpigrad.solution import Solution
from mpigrad.sparse.matrix.blocks import Blocks
from mpigrad.sparse.matrix.matrix import Matrix, apply
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.products import transpose_values, transposed
from mpigrad.sparse.solvers import boxmg, hypre, jax_backend, petsc
from mpigrad.sparse.solvers.block_solve import solve_blocks
from mpigrad.sparse.solvers.guesses import Guesses, first_guess, next_vectors
from mpigrad.sparse.solvers.jax_backend import (
    has_usual_squares,
    largest,
    normalizing,
    refuse_overflow,
    scaled,
)
from mpigrad.sparse.solvers.methods import (
    INFO,
    Cycle,
    LinearSolver,
    check_diagonal,
    check_hashable,
    default_solver,
)
from mpigrad.sparse.solvers.nullspace import (
    as_nullspace,
    check_nullspace,
    into_range,
    mark_faults,
    orthonormal,
    projected,
    without_nullspace,
)
from mpigrad.sparse.solvers.operator_solve import solve_operator
from mpigrad.sparse.solvers.preconditioners import Preconditioner

__all__ = ["solve"]


# Each has `check(solver, pattern, dtype)`, and `run`, which jax_backend.py describes.
_BACKENDS: dict[str, Any] = {
    "jax": jax_backend,
    "hypre": hypre,
    "boxmg": boxmg,
    "petsc": petsc,
}


def solve(
    A: Any,
    b: Any,
    solver: LinearSolver | None = None,
    x0: Any = None,
    *,
    nullspace: Any = None,
    throw: bool = True,
) -> Solution:
    """Solve A x = b (collective).

    Differentiable in `A.values` and `b`, in forward and reverse mode and to any order. The
    derivative of a solve is another solve with the same matrix, dx = A⁻¹ (db - dA x). Its adjoint
    is a solve with the transposed matrix, λ = A⁻ᵀ x̄: b̄ = λ, Ā_ij = -λ_i x_j on the pattern (Giles
    2008). `PCG` takes A in place of Aᵀ, and needs no second set-up for it. Its second derivatives
    are those along changes of A that keep it symmetric. The other methods make the transpose, which
    has a hierarchy of its own, and their derivatives are those along any change of A.

    Parameters
    ----------
    A
        The square matrix. For `PCG` it is symmetric: entries (i, j) and (j, i) hold the same value,
        which is checked. Or `Blocks`. Or a linear function v -> A v of this rank's part of a
        vector, or an `Operator`, differentiable with respect to all that it closes over.
    b
        This rank's part of the right-hand side, shape (n_local,), or (n_local, k) for k right-hand
        sides, which are solved one after the other. With blocks: a tuple of fields. With a
        function: an array or pytree of any shapes, all of it one right-hand side.
    solver
        `PCG(...)`, `MINRES(...)`, `GMRES(...)`, `BiCGStab(...)`, `Multigrid(...)`, `PETSc(...)`, or
        a `LinearSolver` of your own. Default: `default_solver(pattern=A.pattern, dtype=...)`, with
        the common dtype of A and b. With a function in place of a matrix the default is `GMRES()`,
        and a preconditioner is part of the `Operator`.
    x0
        The first guess, in the shape of b. Default: zeros. No derivative is taken with respect to
        it: the solution does not depend on it. Or `Guesses`: the solutions of earlier solves, from
        which the first guess is taken, and those of adjoint solves from earlier adjoint solves.
    nullspace
        For a singular matrix its null space: "constants", or a vector like b, or a list of such
        vectors, or a `NullSpace`. The solution is orthogonal to it. The derivatives in `A.values`
        are those along changes of A that keep the null spaces, and are exact to any order.
    throw
        Raise an error on every rank if the solve fails: no convergence, a breakdown, NaN, for
        `PCG` a matrix that is not symmetric positive definite, a right-hand side that is not in the
        range of a singular matrix. With `throw=False`, look at `Solution.result`.

    Returns
    -------
    A `Solution`: `value` in the shape of b, `result` as an integer array (0 is success), and in
    `stats`, the same on all ranks, `num_steps`, `relative_residual` |b - A x| / |b|, and `setups`,
    the number of set-ups of the preconditioner so far for this pattern and solver. `state` has the
    `Guesses` for the next solve if x0 is of this type, else None.

    Raises
    ------
    TypeError, ValueError
        If the shapes, dtypes or settings do not fit together.
    jax.errors.JaxRuntimeError
        On all ranks, if the solve fails and `throw` is true.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad.sparse import PCG, Jacobi, Matrix, Pattern, solve
    >>> pattern = Pattern.from_coo([0, 0, 1, 1], [0, 1, 0, 1], n_local=2)
    >>> solver = PCG(rtol=1e-6, preconditioner=Jacobi())
    >>> def f(values, b):
    ...     return jnp.sum(solve(Matrix(pattern, values), b, solver).value)
    >>> values = jnp.array([2.0, 1.0, 1.0, 2.0])
    >>> value, gradient = mg.value_and_grad(f)(values, jnp.ones(2))
    >>> bool(jnp.allclose(value, 2 / 3)), bool(jnp.allclose(gradient, -1 / 9))
    (True, True)
    """
    if isinstance(solver, Preconditioner):
        name = type(solver).__name__
        raise TypeError(
            f"solve: expected a solver, got the preconditioner {name}. Write "
            f"PCG(preconditioner={name}(...))."
        )
    if isinstance(A, Blocks):
        return solve_blocks(A, b, solver, x0, nullspace, throw, solve)
    if callable(A):
        return _solution(*solve_operator(A, b, solver, x0=x0, nullspace=nullspace, throw=throw))
    b = as_array(b)
    guesses = x0 if isinstance(x0, Guesses) else None
    plain = x0 is not None and guesses is None
    x0 = jax.lax.stop_gradient(as_array(x0)) if plain else None
    if solver is None and isinstance(A, Matrix):
        common = jnp.promote_types(A.values.dtype, b.dtype)
        solver = default_solver(pattern=A.pattern, dtype=common)
    _check(A, b, x0 if plain else b, solver)
    assert solver is not None
    solver = solver.for_matrix
    pattern = A.pattern
    dtype = jnp.promote_types(A.values.dtype, b.dtype)
    _check_solver(solver, pattern, dtype)

    columns = _rows(b, dtype=dtype)
    empty = np.zeros((len(columns), 0), dtype)
    first = empty if x0 is None else _rows(x0, dtype=dtype)
    if guesses is not None:
        guesses.check(b, dtype)
        (vectors,) = jax.tree.leaves(guesses)
        first = jnp.moveaxis(vectors, 2, 0) if b.ndim == 2 else vectors[None]
    space, null, null_check = None, without_nullspace(dtype), ""
    if nullspace is not None:
        space, null_check = as_nullspace(nullspace, solver), "consistent"
        null = orthonormal(space, _null_vector(pattern), pattern.n_local, dtype, pattern.comm)
        if space.project:
            columns, null_check = projected(null[-1:], columns, pattern.comm), "project"
    x, info, after = solve_p.bind(
        _row(A.values, dtype=dtype),
        columns,
        first,
        np.zeros(0, np.finfo(dtype).dtype),
        jax.lax.stop_gradient(null)[None],
        carrier(),
        pattern=pattern,
        solver=solver,
        null_check=null_check,
        throw=bool(throw),
        site=call_site(),
    )
    if space is not None:  # for derivatives in the vectors
        x = projected(null[:1], x, pattern.comm)
    state = None
    if guesses is not None:
        after = jnp.moveaxis(after, 0, 2) if b.ndim == 2 else after[0]
        state = Guesses.tree_unflatten(None, (after,))
    value, info = _results(x, info, axes=b.ndim)
    return _solution(value, info, state)


def _null_vector(pattern: Pattern) -> Callable[[Any], jax.Array]:
    def flat(v: Any) -> jax.Array:
        v = as_array(v)
        if v.shape != (pattern.n_local,):
            raise ValueError(
                f"NullSpace: expected a vector of shape ({pattern.n_local},) on rank "
                f"{pattern.comm.rank}, got shape {v.shape}. Give this rank's part of each vector, "
                "and several vectors as a list."
            )
        return v

    return flat


@jit_local(static_argnames=("dtype",))
def _row(values: jax.Array, dtype: Any) -> jax.Array:
    return values[None].astype(dtype)


@jit_local(static_argnames=("dtype",))
def _rows(v: jax.Array, dtype: Any) -> jax.Array:
    """Return the columns of a vector or of several ones as rows."""
    return (v.T if v.ndim == 2 else v[None]).astype(dtype)


@jit_local(static_argnames=("axes",))
def _results(x: jax.Array, info: jax.Array, axes: int) -> tuple[jax.Array, jax.Array]:
    return (x.T, info) if axes == 2 else (x[0], info[0])


def _solution(value: Any, info: jax.Array, state: Guesses | None) -> Solution:
    result, steps, residual, setups = _columns_of(info)
    return Solution(
        value=value,
        result=result,
        stats={"num_steps": steps, "relative_residual": residual, "setups": setups},
        state=state,
    )


@jit_local
def _columns_of(info: jax.Array) -> tuple[jax.Array, ...]:
    result, steps, residual, setups = (info[..., i] for i in range(4))
    return result.astype("int32"), steps.astype("int32"), residual, setups.astype("int32")


def _check(A: Any, b: jax.Array, x0: jax.Array, solver: Any) -> None:
    if not isinstance(A, Matrix):
        raise TypeError(
            "solve: A must be a mpigrad.sparse.Matrix, a linear function or an Operator, got "
            f"{type(A).__name__}. Make a matrix with Matrix(pattern, values)."
        )
    if not isinstance(solver, LinearSolver):
        raise TypeError(
            "solve: the solver must be PCG(...), GMRES(...), BiCGStab(...), Multigrid(...), "
            f"PETSc(...) or a LinearSolver of your own, got {solver!r}. Choose one of them."
        )
    pattern = A.pattern
    if A.shape[0] != A.shape[1]:
        raise ValueError(
            f"solve: the matrix must be square, got shape {A.shape}. Solve the normal equations "
            "with A.T @ A for least squares."
        )
    if pattern.n_local != pattern.n_local_columns:
        raise ValueError(
            f"solve: rows and columns must have the same stripes, but rank {pattern.comm.rank} "
            f"owns {pattern.n_local} rows and {pattern.n_local_columns} columns. Leave out "
            "n_local_columns."
        )
    if b.ndim not in (1, 2) or b.shape[0] != pattern.n_local:
        raise ValueError(
            f"solve: b has shape {b.shape} on rank {pattern.comm.rank}, which owns "
            f"{pattern.n_local} rows. Give shape ({pattern.n_local},) or ({pattern.n_local}, k)."
        )
    if b.ndim == 2 and b.shape[1] == 0:
        raise ValueError(
            f"solve: b must have at least one column, got shape {b.shape}. Give a right-hand side."
        )
    if x0.shape != b.shape:
        raise ValueError(
            f"solve: x0 must have the shape of b, {b.shape}, got {x0.shape} on rank "
            f"{pattern.comm.rank}. Give one first guess for each right-hand side."
        )


def _check_solver(solver: LinearSolver, pattern: Pattern, dtype: Any) -> None:
    check_hashable(solver)
    preconditioner = solver.preconditioner
    if not isinstance(preconditioner, Preconditioner | None):
        raise TypeError(
            f"solve: the preconditioner of {type(solver).__name__} must be a Preconditioner or "
            f"None for a matrix, got {preconditioner!r}. Return such a solver from `for_matrix`."
        )
    if preconditioner is not None and preconditioner.needs_diagonal:
        check_diagonal(pattern, type(preconditioner).__name__)
    _BACKENDS[solver.backend].check(solver, pattern, dtype)
    solver.check(pattern, dtype)


# ---- the primitive: (values (1 or B, nnz), b, x0, values_id, null, carrier) -> x, info, vectors,
# with the shapes of `jax_backend.run`. x0 may also be the vectors of guesses, shape (B, 2 k,
# n_local). Then `vectors` are those for the next solve. Otherwise k = 0. `null` has orthonormal
# null vectors, shape (1 or B, 1 or 2, k, n_local): right ones, and left ones if they differ ----


def _shapes(values: Any, b: Any, x0: Any, *_: Any, **__: Any) -> list[Any]:
    real = np.finfo(b.dtype).dtype
    k = x0.shape[1] if x0.ndim == 3 else 0
    return [
        b,
        jax.ShapeDtypeStruct((b.shape[0], INFO), real),
        jax.ShapeDtypeStruct((b.shape[0], k, b.shape[1]), b.dtype),
    ]


def _run(
    values: Any,
    b: Any,
    x0: Any,
    values_id: Any,
    null: Any,
    a: Any,
    *,
    solver: LinearSolver,
    pattern: Pattern,
    null_check: str,
    **how: Any,
) -> Any:
    guessed = x0.ndim == 3
    vectors = x0 if guessed else jnp.zeros((b.shape[0], 0, b.shape[1]), b.dtype)
    comm, head = pattern.comm, f"solve, {describe(how['site'])}: "
    singular = null.shape[2] > 0
    by_library = solver.backend != "jax"

    def method(values: Any, b: Any, x0: Any) -> tuple[Any, Any]:
        if guessed:
            sums = functools.partial(allreduce, comm=comm)
            x0 = jnp.stack([first_guess(sums, *each) for each in zip(x0, b, strict=True)])
        run = _BACKENDS[solver.backend].run
        return run(solver, pattern, values, b, x0, values_id, null, **how)

    def scaled_method() -> tuple[Any, Any]:
        # A method of the user may have parameters that fit the matrix. Libraries have no squares of
        # the matrix in float64.
        if by_library or not solver.judges_residual:
            (up,) = normalizing([largest(b)], comm)
            of_matrix, down = values, -up
        else:
            matrix, up = normalizing([largest(values), largest(b)], comm)
            of_matrix, down = scaled(values, matrix), matrix - up
        if guessed:
            solutions, sides = jnp.split(x0, 2, axis=1)
            first = jnp.concatenate([scaled(solutions, -down), scaled(sides, up)], axis=1)
        else:
            first = scaled(x0, -down) if x0.size else x0
        x, info = method(of_matrix, scaled(b, up), first)
        info = refuse_overflow(x, down, info, comm, head, how["throw"])
        return scaled(x, down), info

    with without_carriers():  # differentiation has happened: these messages carry values only
        faults = None
        if null_check:
            rhs = b if null_check == "consistent" else None
            faults = _null_faults(values, rhs, null, len(b), solver, pattern, head, how["throw"])
        if singular:
            b = into_range(null[:, -1], b, comm)
        if isinstance(solver, Cycle):  # linear for vectors of any size
            x, info = method(values, b, x0)
        elif by_library:  # they are so fast that copies of vectors count
            x, info = jax.lax.cond(
                has_usual_squares(b, comm),
                mark_common_branch(lambda: method(values, b, x0)),
                mark_common_branch(scaled_method),
            )
        else:
            x, info = scaled_method()
        if singular:
            x = projected(null[:, 0], x, comm)
        if faults is not None:
            x, info = mark_faults(x, info, faults)
    if vectors.shape[1] > 0:
        vectors = jax.vmap(next_vectors)(vectors, x, b, info[:, 0])
    return x, info, vectors


def _null_faults(
    values: Any,
    b: Any,
    null: Any,
    n: int,
    solver: LinearSolver,
    pattern: Pattern,
    head: str,
    throw: bool,
) -> jax.Array:
    """Return `check_nullspace` for each of n right-hand sides."""

    def one(k: Any) -> jax.Array:
        matrix = Matrix(pattern, values[k if len(values) > 1 else 0])
        vectors, rhs = null[k if len(null) > 1 else 0], None if b is None else b[k]
        return check_nullspace(
            vectors, lambda v: matrix @ v, rhs, solver, pattern.comm, pattern.offset, head, throw
        )

    return one(0)[None] if n == 1 else jax.lax.map(one, jnp.arange(n))


def _local_and_ghost(pattern: Pattern, x: jax.Array, link: Any, site: int) -> jax.Array:
    """Return own and ghost entries of x (B, n_local), shape (n_local + n_ghosts, B).

    The message is sent if the carrier is active, also on ranks whose matrix is constant.
    """
    ghosts = pattern.ghosts
    local = x.T
    if not ghosts.neighbors:
        return local
    (received,) = neighbor_alltoallv_p.bind(
        take(local, ghosts.send_index),
        link,
        comm=derivative_slot(pattern.comm.slot),  # as `neighbor_alltoallv` does
        site=site,
        tag=NEIGHBOR_TAG,
        neighbors=ghosts.neighbors,
        sendcounts=ghosts.sendcounts,
        recvcounts=ghosts.recvcounts,
    )
    return jnp.concatenate([local, received])


def _product(pattern: Pattern, values: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply (1 or B, nnz) and own and ghost entries (n_local + n_ghosts, B): (B, n_local)."""
    if x.shape[1] == 1:
        return apply(pattern, values[0], x[:, 0])[None]
    if values.shape[0] == 1:
        return apply(pattern, values[0], x).T
    return jax.vmap(lambda v, p: apply(pattern, v, p), in_axes=(0, 1))(values, x)


def _differentiate(
    primals: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], tuple[Any, ...], Callable[..., Any]]:
    """Return the primal results, the residuals of the tangent map, and the tangent map."""
    values, b, x0, values_id, null, a = primals
    guessed = x0.ndim == 3
    x, info, vectors = solve_p.bind(values, b, x0, values_id, null, a, **params)
    params = {**params, "null_check": ""}
    pattern, x_type, guesses = params["pattern"], jax.typeof(x), jax.typeof(x0)
    # The tangent's carrier depends on x, so that it is active on every rank on which x is.
    link = a + opaque_zero(x, CARRIER)
    all_x = _local_and_ghost(pattern, x, link, params["site"])

    def tangent(residuals: Any, tangents: Any) -> list[Any]:
        (values, link, all_x, values_id, null), (tv, tb, tx0, _, _, ta) = residuals, tangents
        rhs = tb
        if tv is not None:
            moved = _product(pattern, tv, all_x)
            rhs = -moved if rhs is None else rhs - moved
        elif rhs is None:  # inactive here, perhaps active elsewhere: solve all the same
            rhs = jnp.zeros(x_type.shape, x_type.dtype)
            rhs = rhs if ta is None else opaque_zero(ta, x_type)
        # Tangents have guesses of their own, as have cotangents.
        first = np.zeros((x_type.shape[0], 0), x_type.dtype)
        if guessed:
            first = jnp.zeros(guesses.shape, guesses.dtype) if tx0 is None else tx0
        dx, _, after = solve_p.bind(values, rhs, first, values_id, null, link, **params)
        return [dx, None, after]

    return [x, info, vectors], (values, link, all_x, info[0, -1:], null), tangent


def _transpose(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    # Linear in b: the adjoint is a solve with the transposed matrix. The cotangents of guesses hold
    # guesses for adjoint solves. They are used on all ranks or on none, as their shapes say.
    values, _, _, values_id, null, a = operands
    ct, _, vectors = cotangents
    guessed = vectors.shape[1] > 0
    pattern, solver = params["pattern"], params["solver"]
    if not solver.symmetric:
        params |= {"pattern": transposed(pattern), "solver": solver.transposed}
        with set_carrier(a):
            values = transpose_values(pattern, values.T).T
        if not solver.keeps_factors:
            values_id = values_id[:0]  # the transpose is another matrix
        null = null[:, ::-1].conj()  # of the transpose, not of the adjoint
    first = vectors if guessed else np.zeros((len(ct), 0), ct.dtype)
    back, _, before = solve_p.bind(values, ct, first, values_id, null, a, **params)
    return [None, back, before, None, None, None]


def _batch(args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> Any:
    (values, b, x0, values_id, null, a), (dv, db, dx, dk, dn, da) = args, dims
    n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    # If b is not batched, another rank's may be: solve for the batch.
    b, x0 = (
        jnp.broadcast_to(v, (n, *v.shape)) if d is None else jnp.moveaxis(v, d, 0)
        for v, d in ((b, db), (x0, dx))
    )
    inner = b.shape[1]
    values, null = (_for_each(v, d, n, inner) for v, d in ((values, dv), (null, dn)))
    if dk is not None:
        values_id = jnp.moveaxis(values_id, dk, 0)[0]  # one solve for the batch has one
    if da is not None:
        a = jnp.sum(a)
    b, x0 = (v.reshape(n * inner, *v.shape[2:]) for v in (b, x0))
    results = solve_p.bind(values, b, x0, values_id, null, a, **params)
    return [v.reshape(n, inner, *v.shape[1:]) for v in results], [0, 0, 0]


def _for_each(v: Any, axis: int | None, n: int, inner: int) -> Any:
    """Return one entry for all n * inner right-hand sides, or one for each."""
    if axis is not None:
        v = jnp.moveaxis(v, axis, 0)
        return jnp.broadcast_to(v, (n, inner, *v.shape[2:])).reshape(n * inner, *v.shape[2:])
    return v if len(v) == 1 else jnp.tile(v, (n,) + (1,) * (v.ndim - 1))


solve_p = primitive(
    "solve",
    shapes=_shapes,
    run=_run,
    programs=lambda params: params["pattern"].derived,  # they go with their pattern
    differentiate=_differentiate,
    undifferentiated=(1,),
    transpose=_transpose,
    batch=_batch,
)
