"""Linear systems scaled by powers of two, so that no square of a number overflows or vanishes.

A' x' = b' with A' = 2^a A and b' = 2^s b has the solution x' = 2^(s - a) x. Powers of two are
exact, so a solve at another scale has the same steps and the same digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations import allreduce, require
from mpigrad.operations.carrier import mark_common_branch
from mpigrad.solution import Result

__all__ = ["has_usual_squares", "largest", "normalizing", "refuse_overflow", "scaled", "scaled_map"]

_PADDING = 16  # numbers


def largest(x: jax.Array, axis: int = -1) -> jax.Array:
    """Return the largest absolute value of a real or imaginary part along an axis, 0 if empty."""
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    return jnp.max(jnp.stack([jnp.max(jnp.abs(p), axis=axis, initial=0) for p in parts]), axis=0)


def normalizing(sizes: Sequence[jax.Array], comm: Communicator) -> list[jax.Array]:
    """Return for each number e, so that 2^e times its maximum over ranks is about 1.

    The numbers are real arrays, from `largest`. e is 0 where the maximum is 0 or not finite. One
    message is sent.
    """
    flat = jnp.concatenate([jnp.ravel(size) for size in sizes])
    most = allreduce(_padded(flat), MPI.MAX, comm=comm)[: len(flat)]
    usual = jnp.isfinite(most) & (most > 0)
    exponents = jnp.where(usual, -jnp.frexp(jnp.where(usual, most, 1))[1], 0)
    ends = np.cumsum([size.size for size in sizes])[:-1]
    return [e.reshape(s.shape) for e, s in zip(jnp.split(exponents, ends), sizes, strict=True)]


def has_usual_squares(b: jax.Array, comm: Communicator) -> jax.Array:
    """Return whether |b|^2 of all rows (B, n) is far from both ends of float64, over all ranks."""
    squares = jax.vmap(jnp.vdot)(b, b).real
    total = allreduce(_padded(squares), comm=comm)[: len(squares)]
    return jnp.all((total > 1e-200) & (total < 1e200))


def _padded(numbers: jax.Array) -> jax.Array:
    """Return as many numbers as ranks with other numbers of right-hand sides usually have.

    So the solver finds the difference, and can name it.
    """
    return jnp.pad(numbers, (0, -len(numbers) % _PADDING))


def scaled(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return 2^exponent x. The exponent has the leading axes of x."""
    real = jnp.finfo(x.dtype).dtype
    most = jnp.finfo(real).maxexp - 2  # of a factor whose inverse is no subnormal number
    exponent = jnp.clip(exponent, -3 * most, 3 * most)
    for left in (3, 2, 1):
        part = exponent // left
        factor = jnp.ldexp(jnp.ones((), real), part)
        x = x * factor.reshape(factor.shape + (1,) * (x.ndim - factor.ndim))
        exponent = exponent - part
    return x


def scaled_map(
    linear: Callable[[jax.Array], jax.Array], v: jax.Array, exponent: jax.Array
) -> jax.Array:
    """Return 2^exponent linear(v), so that neither small nor large products are lost."""
    return scaled(linear(scaled(v, jnp.maximum(exponent, 0))), jnp.minimum(exponent, 0))


def refuse_overflow(
    x: jax.Array, exponent: jax.Array, info: jax.Array, comm: Communicator, head: str, throw: bool
) -> jax.Array:
    """Return `info` with the result TOO_LARGE where 2^exponent x is too large for its dtype."""
    most = int(jnp.finfo(x.dtype).maxexp)

    def power() -> jax.Array:
        size = allreduce(largest(jnp.where(jnp.isfinite(x), x, 0)), MPI.MAX, comm=comm)
        return jnp.frexp(size)[1] + exponent

    # The exponents are the same on all ranks. x is the solution of a scaled system.
    possible = jnp.any(exponent > most // 4)
    powers = jax.lax.cond(
        possible, mark_common_branch(power), lambda: jnp.zeros(info.shape[:-1], "int32")
    )
    result = info[..., 0]
    over = (result == Result.SUCCESSFUL) & (powers > most)
    if throw:
        name = np.dtype(x.dtype).name
        text = (
            f"{head}{Result.TOO_LARGE.message}: {name} holds numbers up to 2^{most}, and the "
            "largest entry of the solution is about 2^{}. Scale the system, or use float64 arrays."
        )
        require(~jnp.any(over), text, jnp.max(powers), comm=comm)
    return info.at[..., 0].set(jnp.where(over, Result.TOO_LARGE, result).astype(info.dtype))
