"""Blocks of jobs: the unit of `vmap`, of schedules and of sums."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpigrad.jobs.context import JobFunction, inside_job, traced
from mpigrad.jobs.items import Bucket

__all__ = ["apart", "compute_block", "result_types"]


def compute_block(
    job: JobFunction, params: Any, item_params: Any, item: Any, counts: Any, ids: Any
) -> tuple[Any, Any, Any]:
    """Compute all jobs of a block.

    All arguments but `params` have a leading axis over the jobs of the block.

    Returns
    -------
    The sum over the jobs that count, the result of each job, and a mask of the jobs without a NaN.
    """

    def one(item_params: Any, item: Any, index: Any) -> tuple[Any, Any]:
        return traced(job, params, item_params, item, index)

    added, kept = jax.vmap(one)(item_params, item, ids)
    finite = jnp.ones(counts.shape, bool)
    for leaf in jax.tree.leaves((added, kept)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            nan = jnp.isnan(jax.lax.stop_gradient(leaf))
            finite &= ~jnp.any(nan, tuple(range(1, nan.ndim)))

    def total(y: Any) -> Any:
        counted = counts.reshape(-1, *[1] * (y.ndim - 1))
        return jnp.sum(jnp.where(counted, y, jnp.zeros_like(y)), 0, dtype=y.dtype)

    return jax.tree.map(total, added), kept, finite


def apart(job: JobFunction, *operands: Any) -> tuple[Any, Any, Any]:
    """Run `compute_block` as a separately compiled region.

    Without it, XLA would inline a loop of one iteration, and the rounding of a block would depend
    on how many blocks a rank has.
    """
    block = jax.jit(functools.partial(compute_block, job))
    types = jax.eval_shape(block, *operands)
    # True at run time, which the compiler cannot see.
    always = jax.lax.optimization_barrier(jnp.asarray(True))
    return jax.lax.cond(
        always,
        lambda: block(*operands),
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types),
    )


def result_types(
    job: JobFunction, bucket: Bucket, params: Any, item_params: Any
) -> tuple[Any, Any]:
    """Return shapes and dtypes of one job's results: (the summed ones, the separate ones).

    `item_params` has a leading axis over jobs.
    """
    items = bucket.item([jax.ShapeDtypeStruct(s, d) for s, d in bucket.leaves])
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), item_params)
    index = jax.ShapeDtypeStruct((), "int32")
    program, types = jax.make_jaxpr(lambda *operands: traced(job, *operands), return_shape=True)(
        params, own, items, index
    )
    # The cotangents of other ranks' jobs would never arrive at a traced value from outside.
    if not inside_job() and any(isinstance(x, Tracer) for x in program.consts):
        kinds = ", ".join(str(jax.typeof(x)) for x in program.consts if isinstance(x, Tracer))
        raise TypeError(
            f"the job's function closes over traced values ({kinds}), whose derivatives would "
            "miss the jobs of other ranks. Pass every value that is differentiated or traced by "
            "jit in `params` or `item_params`."
        )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types)  # no weak types
