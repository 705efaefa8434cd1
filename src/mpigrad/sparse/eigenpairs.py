"""The verb `eigh`: the smallest or largest eigenpairs of a symmetric matrix, with derivatives."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.extend import (
    CARRIER,
    Activity,
    call_site,
    carrier,
    describe,
    opaque_zero,
    primitive,
    raise_on_all_ranks,
    without_carriers,
)
from mpigrad.operations import require
from mpigrad.solution import Result, Solution
from mpigrad.sparse.eigen_derivatives import bordered_p, eigenproblem, frame_p, with_ghosts
from mpigrad.sparse.lobpcg import (
    BACKENDS,
    OF_PRECONDITIONER,
    block_size,
    check_symmetric,
    inner_products,
    lobpcg,
)
from mpigrad.sparse.matrix.matrix import Matrix, apply
from mpigrad.sparse.matrix.pattern import Pattern, same_communicator
from mpigrad.sparse.slepc import SLEPc, slepc_vectors
from mpigrad.sparse.solvers.krylov import RUNNING
from mpigrad.sparse.solvers.methods import Cycle, check_diagonal, check_steps, default_solver
from mpigrad.sparse.solvers.preconditioners import Jacobi, Preconditioner

__all__ = ["Eigenpairs", "eigh"]


class Eigenpairs(NamedTuple):
    """The value of `eigh`: pairs with A x = λ B x.

    Attributes
    ----------
    values
        The eigenvalues in ascending order, shape (k,), the same on all ranks.
    vectors
        This rank's part of the vectors, shape (n_local, k), with Xᵀ B X = 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import Eigenpairs
    >>> pairs = Eigenpairs(jnp.array([1.0]), jnp.ones((3, 1)))
    >>> pairs.vectors.shape
    (3, 1)
    """

    values: jax.Array
    vectors: jax.Array


def eigh(
    A: Matrix,
    B: Matrix | None = None,
    k: int = 1,
    *,
    fixed: Any = None,
    which: Literal["smallest", "largest"] = "smallest",
    preconditioner: Preconditioner | Literal["auto"] | None = "auto",
    shift: float = 0.0,
    rtol: float = 1e-8,
    max_steps: int = 200,
    solver: SLEPc | None = None,
    throw: bool = True,
) -> Solution:
    """Compute eigenpairs A x = λ B x of a symmetric matrix at one end of its spectrum (collective).

    The method is LOBPCG (Knyazev, SIAM J. Sci. Comput. 23, 2001) with a few vectors more than k, or
    one of SLEPc's. The values, and functions of the vectors that do not depend on the choice of a
    basis, are differentiable in `A.values` and `B.values`, in forward and reverse mode and to any
    order: dλ = xᵀ (dA - λ dB) x (Magnus, Econometric Theory 1, 1985), and dx by conjugate gradients
    on the complement of the vectors. Derivatives are those along symmetric changes of A and B.

    Parameters
    ----------
    A
        The real symmetric matrix, float64 or float32.
    B
        The symmetric positive definite matrix of a generalized problem, with the rows of A.
        Default: the identity.
    k
        The number of pairs, at most the number of rows that are not fixed.
    fixed
        True for the rows in which all vectors are 0: a Dirichlet condition. Booleans with this
        rank's n_local entries, such as `fem.Space.fixed` makes. Rows and columns are removed here,
        so give A and B as they are assembled. Default: no rows, which is then so on all ranks.
    which
        "smallest" or "largest", by value and not by size.
    preconditioner
        A `Preconditioner` made of A + shift B (of shift B - A for the largest pairs). "auto": the
        preconditioner of `default_solver`, and for the largest pairs the diagonal of B, if any.
        None: no preconditioner. Only the number of steps depends on it.
    shift
        A number that makes A + shift B positive definite, for the preconditioner and the
        tolerance. A singular matrix, such as that of a free body, needs one. Take about the size of
        the smallest eigenvalue that is not zero.
    rtol
        The tolerance: a pair has converged when |A x - λ B x| <= rtol (|λ| + |shift|) |B x| in the
        two-norm, with products that are computed again at the end. Eigenvalues are then more
        accurate than that, about as its square. Solves for derivatives have this tolerance, too.
    max_steps
        The largest number of steps. Solves for derivatives take ten times as many.
    solver
        `SLEPc(options)` computes k + 1 pairs by a method of SLEPc. They are made orthonormal and
        checked here, and derivatives stay the same. Then `preconditioner` is for derivatives only,
        but must fit the matrix in any case. Default: LOBPCG.
    throw
        Raise an error on every rank if the method fails. With `throw=False`, look at
        `Solution.result`.

    Returns
    -------
    A `Solution`: `value` are `Eigenpairs(values, vectors)`, `result` is 0 for success, and `stats`
    has, the same on all ranks, `num_steps`, `relative_residual` (k,), and `next_value`, the
    approximate eigenvalue after the wanted ones (infinite if there is none).

    Raises
    ------
    TypeError, ValueError
        If the matrices or settings do not fit together, on all ranks.
    jax.errors.JaxRuntimeError
        On all ranks, if the method fails and `throw` is true, or if a derivative does not exist.

    Notes
    -----
    Eigenvalues that differ by less than 100 rtol (|λ| + |shift|) (at least √eps in place of 100
    rtol) form a group, whose vectors are an arbitrary basis. Derivatives exist for functions that
    are the same for every such basis, for example the sum of the values or X Xᵀ. In forward mode
    each value of the group has the mean derivative. In reverse mode a function that treats the
    members of a group differently raises an error, and so does one that depends on a group that
    continues after the k-th value.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad.sparse import Jacobi, Matrix, Pattern, eigh
    >>> pattern = Pattern.from_coo([0, 0, 1, 1], [0, 1, 0, 1], n_local=2)
    >>> def lowest(values):
    ...     solution = eigh(Matrix(pattern, values), k=1, preconditioner=Jacobi(), rtol=1e-5)
    ...     return solution.value.values[0]
    >>> value, gradient = mg.value_and_grad(lowest)(jnp.array([2.0, -1.0, -1.0, 2.0]))
    >>> bool(abs(value - 1) < 1e-5), bool(abs(gradient - 0.5).max() < 1e-3)
    (True, True)
    """
    k, shift = _check(A, B, k, which, shift, rtol, max_steps)
    if not isinstance(solver, SLEPc | None):
        raise TypeError(f"eigh: solver must be SLEPc(...) or None, got {solver!r}. Give one.")
    A, B, free, n_free = _without_fixed(A, B, k, fixed)
    pattern, mass = A.pattern, None if B is None else B.pattern
    dtype = jnp.promote_types(A.dtype, A.dtype if B is None else B.dtype)
    if solver is not None:
        solver.check(pattern, dtype)
    sign = 1 if which == "smallest" else -1
    a_values = sign * A.values.astype(dtype)
    b_values = jnp.zeros(0, dtype) if B is None else B.values.astype(dtype)
    method, matrix = _preconditioner(
        preconditioner, Matrix(pattern, a_values), B, sign, shift, dtype
    )
    if free and method is not None:  # ones in fixed rows, without the shift and of this sign
        matrix = matrix.at_boundary(~np.frombuffer(free, bool))
    lam, x, _, info = eigh_p.bind(
        a_values,
        b_values,
        jax.lax.stop_gradient(matrix.values.astype(dtype)),
        carrier(),
        pattern=pattern,
        free=free,
        n_free=n_free,
        mass=mass,
        inverted=matrix.pattern,
        method=method,
        k=k,
        shift=shift,
        which=which,
        rtol=float(rtol),
        max_steps=int(max_steps),
        solver=solver,
        throw=bool(throw),
        site=call_site(),
    )
    values = jnp.diagonal(lam)
    still, frame = jax.lax.stop_gradient(values), jax.lax.stop_gradient(x)
    moved, turned = frame_p.bind(
        values - still, x - frame, still, frame, jax.lax.stop_gradient(info), carrier(),
        pattern=pattern, rtol=float(rtol), shift=shift, site=call_site(),
    )  # fmt: skip
    values, x = still + moved, frame + turned
    result, steps = info[0].astype("int32") % OF_PRECONDITIONER, info[1].astype("int32")
    follower = sign * info[2]
    relative = info[3:]
    if sign < 0:
        values, x, relative = -values[::-1], x[::-1], relative[::-1]
    return Solution(
        value=Eigenpairs(values, x.T),
        result=result,
        stats={"num_steps": steps, "relative_residual": relative, "next_value": follower},
    )


# ---- checks ----


def _check(
    A: Any, B: Any, k: Any, which: Any, shift: Any, rtol: float, max_steps: int
) -> tuple[int, float]:
    for name, matrix in (("A", A), ("B", B)):
        if not isinstance(matrix, Matrix) and (name == "A" or matrix is not None):
            raise TypeError(
                f"eigh: {name} must be a mpigrad.sparse.Matrix, got {type(matrix).__name__}. Make "
                "a matrix with Matrix(pattern, values), and give the number of pairs as k=."
            )
        if matrix is None:
            continue
        if jnp.issubdtype(matrix.dtype, jnp.complexfloating) or matrix.dtype.itemsize < 4:
            raise TypeError(
                f"eigh: {name} must be real, float64 or float32, got {matrix.dtype.name}. Convert "
                "it. A complex Hermitian matrix H + iK is the real symmetric one [[H, -K], [K, H]]."
            )
        if not matrix.pattern.is_square:
            raise ValueError(
                f"eigh: {name} must be square, with the same stripes of rows and columns, got "
                f"shape {matrix.shape}. Make its pattern without n_local_columns."
            )
    try:
        k = operator.index(k)
    except TypeError:
        raise TypeError(
            f"eigh: k must be an integer, got {k!r} of type {type(k).__name__}. Give the number of "
            "eigenpairs. The matrix B comes before it: eigh(A, B, k)."
        ) from None
    _check_count(k, A.shape[0], "rows")
    if which not in ("smallest", "largest"):
        raise ValueError(
            f"eigh: which must be 'smallest' or 'largest', got {which!r}. For the values of "
            "largest size take both ends."
        )
    check_steps("eigh", rtol, max_steps)
    shift = float(shift)
    if not np.isfinite(shift):
        raise ValueError(f"eigh: shift must be finite, got {shift}. Give a number.")
    if B is not None:
        same_communicator("eigh", A.pattern, B.pattern)
        comm, rows = A.pattern.comm, B.pattern.n_local
        if B.pattern is not A.pattern:
            with raise_on_all_ranks(comm):
                if rows != A.pattern.n_local:
                    raise ValueError(
                        f"eigh: A and B must have the same stripes of rows, got "
                        f"{A.pattern.n_local} rows of A and {rows} of B on rank {comm.rank}. Make "
                        "both with the same n_local."
                    )
    return k, shift


def _check_count(k: int, count: int, what: str) -> None:
    if not 1 <= k <= count:
        raise ValueError(
            f"eigh: k must be at least 1 and at most the number of {what}, {count}, got k={k}. "
            "Ask for fewer eigenpairs."
        )


def _without_fixed(
    A: Matrix, B: Matrix | None, k: int, fixed: Any
) -> tuple[Matrix, Matrix | None, bytes, int]:
    """Return the matrices with rows of the identity, which rows are free, and their number."""
    n, comm = A.pattern.n_local, A.pattern.comm
    if fixed is None:
        return A, B, b"", A.shape[0]
    with raise_on_all_ranks(comm):
        if isinstance(fixed, Tracer):
            raise TypeError(
                "eigh: fixed must be known before tracing, got a traced array. Make it outside of "
                "the function."
            )
        fixed = np.asarray(fixed)
        if fixed.dtype != bool or fixed.size != n:
            raise TypeError(
                f"eigh: fixed must be booleans for the {n} rows of rank {comm.rank}, got dtype "
                f"{fixed.dtype} and shape {fixed.shape}. Make them by space.fixed(...)."
            )
    fixed = fixed.reshape(-1)
    n_free = int(comm.mpi.allreduce(int(np.sum(~fixed))))
    _check_count(k, n_free, "rows that are not fixed")
    A = A.at_boundary(fixed, jnp.zeros(n, A.dtype))[0]
    B = None if B is None else B.at_boundary(fixed, jnp.zeros(n, B.dtype))[0]
    return A, B, (~fixed).tobytes(), n_free


def _preconditioner(
    given: Any, A: Matrix, B: Matrix | None, sign: int, shift: float, dtype: Any
) -> tuple[Preconditioner | None, Matrix]:
    """Return the preconditioner, and the matrix of which it is made."""
    if isinstance(given, str) and given == "auto" and sign < 0:
        return (None, A) if B is None else (Jacobi(), B)
    if given is None:
        return None, A
    matrix = A
    if shift != 0 and B is None:
        check_diagonal(A.pattern, "eigh with a shift")
        index = A.pattern.diagonal_index
        matrix = Matrix(A.pattern, A.values.at[index].add(shift, unique_indices=True))
    elif shift != 0 and B is not None:
        same = B.pattern is A.pattern
        matrix = Matrix(A.pattern, A.values + shift * B.values) if same else A + shift * B
    if isinstance(given, str) and given == "auto":
        given = default_solver(pattern=matrix.pattern, dtype=dtype).preconditioner
    if not isinstance(given, Preconditioner):
        raise TypeError(
            "eigh: the preconditioner must be BoomerAMG(...), PFMG(...), BoxMG(...), Jacobi(), a "
            f'Preconditioner of your own, "auto" or None, got {given!r}. Choose one of them.'
        )
    if not given.symmetric:
        raise ValueError(
            f"eigh: the preconditioner must be symmetric, but {given!r} is not. Choose another "
            "relaxation."
        )
    try:
        hash(given)
        if given.needs_diagonal:
            check_diagonal(matrix.pattern, type(given).__name__)
        if given.backend != "jax":
            BACKENDS[given.backend].check(Cycle(given), matrix.pattern, dtype)
    except (TypeError, ValueError, RuntimeError) as error:  # they name `solve` or PCG
        raise type(error)(f"eigh: {str(error).partition(': ')[2] or error}") from None
    return given, matrix


def _raise_faults(
    info: jax.Array, k: int, rtol: float, remedy: str, comm: Any, head: str, which: str
) -> None:
    """Raise an error on all ranks unless `info` holds a success."""
    result, steps, worst = info[0], info[1], jnp.max(info[3:])
    definite = "Check how it is assembled: a mass matrix has a positive diagonal."
    shifted_matrix = "A + shift B" if which == "smallest" else "shift B - A"
    shifted = (
        f"The preconditioner needs a positive definite {shifted_matrix}. Give a larger shift=, "
        "or preconditioner=None."
    )
    for failure, text in (
        (Result.NOT_FINITE, "the matrix A holds NaN or infinity. Look for a division by zero."),
        (Result.NOT_SYMMETRIC, "A must be symmetric, got entries (i, j) and (j, i) that differ. "
         "Give both the same value, also if i and j belong to different ranks."),
        (_OF_B + Result.NOT_FINITE, "the matrix B holds NaN or infinity. Look for a division by "
         "zero."),
        (_OF_B + Result.NOT_SYMMETRIC, "B must be symmetric, got entries (i, j) and (j, i) that "
         "differ. Give both the same value."),
        (_OF_B + Result.NOT_POSITIVE_DEFINITE, "B must be positive definite, got a diagonal entry "
         f"that is not positive. {definite}"),
        (Result.NOT_POSITIVE_DEFINITE, "B must be positive definite, got a vector x with xᵀ B x <= "
         f"0. {definite}"),
        (Result.BREAKDOWN, "a product with A, B or the preconditioner is NaN or infinite. Check "
         "the preconditioner, and the size of the entries."),
        (OF_PRECONDITIONER + Result.NOT_POSITIVE_DEFINITE, f"{shifted_matrix} is not positive "
         f"definite. {shifted}"),
    ):  # fmt: skip
        require(result != failure, f"{head}{text}", comm=comm)
    require(
        result < OF_PRECONDITIONER,
        f"{head}the preconditioner failed with result {{}}. {shifted}",
        result - OF_PRECONDITIONER,
        comm=comm,
    )
    require(
        result != Result.STAGNATED,
        f"{head}rounding errors allow no smaller residual: the largest relative one is {{}} after "
        f"{{}} steps, above rtol={rtol:.3g}. Take a larger rtol, or float64 arrays. If A is "
        "singular, give shift=.",
        worst,
        steps,
        comm=comm,
    )
    require(
        result == Result.SUCCESSFUL,
        f"{head}expected {k} eigenpairs, got {{}} after {{}} steps: the largest relative residual "
        f"is {{}}, above rtol={rtol:.3g}. {remedy}",
        jnp.sum(info[3:] <= rtol),
        steps,
        worst,
        comm=comm,
    )


_OF_B = 200  # added to the `Result` of a check of B


# ---- the pairs: (A values, B values, values for the preconditioner, carrier) -> Λ (k, k), X
# (k, n_local), B X, info (3 + k): result, steps, next value, relative residuals. The parameter
# `free` has the bytes of a mask of the rows that are not fixed, or none ----


_APPROXIMATE = (
    Result.SUCCESSFUL,
    Result.MAX_STEPS_REACHED,
    Result.STAGNATED,
    Result.INACCURATE,
)


def _shapes(a: Any, *_: Any, k: int, pattern: Pattern, **__: Any) -> list[Any]:
    shapes = [(k, k), (k, pattern.n_local), (k, pattern.n_local), (3 + k,)]
    return [jax.ShapeDtypeStruct(shape, a.dtype) for shape in shapes]


def _run(a: Any, b: Any, shifted: Any, _: Any, **params: Any) -> list[Any]:
    pattern, mass, k = params["pattern"], params["mass"], params["k"]
    m = block_size(k, params["n_free"])
    with without_carriers():
        problem = eigenproblem(params, a, b, shifted)
        state = check_symmetric(Matrix(pattern, a), definite=False)
        if mass is not None:
            other = check_symmetric(Matrix(mass, b), definite=True)
            state = jnp.where((state == RUNNING) & (other != RUNNING), _OF_B + other, state)
        steps, solver = params["max_steps"], params["solver"]
        remedy = (
            f"Raise max_steps={steps}, loosen rtol, or take a better preconditioner. If A is "
            "singular or indefinite, give shift=."
        )
        if solver is None:
            end = lobpcg(problem, k, m, steps, state, a.dtype)
        else:
            vectors, state, taken = slepc_vectors(params, a, b, state, m)
            problem = dataclasses.replace(problem, precondition=lambda r: (r, jnp.int32(0)))
            end = lobpcg(problem, k, m, 0, state, a.dtype, vectors)
            result = jnp.where(
                end.result == Result.MAX_STEPS_REACHED, Result.INACCURATE, end.result
            )
            end = end._replace(steps=taken, result=result.astype("int32"))
            remedy = (
                "Loosen rtol, or give other options. If the residual is large, there are smaller "
                "pairs: with -st_type sinvert give a larger shift=."
            )
        massed = end.x if end.bx is None else end.bx
        follower = end.values[k] if m > k else jnp.full((), jnp.inf, a.dtype)
        usable = jnp.zeros((), bool)
        for result in _APPROXIMATE:
            usable |= end.result == result
        values, x, bx = (jnp.where(usable, v, jnp.nan) for v in (end.values, end.x, massed))
        numbers = jnp.stack([end.result.astype(a.dtype), end.steps.astype(a.dtype), follower])
        info = jnp.concatenate([numbers, jnp.where(usable, end.relative[:k], jnp.nan)])
        if params["throw"]:
            head = f"eigh, {describe(params['site'])}: "
            _raise_faults(info, k, params["rtol"], remedy, pattern.comm, head, params["which"])
    return [jnp.diag(values[:k]), x[:k], bx[:k], info]


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., Any]]:
    """Differentiate A X = B X Λ and Xᵀ B X = 1."""
    a, b, shifted, c = operands
    lam, x, bx, info = eigh_p.bind(*operands, **params)
    pattern, mass = params["pattern"], params["mass"]
    link = c + opaque_zero(x, CARRIER)
    all_x = with_ghosts(pattern, x, link)
    all_bx = None if mass is None else all_x if mass is pattern else with_ghosts(mass, x, link)

    def tangent(saved: Any, tangents: Sequence[Any]) -> list[Any]:
        (a, b, shifted, lam, x, bx, info, all_x, all_bx, link), (ta, tb, _, tc) = saved, tangents
        r = jnp.zeros_like(x) if tc is None else opaque_zero(tc, jax.typeof(x))
        h, moved = jnp.zeros_like(lam), None
        if ta is not None:
            r = r - apply(pattern, ta, all_x).T
        if tb is not None and mass is not None:
            moved = apply(mass, tb, all_bx).T
            r, h = r + lam.T @ moved, -inner_products(x, moved) / 2
        z, bz, theta = bordered_p.bind(
            a, b, shifted, lam, x, bx, info, r, jnp.zeros_like(x), h, link, **params
        )
        return [theta, z, bz if moved is None else bz + moved, None]

    return (
        [lam, x, bx, info],
        (a, b, shifted, lam, x, bx, jax.lax.stop_gradient(info), all_x, all_bx, link),
        tangent,
    )


eigh_p = primitive(
    "eigh",
    shapes=_shapes,
    run=_run,
    programs=lambda params: params["pattern"].derived,  # they go with their pattern
    differentiate=_differentiate,
    undifferentiated=(3,),
    batch="map",
)
