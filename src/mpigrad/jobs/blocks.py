"""A block of jobs: the unit of `vmap`, of schedules and of sums."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpigrad.jobs.context import Job, inside_job, traced
from mpigrad.jobs.items import Bucket

__all__ = ["apart", "compute_block", "result_types"]


def compute_block(
    job: Job, shared: Any, mine: Any, record: Any, counts: Any, numbers: Any
) -> tuple[Any, Any, Any]:
    """All jobs of a block: (sum over those that count, what is kept of each, which have no NaN).

    All but `shared` have a leading axis over the jobs of the block.
    """

    def one(mine: Any, record: Any, number: Any) -> tuple[Any, Any]:
        return traced(job, shared, mine, record, number)

    added, kept = jax.vmap(one)(mine, record, numbers)
    whole = jnp.ones(counts.shape, bool)
    for leaf in jax.tree.leaves((added, kept)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            nan = jnp.isnan(jax.lax.stop_gradient(leaf))
            whole &= ~jnp.any(nan, tuple(range(1, nan.ndim)))

    def total(y: Any) -> Any:
        counted = counts.reshape(-1, *[1] * (y.ndim - 1))
        return jnp.sum(jnp.where(counted, y, jnp.zeros_like(y)), 0, dtype=y.dtype)

    return jax.tree.map(total, added), kept, whole


def apart(job: Job, *operands: Any) -> tuple[Any, Any, Any]:
    """`compute_block`, compiled by itself: a loop with one round would be dissolved around it.

    How a block rounds then does not depend on how many blocks a rank has.
    """
    block = jax.jit(functools.partial(compute_block, job))
    types = jax.eval_shape(block, *operands)
    always = jax.lax.optimization_barrier(jnp.asarray(True))  # for all that the compiler knows
    return jax.lax.cond(
        always,
        lambda: block(*operands),
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types),
    )


def result_types(job: Job, bucket: Bucket, shared: Any, mine: Any) -> tuple[Any, Any]:
    """Shapes and dtypes of (what is added, what is kept) of one job of a bucket.

    `mine` has a leading axis over jobs.
    """
    records = bucket.record([jax.ShapeDtypeStruct(s, d) for s, d in bucket.leaves])
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), mine)
    number = jax.ShapeDtypeStruct((), "int32")
    program, types = jax.make_jaxpr(lambda *operands: traced(job, *operands), return_shape=True)(
        shared, own, records, number
    )
    # Cotangents of other ranks' jobs would never arrive at it.
    if not inside_job() and any(isinstance(x, Tracer) for x in program.consts):
        kinds = ", ".join(str(jax.typeof(x)) for x in program.consts if isinstance(x, Tracer))
        raise TypeError(
            f"the job's function takes traced values ({kinds}) from around it: give all that is "
            "differentiated, or traced by jit, as arguments, in `shared` or `per_job`"
        )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types)  # none is weak
