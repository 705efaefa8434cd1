"""What Krylov methods see of a linear system, and when they stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.operations import allreduce
from mpigrad.sparse.solvers.base import Result

__all__ = ["RUNNING", "Outcome", "System", "noise"]

RUNNING = -1
# A restart from the true residual must have lowered its square at least so far since the last one.
_PROGRESS = 0.999


class Outcome(NamedTuple):
    """Where a method ended: the solution, |b - A x|^2, |b|^2, iterations and `Result`."""

    x: jax.Array
    rr: jax.Array
    size: jax.Array
    steps: jax.Array
    result: jax.Array


@dataclasses.dataclass(frozen=True)
class System:
    """A x = b on this rank's stripe.

    Attributes
    ----------
    product, precondition
        v -> A v and v -> M v, where M approximates the inverse of A; messages may stand inside.
    b, x0
        Right-hand side and first guess, shape (n_local,).
    rtol, max_steps
        See `LinearSolver`.
    first
        A number for the first entry of this rank's stripe; ranks differ.
    wrong
        Whether something that this rank was given is not finite.
    negative
        Whether something on this rank tells that A is not positive definite.
    scale
        One over the square root of A's diagonal, as far as it is known.
    defect
        Shape (2,): |f(v) - A v|^2 and |A v|^2 for some v on this rank, if A is to be the linear
        map f.
    """

    product: Callable[[jax.Array], jax.Array]
    precondition: Callable[[jax.Array], jax.Array]
    b: jax.Array
    x0: jax.Array
    rtol: float
    max_steps: int
    comm: Communicator
    first: int
    wrong: Any = False
    negative: Any = False
    scale: Any = 1.0
    defect: Any = (0.0, 0.0)

    def sums(self, terms: jax.Array) -> jax.Array:
        """Sums over ranks, by one message."""
        return allreduce(terms, comm=self.comm)

    def dots(self, *pairs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Inner products over all ranks (the first of each pair conjugated), by one message."""
        return self.sums(jnp.stack([jnp.vdot(u, v) for u, v in pairs]))

    def begin(self, *more: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """(|b|^2, goal for |b - A x|^2, `Result` or RUNNING, sums of `more`), by one message."""
        bad = self.wrong | ~jnp.isfinite(self.b).all() | ~jnp.isfinite(self.x0).all()
        terms = [bad, self.negative, *self.defect, jnp.vdot(self.b, self.b), *more]
        total = self.sums(jnp.stack([jnp.asarray(v).astype(self.b.dtype) for v in terms]))
        wrong, negative, defect, product, size = total[:5].real
        state = jnp.where(negative > 0, Result.NOT_POSITIVE_DEFINITE, RUNNING)
        unlike = defect > jnp.finfo(size.dtype).eps * product
        state = jnp.where(unlike, Result.NOT_LINEAR, state)
        finite = jnp.isfinite(size) & jnp.isfinite(defect)
        state = jnp.where((wrong > 0) | ~finite, Result.NOT_FINITE, state)
        goal = jnp.asarray(self.rtol, size.dtype) ** 2 * size
        return size, goal, state.astype("int32"), total[5:]

    def guess(self, size: jax.Array) -> jax.Array:
        """The first guess; zero, which is the solution, where the right-hand side is zero."""
        return jnp.where(size > 0, self.x0, 0)

    def verdict(self, rr: Any, goal: Any, last: Any, steps: Any) -> jax.Array:
        """`Result` or RUNNING where the true residual is `rr`, and was `last` at the last restart.

        Without progress since then a method would go round for ever: rounding lets the residual
        get no lower, or the matrix is singular.
        """
        state = jnp.where(rr < _PROGRESS * last, RUNNING, Result.STAGNATED)
        state = jnp.where(steps >= self.max_steps, Result.MAX_STEPS_REACHED, state)
        state = jnp.where(rr <= goal, Result.SUCCESSFUL, state)
        return self.unless_finite(rr, state, steps)

    def unless_finite(self, rr: Any, state: Any, steps: Any) -> jax.Array:
        fault = jnp.where(steps > 0, Result.BREAKDOWN, Result.NOT_FINITE)
        return jnp.where(jnp.isfinite(rr), state, fault).astype("int32")


def noise(first: int, n: int, dtype: Any, factor: int) -> jax.Array:
    """A vector in [-1, 1) that looks random; entry i depends on first + i alone.

    Integer arithmetic: a sine may round differently in each loop that XLA fuses it into.
    """
    row = jnp.arange(n, dtype="uint32") + np.uint32(first % 2**32)
    bits = row * np.uint32(factor)
    bits = (bits ^ (bits >> 15)) * np.uint32(3266489917)
    return ((bits >> 8).astype(jnp.finfo(dtype).dtype) * 2.0**-23 - 1).astype(dtype)
