"""Failed jobs: detected, collected from all ranks, and raised on every rank."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.extend import mark_common_branch
from mpigrad.jobs.items import Data, job_id
from mpigrad.operations import custom_operation

__all__ = ["Failure", "FailureLog", "JobError", "drop_caught", "end_with", "host_call", "key_data"]

_SHOWN = 5


@dataclass(frozen=True)
class Failure:
    """A job that failed.

    Attributes
    ----------
    job
        The id of the job: the index of its item in `Pool.put`.
    rank
        The rank that computed the job, or -1 if the function failed while JAX traced it, which
        every rank does.
    kind, message, traceback
        The type name, text and traceback of the exception. If the job's result, or the Jacobian
        that travels with it, has a NaN, `kind` is "NaN" and `traceback` is empty.
    inputs
        The arguments (params, item_params, item) of the job as pytrees of NumPy arrays, or None
        if the function failed while JAX traced it.
    """

    job: int
    rank: int
    kind: str
    message: str
    traceback: str
    inputs: tuple[Any, Any, Any] | None

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.rank >= 0 else "every rank"
        lines = [f"job {self.job} on {where}: {self.kind}: {self.message}"]
        lines += [f"    {line}" for line in self.traceback.splitlines()]
        if self.inputs is not None:
            names = ("params", "item_params", "item")
            lines += [
                f"    {name} = {_short(value)}"
                for name, value in zip(names, self.inputs, strict=True)
            ]
        return "\n".join(lines)


class JobError(RuntimeError):
    """Failed jobs, raised on every rank.

    Attributes
    ----------
    failures
        The failures of all ranks, sorted by job id, the same on every rank.
    """

    def __init__(self, failures: Sequence[Failure], jobs: int) -> None:
        self.failures = tuple(failures)
        super().__init__(_error_text(self.failures, jobs))


def _error_text(failures: Sequence[Failure], jobs: int) -> str:
    if not failures:
        return (
            "sum: the sum over jobs is NaN, but no job's result is NaN: the jobs returned "
            "infinities of both signs. Return finite numbers from the jobs."
        )
    lines = [f"{len(failures)} of {jobs} jobs failed"]
    lines += [str(failure) for failure in failures[:_SHOWN]]
    if len(failures) > _SHOWN:
        lines.append(f"and jobs {', '.join(str(f.job) for f in failures[_SHOWN:])}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 300 else text[:300] + "…"


# ---- exceptions in functions of the host ----

# (job, type, message, traceback) of exceptions that were turned into NaNs.
_caught: collections.deque[tuple[int, str, str, str]] = collections.deque(maxlen=10_000)


def host_call(function: Callable[..., Any], like: Any, *args: Any) -> Any:
    """Call a Python function inside a job, and report its exception as the job's failure.

    Parameters
    ----------
    function
        A function of NumPy arrays that returns a pytree with the shapes and dtypes of `like`.
    like
        Pytree of arrays, or of other objects with `shape` and `dtype`, that gives the shapes and
        the floating-point dtypes of the results.
    args
        Arrays or pytrees of arrays.

    Returns
    -------
    The results, or NaN if the function raised an exception, which `JobError` then reports. Define
    derivatives by `jax.custom_jvp` or `jax.custom_vjp` if you need them.

    Raises
    ------
    TypeError
        If a dtype in `like` is not a floating-point or complex dtype, so that NaN cannot mark a
        failure.

    Notes
    -----
    Outside a job this function is `jax.pure_callback`, and exceptions are raised.

    Do not use `jax.pure_callback` itself, or checks such as equinox's `error_if`, for errors inside
    a job: their exception ends the program on one rank only. The other ranks would wait for that
    rank, so mpigrad ends the run on all ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from mpigrad import jobs
    >>> pool = jobs.pool()
    >>> data = pool.put([1.0, 4.0])
    >>> root = lambda params, item_params, item: jobs.host_call(np.sqrt, jnp.zeros(()), item)
    >>> print(pool.sum(root, data)(None))
    3.0
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), like)
    for leaf in jax.tree.leaves(like):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"host_call: expected floating-point results, because NaN marks a failure, got "
                f"dtype {leaf.dtype} in like. Return a floating-point number instead."
            )

    def call(number: Any, *args: Any) -> Any:
        try:
            result = function(*jax.tree.map(np.asarray, args))
            return jax.tree.map(_as_promised, like, result)
        except Exception as error:  # any error in the user's function is the job's failure
            if number < 0:
                raise
            text = traceback.format_exc()
            _caught.append((int(number), type(error).__name__, str(error), text))
            return jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), like)

    return jax.pure_callback(
        call, like, jnp.asarray(job_id(), "int32"), *args, vmap_method="sequential"
    )


def drop_caught() -> None:
    """Drop the recorded exceptions of earlier programs that ignored their NaNs."""
    _caught.clear()


def _as_promised(like: Any, x: Any) -> np.ndarray:
    x = np.asarray(x, like.dtype)
    if x.shape != like.shape:
        raise TypeError(
            f"host_call: expected a result of shape {like.shape} as in like, got {x.shape}. "
            "Correct the function or like."
        )
    return x


# ---- the end of a program with failed jobs ----


class FailureLog:
    """The failed jobs that ended the last program, if any."""

    failures: tuple[Failure, ...] | None = None


def end_with(
    log: FailureLog,
    data: Data,
    comm: Communicator,
    blocks: Sequence[np.ndarray],
    results: Sequence[Any],
    finite: Sequence[Any],
    params: Any,
    by_bucket: Sequence[Any],
) -> None:
    """End the program on all ranks if a result is NaN.

    Parameters
    ----------
    blocks
        For each bucket the indices of the blocks in `finite` and `by_bucket`.
    results
        The results of all jobs, the same on all ranks.
    finite
        For each bucket the mask of jobs without a NaN, shape (blocks, block), which is True for
        jobs of other ranks.
    params
        The parameters of all jobs.
    by_bucket
        For each bucket the parameters of its jobs, with leading axes (blocks, block).
    """
    bad = jnp.zeros((), bool)
    for x in results:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            bad |= jnp.any(jnp.isnan(jax.lax.stop_gradient(x)))
    operands = jax.tree.map(
        lambda x: jax.lax.stop_gradient(key_data(x)), (list(finite), params, list(by_bucket))
    )
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    rank = comm.rank
    ids = [b.jobs[b.places[indices]] for b, indices in zip(data.buckets, blocks, strict=True)]

    def collect_failures(raw: np.ndarray, mpi: MPI.Intracomm) -> np.ndarray:
        flags, params, item_params = _from_bytes(raw, types)
        caught: dict[int, list[str]] = {}
        for number, *texts in _caught:  # under vmap the first one is of the first batch member
            caught.setdefault(number, texts)
        failures: dict[int, Failure] = {}
        for b, bucket in enumerate(data.buckets):
            data_leaves = [np.asarray(x) for x in data.stacked(b, blocks[b])]
            for i, k in np.argwhere(~flags[b]):
                job = int(ids[b][i, k])
                item = bucket.item([x[i, k] for x in data_leaves])
                texts = caught.get(job, ("NaN", "in the result of the job or its Jacobian", ""))
                inputs = (params, jax.tree.map(lambda x, i=i, k=k: x[i, k], item_params[b]), item)
                failures.setdefault(job, Failure(job, rank, texts[0], texts[1], texts[2], inputs))
        every = [f for part in mpi.allgather(list(failures.values())) for f in part]
        if not every and not mpi.allreduce(int(raw[-1]), op=MPI.MAX):
            return np.zeros(1, np.uint8)
        drop_caught()
        log.failures = tuple(sorted(every, key=lambda f: f.job))
        raise JobError(log.failures, data.jobs)

    operation = custom_operation(
        collect_failures, lambda ct, mpi: ct, lambda x: jax.ShapeDtypeStruct((1,), "uint8")
    )

    def end() -> Any:
        raw = jnp.concatenate([_to_bytes(operands), bad.astype("uint8")[None]])
        return operation(raw, comm)

    jax.lax.cond(bad, mark_common_branch(end), lambda: jnp.zeros(1, "uint8"))


def key_data(x: Any) -> Any:
    """Return `x`, or the bits of random keys."""
    return x if isinstance(x.dtype, np.dtype) else jax.random.key_data(x)


def _to_bytes(tree: Any) -> Any:
    parts = [jnp.zeros(0, "uint8")]
    for leaf in jax.tree.leaves(tree):
        pair = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        x = jnp.stack([leaf.real, leaf.imag], -1) if pair else leaf
        x = x.astype("uint8") if x.dtype == bool else x
        parts.append(jax.lax.bitcast_convert_type(x, "uint8").ravel())
    return jnp.concatenate(parts)


def _from_bytes(raw: np.ndarray, types: Any) -> Any:
    leaves, offset = [], 0
    for kind in jax.tree.leaves(types):
        size = kind.size * kind.dtype.itemsize
        part = np.frombuffer(raw[offset : offset + size].tobytes(), kind.dtype)
        leaves.append(part.reshape(kind.shape))
        offset += size
    return jax.tree.unflatten(jax.tree.structure(types), leaves)
