"""What a pool computes of all jobs: their results in order, or the sum of these."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.jobs.blocks import result_types
from mpigrad.jobs.context import Job, UserJob
from mpigrad.jobs.derivatives import Derivatives, Evaluate, with_adjoint, with_jacobian
from mpigrad.jobs.failures import Failure, JobError
from mpigrad.jobs.items import Bucket

__all__ = ["Whole", "compute"]


@dataclass(frozen=True, eq=False)
class Whole:
    """What is made of all jobs.

    Attributes
    ----------
    fn
        (shared, mine, record) -> pytree.
    total
        Whether results are added up.
    derivatives
        How they travel; None: whichever moves less.
    """

    fn: Callable[..., Any]
    total: bool
    derivatives: Derivatives | None

    def __post_init__(self) -> None:
        if self.derivatives not in (None, "jacobian", "adjoint"):
            raise ValueError(
                f'derivatives={self.derivatives!r}: it is "jacobian", "adjoint" or None'
            )


def compute(
    whole: Whole,
    buckets: Sequence[Bucket],
    shared: Any,
    per_job: Any,
    evaluate: Evaluate,
    transparent: bool,
) -> Any:
    """The results of all jobs in their order, or their sum.

    Parameters
    ----------
    per_job
        Pytree with a leading axis over all jobs.
    evaluate
        How jobs are computed.
    transparent
        Whether JAX differentiates `evaluate` as it is.
    """
    job = UserJob(whole.fn, whole.total)
    spread = [jax.tree.map(lambda x, b=b: _of_bucket(x, b), per_job) for b in buckets]
    types = _types(job, whole, buckets, shared, spread)

    def inner(job: Job) -> Any:
        if transparent:
            return lambda shared, spread: evaluate(job, shared, spread)
        return with_jacobian(job, buckets, evaluate, inner)

    if _jacobian_travels(whole.derivatives, (shared, per_job), types, transparent):
        pairs = [(t, ()) if whole.total else ((), t) for t in types]
        function = with_jacobian(job, buckets, evaluate, inner, pairs)
    elif transparent:
        function = inner(job)
    else:
        function = with_adjoint(job, lambda job, *arguments: inner(job)(*arguments))
    added, kept = function(shared, spread)
    return added if whole.total else _in_order(kept, buckets, types)


def _of_bucket(x: Any, bucket: Bucket) -> Any:
    return x if len(bucket.jobs) == len(x) else x[bucket.jobs]


def _types(
    job: Job, whole: Whole, buckets: Sequence[Bucket], shared: Any, spread: Sequence[Any]
) -> list[Any]:
    """Shapes and dtypes of one job's result, for each bucket."""
    types, failures = [], []
    cause: Exception | None = None
    for bucket, mine in zip(buckets, spread, strict=True):
        try:
            added, kept = result_types(job, bucket, shared, mine)
            types.append(added if whole.total else kept)
        except Exception as error:  # whatever it is, it belongs to the jobs
            text = "".join(traceback.format_exception(error)[-3:])
            name = f"{type(error).__name__} (in all jobs of its shape)"
            failures.append(Failure(int(bucket.jobs[0]), -1, name, str(error), text, None))
            cause = cause or error
    if failures:
        raise JobError(failures, sum(len(b.jobs) for b in buckets)) from cause
    if whole.total:
        for bucket, kind in zip(buckets, types, strict=True):
            if kind != types[0]:
                raise ValueError(
                    f"sum: the result of job {bucket.jobs[0]} is {kind}, that of job "
                    f"{buckets[0].jobs[0]} is {types[0]}: only equal shapes can be added"
                )
    return types


def _jacobian_travels(
    wanted: Derivatives | None, arguments: Any, types: Sequence[Any], transparent: bool
) -> bool:
    leaves = jax.tree.leaves((arguments, list(types)))
    complex_ = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves)
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(list(types)))
    if wanted == "jacobian" and (complex_ or not floating):
        raise TypeError(
            'derivatives="jacobian" is for real floats; take "adjoint" for other results, and for '
            "complex arguments"
        )
    if wanted is not None or complex_ or not floating:
        return wanted == "jacobian"
    if not transparent:  # so that all modes work
        return True
    return all(sum(x.size for x in jax.tree.leaves(kind)) == 1 for kind in types)


def _in_order(results: Sequence[Any], buckets: Sequence[Bucket], types: Sequence[Any]) -> Any:
    """The results of the buckets as one stack in the order of jobs, or a list of them."""
    if len(results) == 1:
        return results[0]
    order = np.argsort(np.concatenate([bucket.jobs for bucket in buckets]))
    if all(kind == types[0] for kind in types):
        return jax.tree.map(lambda *ys: jnp.concatenate(ys)[order], *results)
    every = [
        jax.tree.map(lambda y, i=i: y[i], ys)
        for bucket, ys in zip(buckets, results, strict=True)
        for i in range(len(bucket.jobs))
    ]
    return [every[i] for i in order]
