"""Norms over the entries of all ranks, for solvers that take a norm as an argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations.collectives import allreduce
from mpigrad.operations.pytree_packing import arrays

__all__ = ["max_norm", "noise", "rms_norm", "root_of_sums", "sums_of_squares", "two_norms"]


def rms_norm(x: Any, comm: Communicator | None = None) -> jax.Array:
    """Compute the root mean square of the entries of all ranks.

    The function itself is a `norm=` argument of diffrax and optimistix: all ranks get the same
    value, so they take the same steps and stop at the same step. The call is collective and sends
    one message. It is differentiable. Its gradient is zero if all entries are zero, or if the norm
    is infinite.

    Parameters
    ----------
    x
        Array or pytree of arrays, real or complex: this rank's part of a distributed vector. Its
        size may differ between ranks and may be zero. Its dtype must be the same on all ranks.
    comm
        The communicator of the ranks that have parts of the vector. Default: the communicator of
        the enclosing `with`, or all ranks.

    Returns
    -------
    jax.Array
        √(Σ |x|² / n), a real scalar, equal on all ranks. Both Σ and the number of entries n are
        taken over all ranks. It is 0 without entries. Its dtype is that of `x`, or the real
        one of a complex `x`. Sums of 16-bit floats are computed in float32.

    See Also
    --------
    mpigrad.optimize.global_norm : The two-norm, of trees with replicated and sharded leaves.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> float(mg.rms_norm({"u": jnp.full(3, 2.0), "v": jnp.full((2, 2), -2.0)}))
    2.0

    As the norm of a solver: `diffrax.PIDController(rtol=1e-4, atol=1e-6, norm=mg.rms_norm)`.
    """
    leaves, dtype, work = _leaves("rms_norm", x)
    parts = [part.astype(work) for leaf in leaves for part in _real(leaf)]
    count = jnp.asarray(float(sum(leaf.size for leaf in leaves)), work)
    sums = sum(map(sums_of_squares, parts), jnp.zeros(3, work))
    *total, count = allreduce(jnp.append(sums, count), comm=comm)
    return root_of_sums(*(each / jnp.maximum(count, 1) for each in total)).astype(dtype)


def two_norms(*vectors: jax.Array, comm: Communicator) -> list[jax.Array]:
    """Return the two-norms of vectors of one dtype over all ranks, by one message."""
    sums = [
        sum(map(sums_of_squares, _real(v)), jnp.zeros(3, jnp.finfo(v.dtype).dtype)) for v in vectors
    ]
    return [root_of_sums(*each) for each in allreduce(jnp.stack(sums), comm=comm)]


def max_norm(x: Any, comm: Communicator | None = None) -> jax.Array:
    """Compute the largest absolute value of the entries of all ranks.

    It is used as `rms_norm`, and sends one message. It is differentiable: the derivative is shared
    equally between the ranks that have the largest value, and then between the entries of a rank.
    It is zero if all entries are zero.

    Parameters
    ----------
    x, comm
        As for `rms_norm`.

    Returns
    -------
    jax.Array
        max |x|, a real scalar, equal on all ranks. It is 0 without entries, and NaN if an
        entry is NaN. Its dtype is that of `x`, or the real one of a complex `x`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> float(mg.max_norm([jnp.array([1.0, -3.0]), jnp.zeros((2, 2))]))
    3.0
    """
    leaves, dtype, work = _leaves("max_norm", x)
    # The derivative of |x| is zero at zero. The last zero is for ranks without entries.
    sizes = [jnp.where(leaf == 0, 0, jnp.abs(leaf)).astype(work).ravel() for leaf in leaves]
    most = jnp.max(jnp.concatenate([*sizes, jnp.zeros(1, work)]))
    return allreduce(most, op=MPI.MAX, comm=comm).astype(dtype)


def _leaves(operation: str, x: Any) -> tuple[list[jax.Array], Any, Any]:
    """Return the leaves, the dtype of their norm, and the dtype in which MPI reduces it."""
    leaves = jax.tree.leaves(arrays(operation, x))
    dtype = jnp.result_type(*leaves) if leaves else jnp.result_type(float)
    if not jnp.issubdtype(dtype, jnp.inexact):
        leaves, dtype = [leaf.astype(float) for leaf in leaves], jnp.result_type(float)
    dtype = jnp.finfo(dtype).dtype  # the real dtype of a complex dtype
    return leaves, dtype, jnp.promote_types(dtype, jnp.float32)


# Numbers whose squares would vanish or overflow are added up at another scale, so that one message
# is enough (Blue, A portable Fortran program to find the Euclidean norm of a vector, 1978).


def _factor(dtype: Any) -> tuple[float, float]:
    """Return the size from which numbers are large, and the factor that makes them small."""
    exponent = int(jnp.finfo(dtype).maxexp)  # 128 or 1024
    return 2.0 ** (exponent * 3 // 8), 2.0 ** -(exponent * 5 // 8)


def sums_of_squares(x: jax.Array) -> jax.Array:
    """Return the sums of x² over small, usual and large numbers, shape (3,).

    Small and large ones are scaled. Infinite numbers have the derivative zero, not NaN.
    """
    large, factor = _factor(x.dtype)
    size, finite = jnp.abs(jax.lax.stop_gradient(x)), jnp.isfinite(x)
    is_small, is_large = size < 1 / large, size > large
    parts = []
    for chosen, scale in (
        (is_small, 1 / factor), (~(is_small | is_large), 1.0), (is_large, factor),
    ):  # fmt: skip
        # Without the barrier XLA multiplies the square by the square of the factor.
        part = jax.lax.optimization_barrier(jnp.where(chosen & finite, x, 0) * scale)
        parts.append(jnp.sum(jnp.square(part)))
    others = jnp.where(finite, 0, jnp.square(jax.lax.stop_gradient(x)))
    return jnp.stack([*parts[:2], parts[2] + jnp.sum(others)])


def root_of_sums(small: jax.Array, usual: jax.Array, large: jax.Array) -> jax.Array:
    """Return the square root of the sum of squares from their sums of `sums_of_squares`."""
    _, factor = _factor(usual.dtype)

    def smaller(square: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(square * factor) * factor

    # NaN is among the large ones, and compares false.
    cases = [~(large == 0), usual > 0, small > 0]
    values = [large + smaller(usual), usual + smaller(small), small]
    total = jnp.select(cases, values, 1.0)  # the square root is not differentiable at zero
    scale = jnp.select(cases, [1 / factor, 1.0, factor], 0.0)
    return jnp.sqrt(total) * scale.astype(total.dtype)


def _real(leaf: jax.Array) -> tuple[jax.Array, ...]:
    return (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)


def noise(first: int, n: int, dtype: Any, seed: int) -> jax.Array:
    """Return a vector in [-1, 1) that looks random. Entry i depends on first + i alone.

    Integer arithmetic: a sine may round differently in each loop that XLA fuses it into.
    """
    row = jnp.arange(n, dtype="uint32") + np.uint32(first % 2**32)
    bits = row * np.uint32(seed)
    bits = (bits ^ (bits >> 15)) * np.uint32(3266489917)
    return ((bits >> 8).astype(jnp.finfo(dtype).dtype) * 2.0**-23 - 1).astype(dtype)
