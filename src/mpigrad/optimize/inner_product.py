"""Inner products of trees whose leaves may be replicated or sharded over ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import root_of_sums, sums_of_squares
from mpigrad.grid import Grid
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

    It neither overflows nor underflows when its squares do.

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
    comm = resolve(comm)
    dtype = jnp.result_type(*jax.tree.leaves(tree))

    def of_leaf(kind: Any, leaf: Any) -> Any:
        sums = sums_of_squares(jnp.asarray(leaf, dtype))
        return sums if kind is not False or comm.rank == 0 else 0 * sums

    kinds = jax.tree.broadcast(sharded, tree, is_leaf=lambda x: isinstance(x, bool | Grid))
    total = sum(jax.tree.leaves(jax.tree.map(of_leaf, kinds, tree)), jnp.zeros(3, dtype))
    return root_of_sums(*allreduce(total, comm=comm))


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
