"""Pools of ranks, and the functions that they compute."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.jobs.blocks import compute_block
from mpigrad.jobs.context import Job, UserJob, inside_job
from mpigrad.jobs.derivatives import Derivatives
from mpigrad.jobs.dynamic import Queue, evaluate_dynamically
from mpigrad.jobs.evaluation import Team, evaluate
from mpigrad.jobs.failures import Failure, JobError, Watch, forget, key_data
from mpigrad.jobs.functions import Whole, compute
from mpigrad.jobs.items import Data, Store
from mpigrad.jobs.schedules import Schedule, Static
from mpigrad.operations.checks import assert_replicated
from mpigrad.operations.jit import jit

__all__ = ["Pool", "pool"]

OnError = Literal["raise", "nan"]
_BESIDE = "mpigrad-jobs"  # the thread of what was started


class Pool:
    """Ranks that do jobs together; made by `pool`."""

    def __init__(self, comm: Communicator, schedule: Schedule, on_error: OnError) -> None:
        if on_error not in ("raise", "nan"):
            raise ValueError(f'pool: on_error={on_error!r}: it is "raise" or "nan"')
        self.comm, self.schedule, self.on_error = comm, schedule, on_error
        self._store, self._watch = Store(comm), Watch()
        self._queue: Queue | None = None
        self._beside: ThreadPoolExecutor | None = None
        self._started: Future[Any] | None = None  # the last

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failed jobs that ended the last program, also one of the user's own."""
        return self._watch.failures or ()

    def put(
        self,
        records: Any,
        *,
        schedule: Schedule | None = None,
        block: int | None = None,
        everywhere: bool = False,
    ) -> Data:
        """Share records out over the ranks, on whose devices they stay (collective).

        Parameters
        ----------
        records
            A list of pytrees of arrays, one for each job. Shapes may differ between jobs: those
            with equal shapes form a bucket. Rank 0's are sent; other ranks give the same, which is
            checked, or None.
        schedule
            Which rank does which jobs; default: the pool's.
        block
            Jobs in a block: what is computed together by `vmap`, given to a rank, and added up,
            whatever the number of ranks. Default: of each bucket a sixteenth, at most 64.
        everywhere
            Whether every rank keeps all records, which functions that are used inside a job need.

        Returns
        -------
        The data that `map` and `sum` take: a snapshot, later changes of `records` do not reach
        it. Put changed records again: blocks are known by digests of their contents, and only
        those that a rank does not have are sent.

        Raises
        ------
        TypeError, ValueError
            On every rank: what cannot be a record, and records that differ between ranks.
        """
        if block is not None and block < 1:
            raise ValueError(f"put: block={block} must be at least 1")
        self._settle()
        data = self._store.put(records, schedule or self.schedule, block, everywhere)
        if data.dynamic and self._queue is None:
            self._queue = Queue(self.comm)
        return data

    def map(
        self, fn: Callable[..., Any], data: Data, *, derivatives: Derivatives | None = None
    ) -> Callable[..., Any]:
        """A function (shared, per_job=None) -> the results of all jobs, in their order.

        Parameters
        ----------
        fn
            (shared, mine, record) -> pytree: one job, in JAX, without messages. `mine` is the
            job's part of `per_job`, None where that is None.
        data
            Of `put`.
        derivatives
            How derivatives travel. "jacobian": with the results, in one message; then no
            derivative sends anything. "adjoint": cotangents to the owner of the job, which has
            kept what it needs, and gradients back. Default: "jacobian" for jobs whose result is
            one real number, else "adjoint", which moves fewer numbers.

        Returns
        -------
        A compiled function, called by all ranks with the same arguments, under any of JAX's
        transformations: `shared` is a pytree that all jobs get, `per_job` one with a leading axis
        over the jobs. Results have that axis; where jobs have results of different shapes, they
        are a list. On every rank they are the same, and so are gradients by plain `jax.grad`.
        """
        return self._function(Whole(fn, False, derivatives), data)

    def sum(
        self, fn: Callable[..., Any], data: Data, *, derivatives: Derivatives | None = None
    ) -> Callable[..., Any]:
        """A function (shared, per_job=None) -> the sum of the results of all jobs.

        As `map`, with results of one shape, which are added up within blocks, and then in the order
        of blocks; truth values are counted. Without any job the sum is 0.
        """
        return self._function(Whole(fn, True, derivatives), data)

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Begin `function(*args)`, and go on: `.result()` of what is returned waits for the value.

        The ranks compute while this one does other things; its own part of the jobs is done by a
        thread beside them. All ranks start the same, in the same order (where the root drives, the
        root alone), and send no message of their own before they ask for the result. What else the
        pool does waits until the value is there; but a program of your own (`jax.jit` of more
        than the pool's function) that is compiled already does not: ask for the result before you
        call it.
        """
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, _BESIDE)
        x64 = jax.config.read("jax_enable_x64")

        def compute() -> Any:
            with jax.enable_x64(x64):  # as here, also where that is a context
                return jax.block_until_ready(function(*args))

        self._started = self._beside.submit(compute)
        return self._started

    def _settle(self) -> None:
        """Let what was started end first: its messages and the next ones would mix."""
        if inside_job():
            raise ValueError(
                "put or measure inside a job: the other ranks are busy with other jobs"
            )
        if self._started is not None and not threading.current_thread().name.startswith(_BESIDE):
            wait([self._started])
            self._started = None

    def measure(
        self, fn: Callable[..., Any], data: Data, shared: Any, per_job: Any = None
    ) -> np.ndarray:
        """The seconds that each job takes, for `Weighted` (collective; the same on all ranks).

        Each rank runs its blocks twice and takes the shorter time, a job's share of its block's.
        """
        self._settle()
        shared, per_job = jax.tree.map(jnp.asarray, (shared, per_job))
        _check(per_job, data.jobs, fn)
        compiled = jax.jit(functools.partial(compute_block, UserJob(fn, False)))
        seconds = np.zeros(data.jobs)
        with raise_on_all_ranks(self.comm):
            for b, bucket in enumerate(data.buckets):
                for block in data.owned(bucket, self.comm.rank):
                    jobs = bucket.jobs[bucket.places[block]]
                    mine = jax.tree.map(lambda x, jobs=jobs: x[jobs], per_job)
                    record = [x[0] for x in data.stacked(b, np.array([block]))]
                    counts = bucket.counts[block]
                    operands = shared, mine, bucket.record(record), counts, jobs.astype("int32")
                    jax.block_until_ready(compiled(*operands))  # compiles
                    best = min(_seconds(compiled, operands) for _ in range(2))
                    seconds[jobs[counts]] = best / counts.sum()
        return np.asarray(self.comm.mpi.allreduce(seconds))

    def _evaluate(self, data: Data, alone: bool, job: Job, shared: Any, per_job: Any) -> Any:
        if alone and not data.everywhere and self.comm.size > 1:  # even if this rank has them all
            raise ValueError(
                "these records are kept on several ranks: to use them inside a job, put them on "
                "all ranks, pool.put(records, everywhere=True)"
            )
        watch = self._watch if self.on_error == "raise" else None
        if data.dynamic and not alone and self._queue is not None:
            return evaluate_dynamically(job, shared, per_job, data, self.comm, self._queue, watch)
        return evaluate(job, shared, per_job, Team(data, None if alone else self.comm), watch)

    def _transparent(self, data: Data, alone: bool) -> bool:
        """Whether JAX differentiates `_evaluate` as it is."""
        return alone or not data.dynamic

    def _check_arguments(self, arguments: Any) -> None:
        if os.environ.get("MPIGRAD_GUARD") == "1":
            arguments = [key_data(x) for x in jax.tree.leaves(arguments)]
            assert_replicated(arguments, self.comm, "an argument of a pool's function")

    def _function(self, whole: Whole, data: Data) -> Callable[..., Any]:
        def program(shared: Any, per_job: Any, alone: bool) -> Any:
            evaluate_ = functools.partial(self._evaluate, data, alone)
            transparent = self._transparent(data, alone)
            # By itself a rank has nothing to send, and JAX sees through the whole.
            how = dataclasses.replace(whole, derivatives="adjoint") if alone else whole
            return compute(how, data.buckets, shared, per_job, evaluate_, transparent)

        if data.comm.slot != self.comm.slot:
            raise ValueError(
                "these records were put by a pool of other ranks; put them by this one"
            )
        compiled = jit(program, static_argnums=2)

        @functools.wraps(whole.fn)
        def function(shared: Any, per_job: Any = None) -> Any:
            shared, per_job = jax.tree.map(jnp.asarray, (shared, per_job))
            _check(per_job, data.jobs, whole.fn)
            if data.jobs == 0:
                return jnp.zeros(()) if whole.total else []
            alone = inside_job()
            if not alone:
                self._settle()
                self._check_arguments((shared, per_job))
            self._watch.failures = None
            forget()
            try:
                return compiled(shared, per_job, alone)
            except jax.errors.JaxRuntimeError:
                if self._watch.failures is None:
                    raise
                raise JobError(self._watch.failures, data.jobs) from None

        return function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads of this pool; functions of data with the dynamic schedule end, too."""
        if self._beside is not None:
            self._beside.shutdown()  # waits for what was started
        if self._queue is not None:
            self._queue.stop()


def _seconds(f: Callable[..., Any], operands: Any) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(f(*operands))
    return time.perf_counter() - begun


def _check(per_job: Any, jobs: int, fn: Callable[..., Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(per_job):
        if jnp.shape(leaf)[:1] != (jobs,):
            name = getattr(fn, "__name__", "the function")
            raise ValueError(
                f"{name}: per_job{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; its "
                f"leading axis must have one entry for each of the {jobs} jobs that were put"
            )


def pool(
    comm: Communicator | None = None,
    *,
    schedule: Schedule = Static(),  # noqa: B008  frozen
    on_error: OnError = "raise",
) -> Pool:
    """The ranks of `comm` as a pool for jobs (every rank runs the program, and calls this).

    Parameters
    ----------
    comm
        The ranks; default: the default communicator.
    schedule
        Which rank does which jobs, unless `put` says otherwise.
    on_error
        "raise": a job that fails, or gives a NaN, ends the call with a `JobError` on every rank.
        "nan": its results are NaN.

    Inside a job (of another pool) a pool's functions are computed by the rank alone.
    """
    return Pool(resolve(comm), schedule, on_error)
