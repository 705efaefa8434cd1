"""Inner products over trees of which some leaves are replicated and some sharded."""

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
    """⟨u, v⟩ of each pair of trees, over all ranks and in one message (collective).

    Parameters
    ----------
    pairs
        (u, v), trees of real arrays alike; all pairs have the structure of the first.
    sharded
        A prefix of the trees, as for `minimize`: replicated leaves (False) count once, of sharded
        ones (True, or a Grid) each rank's part.
    comm
        The ranks.

    Returns
    -------
    An array of shape (len(pairs),), equal on all ranks; inside compiled programs as well, and
    differentiable. Of the leaves' dtype: products of float32 beyond 1e38 are inf, below 1e-38 zero.
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
    """The two-norm of a tree over all ranks, with `sharded` as in `inner_products`.

    Of float32 it neither overflows nor vanishes where its squares do, for one more message.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    unit = jnp.ones((), jnp.result_type(*leaves))
    if unit.dtype != jnp.dtype("float64"):  # squares of float32 numbers leave float32
        largest = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]
        most = allreduce(jax.lax.stop_gradient(jnp.max(jnp.stack(largest))), MPI.MAX, comm)
        # A power of two, so that nothing is rounded; 1/unit has to be a number as well.
        exponent = jnp.clip(jnp.frexp(most)[1], -120, 120)
        unit = jnp.where((most > 0) & jnp.isfinite(most), jnp.ldexp(unit, exponent), 1)
    scaled = jax.tree.map(lambda leaf: leaf * (1 / unit).astype(jnp.result_type(leaf)), tree)
    return unit * jnp.sqrt(inner_products((scaled, scaled), sharded=sharded, comm=comm)[0])


def clip_by_global_norm(
    tree: Any, largest: float, *, sharded: Any = False, comm: Communicator | None = None
) -> Any:
    """The tree, made shorter where its two-norm over all ranks is above `largest`."""
    norm = global_norm(tree, sharded=sharded, comm=comm)
    factor = jnp.where(norm > largest, largest / norm, 1.0)
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)
