"""Jobs that fail: found, collected from all ranks, and told to every rank."""

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
from mpigrad.jobs.context import job_number
from mpigrad.jobs.items import Data
from mpigrad.operations.carrier import mark_common_branch
from mpigrad.operations.custom import custom_operation

__all__ = ["Failure", "JobError", "Watch", "end_with", "forget", "host_call", "key_data"]

_SHOWN = 5


@dataclass(frozen=True)
class Failure:
    """A job that failed.

    Attributes
    ----------
    job, rank
        The job's number, and the rank that did it.
    kind, message, traceback
        Of the exception; "NaN", and no traceback, where the job's result, or its Jacobian where
        that travels with it, had one.
    inputs
        (shared, mine, record) of the job, of NumPy arrays.
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
            names = ("shared", "mine", "record")
            lines += [
                f"    {name} = {_short(value)}"
                for name, value in zip(names, self.inputs, strict=True)
            ]
        return "\n".join(lines)


class JobError(RuntimeError):
    """Jobs have failed; `failures` are all of them, on every rank."""

    def __init__(self, failures: Sequence[Failure], jobs: int) -> None:
        self.failures = tuple(failures)
        super().__init__(_told(self.failures, jobs))


def _told(failures: Sequence[Failure], jobs: int) -> str:
    if not failures:
        return "the sum over jobs is NaN, though no job gives one: infinities of both signs"
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
    """Call a Python function inside a job; an exception in it is the job's failure.

    Parameters
    ----------
    function
        Of NumPy arrays; it returns what `like` promises.
    like
        Pytree of things with the shape and the floating-point dtype of the results.
    args
        Arrays or pytrees.

    Returns
    -------
    The results; NaN where the function raised an exception, which then is told by `JobError`. It
    has no derivative: give one by `jax.custom_jvp` or `jax.custom_vjp`.

    Notes
    -----
    Outside a job it is a `jax.pure_callback`: exceptions are raised.

    An exception in a `jax.pure_callback`, or of a check such as equinox's `error_if`, ends the
    program on one rank alone, for which the others would wait: the whole run is ended.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), like)
    for leaf in jax.tree.leaves(like):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"host_call: a result of dtype {leaf.dtype} can't tell a failure by NaN"
            )

    def call(number: Any, *args: Any) -> Any:
        try:
            result = function(*jax.tree.map(np.asarray, args))
            return jax.tree.map(_as_promised, like, result)
        except Exception as error:  # whatever it is, it belongs to the job
            if number < 0:
                raise
            text = traceback.format_exc()
            _caught.append((int(number), type(error).__name__, str(error), text))
            return jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), like)

    return jax.pure_callback(
        call, like, jnp.asarray(job_number(), "int32"), *args, vmap_method="sequential"
    )


def forget() -> None:
    """Forget exceptions of earlier programs, whose NaNs nobody has asked about."""
    _caught.clear()


def _as_promised(like: Any, x: Any) -> np.ndarray:
    x = np.asarray(x, like.dtype)
    if x.shape != like.shape:
        raise TypeError(f"a result of shape {x.shape} where {like.shape} was promised")
    return x


# ---- the end of a program with failed jobs ----


class Watch:
    """The failed jobs that have ended a program, if any."""

    failures: tuple[Failure, ...] | None = None


def end_with(
    watch: Watch,
    data: Data,
    comm: Communicator,
    blocks: Sequence[np.ndarray],
    results: Sequence[Any],
    whole: Sequence[Any],
    shared: Any,
    per_job: Sequence[Any],
) -> None:
    """End the program, on all ranks alike, where a result is NaN.

    Parameters
    ----------
    blocks
        For each bucket the blocks that `whole` and `per_job` are about.
    results
        What all ranks have, of all jobs.
    whole
        For each bucket which jobs have no NaN, shape (blocks, block); true for other ranks' jobs.
    shared
        What all jobs have.
    per_job
        For each bucket what its jobs have, with leading axes (blocks, block).
    """
    bad = jnp.zeros((), bool)
    for x in results:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            bad |= jnp.any(jnp.isnan(jax.lax.stop_gradient(x)))
    operands = jax.tree.map(
        lambda x: jax.lax.stop_gradient(key_data(x)), (list(whole), shared, list(per_job))
    )
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    rank = comm.rank
    numbers = [b.jobs[b.places[own]] for b, own in zip(data.buckets, blocks, strict=True)]

    def tell(raw: np.ndarray, mpi: MPI.Intracomm) -> np.ndarray:
        flags, shared, mine = _from_bytes(raw, types)
        caught: dict[int, list[str]] = {}
        for number, *told in _caught:  # under vmap the first one is of the first batch member
            caught.setdefault(number, told)
        failures: dict[int, Failure] = {}
        for b, bucket in enumerate(data.buckets):
            record_leaves = [np.asarray(x) for x in data.stacked(b, blocks[b])]
            for i, k in np.argwhere(~flags[b]):
                job = int(numbers[b][i, k])
                record = bucket.record([x[i, k] for x in record_leaves])
                told = caught.get(job, ("NaN", "in the result of the job or its Jacobian", ""))
                inputs = (shared, jax.tree.map(lambda x, i=i, k=k: x[i, k], mine[b]), record)
                failures.setdefault(job, Failure(job, rank, told[0], told[1], told[2], inputs))
        every = [f for part in mpi.allgather(list(failures.values())) for f in part]
        if not every and not mpi.allreduce(int(raw[-1]), op=MPI.MAX):
            return np.zeros(1, np.uint8)
        forget()
        watch.failures = tuple(sorted(every, key=lambda f: f.job))
        raise JobError(watch.failures, data.jobs)

    operation = custom_operation(
        tell, lambda ct, mpi: ct, lambda x: jax.ShapeDtypeStruct((1,), "uint8")
    )

    def end() -> Any:
        raw = jnp.concatenate([_to_bytes(operands), bad.astype("uint8")[None]])
        return operation(raw, comm)

    jax.lax.cond(bad, mark_common_branch(end), lambda: jnp.zeros(1, "uint8"))


def key_data(x: Any) -> Any:
    """`x`, or the bits of random keys."""
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
