"""Dynamic distribution of blocks of jobs to free ranks, from a queue on rank 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.extend import at_exit
from mpigrad.jobs.evaluation import assembled, rows, sealed
from mpigrad.jobs.failures import FailureLog, end_with
from mpigrad.jobs.items import Data, JobFunction, apart, result_types
from mpigrad.operations import allreduce, custom_operation

__all__ = ["Queue", "evaluate_dynamically"]

_ASK, _ANSWER = 1, 2


class Queue:
    """A queue that gives the next block of an evaluation to any rank that asks.

    On rank 0 a thread answers, while rank 0 itself may compute. Evaluations have ids, which are the
    same on all ranks because all ranks run the same evaluations in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.mpi = MPI.Intracomm(comm.mpi).Dup()
        self.evaluations = 0
        self._next: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if self.rank == 0 and self.size > 1:
            self._thread = threading.Thread(target=self._answer, daemon=True, name="mpigrad-jobs")
            self._thread.start()
            at_exit(self.stop)
        self.begin = custom_operation(self._begin, lambda ct, mpi: ct)
        self.next = custom_operation(self._ask, lambda ct, mpi: ct)

    def stop(self) -> None:
        """Stop the thread that answers."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, x: np.ndarray, mpi: MPI.Intracomm) -> np.ndarray:
        if self._stopped.is_set():
            raise RuntimeError(
                "map or sum: the pool is closed, and with it the queue of the Dynamic schedule. "
                "Call the function before Pool.close."
            )
        self.evaluations += 1
        return np.full_like(x, self.evaluations)

    def _ask(self, x: np.ndarray, mpi: MPI.Intracomm) -> np.ndarray:
        """Return the next block of (evaluation, bucket) as (block, bucket)."""
        answer = np.empty(1, np.int64)
        if self.rank == 0:
            answer[0] = self._take(int(x[0]), int(x[1]))
        else:
            self.mpi.Send(x.astype(np.int64), 0, _ASK)
            self.mpi.Recv(answer, 0, _ANSWER)
        return np.array([answer[0], x[1]], x.dtype)

    def _take(self, evaluation: int, bucket: int) -> int:
        with self._lock:
            # Each rank starts with the block whose index is the rank.
            block = self._next.get((evaluation, bucket), self.size)
            self._next[evaluation, bucket] = block + 1
            for old in [key for key in self._next if key[0] < evaluation - 1]:
                del self._next[old]
        return block

    def _answer(self) -> None:
        status, question, idle = MPI.Status(), np.empty(2, np.int64), 0
        while not self._stopped.is_set():
            if not self.mpi.Iprobe(MPI.ANY_SOURCE, _ASK, status):
                idle += 1
                time.sleep(2e-5 if idle < 5000 else 2e-3)
                continue
            idle = 0
            self.mpi.Recv(question, status.source, _ASK)
            answer = np.array([self._take(int(question[0]), int(question[1]))])
            self.mpi.Send(answer, status.source, _ANSWER)


def evaluate_dynamically(
    job: JobFunction,
    params: Any,
    by_bucket: Sequence[Any],
    data: Data,
    comm: Communicator,
    queue: Queue,
    log: FailureLog | None = None,
) -> tuple[Any, list[Any]]:
    """Compute `job` for all items, as `evaluate` does, but without derivatives."""
    evaluation = queue.begin(jnp.zeros(1, "int32"), comm)[0]
    outputs: list[Any] = []
    finite, inputs, structures = [], [], []
    for b, (bucket, bucket_params) in enumerate(zip(data.buckets, by_bucket, strict=True)):
        types = result_types(job, bucket, params, bucket_params)
        added, kept = types
        structures.append(jax.tree.structure(types))
        shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(added)]
        shapes += [((bucket.block, *x.shape), x.dtype) for x in jax.tree.leaves(kept)]
        item_params = jax.tree.map(lambda x, p=bucket.places: rows(x, p), bucket_params)
        inputs.append(item_params)
        operands = (
            item_params,
            bucket.item(data.stacked(b, np.arange(bucket.blocks))),
            jnp.asarray(bucket.counts),
            jnp.asarray(bucket.jobs[bucket.places].astype("int32")),
        )
        start = (
            jnp.asarray(comm.rank, "int32"),
            [jnp.zeros((bucket.blocks, *s), d) for s, d in shapes],
            jnp.ones((bucket.blocks, bucket.block), bool),
        )

        def step(state: Any, operands: Any = operands, b: int = b) -> Any:
            block, buffers, ok = state
            chosen = jax.tree.map(lambda x: x[block], operands)
            *results, fine = apart(job, params, *chosen)
            leaves = jax.tree.leaves(results)
            buffers = [x.at[block].set(y) for x, y in zip(buffers, leaves, strict=True)]
            following = queue.next(jnp.stack([evaluation, jnp.asarray(b, "int32")]), comm)[0]
            return following, buffers, ok.at[block].set(fine)

        _, buffers, ok = jax.lax.while_loop(
            lambda state, n=bucket.blocks: state[0] < n, step, start
        )
        outputs += buffers
        finite.append(ok)
    results = assembled(data.buckets, structures, sealed(_merged(outputs, comm)))
    if log is not None:
        blocks = [np.arange(bucket.blocks) for bucket in data.buckets]
        end_with(log, data, comm, blocks, jax.tree.leaves(results), finite, params, inputs)
    return results


def _merged(buffers: Sequence[Any], comm: Communicator) -> list[Any]:
    """Take each entry from the rank that computed it, by a sum of bits that are zero elsewhere."""
    if comm.size == 1:
        return list(buffers)

    def bits(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = jnp.stack([x.real, x.imag], -1)
        if x.dtype == bool:
            return x.astype("uint8")
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    def value(x: Any, like: Any) -> Any:
        if like.dtype == bool:
            return x.astype(bool)
        if not jnp.issubdtype(like.dtype, jnp.complexfloating):
            return jax.lax.bitcast_convert_type(x, like.dtype)
        pair = jax.lax.bitcast_convert_type(x, like.real.dtype)
        return jax.lax.complex(pair[..., 0], pair[..., 1])

    sums = allreduce([bits(x) for x in buffers], comm=comm)
    return [value(x, like) for x, like in zip(sums, buffers, strict=True)]
