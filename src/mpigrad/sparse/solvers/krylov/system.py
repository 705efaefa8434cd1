"""The interface between a linear system and the iterative methods that solve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.operations import allreduce
from mpigrad.solution import Result

__all__ = ["RUNNING", "LinearSystem", "Outcome", "noise"]

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


def noise(first: int, n: int, dtype: Any, seed: int) -> jax.Array:
    """Return a vector in [-1, 1) that looks random. Entry i depends on first + i alone.

    Integer arithmetic: a sine may round differently in each loop that XLA fuses it into.
    """
    row = jnp.arange(n, dtype="uint32") + np.uint32(first % 2**32)
    bits = row * np.uint32(seed)
    bits = (bits ^ (bits >> 15)) * np.uint32(3266489917)
    return ((bits >> 8).astype(jnp.finfo(dtype).dtype) * 2.0**-23 - 1).astype(dtype)
