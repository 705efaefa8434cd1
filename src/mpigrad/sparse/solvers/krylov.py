"""Krylov methods written in JAX: for any linear map, any floating-point type, without hypre."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.extend import mark_common_branch, noise
from mpigrad.operations import allreduce
from mpigrad.solution import Result

__all__ = [
    "RUNNING",
    "LinearSystem",
    "Outcome",
    "bicgstab",
    "gmres",
    "minres",
    "pcg",
]

# ---- The interface between a linear system and the iterative methods that solve it ----


RUNNING = -1
# A restart from the true residual must have reduced its square by this factor since the last one.
_PROGRESS = 0.999
_PROBES = (2654435761, 2246822519)  # seeds of the vectors that check a matrix


class Outcome(NamedTuple):
    """The end of a built-in method: x, |b - A x|^2, |b|^2, the number of steps and a `Result`."""

    x: jax.Array
    rr: jax.Array
    bb: jax.Array
    num_steps: jax.Array
    result: jax.Array


@dataclasses.dataclass(frozen=True)
class LinearSystem:
    """This rank's part of a linear system A x = b, as `LinearSolver.iterate` gets it.

    Attributes
    ----------
    product
        The function v -> A v, with v and A v like `b`. It exchanges messages, so all ranks call it
        the same number of times.
    precondition
        The function r -> M r, where M is the preconditioner, or the identity. All ranks call it the
        same number of times, too.
    b, x0
        The right-hand side and the first guess, shape (n_local,).
    rtol, max_steps
        The tolerance and the largest number of steps, those of the solver.
    comm
        The communicator over whose ranks the system is distributed.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad.sparse import LinearSystem
    >>> b = jnp.array([1.0, 2.0])
    >>> comm = mg.default_communicator()
    >>> system = LinearSystem(lambda v: 2 * v, lambda r: r / 2, b, 0 * b, 1e-6, 10, comm)
    >>> bb, ba = system.dots((b, b), (b, system.product(b)))  # over all ranks
    >>> float(bb), float(ba)
    (5.0, 10.0)
    """

    product: Callable[[jax.Array], jax.Array]
    precondition: Callable[[jax.Array], jax.Array]
    b: jax.Array
    x0: jax.Array
    rtol: float
    max_steps: int
    comm: Communicator
    # The rest is for the checks of the built-in methods. An index of this rank's first entry, which
    # differs between ranks:
    first: int = 0
    wrong: Any = False  # True if some input of this rank is not finite
    negative: Any = False  # True if some input of this rank shows that A is not positive definite
    scale: Any = 1.0  # 1 / sqrt(diagonal of A), if it is known
    # Positive real numbers w, shape (n_local,). GMRES minimises |w (b - A x)| then. None: ones.
    weights: Any = None
    # |f(v) - A v|^2 and |A v|^2 for a vector v on this rank, if A is the linearization of f.
    defect: Any = (0.0, 0.0)

    def sums(self, terms: jax.Array) -> jax.Array:
        """Return the sums over ranks, by one message."""
        return allreduce(terms, comm=self.comm)

    def dots(self, *pairs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return the inner products over all ranks of these pairs, by one message.

        The first vector of each pair is conjugated. The result has shape (len(pairs),).
        """
        return self.sums(jnp.stack([jnp.vdot(u, v) for u, v in pairs]))

    def begin(self, *more: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """Return |b|^2, the goal for |b - A x|^2, `Result` or RUNNING, and the sums of `more`."""
        bad = self.wrong | ~jnp.isfinite(self.b).all() | ~jnp.isfinite(self.x0).all()
        terms = [bad, self.negative, *self.defect, jnp.vdot(self.b, self.b), *more]
        total = self.sums(jnp.stack([jnp.asarray(v).astype(self.b.dtype) for v in terms]))
        wrong, negative, defect, product, size = total[:5].real
        state = jnp.where(negative > 0, Result.NOT_POSITIVE_DEFINITE, RUNNING)
        differs = defect > jnp.finfo(size.dtype).eps * product
        state = jnp.where(differs, Result.NOT_LINEAR, state)
        finite = jnp.isfinite(size) & jnp.isfinite(defect)
        state = jnp.where((wrong > 0) | ~finite, Result.NOT_FINITE, state)
        goal = jnp.asarray(self.rtol, size.dtype) ** 2 * size
        return size, goal, state.astype("int32"), total[5:]

    def begin_symmetric(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Begin, and check that A is symmetric: |b|^2, the goal, and `Result` or RUNNING."""
        u, w = probes = jnp.stack(
            [noise(self.first, self.b.shape[0], self.b.dtype, seed) for seed in _PROBES]
        )
        # Scaled by the diagonal: a row of huge entries would hide all others.
        au, aw = jax.lax.map(lambda v: self.scale * self.product(self.scale * v), probes)
        size, goal, state, (asymmetry, spread) = self.begin(
            jnp.vdot(w.conj(), au) - jnp.vdot(u.conj(), aw), jnp.vdot(au, au) + jnp.vdot(aw, aw)
        )
        # If A is not symmetric, w.Au - u.Aw is about as large as |Au|. If it is, this is rounding.
        spread = spread.real
        skew = jnp.abs(asymmetry) > jnp.sqrt(jnp.finfo(spread.dtype).eps * spread)
        state = jnp.where((state == RUNNING) & skew, Result.NOT_SYMMETRIC, state)
        state = jnp.where(jnp.isfinite(spread), state, Result.NOT_FINITE)
        return size, goal, state.astype("int32")

    def guess(self, size: jax.Array) -> jax.Array:
        """Return the first guess, or zero if the right-hand side is zero: the solution then."""
        return jnp.where(size > 0, self.x0, 0)

    def verdict(self, rr: Any, goal: Any, last: Any, steps: Any) -> jax.Array:
        """Return `Result` or RUNNING from the true residual, and its value at the last restart.

        A method that has made no progress since then would never end: rounding allows no smaller
        residual, or the matrix is singular.
        """
        state = jnp.where(rr < _PROGRESS * last, RUNNING, Result.STAGNATED)
        state = jnp.where(steps >= self.max_steps, Result.MAX_STEPS_REACHED, state)
        state = jnp.where(rr <= goal, Result.SUCCESSFUL, state)
        return self.unless_finite(rr, state, steps)

    def unless_finite(self, rr: Any, state: Any, steps: Any) -> jax.Array:
        """Return `state` if `rr` is finite, else the reason why it is not."""
        fault = jnp.where(steps > 0, Result.BREAKDOWN, Result.NOT_FINITE)
        return jnp.where(jnp.isfinite(rr), state, fault).astype("int32")


# ---- Preconditioned conjugate gradients with one reduction in each iteration ----


class _CGIterate(NamedTuple):
    x: jax.Array
    r: jax.Array  # b - A x, by recursion
    p: jax.Array
    ap: jax.Array
    rz: jax.Array
    alpha: jax.Array
    rr: jax.Array
    last: jax.Array  # |b - A x|^2 at the last check
    steps: jax.Array
    check: jax.Array  # True if the next product is A x, to compute b - A x again
    state: jax.Array


def pcg(s: LinearSystem) -> Outcome:
    """Solve with a symmetric positive definite A (Chronopoulos & Gear, J. Comput. Appl. Math. 25,
    1989).

    The recursions drift from the true residual. So when the method seems to have converged, the
    true residual is computed, and the method restarts from it if it is too large.
    """
    dtype = s.b.dtype
    eps = jnp.finfo(dtype).eps
    size, goal, state = s.begin_symmetric()

    def step(i: _CGIterate) -> _CGIterate:
        z = s.precondition(i.r)
        q = s.product(jnp.where(i.check, i.x, z))
        r = jnp.where(i.check, s.b - q, i.r)
        rr, rz, zaz = s.dots((r, r), (i.r, z), (z, q))

        seems_done = (rr <= goal) | (i.steps >= s.max_steps)
        beta = rz / i.rz
        curvature = zaz - beta * rz / i.alpha  # p.Ap of the new direction p = z + beta p
        bad = (rz <= 0) | (zaz <= 0) | (curvature < -jnp.sqrt(eps) * zaz)
        go = ~i.check & ~seems_done & (curvature > 0) & ~bad
        beta, alpha = jnp.where(go, beta, 0), jnp.where(go, rz / curvature, 0)
        p, ap = z + beta * i.p, q + beta * i.ap

        going = jnp.where(bad & ~seems_done, Result.NOT_POSITIVE_DEFINITE, RUNNING)
        state = jnp.where(i.check, s.verdict(rr, goal, i.last, i.steps), going)
        return _CGIterate(
            i.x + alpha * p,
            r - alpha * ap,
            p,
            ap,
            jnp.where(go, rz, jnp.inf),  # infinite: the next direction is the residual's
            jnp.where(go, alpha, 1),
            rr,
            jnp.where(i.check, rr, i.last),
            i.steps + go,
            ~i.check & ~go,
            s.unless_finite(rr + rz + zaz, state, i.steps),
        )

    zero, one = jnp.zeros_like(s.b), jnp.ones((), dtype)
    infinite, true = jnp.full((), jnp.inf, dtype), jnp.ones((), bool)
    first = _CGIterate(
        s.guess(size), zero, zero, zero, infinite, one, size, infinite,
        jnp.zeros((), "int32"), true, state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, first)
    return Outcome(end.x, end.rr, size, end.steps, end.state)


# ---- Preconditioned minimal residuals, two reductions in each iteration ----


class _MINRESIterate(NamedTuple):
    x: jax.Array
    r: jax.Array  # b - A x, by recursion
    v: jax.Array  # the Lanczos vectors, now and before
    v_before: jax.Array
    z: jax.Array  # M v / gamma
    w: jax.Array  # directions, now and before, and their products with A
    w_before: jax.Array
    aw: jax.Array
    aw_before: jax.Array
    gamma: jax.Array  # sqrt(v.M v), now and before
    gamma_before: jax.Array
    rotations: jax.Array  # cosine and sine, now and before
    eta: jax.Array  # what is left of |r| in the norm of M
    length: jax.Array  # the largest row of the Lanczos matrix so far, about |M A|
    last: jax.Array  # |b - A x|^2 at the last check
    steps: jax.Array
    check: jax.Array  # True if the next product is A x, to restart from the true residual
    state: jax.Array


_NO_ROTATION = np.array([[1.0, 1.0], [0.0, 0.0]])


def minres(s: LinearSystem) -> Outcome:
    """Solve with a symmetric A that may be indefinite (Paige & Saunders, SIAM J. Numer. Anal. 12,
    1975).

    The preconditioner M is symmetric positive definite. The recursion is algorithm 4.1 of Elman,
    Silvester & Wathen (2014). It minimises the residual in the norm of M. A recursion for the
    residual itself says when it seems small enough, and then the true one is computed.
    """
    dtype = s.b.dtype
    eps = jnp.finfo(dtype).eps
    size, goal, state = s.begin_symmetric()

    def step(i: _MINRESIterate) -> _MINRESIterate:
        q = s.product(jnp.where(i.check, i.x, i.z))
        delta, rr = s.dots((i.z, q), (i.r, i.r))
        seems_done = ~i.check & ((rr <= goal) | (i.steps >= s.max_steps))
        lanczos = q - (delta / i.gamma) * i.v - (i.gamma / i.gamma_before) * i.v_before
        v = jnp.where(i.check, s.b - q, lanczos)
        z = s.precondition(v)
        square, vv, zz = s.dots((v, z), (v, v), (z, z))
        gamma = jnp.sqrt(jnp.maximum(square, 0))

        (c, c_before), (sine, sine_before) = i.rotations
        a0 = c * delta - c_before * sine * i.gamma
        a1 = jnp.sqrt(a0**2 + square)
        a2 = sine * delta + c_before * c * i.gamma
        a3 = sine_before * i.gamma
        pivot = jnp.where(a1 > 0, a1, 1)
        w = (i.z - a3 * i.w_before - a2 * i.w) / pivot
        aw = (q - a3 * i.aw_before - a2 * i.aw) / pivot
        turned = jnp.stack([jnp.stack([a0, gamma]) / pivot, i.rotations[:, 0]], axis=1)
        # |A r| is root times |r|: if it is small, b is not in the range of a singular A, and from
        # here on x would grow along the null space.
        root = jnp.sqrt(a0**2 + (c * gamma) ** 2)
        size_of_a = jnp.maximum(i.length, jnp.sqrt(delta**2 + square))
        least = root <= jnp.sqrt(eps) * size_of_a
        go = ~i.check & ~seems_done & (a1 > 0) & ~least
        along = jnp.where(go, turned[0, 0] * i.eta, 0)

        # An invariant subspace ends here, and so do recursions that a check interrupts.
        ends = gamma <= eps * jnp.abs(a1)
        check = ~i.check & (~go | ends)
        bad = (square < -jnp.sqrt(eps * vv * zz)) & ~seems_done
        going = jnp.where(bad, Result.NOT_POSITIVE_DEFINITE, RUNNING)
        verdict = s.verdict(vv, goal, i.last, i.steps)
        divisor = jnp.where(gamma > 0, gamma, 1)

        def fresh(old: jax.Array, new: Any) -> jax.Array:
            """Return `new` if the Lanczos vectors start again."""
            return jnp.where(i.check, new, old)

        return _MINRESIterate(
            i.x + along * w,
            fresh(i.r - along * aw, v),
            v,
            fresh(i.v, jnp.zeros_like(v)),
            z / divisor,
            fresh(w, jnp.zeros_like(w)),
            fresh(i.w, jnp.zeros_like(w)),
            fresh(aw, jnp.zeros_like(w)),
            fresh(i.aw, jnp.zeros_like(w)),
            divisor,
            fresh(i.gamma, jnp.ones_like(gamma)),
            fresh(turned, _NO_ROTATION.astype(dtype)),
            fresh(-turned[1, 0] * i.eta, gamma),
            fresh(size_of_a, i.length),
            fresh(i.last, vv),
            i.steps + go,
            check,
            s.unless_finite(rr + square + vv, jnp.where(i.check, verdict, going), i.steps),
        )

    zero, one = jnp.zeros_like(s.b), jnp.ones((), dtype)
    first = _MINRESIterate(
        s.guess(size), zero, zero, zero, zero, zero, zero, zero, zero, one, one,
        jnp.asarray(_NO_ROTATION, dtype), one, jnp.zeros((), dtype), jnp.full((), jnp.inf, dtype),
        jnp.zeros((), "int32"), jnp.ones((), bool), state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, first)
    return Outcome(end.x, end.last, size, end.steps, end.state)


# ---- Stabilised biconjugate gradients, two reductions in each iteration ----


class _BiCGStabIterate(NamedTuple):
    x: jax.Array
    r: jax.Array  # b - A x, by recursion
    shadow: jax.Array
    p: jax.Array
    rho: jax.Array  # shadow.r
    rr: jax.Array
    last: jax.Array  # |b - A x|^2 at the last check
    steps: jax.Array
    check: jax.Array  # True if b - A x is computed again, to restart from there
    state: jax.Array


def bicgstab(s: LinearSystem) -> Outcome:
    """Solve with any A in short recursions (van der Vorst, SIAM J. Sci. Stat. Comput. 13, 1992).

    When a recursion breaks down, and when the method seems to have converged, the true residual is
    computed. The method ends if it is small enough, and restarts from it if not.
    """
    dtype = s.b.dtype
    size, goal, state, _ = s.begin()
    eps = jnp.finfo(dtype).eps

    def advance(
        i: _BiCGStabIterate, y: jax.Array, v: jax.Array, sigma: jax.Array
    ) -> _BiCGStabIterate:
        alpha = jnp.where(sigma == 0, 0, i.rho / jnp.where(sigma == 0, 1, sigma))
        half = i.r - alpha * v
        z = s.precondition(half)
        q = s.product(z)
        qs, qq, ss, hs, hq = s.dots(
            (q, half), (q, q), (half, half), (i.shadow, half), (i.shadow, q)
        )
        omega = jnp.where(qq == 0, 0, qs / jnp.where(qq == 0, 1, qq))
        r, rho = half - omega * q, hs - omega * hq
        # The true residual is computed in the end, whatever cancels here.
        rr = jnp.maximum(ss.real - (omega * qs.conj()).real, 0)
        broken = jnp.abs(rho) <= eps * jnp.sqrt(rr * i.last)
        broken |= (omega == 0) | (sigma == 0)
        divisor = jnp.where(broken, 1, i.rho * omega)
        p = r + rho * alpha / divisor * (i.p - omega * v)
        steps = i.steps + 1
        check = (rr <= goal) | (steps >= s.max_steps) | broken
        state = s.unless_finite(rr + jnp.abs(rho), RUNNING, i.steps)
        return _BiCGStabIterate(
            i.x + alpha * y + omega * z, r, i.shadow, p, rho, rr, i.last, steps, check, state
        )

    def restart(i: _BiCGStabIterate, v: jax.Array, rr: jax.Array) -> _BiCGStabIterate:
        r = s.b - v
        verdict = s.verdict(rr, goal, i.last, i.steps)
        return _BiCGStabIterate(
            i.x, r, r, r, rr.astype(dtype), rr, rr, i.steps, jnp.zeros_like(i.check), verdict
        )

    def step(i: _BiCGStabIterate) -> _BiCGStabIterate:
        y = s.precondition(i.p)
        v = s.product(jnp.where(i.check, i.x, y))
        r = s.b - v
        sigma, rr = s.dots((i.shadow, v), (r, r))
        return jax.lax.cond(
            i.check,
            mark_common_branch(lambda: restart(i, v, rr.real)),
            lambda: advance(i, y, v, sigma),
        )

    zero = jnp.zeros_like(s.b)
    infinite = jnp.full((), jnp.inf, size.dtype)
    first = _BiCGStabIterate(
        s.guess(size), zero, zero, zero, jnp.zeros((), dtype), size, infinite,
        jnp.zeros((), "int32"), jnp.ones((), bool), state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, first)
    return Outcome(end.x, end.rr, size, end.steps, end.state)


# ---- GMRES with restarts: classical Gram-Schmidt twice, two reductions in each iteration ----


# Rows of vectors as arrays of 16, 48, 192, ... rows: only those in use are read.
_Rows = tuple[jax.Array, ...]


def _empty_rows(m: int, n: int, dtype: Any) -> _Rows:
    ends = [16]
    while ends[-1] < m:
        ends.append(4 * ends[-1])
    return tuple(
        jnp.zeros((min(end, m) - start, n), dtype)
        for start, end in zip([0, *ends], ends, strict=False)
        if start < m
    )


def _starts(rows: _Rows) -> list[int]:
    return [sum(len(part) for part in rows[:k]) for k in range(len(rows))]


def _products(rows: _Rows, w: jax.Array, last: jax.Array) -> jax.Array:
    """Return this rank's part of the inner products with w, where rows after `last` count as 0."""
    return jnp.concatenate(
        [
            jax.lax.cond(
                start <= last,
                lambda part: part.conj() @ w,
                lambda part: jnp.zeros(len(part), part.dtype),
                part,
            )
            for start, part in zip(_starts(rows), rows, strict=True)
        ]
    )


def _added(w: jax.Array, h: jax.Array, rows: _Rows, last: jax.Array) -> jax.Array:
    """Return w + sum of h_k row_k, where h is 0 after `last`."""
    for start, part in zip(_starts(rows), rows, strict=True):
        own = h[start : start + len(part)]
        w = jax.lax.cond(
            start <= last, lambda w, own, part: w + own @ part, lambda w, *_: w, w, own, part
        )
    return w


def _with_row(rows: _Rows, k: jax.Array, w: jax.Array) -> _Rows:
    parts = []
    for start, part in zip(_starts(rows), rows, strict=True):
        at = jnp.clip(k - start, 0, len(part) - 1)
        parts.append(part.at[at].set(jnp.where(at == k - start, w, part[at])))
    return tuple(parts)


class _GMRESIterate(NamedTuple):
    x: jax.Array
    v: jax.Array  # the newest vector of the basis. V y at the end of a cycle, to add M V y to x
    basis: _Rows  # (m + 1, n_local), orthonormal
    directions: _Rows  # (m, n_local), M times the basis. (): M is a fixed linear map
    triangle: jax.Array  # (m, m), of the Hessenberg matrix's QR factorisation
    rotation: jax.Array  # (m + 1, m + 1), unitary: rotation @ Hessenberg = triangle
    scale: jax.Array  # |w (b - A x)| at the start of the cycle
    rr: jax.Array  # |b - A x|^2 at the start of the cycle
    column: jax.Array  # the number of columns of the cycle
    fresh: jax.Array  # True if the next product is A x, to start a cycle
    steps: jax.Array
    state: jax.Array


def gmres(s: LinearSystem, restart: int, *, flexible: bool = False) -> Outcome:
    """Solve with any A by minimal residuals (Saad & Schultz, SIAM J. Sci. Stat. Comput. 7, 1986).

    The preconditioner is on the right, so that |b - A x| is minimised, or with
    `LinearSystem.weights` w the norm |w (b - A x)|: rounding errors of a stiff part, whose rows are
    large, disturb the basis less then. Each cycle starts from the true residual, and its two-norm
    decides if the solve has converged. The flexible method (Saad, SIAM J. Sci. Comput. 14, 1993)
    keeps all preconditioned vectors.
    """
    m, n, dtype = min(restart, s.max_steps), s.b.shape[0], s.b.dtype
    size, goal, state, _ = s.begin()
    rows = jnp.arange(m + 1)
    identity = jnp.eye(m + 1, dtype=dtype)
    real = size.dtype
    weights = s.weights

    def weighted(r: jax.Array) -> jax.Array:
        return r if weights is None else weights * r

    def preconditioned(v: jax.Array) -> jax.Array:
        return s.precondition(v if weights is None else v / weights)

    def extend(i: _GMRESIterate) -> tuple[jax.Array, ...]:
        """Return the next vector, its coefficients, its norm before scaling, |r|^2, M v and x."""
        is_known = i.fresh & (flexible | (i.steps == 0))  # x
        z = jax.lax.cond(is_known, mark_common_branch(jnp.zeros_like), preconditioned, i.v)
        x = jnp.where(i.fresh, i.x + z, i.x)
        q = s.product(jnp.where(i.fresh, x, z))
        rest = jnp.where(i.fresh, s.b - q, q)
        w = weighted(rest)
        last = jnp.where(i.fresh, -1, i.column)
        present = rows <= last
        h = jnp.where(present, s.sums(_products(i.basis, w, last)), 0)
        w = _added(w, -h, i.basis, last)
        squares = jnp.stack([jnp.vdot(rest, rest), jnp.vdot(w, w)])
        sums = s.sums(jnp.concatenate([_products(i.basis, w, last), squares]))
        again = jnp.where(present, sums[:-2], 0)
        w = _added(w, -again, i.basis, last)
        # The second correction is small compared with w: nothing cancels.
        norm = jnp.sqrt(jnp.maximum(sums[-1].real - jnp.vdot(again, again).real, 0))
        return w / jnp.where(norm > 0, norm, 1).astype(dtype), h + again, norm, sums[-2].real, z, x

    def step(i: _GMRESIterate) -> _GMRESIterate:
        j = i.column
        w, h, norm, rr, z, x = extend(i)
        row = jnp.where(i.fresh, -1, j)
        directions = _with_row(i.directions, row, z) if flexible else i.directions
        basis = _with_row(i.basis, jnp.where(i.fresh, 0, j + 1), w)

        # A fresh cycle: its residual is w, of this norm, which must fall from cycle to cycle.
        last = jnp.where(norm**2 < _PROGRESS * i.scale**2, jnp.inf, 0)
        start = _GMRESIterate(
            x, w, basis, directions, identity[:m, :m], identity, norm, rr, jnp.zeros_like(j),
            jnp.zeros_like(i.fresh), i.steps, s.verdict(rr, goal, last, i.steps),
        )  # fmt: skip

        # One more column: rotate its last two entries into one.
        column = i.rotation @ h
        a, radius = column[j], jnp.sqrt(jnp.abs(column[j]) ** 2 + norm**2)
        turned = jnp.where(radius > 0, radius, 1)
        turn = (jnp.stack([a.conj(), norm, -norm, a]).reshape(2, 2) / turned).astype(dtype)
        pair = jax.lax.dynamic_slice_in_dim(i.rotation, j, 2)
        rotation = jax.lax.dynamic_update_slice_in_dim(i.rotation, turn @ pair, j, 0)
        # Without a pivot, an infinite one leaves this column out of the solution.
        pivot = jnp.where(radius > 0, radius, jnp.inf).astype(dtype)
        column = jnp.where(rows == j, pivot, jnp.where(rows < j, column, 0))
        triangle = i.triangle.at[:, j].set(column[:m])
        reduced = jnp.abs(rotation[j + 1, 0]) ** 2  # the square of what is left of the residual
        steps = i.steps + 1
        # Another cycle, because the two-norm was still too large, goes further.
        aim = goal if weights is None else jnp.where(i.steps == j, goal, goal / 4)
        full = (j + 1 == m) | (reduced * i.rr <= aim) | (steps >= s.max_steps)
        full |= (
            norm <= jnp.finfo(real).eps * radius
        )  # an invariant subspace: x solves, if any vector does

        def finish(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            g = jnp.where(rows[:m] <= j, i.scale * rotation[:m, 0], 0)
            y = jax.scipy.linalg.solve_triangular(triangle, g)
            if flexible:
                return _added(x, y, directions, j), w
            return x, _added(jnp.zeros_like(w), jnp.pad(y, (0, 1)), basis, j)

        ends = full & ~i.fresh
        x, w = jax.lax.cond(ends, mark_common_branch(finish), lambda *both: both, x, w)
        state = s.unless_finite(radius, RUNNING, i.steps)
        grown = _GMRESIterate(
            x, w, basis, directions, triangle, rotation, i.scale, i.rr, j + 1, full, steps, state
        )  # fmt: skip
        return jax.tree.map(lambda u, v: v if u is v else jnp.where(i.fresh, u, v), start, grown)

    zero, infinite = jnp.zeros((), "int32"), jnp.full((), jnp.inf, real)
    first = _GMRESIterate(
        s.guess(size), jnp.zeros(n, dtype), _empty_rows(m + 1, n, dtype),
        _empty_rows(m if flexible else 0, n, dtype), identity[:m, :m], identity,
        infinite, infinite, zero, jnp.ones((), bool), zero, state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, first)
    return Outcome(end.x, end.rr, size, end.steps, end.state)
