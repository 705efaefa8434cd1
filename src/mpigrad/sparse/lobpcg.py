"""LOBPCG over ranks, and the solves on the complement of eigenvectors that derivatives need.

Vectors are rows here: k vectors of this rank have shape (k, n_local).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.extend import mark_common_branch, noise
from mpigrad.operations import allreduce, bcast
from mpigrad.solution import Result
from mpigrad.sparse.matrix.matrix import Matrix, apply
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers import boxmg, hypre, jax_backend
from mpigrad.sparse.solvers.krylov import RUNNING, LinearSystem
from mpigrad.sparse.solvers.methods import Cycle
from mpigrad.sparse.solvers.nullspace import without_nullspace
from mpigrad.sparse.solvers.preconditioners import Preconditioner

__all__ = [
    "BACKENDS",
    "OF_PRECONDITIONER",
    "Eigenproblem",
    "Iterate",
    "block_size",
    "check_symmetric",
    "inner_products",
    "lobpcg",
    "multiply_rows",
    "preconditioned",
    "solve_on_complement",
]

BACKENDS: dict[str, Any] = {"jax": jax_backend, "hypre": hypre, "boxmg": boxmg}
_SEED = 2654435761  # of the first vectors
OF_PRECONDITIONER = 100  # added to the `Result` of a preconditioner
_REFRESH = 8  # steps after which inner products are not updated, but computed
_ROUNDS = 4  # of restarts from residuals that are computed, not updated

Rows = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Eigenproblem:
    """This rank's part of A x = λ B x.

    Attributes
    ----------
    product, mass
        The functions rows -> A rows and rows -> B rows. `mass` is None if B is the identity.
    precondition
        The function rows -> (M rows, 0 or the `Result` of its failure).
    n
        The number of this rank's entries of a vector.
    first
        The index of this rank's first entry.
    rtol, shift
        A pair has converged when |A x - λ B x| <= rtol (|λ| + |shift|) |B x|.
    comm
        The communicator over whose ranks the problem is distributed.
    free
        False in rows in which all vectors are 0, shape (n,). None: there are none.
    """

    product: Rows
    mass: Rows | None
    precondition: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    n: int
    first: int
    rtol: float
    shift: float
    comm: Communicator
    free: np.ndarray | None = None

    def in_free_rows(self, rows: jax.Array) -> jax.Array:
        """Return rows of numbers with zeros where all vectors are 0."""
        return rows if self.free is None else jnp.where(self.free, rows, 0)

    def massed(self, rows: jax.Array) -> jax.Array:
        """Return B rows."""
        return rows if self.mass is None else self.mass(rows)

    def sums(self, terms: jax.Array) -> jax.Array:
        """Return the sums over ranks, by one message."""
        return allreduce(terms, comm=self.comm)


def block_size(k: int, n_rows: int) -> int:
    """Return the number of vectors of the iteration, with guards after the wanted ones.

    Guards make the last wanted pairs converge, and show if a group of equal values continues.
    """
    return min(k + max(3, k // 4), n_rows)


# ---- products and preconditioners for several vectors ----


def multiply_rows(pattern: Pattern, values: jax.Array, rows: jax.Array) -> jax.Array:
    """Return A times each row, with one message for all of them."""
    ghosts = pattern.ghosts
    if not ghosts.neighbors:
        return jax.lax.map(lambda x: apply(pattern, values, x), rows)
    received = ghosts.local_and_ghost(rows.T)[rows.shape[1] :].T
    return jax.lax.map(lambda pair: apply(pattern, values, jnp.concatenate(pair)), (rows, received))


def preconditioned(
    method: Preconditioner | None, pattern: Pattern, values: jax.Array, site: int
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return `Eigenproblem.precondition`: one cycle of a library, or `Preconditioner.inverse`.

    A library's set-up is kept while the values are the same.
    """
    fine = jnp.zeros((), "int32")
    if method is None:
        return lambda rows: (rows, fine)
    if method.backend == "jax":
        inverse = method.inverse(Matrix(pattern, values))
        return lambda rows: (jax.lax.map(inverse, rows), fine)

    def cycle(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, info = BACKENDS[method.backend].run(
            Cycle(method), pattern, values[None], rows, jnp.zeros((len(rows), 0), rows.dtype),
            jnp.zeros(0, rows.dtype), without_nullspace(rows.dtype)[None], throw=False, site=site,
        )  # fmt: skip
        result = info[:, 0].astype("int32")
        # A cycle of an indefinite matrix may be indefinite, too.
        squares = allreduce(jnp.sum(rows * x, axis=1), comm=pattern.comm)
        result = jnp.where(squares < 0, Result.NOT_POSITIVE_DEFINITE, result)
        return x, jnp.max(result).astype("int32")

    return cycle


def inner_products(u: jax.Array, v: jax.Array) -> jax.Array:
    """Return this rank's part of u_i . v_j."""
    return jax.lax.dot_general(u, v, (((1,), (1,)), ((), ())))


def _squares(rows: jax.Array) -> jax.Array:
    return jnp.sum(rows * rows, axis=1)


# ---- LOBPCG ----


class Iterate(NamedTuple):
    """The vectors of the iteration: the pairs, and the directions of the last step."""

    x: jax.Array  # (m, n), B-orthonormal
    ax: jax.Array
    bx: jax.Array | None  # None if B is the identity
    p: jax.Array  # (m, n), B-orthonormal and B-orthogonal to x, or zero
    ap: jax.Array
    bp: jax.Array | None
    gram: jax.Array  # (2, 2 m, 2 m), the inner products of X and P with A and B
    values: jax.Array  # (m,)
    relative: jax.Array  # (m,), |A x - λ B x| / ((|λ| + |shift|) |B x|)
    rounded: jax.Array  # (m,), True if A x - λ B x is as small as rounding allows
    size: jax.Array  # about |A|
    steps: jax.Array
    rounds: jax.Array  # the number of checks
    check: jax.Array  # True if the next products are those of X, to compute its residuals again
    result: jax.Array


def lobpcg(
    problem: Eigenproblem,
    k: int,
    m: int,
    max_steps: int,
    state: jax.Array,
    dtype: Any,
    vectors: jax.Array | None = None,
) -> Iterate:
    """Compute the k smallest eigenvalues and their vectors by m vectors (collective).

    (Knyazev, SIAM J. Sci. Comput. 23, 2001.) The basis [X, W, P] is orthonormalised by the
    eigenvectors of its scaled Gram matrix, and directions that depend on the others within rounding
    are left out of the step (Stathopoulos & Wu, SIAM J. Sci. Comput. 23, 2002). P is orthonormal to
    the new X, as in Hetmaniuk & Lehoucq, J. Comput. Phys. 218, 2006. Pairs that have converged get
    no new directions, and stay in the basis (soft locking).

    Parameters
    ----------
    state
        `RUNNING`, or a `Result` with which nothing is computed.
    vectors
        At most m first vectors, rows of shape (n,), which may have converged already. With
        `max_steps=0` they are only checked: the smallest pairs in the span of these vectors and of
        others without structure, with their residuals.
    """
    wanted = jnp.arange(m) < k
    # The first guard shows if the last group of equal values continues.
    loose = jnp.where(jnp.arange(m) == k, max(problem.rtol, problem.rtol**0.5), jnp.inf)
    goal = jnp.where(wanted, problem.rtol, loose).astype(dtype)

    old = np.r_[:m, 2 * m : 3 * m]  # X and P among X, W and P
    is_new = (jnp.arange(3 * m) >= m) & (jnp.arange(3 * m) < 2 * m)

    def residuals(i: Iterate) -> jax.Array:
        return i.ax - i.values[:, None] * _or(i.bx, i.x)

    def measured(i: Iterate, w: jax.Array, aw: jax.Array) -> Iterate:
        vectors = [residuals(i), _or(i.bx, i.x), w, aw, *([] if i.bx is None else [i.x])]
        squares = problem.sums(jnp.stack([_squares(v) for v in vectors]))
        rr, bb, ww, aa, xx = (*squares, squares[1])[:5]
        tiny = jnp.finfo(dtype).tiny
        scale = (jnp.abs(i.values) + abs(problem.shift)) * jnp.sqrt(bb)
        relative = jnp.sqrt(rr) / jnp.maximum(scale, tiny)
        size = jnp.max(jnp.sqrt(aa / jnp.where(ww > 0, ww, jnp.inf)), initial=i.size)
        rounded = jnp.sqrt(rr) <= 4 * jnp.finfo(dtype).eps * size * jnp.sqrt(xx)
        finite = jnp.isfinite(rr[:k]).all()
        result = jnp.where(finite | (i.result != RUNNING), i.result, Result.BREAKDOWN)
        return i._replace(
            relative=relative, rounded=rounded, size=size, result=result.astype("int32")
        )

    def exact(s: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        gram = problem.sums(jnp.stack([inner_products(s, a), inner_products(s, b)]))
        return gram[:, old[:, None], old]

    def combined(i: Iterate, w: jax.Array, aw: jax.Array, bw: jax.Array | None) -> Iterate:
        """Return the smallest pairs in the span of X, W and P, or of W alone in a check."""
        s = jnp.concatenate([i.x, w, i.p])
        a = jnp.concatenate([i.ax, aw, i.ap])
        b = s if bw is None else jnp.concatenate([_or(i.bx, w), bw, _or(i.bp, w)])
        products = [inner_products(s, aw), inner_products(s, _or(bw, w))]
        cross = problem.sums(jnp.stack(products))
        # Without their part of the Gram matrices, X and P are left out.
        kept = jax.lax.cond(
            i.steps % _REFRESH == 0, mark_common_branch(lambda: exact(s, a, b)), lambda: i.gram
        )
        kept = jnp.where(i.check, 0, kept)
        gram = _bordered(kept, jnp.where(i.check & ~is_new[:, None], 0, cross))
        values, c, definite, consistent = _smallest(gram, m, i.check, problem.comm)
        (x, p), (ax, ap) = (jnp.split(c @ v, 2) for v in (s, a))
        bx, bp = (None, None) if bw is None else jnp.split(c @ b, 2)
        result = jnp.where(
            definite | (i.result != RUNNING), i.result, Result.NOT_POSITIVE_DEFINITE
        ).astype("int32")
        return i._replace(
            x=x, ax=ax, bx=bx, p=p, ap=ap, bp=bp, gram=c @ gram @ c.T, values=values, result=result,
            check=i.check | ~consistent,
        )  # fmt: skip

    def step(i: Iterate) -> Iterate:
        open_ = (i.relative > 0.8 * problem.rtol) & ~i.rounded & ~i.check
        w, fault = problem.precondition(jnp.where(open_[:, None], residuals(i), 0))
        w = jnp.where(i.check, i.x, w)
        was = i.check
        aw = problem.product(w)
        i = measured(combined(i, w, aw, problem.mass and problem.mass(w)), w, aw)
        steps = i.steps + ~was
        ended = jnp.all((i.relative <= 0.9 * goal) | i.rounded)
        end = jnp.where(i.rounds >= _ROUNDS, Result.INACCURATE, RUNNING)
        end = jnp.where(steps >= max_steps, Result.MAX_STEPS_REACHED, end)
        end = jnp.where(ended & (i.rounds > 0), Result.STAGNATED, end)
        end = jnp.where(has_converged(i) & (i.rounds > 0), Result.SUCCESSFUL, end)
        end = jnp.where(was & (i.result == RUNNING), end, i.result)
        end = jnp.where(fault > 0, fault + OF_PRECONDITIONER, end).astype("int32")
        check = ~was & (i.check | ended | (steps >= max_steps))
        return i._replace(steps=steps, rounds=i.rounds + was, check=check, result=end)

    def has_converged(i: Iterate) -> jax.Array:
        return jnp.all((i.relative <= goal) | (i.rounded & ~wanted))

    zeros, count = jnp.zeros((m, problem.n), dtype), jnp.zeros((), "int32")
    # Entry (i, j) depends on the global row i alone: the same vectors on any number of ranks.
    start = noise(problem.first * m, problem.n * m, dtype, _SEED).reshape(problem.n, m).T
    start = problem.in_free_rows(start)
    side_of = start[0]
    if vectors is not None:
        start = jnp.concatenate([vectors, start[len(vectors) :]])
    none = jnp.zeros(m, dtype)
    massed = None if problem.mass is None else zeros
    first = Iterate(
        start, zeros, massed, zeros, zeros, massed, jnp.zeros((2, 2 * m, 2 * m), dtype), none, none,
        none > 0, none[0], count, count + (vectors is not None), count == 0, state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.result == RUNNING, step, first)
    # The sign is that of the product with a fixed vector: the same on any number of ranks.
    side = problem.sums(_or(end.bx, end.x) @ side_of)
    sign = jnp.where(side < 0, -1, 1).astype(dtype)[:, None]
    return end._replace(x=sign * end.x, bx=None if end.bx is None else sign * end.bx)


def _or(massed: jax.Array | None, rows: jax.Array) -> jax.Array:
    return rows if massed is None else massed


def _whitening(gram: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return F with Fᵀ G F = 1 or 0 on the diagonal, which columns are not 0, and if G >= 0."""
    eps = jnp.finfo(gram.dtype).eps
    square = jnp.diagonal(gram)
    scale = jnp.where(square > 0, 1 / jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    sizes, directions = jnp.linalg.eigh(scale[:, None] * gram * scale)
    present = sizes > jnp.sqrt(eps)
    factor = jnp.where(present, 1 / jnp.sqrt(jnp.where(present, sizes, 1)), 0)
    return scale[:, None] * directions * factor, present, jnp.min(sizes) > -jnp.sqrt(eps)


def _bordered(gram: jax.Array, cross: jax.Array) -> jax.Array:
    """Return the inner products of [X, W, P] from those of [X, P], and those with W."""
    m = cross.shape[-1]
    old, new = np.r_[:m, 2 * m : 3 * m], np.arange(m, 2 * m)
    whole = jnp.zeros((2, 3 * m, 3 * m), cross.dtype)
    whole = whole.at[:, old[:, None], old].set(gram)
    whole = whole.at[:, new].set(jnp.swapaxes(cross, 1, 2)).at[:, :, new].set(cross)
    return (whole + jnp.swapaxes(whole, 1, 2)) / 2


def _smallest(
    gram: jax.Array, m: int, check: jax.Array, comm: Communicator
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the m smallest values of the Gram matrices, and the rows that combine X and P.

    The last results say if xᵀ B x >= 0 for all vectors, and if the matrix of B agrees with that.
    If not, rounding errors have added up, and the old X is returned, to be checked. Computed on
    rank 0: another processor's library could turn vectors of equal values.
    """
    a, b = gram
    basis, present, consistent = _whitening(b)
    definite = jnp.min(jnp.diagonal(b)) >= 0
    # Exact inner products of X alone show negative values of B in its span, too.
    definite &= consistent | ~check
    consistent |= check
    inside = basis.T @ a @ basis
    beyond = 1 + 2 * jnp.max(jnp.sum(jnp.abs(inside), axis=1))
    inside = inside + jnp.diag(jnp.where(present, 0, beyond))
    values, turn = jnp.linalg.eigh(inside)
    turn = turn[:, :m]
    x = basis @ turn
    # The directions of the step: the part of the new X that is not in the old one.
    p = jnp.where(check, 0, basis.T @ (b @ x.at[:m].set(0)))
    for _ in range(2):
        before = jnp.sum(p * p, axis=0)
        p = p - turn @ (turn.T @ p)
        p = jnp.where(jnp.sum(p * p, axis=0) > jnp.finfo(p.dtype).eps * before, p, 0)
        p = p @ _whitening(p.T @ p)[0]
    rows = jnp.concatenate([x, basis @ p], axis=1).T
    old = jnp.diag(jnp.arange(3 * m) < m).astype(rows.dtype)[: 2 * m]
    rows = jnp.where(consistent, rows, old)
    values = jnp.where(consistent, values[:m], jnp.diagonal(a)[:m])
    flags = jnp.stack([definite, consistent]).astype(values.dtype)
    packed = bcast(jnp.concatenate([values, rows.ravel(), flags]), comm=comm)
    return packed[:m], packed[m:-2].reshape(rows.shape), packed[-2] > 0, packed[-1] > 0


# ---- solves on the complement of the vectors ----


class _Descent(NamedTuple):
    y: jax.Array
    r: jax.Array
    p: jax.Array
    ap: jax.Array
    pap: jax.Array  # (k,)
    rr: jax.Array  # (k,)
    yy: jax.Array  # (k,)
    size: jax.Array  # about |A|
    steps: jax.Array
    rounds: jax.Array
    check: jax.Array  # True if the next product is that of y, to compute its residual again
    state: jax.Array


def solve_on_complement(
    problem: Eigenproblem,
    x: jax.Array,
    bx: jax.Array,
    values: jax.Array,
    rhs: jax.Array,
    steps: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Solve (A - λ_i B) y_i = r_i for all i at once, with y B-orthogonal to all x (collective).

    Conjugate gradients with a number of their own for each i. The directions are made conjugate to
    the last one, not by the residuals' norms, so that the preconditioner may have a factor that
    differs from step to step (Notay, SIAM J. Sci. Comput. 22, 2000).

    Parameters
    ----------
    x, bx, values
        The pairs, and B x.
    rhs
        The right-hand sides, shape (k, n_local). Their parts along B x are removed.
    steps
        The largest number of steps.

    Returns
    -------
    y, the relative residuals (k,), the number of steps, and a `Result`.
    """
    eps = jnp.finfo(rhs.dtype).eps

    def off(rows: jax.Array, parts: jax.Array, u: jax.Array) -> jax.Array:
        return rows - parts @ u

    def operator(z: jax.Array) -> jax.Array:
        return problem.product(z) - values[:, None] * problem.massed(z)

    squares = problem.sums(_squares(rhs))

    def is_open(i: _Descent) -> jax.Array:
        goal = problem.rtol**2 * squares
        # No residual below the rounding of A y can be expected.
        rounding = (4 * eps * i.size) ** 2 * i.yy
        return i.rr > jnp.maximum(goal, rounding)

    def step(i: _Descent) -> _Descent:
        running = is_open(i) & ~i.check
        z, fault = problem.precondition(jnp.where(running[:, None], i.r, 0))
        z = off(z, problem.sums(inner_products(z, bx)), x)
        q = operator(jnp.where(i.check, i.y, z))
        q = jnp.where(i.check, rhs - q, q)  # when checked, it is the residual of y
        pairs = [(i.r, z), (z, q), (z, i.ap), (z, z), (q, q)]
        dots = jnp.stack([jnp.sum(u * v, axis=1) for u, v in pairs], axis=1)
        total = problem.sums(jnp.concatenate([inner_products(q, x), dots], axis=1))
        q, (rz, zq, zap, zz, qq) = off(q, total[:, : len(x)], bx), total[:, len(x) :].T
        beta = jnp.where(i.pap > 0, -zap / jnp.where(i.pap > 0, i.pap, 1), 0)
        beta = jnp.where(zq + beta * zap > eps * zq, beta, 0)
        curvature = zq + beta * zap
        bad = running & ((rz <= 0) | (zq <= 0))
        alpha = jnp.where(running & ~bad, rz / jnp.where(curvature > 0, curvature, 1), 0)
        p, ap = (jnp.where(i.check, 0, u + beta[:, None] * v) for u, v in ((z, i.p), (q, i.ap)))
        y, r = i.y + alpha[:, None] * p, jnp.where(i.check, q, i.r - alpha[:, None] * ap)
        size = jnp.max(jnp.sqrt(qq / jnp.where(zz > 0, zz, jnp.inf)), initial=i.size)
        rr, yy = problem.sums(jnp.stack([_squares(r), _squares(y)]))
        i = i._replace(
            y=y, r=r, p=p, ap=ap, pap=jnp.where(running, curvature, 0), rr=rr, yy=yy, size=size
        )
        ended, taken = ~is_open(i).any(), i.steps + ~i.check
        end = jnp.where(i.rounds >= _ROUNDS, Result.INACCURATE, RUNNING)
        end = jnp.where(taken >= steps, Result.MAX_STEPS_REACHED, end)
        end = jnp.where(i.check, jnp.where(ended, Result.SUCCESSFUL, end), RUNNING)
        end = jnp.where(bad.any(), Result.NOT_POSITIVE_DEFINITE, end)
        end = jnp.where(fault > 0, fault + OF_PRECONDITIONER, end)
        end = jnp.where(jnp.isfinite(rr).all(), end, Result.BREAKDOWN)
        end = jnp.where(jnp.isfinite(squares).all(), end, Result.NOT_FINITE).astype("int32")
        check = ~i.check & (ended | (taken >= steps))
        return i._replace(steps=taken, rounds=i.rounds + i.check, check=check, state=end)

    zeros, none, count = jnp.zeros_like(rhs), jnp.zeros_like(squares), jnp.zeros((), "int32")
    begin = _Descent(
        zeros, zeros, zeros, zeros, none, none, none, jnp.zeros((), rhs.dtype), count, count,
        count == 0, jnp.full((), RUNNING, "int32"),
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, begin)
    relative = jnp.sqrt(end.rr / jnp.where(squares > 0, squares, 1))
    return end.y, relative, end.steps, end.state


def check_symmetric(matrix: Matrix, definite: bool) -> jax.Array:
    """Return `RUNNING`, or the `Result` that says why the matrix is not valid (collective)."""
    pattern, diagonal = matrix.pattern, matrix.diagonal()
    size = jnp.abs(jnp.where(diagonal == 0, 1, diagonal))
    ones = jnp.ones(pattern.n_local, matrix.dtype)
    system = LinearSystem(
        product=lambda v: matrix @ v,
        precondition=lambda r: r,
        b=ones,
        x0=ones,
        rtol=1.0,
        max_steps=1,
        comm=pattern.comm,
        first=pattern.offset,
        wrong=~jnp.isfinite(matrix.values).all(),
        negative=(diagonal <= 0).any() if definite else False,
        scale=1 / jnp.sqrt(size),
    )
    return system.begin_symmetric()[2]
