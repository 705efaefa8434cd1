"""Pools of ranks, and the functions that they compute."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import as_array
from mpigrad.jobs.derivatives import Derivatives, Evaluate, with_adjoint, with_jacobian
from mpigrad.jobs.dynamic import Queue, evaluate_dynamically
from mpigrad.jobs.evaluation import BlockAssignment, evaluate
from mpigrad.jobs.failures import Failure, FailureLog, JobError, drop_caught, key_data
from mpigrad.jobs.items import (
    BlockStore,
    Bucket,
    Data,
    JobFunction,
    UserJob,
    compute_block,
    inside_job,
    result_types,
)
from mpigrad.jobs.schedules import Schedule, Static
from mpigrad.operations import assert_replicated, jit

__all__ = [
    "MapSpec",
    "Pool",
    "compute",
    "pool",
]

# ---- The functions of a pool: the results of all jobs in order, or their sum ----


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


# ---- Pools of ranks, and the functions that they compute ----


_THREAD = "mpigrad-jobs"  # the thread that runs started evaluations


class Pool:
    """The ranks of a communicator that compute jobs together, made by `pool`.

    Attributes
    ----------
    comm
        The communicator.
    schedule
        The schedule of `put` if it is given none.
    throw
        True if a failed job raises `JobError`, False if its results are NaN.

    Examples
    --------
    >>> from mpigrad import jobs
    >>> with jobs.pool() as pool:
    ...     data = pool.put([1.0, 2.0, 3.0])
    ...     f = pool.map(lambda params, item_params, item: params * item, data)
    ...     print(f(2.0))
    [2. 4. 6.]
    """

    def __init__(self, comm: Communicator, schedule: Schedule, throw: bool = True) -> None:
        self.comm, self.schedule, self.throw = comm, schedule, throw
        self._store, self._failure_log = BlockStore(comm), FailureLog()
        self._queue: Queue | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._started: Future[Any] | None = None  # the last one

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failed jobs that ended the last program, also if you compiled it yourself."""
        return self._failure_log.failures or ()

    def put(
        self,
        items: Any,
        *,
        schedule: Schedule | None = None,
        block: int | None = None,
        everywhere: bool = False,
    ) -> Data:
        """Distribute items over the ranks, which keep them on their devices (collective).

        Parameters
        ----------
        items
            A list of pytrees of arrays, one for each job. Shapes may differ between items; items of
            equal shapes form a bucket. Rank 0 sends its items. Other ranks pass None or the same
            items, which is checked.
        schedule
            The rule that gives jobs to ranks (default: the pool's schedule).
        block
            Count of jobs in a block. A block is the unit that `vmap` computes, that a rank owns,
            and that sums are made of, on any number of ranks. Default: a sixteenth of each bucket,
            at most 64.
        everywhere
            True to keep all items on every rank. Functions that are called inside a job need it.

        Returns
        -------
        The data for `map` and `sum`. It is a snapshot, which later changes of `items` do not
        change. To use changed items, put them again: blocks are identified by digests of their
        contents, and only blocks that a rank lacks are sent.

        Raises
        ------
        TypeError, ValueError
            On every rank, if `items` is not a list of pytrees of numeric arrays, if the arguments
            differ between ranks, or if `block` is less than 1.
        """
        if block is not None and block < 1:
            raise ValueError(f"put: block must be at least 1, got {block}. Pass a positive count.")
        self._settle()
        data = self._store.put(items, schedule or self.schedule, block, everywhere)
        if data.dynamic and self._queue is None:
            self._queue = Queue(self.comm)
        return data

    def map(
        self, fn: Callable[..., Any], data: Data, *, derivatives: Derivatives | None = None
    ) -> Callable[..., Any]:
        """Return a function `f(params, item_params=None)` that gives the results of all jobs.

        Parameters
        ----------
        fn
            The function of one job, `fn(params, item_params, item)`, which returns a pytree. It
            is written in JAX and sends no messages. Its `item_params` is the entry of this job,
            or None if `f` is called without.
        data
            The items, as `put` returned them.
        derivatives
            How derivatives travel. "jacobian": with the results, in one message, and derivatives
            then send nothing. "adjoint": cotangents travel to the owner of the job, which has the
            residuals, and gradients travel back. Default: "jacobian" if the result of a job is one
            real number, else "adjoint", which moves fewer numbers.

        Returns
        -------
        A compiled function that all ranks call with the same arguments, under any transformation
        of JAX. Its `params` is a pytree that all jobs get, and its `item_params` a pytree with a
        leading axis over the jobs. The results are stacked along a leading axis in the order of
        the items, or a list if their shapes differ between jobs. They are the same on every rank,
        and so are gradients by plain `jax.grad`.

        Raises
        ------
        JobError
            From the returned function, on every rank, if a job fails (see `pool`).
        ValueError
            If a leading axis in `item_params` is not the count of jobs, or if `data` belongs to a
            pool of another communicator.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from mpigrad import jobs
        >>> pool = jobs.pool()
        >>> data = pool.put([1.0, 2.0, 3.0])
        >>> f = pool.map(lambda params, item_params, item: params * item + item_params, data)
        >>> print(f(2.0, jnp.array([0.0, 10.0, 20.0])))
        [ 2. 14. 26.]
        """
        return self._function(MapSpec(fn, False, derivatives), data)

    def sum(
        self, fn: Callable[..., Any], data: Data, *, derivatives: Derivatives | None = None
    ) -> Callable[..., Any]:
        """Return a function `f(params, item_params=None)` that sums the results of all jobs.

        Parameters, returned function and errors are those of `map`. The results of all jobs must
        have the same shapes. They are summed within blocks, and then in the order of blocks.
        Booleans are counted. Without any job the sum is 0.

        Examples
        --------
        >>> import jax
        >>> from mpigrad import jobs
        >>> pool = jobs.pool()
        >>> data = pool.put([1.0, 2.0, 3.0])
        >>> f = pool.sum(lambda params, item_params, item: params**2 * item, data)
        >>> value, gradient = jax.value_and_grad(f)(2.0)
        >>> print(value, gradient)
        24.0 24.0
        """
        return self._function(MapSpec(fn, True, derivatives), data)

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start `function(*args)` in a thread and return a `concurrent.futures.Future`.

        Call `.result()` of the returned future to wait for the value. Meanwhile the program may do
        other work. All ranks start the same functions in the same order (in a pool of `root_pool`,
        the root only), and must not send messages before they have called `.result()`.

        Later calls of the pool wait until the value is there. A compiled function of your own that
        calls the pool (`jax.jit` of more than the pool's function) does not wait: call `.result()`
        before you call such a function.

        Examples
        --------
        >>> from mpigrad import jobs
        >>> with jobs.pool() as pool:
        ...     f = pool.sum(lambda params, item_params, item: params * item, pool.put([1.0, 2.0]))
        ...     future = pool.start(f, 3.0)
        ...     print(future.result())
        9.0
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, _THREAD)
        x64 = jax.config.read("jax_enable_x64")

        def compute() -> Any:
            with jax.enable_x64(x64):  # the caller's setting, which may be that of a context
                return jax.block_until_ready(function(*args))

        self._started = self._executor.submit(compute)
        return self._started

    def _settle(self) -> None:
        """Wait for a started evaluation, whose messages must not mix with the next ones."""
        if inside_job():
            raise ValueError(
                "put, measure: cannot be called inside a job, because the other ranks are busy "
                "with other jobs. Call them before or after the map."
            )
        if self._started is not None and not threading.current_thread().name.startswith(_THREAD):
            wait([self._started])
            self._started = None

    def measure(
        self, fn: Callable[..., Any], data: Data, params: Any, item_params: Any = None
    ) -> np.ndarray:
        """Measure the time of each job in seconds, for `Weighted` (collective).

        Each rank runs each of its blocks twice, takes the shorter time, and divides it by the
        count of jobs in the block.

        Parameters
        ----------
        fn, data
            As for `map`.
        params, item_params
            The arguments of the function that `map` returns.

        Returns
        -------
        The seconds, shape (jobs,), the same on all ranks.

        Examples
        --------
        >>> from mpigrad import jobs
        >>> pool = jobs.pool()
        >>> fn = lambda params, item_params, item: params * item
        >>> pool.measure(fn, pool.put([1.0, 2.0]), 3.0).shape
        (2,)
        """
        self._settle()
        params, item_params = jax.tree.map(as_array, (params, item_params))
        _check(item_params, data.jobs, fn)
        compiled = jax.jit(functools.partial(compute_block, UserJob(fn, False)))
        seconds = np.zeros(data.jobs)
        with raise_on_all_ranks(self.comm):
            for b, bucket in enumerate(data.buckets):
                for block in data.owned(bucket, self.comm.rank):
                    jobs = bucket.jobs[bucket.places[block]]
                    block_params = jax.tree.map(lambda x, jobs=jobs: x[jobs], item_params)
                    item = bucket.item([x[0] for x in data.stacked(b, np.array([block]))])
                    counts = bucket.counts[block]
                    operands = params, block_params, item, counts, jobs.astype("int32")
                    jax.block_until_ready(compiled(*operands))  # compiles
                    best = min(_seconds(compiled, operands) for _ in range(2))
                    seconds[jobs[counts]] = best / counts.sum()
        return np.asarray(self.comm.mpi.allreduce(seconds))

    def _evaluate(
        self, data: Data, alone: bool, job: JobFunction, params: Any, by_bucket: Any
    ) -> Any:
        if alone and not data.everywhere and self.comm.size > 1:  # even if this rank has them all
            raise ValueError(
                "map or sum: a function that is called inside a job needs all items on every "
                "rank, but these are distributed. Put them by pool.put(items, everywhere=True)."
            )
        log = self._failure_log if self.throw else None
        if data.dynamic and not alone and self._queue is not None:
            return evaluate_dynamically(job, params, by_bucket, data, self.comm, self._queue, log)
        assignment = BlockAssignment(data, None if alone else self.comm)
        return evaluate(job, params, by_bucket, assignment, log)

    def _transparent(self, data: Data, alone: bool) -> bool:
        """Return True if JAX can differentiate `_evaluate` directly."""
        return alone or not data.dynamic

    def _check_arguments(self, arguments: Any) -> None:
        if os.environ.get("MPIGRAD_GUARD") == "1":
            arguments = [key_data(x) for x in jax.tree.leaves(arguments)]
            assert_replicated(arguments, self.comm, what="an argument of a pool's function")

    def _function(self, spec: MapSpec, data: Data) -> Callable[..., Any]:
        def program(params: Any, item_params: Any, alone: bool) -> Any:
            evaluate_ = functools.partial(self._evaluate, data, alone)
            transparent = self._transparent(data, alone)
            # A rank alone sends nothing, and JAX can differentiate all of it.
            how = dataclasses.replace(spec, derivatives="adjoint") if alone else spec
            return compute(how, data.buckets, params, item_params, evaluate_, transparent)

        if data.comm.slot != self.comm.slot:
            raise ValueError(
                f"{'sum' if spec.total else 'map'}: the data belong to a pool of other ranks. "
                "Put the items by this pool."
            )
        compiled = jit(program, static_argnums=2)

        @functools.wraps(spec.fn)
        def function(params: Any, item_params: Any = None) -> Any:
            params, item_params = jax.tree.map(as_array, (params, item_params))
            _check(item_params, data.jobs, spec.fn)
            if data.jobs == 0:
                return jnp.zeros(()) if spec.total else []
            alone = inside_job()
            if not alone:
                self._settle()
                self._check_arguments((params, item_params))
            self._failure_log.failures = None
            drop_caught()
            try:
                return compiled(params, item_params, alone)
            except jax.errors.JaxRuntimeError:
                if self._failure_log.failures is None:
                    raise
                raise JobError(self._failure_log.failures, data.jobs) from None

        return function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads of this pool, also the queue that functions of dynamic data need."""
        if self._executor is not None:
            self._executor.shutdown()  # waits for started evaluations
        if self._queue is not None:
            self._queue.stop()


def _seconds(f: Callable[..., Any], operands: Any) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(f(*operands))
    return time.perf_counter() - begun


def _check(item_params: Any, jobs: int, fn: Callable[..., Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(item_params):
        if jnp.shape(leaf)[:1] != (jobs,):
            name = getattr(fn, "__name__", "the function")
            raise ValueError(
                f"{name}: expected item_params with a leading axis of length {jobs}, one entry "
                f"for each item, got shape {jnp.shape(leaf)} at "
                f"item_params{jax.tree_util.keystr(path)}. Stack one entry for each item."
            )


def pool(
    comm: Communicator | None = None,
    *,
    schedule: Schedule = Static(),  # noqa: B008  frozen
    throw: bool = True,
) -> Pool:
    """Make a pool of the ranks of a communicator, which compute jobs together (collective).

    Every rank runs the whole program and calls the functions of the pool with the same arguments.
    See `root_pool` for a program that only rank 0 runs.

    Parameters
    ----------
    comm
        The communicator (default: the default communicator).
    schedule
        The rule that gives jobs to ranks, if `put` is given none: `Static`, `Weighted` or
        `Dynamic`.
    throw
        True: a job that raises an exception or returns a NaN ends the call with a `JobError` on
        every rank. False: the results of the failed job are NaN, in `sum` the sum is NaN, and the
        results of the other jobs are returned. Check them by `jnp.isnan`.

    Notes
    -----
    Inside a job of another pool, each rank computes a pool's functions alone, without messages.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import jobs
    >>> pool = jobs.pool(throw=False)
    >>> f = pool.map(lambda params, item_params, item: jnp.sqrt(item), pool.put([4.0, -1.0]))
    >>> print(f(None))
    [ 2. nan]
    """
    return Pool(resolve(comm), schedule, throw)
