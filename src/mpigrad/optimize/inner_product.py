"""Inner products of trees whose leaves may be replicated or sharded over ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator, resolve
from mpigrad.grid.grid import Grid
from mpigrad.operations import allreduce

__all__ = ["clip_by_global_norm", "global_norm", "inner_products"]


def inner_products(
    *pairs: tuple[Any, Any], sharded: Any = False, comm: Communicator | None = None
) -> jax.Array:
    """Compute ⟨u, v⟩ of each pair of trees over all ranks, in one message (collective).

    It works in compiled programs and is differentiable.

    Parameters
    ----------
    pairs
        (u, v): two trees of real arrays of the same structure and shapes. All pairs have the
        structure of the first.
    sharded
        Without it, of a leaf that is distributed over the ranks only the part of rank 0 counts,
        and the result is wrong without an error. A prefix of the trees, as in `minimize`. True, or
        a Grid: the part of each rank counts. False: the leaf is replicated and counts once.
    comm
        The ranks that hold the trees. Default: the default communicator.

    Returns
    -------
    jax.Array
        Shape (len(pairs),), dtype of the leaves, the same on all ranks. In float32, products above
        1e38 are inf and products below 1e-38 are zero.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import inner_products
    >>> u, v = {"a": jnp.ones(3)}, {"a": jnp.arange(3.0)}
    >>> print(inner_products((u, v), (v, v)))
    [3. 5.]
    """
    comm = resolve(comm)

    def local(u: Any, v: Any) -> Any:
        def of_leaf(kind: Any, a: Any, b: Any) -> Any:
            counts = kind is not False or comm.rank == 0
            return jnp.vdot(a, b) if counts else 0 * jnp.vdot(a, b)

        kinds = jax.tree.broadcast(sharded, u, is_leaf=lambda x: isinstance(x, bool | Grid))
        return sum(jax.tree.leaves(jax.tree.map(of_leaf, kinds, u, v)))

    return allreduce(jnp.stack([local(u, v) for u, v in pairs]), comm=comm)


def global_norm(tree: Any, *, sharded: Any = False, comm: Communicator | None = None) -> jax.Array:
    """Compute the two-norm of a tree over all ranks (collective).

    In float32 it is scaled, at the cost of one more message, so that it neither overflows nor
    underflows when its squares do.

    Parameters
    ----------
    tree
        A pytree of real arrays.
    sharded, comm
        As in `inner_products`.

    Returns
    -------
    jax.Array
        A scalar, the same on all ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import global_norm
    >>> print(global_norm({"a": jnp.full(1, 3.0), "b": jnp.full(1, 4.0)}))
    5.0
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    unit = jnp.ones((), jnp.result_type(*leaves))
    if unit.dtype != jnp.dtype("float64"):  # squares of float32 may overflow
        largest = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]
        most = allreduce(jax.lax.stop_gradient(jnp.max(jnp.stack(largest))), MPI.MAX, comm)
        # A power of two, so that scaling is exact. 1 / unit must be finite, too.
        exponent = jnp.clip(jnp.frexp(most)[1], -120, 120)
        unit = jnp.where((most > 0) & jnp.isfinite(most), jnp.ldexp(unit, exponent), 1)
    scaled = jax.tree.map(lambda leaf: leaf * (1 / unit).astype(jnp.result_type(leaf)), tree)
    return unit * jnp.sqrt(inner_products((scaled, scaled), sharded=sharded, comm=comm)[0])


def clip_by_global_norm(
    tree: Any, largest: float, *, sharded: Any = False, comm: Communicator | None = None
) -> Any:
    """Scale a tree so that its two-norm over all ranks is at most `largest` (collective).

    Parameters
    ----------
    tree
        A pytree of real arrays, such as a gradient.
    largest
        The largest two-norm. A tree with a smaller norm is returned unchanged.
    sharded, comm
        As in `inner_products`.

    Returns
    -------
    A tree of the same structure, shapes and dtypes.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import clip_by_global_norm
    >>> print(clip_by_global_norm(jnp.array([3.0, 4.0]), 1.0))
    [0.6 0.8]
    """
    norm = global_norm(tree, sharded=sharded, comm=comm)
    factor = jnp.where(norm > largest, largest / norm, 1.0)
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)
