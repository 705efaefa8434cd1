"""The functions of a pool: the results of all jobs in order, or their sum."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.jobs.blocks import result_types
from mpigrad.jobs.context import JobFunction, UserJob
from mpigrad.jobs.derivatives import Derivatives, Evaluate, with_adjoint, with_jacobian
from mpigrad.jobs.failures import Failure, JobError
from mpigrad.jobs.items import Bucket

__all__ = ["MapSpec", "compute"]


@dataclass(frozen=True, eq=False)
class MapSpec:
    """The specification of a map or a sum over jobs.

    Attributes
    ----------
    fn
        (params, item_params, item) -> pytree.
    total
        True if the results are summed.
    derivatives
        How derivatives travel, or None for the way that moves fewer numbers.
    """

    fn: Callable[..., Any]
    total: bool
    derivatives: Derivatives | None

    def __post_init__(self) -> None:
        if self.derivatives not in (None, "jacobian", "adjoint"):
            raise ValueError(
                f'{"sum" if self.total else "map"}: derivatives must be "jacobian", '
                f'"adjoint" or None, got {self.derivatives!r}. Pass one of these.'
            )


def compute(
    spec: MapSpec,
    buckets: Sequence[Bucket],
    params: Any,
    item_params: Any,
    evaluate: Evaluate,
    transparent: bool,
) -> Any:
    """Return the results of all jobs in their order, or their sum.

    Parameters
    ----------
    item_params
        Pytree with a leading axis over all jobs.
    evaluate
        The function that computes jobs.
    transparent
        True if JAX can differentiate `evaluate` directly.
    """
    job = UserJob(spec.fn, spec.total)
    spread = [jax.tree.map(lambda x, b=b: _of_bucket(x, b), item_params) for b in buckets]
    types = _types(job, spec, buckets, params, spread)

    def inner(job: JobFunction) -> Any:
        if transparent:
            return lambda params, spread: evaluate(job, params, spread)
        return with_jacobian(job, buckets, evaluate, inner)

    if _jacobian_travels(spec.derivatives, (params, item_params), types, transparent):
        pairs = [(t, ()) if spec.total else ((), t) for t in types]
        function = with_jacobian(job, buckets, evaluate, inner, pairs)
    elif transparent:
        function = inner(job)
    else:
        function = with_adjoint(job, lambda job, *arguments: inner(job)(*arguments))
    added, kept = function(params, spread)
    return added if spec.total else _in_order(kept, buckets, types)


def _of_bucket(x: Any, bucket: Bucket) -> Any:
    return x if len(bucket.jobs) == len(x) else x[bucket.jobs]


def _types(
    job: JobFunction, spec: MapSpec, buckets: Sequence[Bucket], params: Any, spread: Sequence[Any]
) -> list[Any]:
    """Return shapes and dtypes of one job's result, for each bucket."""
    types, failures = [], []
    cause: Exception | None = None
    for bucket, item_params in zip(buckets, spread, strict=True):
        try:
            added, kept = result_types(job, bucket, params, item_params)
            types.append(added if spec.total else kept)
        except Exception as error:  # any error in the user's function is the jobs' failure
            text = "".join(traceback.format_exception(error)[-3:])
            name = f"{type(error).__name__} (in all jobs of its shape)"
            failures.append(Failure(int(bucket.jobs[0]), -1, name, str(error), text, None))
            cause = cause or error
    if failures:
        raise JobError(failures, sum(len(b.jobs) for b in buckets)) from cause
    if spec.total:
        for bucket, kind in zip(buckets, types, strict=True):
            if kind != types[0]:
                raise ValueError(
                    f"sum: the results of all jobs must have the same structure, shapes and "
                    f"dtypes, got {types[0]} from job {buckets[0].jobs[0]} and {kind} from job "
                    f"{bucket.jobs[0]}. Return equal shapes, or use map."
                )
    return types


def _jacobian_travels(
    wanted: Derivatives | None, arguments: Any, types: Sequence[Any], transparent: bool
) -> bool:
    leaves = jax.tree.leaves((arguments, list(types)))
    complex_ = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves)
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(list(types)))
    if wanted == "jacobian" and (complex_ or not floating):
        dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
        raise TypeError(
            'map or sum: derivatives="jacobian" needs real arguments and real floating-point '
            f'results, got the dtypes {dtypes}. Use derivatives="adjoint".'
        )
    if wanted is not None or complex_ or not floating:
        return wanted == "jacobian"
    if not transparent:  # forward mode needs the Jacobian
        return True
    return all(sum(x.size for x in jax.tree.leaves(kind)) == 1 for kind in types)


def _in_order(results: Sequence[Any], buckets: Sequence[Bucket], types: Sequence[Any]) -> Any:
    """Return the results of all buckets in the order of jobs: stacked if possible, else a list."""
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
