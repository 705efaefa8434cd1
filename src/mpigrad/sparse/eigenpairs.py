"""The verb `eigh`: the smallest or largest eigenpairs of a symmetric matrix, with derivatives.

The wanted vectors X, of one group of equal eigenvalues or of several, satisfy A X = B X Λ and
Xᵀ B X = 1. Λ is diagonal at the solution, but its derivative has entries within each group. So
every derivative of the groups is the derivative of one smooth frame, and derivatives of functions
that do not depend on the choice of vectors within a group are exact to any order. All of them are
solves of one bordered system, `bordered_p`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import (
    CARRIER,
    Activity,
    as_array,
    call_site,
    carrier,
    describe,
    opaque_zero,
    primitive,
    raise_on_all_ranks,
    set_carrier,
    without_carriers,
)
from mpigrad.operations import allreduce, require
from mpigrad.solution import Result, Solution
from mpigrad.sparse.lobpcg import (
    BACKENDS,
    OF_PRECONDITIONER,
    Eigenproblem,
    block_size,
    check_symmetric,
    inner_products,
    lobpcg,
    multiply_rows,
    one_step,
    preconditioned,
    solve_on_complement,
)
from mpigrad.sparse.matrix.matrix import Matrix, apply
from mpigrad.sparse.matrix.pattern import Pattern, same_communicator
from mpigrad.sparse.solvers.krylov import RUNNING
from mpigrad.sparse.solvers.methods import check_diagonal, check_steps, default_solver
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
    which: Literal["smallest", "largest"] = "smallest",
    preconditioner: Preconditioner | Literal["auto"] | None = "auto",
    shift: float = 0.0,
    rtol: float = 1e-8,
    max_steps: int = 200,
    throw: bool = True,
) -> Solution:
    """Compute eigenpairs A x = λ B x of a symmetric matrix at one end of its spectrum (collective).

    The method is LOBPCG (Knyazev, SIAM J. Sci. Comput. 23, 2001) with a few vectors more than k.
    The values, and functions of the vectors that do not depend on the choice of a basis, are
    differentiable in `A.values` and `B.values`, in forward and reverse mode and to any order:
    dλ = xᵀ (dA - λ dB) x (Magnus, Econometric Theory 1, 1985), and dx by conjugate gradients on the
    complement of the vectors. Derivatives are those along symmetric changes of A and B.

    Parameters
    ----------
    A
        The real symmetric matrix, float64 or float32.
    B
        The symmetric positive definite matrix of a generalized problem, with the rows of A. Default:
        the identity.
    k
        The number of pairs, at most the number of rows.
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
    pattern, mass = A.pattern, None if B is None else B.pattern
    dtype = jnp.promote_types(A.dtype, A.dtype if B is None else B.dtype)
    sign = 1 if which == "smallest" else -1
    a_values = sign * A.values.astype(dtype)
    b_values = jnp.zeros(0, dtype) if B is None else B.values.astype(dtype)
    method, matrix = _preconditioner(
        preconditioner, Matrix(pattern, a_values), B, sign, shift, dtype
    )
    lam, x, _, info = eigh_p.bind(
        a_values,
        b_values,
        jax.lax.stop_gradient(matrix.values.astype(dtype)),
        carrier(),
        pattern=pattern,
        mass=mass,
        inverted=matrix.pattern,
        method=method,
        k=k,
        shift=shift,
        rtol=float(rtol),
        max_steps=int(max_steps),
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
                "a matrix with Matrix(pattern, values)."
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
    if not 1 <= k <= A.shape[0]:
        raise ValueError(
            f"eigh: k must be at least 1 and at most the number of rows, {A.shape[0]}, got k={k}. "
            "Ask for fewer eigenpairs."
        )
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
            BACKENDS[given.backend].check(one_step(given), matrix.pattern, dtype)
    except (TypeError, ValueError, RuntimeError) as error:  # they name `solve` or PCG
        raise type(error)(f"eigh: {str(error).partition(': ')[2] or error}") from None
    return given, matrix


def _raise_faults(info: jax.Array, k: int, rtol: float, max_steps: int, comm: Any, head: str) -> None:
    """Raise an error on all ranks unless `info` holds a success."""
    result, steps, worst = info[0], info[1], jnp.max(info[3:])
    definite = "Check how it is assembled: a mass matrix has a positive diagonal."
    shifted = (
        "The preconditioner needs a positive definite A + shift B. Give a larger shift=, or "
        "preconditioner=None."
    )
    tight = f"above rtol={rtol:.3g}. Raise max_steps={max_steps}, loosen rtol"
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
        (OF_PRECONDITIONER + Result.NOT_POSITIVE_DEFINITE, f"A + shift B is not positive definite. "
         f"{shifted}"),
    ):  # fmt: skip
        require(result != failure, f"{head}{text}", comm=comm)
    require(
        result < OF_PRECONDITIONER,
        f"{head}the preconditioner failed with result {{}}. {shifted}",
        result - OF_PRECONDITIONER,
        comm=comm,
    )
    require(
        result == Result.SUCCESSFUL,
        f"{head}expected {k} eigenpairs, got {{}} after {{}} steps: the largest relative residual "
        f"is {{}}, {tight}, or take a better preconditioner. If A is singular, give shift=. In "
        "float32 take rtol=1e-4.",
        jnp.sum(info[3:] <= rtol),
        steps,
        worst,
        comm=comm,
    )


_OF_B = 200  # added to the `Result` of a check of B


# ---- the pairs: (A values, B values, values for the preconditioner, carrier) -> Λ (k, k), X
# (k, n_local), B X, info (3 + k): result, steps, next value, relative residuals ----


def _problem(params: dict[str, Any], a: Any, b: Any, shifted: Any) -> Eigenproblem:
    pattern, mass, site = params["pattern"], params["mass"], params["site"]
    return Eigenproblem(
        product=lambda rows: multiply_rows(pattern, a, rows),
        mass=None if mass is None else lambda rows: multiply_rows(mass, b, rows),
        precondition=preconditioned(params["method"], params["inverted"], shifted, site),
        n=pattern.n_local,
        first=pattern.offset,
        rtol=params["rtol"],
        shift=params["shift"],
        comm=pattern.comm,
    )


def _shapes(a: Any, *_: Any, k: int, pattern: Pattern, **__: Any) -> list[Any]:
    shapes = [(k, k), (k, pattern.n_local), (k, pattern.n_local), (3 + k,)]
    return [jax.ShapeDtypeStruct(shape, a.dtype) for shape in shapes]


def _run(a: Any, b: Any, shifted: Any, _: Any, **params: Any) -> list[Any]:
    pattern, mass, k = params["pattern"], params["mass"], params["k"]
    m = block_size(k, pattern.n_rows)
    with without_carriers():
        problem = _problem(params, a, b, shifted)
        state = check_symmetric(Matrix(pattern, a), definite=False)
        if mass is not None:
            other = check_symmetric(Matrix(mass, b), definite=True)
            state = jnp.where((state == RUNNING) & (other != RUNNING), _OF_B + other, state)
        end = lobpcg(problem, k, m, params["max_steps"], state, a.dtype)
        follower = end.values[k] if m > k else jnp.full((), jnp.inf, a.dtype)
        usable = jnp.zeros((), bool)
        for result in (Result.SUCCESSFUL, Result.MAX_STEPS_REACHED, Result.INACCURATE):
            usable |= end.result == result
        values, x, bx = (jnp.where(usable, v, jnp.nan) for v in (end.values, end.x, end.bx))
        numbers = jnp.stack([end.result.astype(a.dtype), end.steps.astype(a.dtype), follower])
        info = jnp.concatenate([numbers, jnp.where(usable, end.relative[:k], jnp.nan)])
        if params["throw"]:
            head = f"eigh, {describe(params['site'])}: "
            _raise_faults(info, k, params["rtol"], params["max_steps"], pattern.comm, head)
    return [jnp.diag(values[:k]), x[:k], bx[:k], info]


def _with_ghosts(pattern: Pattern, rows: jax.Array, link: Any) -> jax.Array:
    """Return own and ghost entries, shape (n_local + n_ghosts, k)."""
    with set_carrier(link):  # active on every rank on which the result is
        return pattern.ghosts.local_and_ghost(rows.T)


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., Any]]:
    """Differentiate A X = B X Λ and Xᵀ B X = 1."""
    a, b, shifted, c = operands
    lam, x, bx, info = eigh_p.bind(*operands, **params)
    pattern, mass = params["pattern"], params["mass"]
    link = c + opaque_zero(x, CARRIER)
    all_x = _with_ghosts(pattern, x, link)
    all_bx = None if mass is None else all_x if mass is pattern else _with_ghosts(mass, x, link)

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
    *_, r, _, h, _ = operands
    return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (r, r, h)]


def _run_bordered(
    a: Any, b: Any, shifted: Any, lam: Any, x: Any, bx: Any, info: Any, r: Any, v: Any, h: Any,
    _: Any, **params: Any,
) -> list[Any]:  # fmt: skip
    comm, values = params["pattern"].comm, jnp.diagonal(lam)
    equal, cut, _ = _groups(values, info, params["rtol"], params["shift"])
    with without_carriers():
        problem = _problem(params, a, b, shifted)
        r = r + problem.massed(v)
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
            f"{head}expected the derivatives of the vectors, got a solve with relative residual {{}} "
            f"after {{}} steps (rtol={params['rtol']:.3g}, largest value {{}}, next value {{}}). If "
            "the next value is close to the largest one, take another k. Otherwise loosen rtol, or "
            "take a better preconditioner.",
            jnp.max(relative), taken, values[-1], info[2], comm=comm,
        )  # fmt: skip
        y = jnp.where(state == Result.SUCCESSFUL, y, jnp.nan)
        return [along.T @ x + y, along.T @ bx + problem.massed(y), theta]


_CUT = (
    "the k={}-th eigenvalue and the next one are equal within the tolerance, so that the function "
    "of this group of values or vectors has no derivative. Take k larger or smaller, so that the "
    "group is complete or left out."
)


def _differentiate_bordered(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., Any]]:
    a, b, shifted, lam, x, bx, info, _, _, _, c = operands
    z, bz, theta = bordered_p.bind(*operands, **params)
    pattern, mass = params["pattern"], params["mass"]
    link = c + opaque_zero(z, CARRIER)
    all_z = _with_ghosts(pattern, z, link)
    both = None  # own and ghost entries of Z and X
    if mass is not None:
        both = _with_ghosts(mass, jnp.concatenate([z, x]), link)

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
        tz, tbz, ttheta = bordered_p.bind(
            a, b, shifted, lam, x, bx, info, r, v, h, link, **params
        )
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
