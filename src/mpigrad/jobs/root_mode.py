"""Pools for a program that only the root runs, while the other ranks serve it.

When the root traces an evaluation, it sends its definition to the other ranks. When a compiled
program of the root reaches the evaluation, it sends the id, and then all ranks run the same
messages. So the root may use its functions under jit, grad, scan and in loops of any length, and
the other ranks need not know the program around them.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import BlockingCall, Communicator, resolve
from mpigrad.jobs.failures import drop_caught
from mpigrad.jobs.items import Data, JobFunction
from mpigrad.jobs.pool import Pool
from mpigrad.jobs.schedules import Schedule, Static
from mpigrad.operations import bcast, custom_operation, jit

__all__ = ["root_pool"]

_TAG = 1
_active: set[int] = set()  # slots of communicators for which this rank is inside a root_pool
_NAPS = (1e-5, 1e-3)  # seconds between two probes, soon after a message and later


@dataclass(frozen=True)
class _Put:
    block: int | None
    schedule: Schedule
    everywhere: bool


@dataclass(frozen=True)
class _Define:
    """An evaluation by its id: a job, the index of its data, and the types of its arguments."""

    number: int
    job: JobFunction
    data: int
    types: Any


@dataclass(frozen=True)
class _Run:
    number: int


@dataclass(frozen=True)
class _Measure:
    fn: Callable[..., Any]
    data: int
    arguments: Any


class RootPool(Pool):
    """The pool that `root_pool` returns on the root."""

    def __init__(
        self,
        comm: Communicator,
        functions: Sequence[Callable[..., Any]],
        schedule: Schedule,
        throw: bool,
    ) -> None:
        super().__init__(comm, schedule, throw)
        self._functions = functions
        self._channel = MPI.Intracomm(comm.mpi).Dup()
        self._serving = True
        self._data: list[Data] = []
        self._evaluations = 0
        self._run = custom_operation(self._announce, lambda ct, mpi: ct)

    # ---- the root ----

    def _tell(self, message: Any) -> None:
        if not self._serving:
            raise RuntimeError(
                "root_pool: the other ranks have stopped serving, because the with block has "
                "ended. Call functions of the pool inside the block."
            )
        if self.comm.size == 1:
            return
        parcel = io.BytesIO()
        try:
            _Pickler(parcel, self._functions).dump(message)
        except Exception as error:
            raise TypeError(
                f"root_pool: the function of a job cannot be sent to the other ranks: {error}. "
                "Pass it to root_pool(function, ...) on all ranks, or define it at the top level "
                "of a module."
            ) from error
        for rank in range(1, self.comm.size):
            self._channel.Send([parcel.getvalue(), MPI.BYTE], rank, _TAG)

    def _announce(self, x: np.ndarray, mpi: MPI.Intracomm) -> np.ndarray:
        self._tell(_Run(int(x[0])))
        return x

    def put(
        self,
        items: Any,
        *,
        schedule: Schedule | None = None,
        block: int | None = None,
        everywhere: bool = False,
    ) -> Data:
        self._settle()
        self._tell(_Put(block, schedule or self.schedule, everywhere))
        data = super().put(items, schedule=schedule, block=block, everywhere=everywhere)
        self._data.append(data)
        return data

    def measure(
        self, fn: Callable[..., Any], data: Data, params: Any, item_params: Any = None
    ) -> np.ndarray:
        self._settle()
        arguments = jax.device_get((params, item_params))
        self._tell(_Measure(fn, self._data.index(data), arguments))
        return super().measure(fn, data, *arguments)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
        if self._serving and self.comm.rank == 0:
            self._tell(None)
        self._serving = False
        super().close()

    def _evaluate(
        self, data: Data, alone: bool, job: JobFunction, params: Any, by_bucket: Any
    ) -> Any:
        if alone:
            return super()._evaluate(data, alone, job, params, by_bucket)
        place = self._data.index(data)
        arguments = (params, list(by_bucket))
        self._evaluations += 1
        number = self._evaluations
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        self._tell(_Define(number, job, place, types))
        self._run(jnp.full(1, number, "int32"), self.comm)
        return super()._evaluate(data, False, job, *bcast(arguments, 0, self.comm))

    def _transparent(self, data: Data, alone: bool) -> bool:
        return alone

    def _check_arguments(self, arguments: Any) -> None:
        pass  # only the root has arguments

    # ---- the other ranks ----

    def serve(self) -> None:
        """Execute the root's messages until it leaves the `with` block."""
        programs: dict[int, Callable[[], Any]] = {}
        while (message := self._hear()) is not None:
            if isinstance(message, _Put):
                with contextlib.suppress(Exception):  # the root raises it
                    options = {"schedule": message.schedule, "everywhere": message.everywhere}
                    self._data.append(super().put(None, block=message.block, **options))
            elif isinstance(message, _Measure):
                data = self._data[message.data]
                with contextlib.suppress(Exception):  # the root raises it
                    super().measure(message.fn, data, *message.arguments)
            elif isinstance(message, _Define):
                programs[message.number] = self._program(message)
            else:
                self._failure_log.failures = None
                drop_caught()
                try:
                    programs[message.number]()
                except jax.errors.JaxRuntimeError:
                    if self._failure_log.failures is None:  # an error of this rank only
                        raise

    def _program(self, defined: _Define) -> Callable[[], Any]:
        data = self._data[defined.data]

        def run(arguments: Any) -> tuple[()]:
            evaluate = super(RootPool, self)._evaluate
            evaluate(data, False, defined.job, *bcast(arguments, 0, self.comm))
            return ()

        compiled = jit(run)
        nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), defined.types)
        return lambda: compiled(nothing)

    def _hear(self) -> Any:
        status, naps = MPI.Status(), 0
        # Without the time limit: the root may compute for any time between two jobs.
        with BlockingCall("the root's next job", unlimited=True):
            while not self._channel.Iprobe(0, _TAG, status):
                naps += 1
                time.sleep(_NAPS[naps > 2000])
            parcel = bytearray(status.Get_count(MPI.BYTE))
            self._channel.Recv([parcel, MPI.BYTE], 0, _TAG)
        try:
            return _Unpickler(io.BytesIO(parcel), self._functions).load()
        except (AttributeError, ImportError) as error:
            raise TypeError(
                f"root_pool: rank {self.comm.rank} cannot import an object that the root uses in "
                f"a job: {error}. Pass functions to root_pool(function, ...) on all ranks."
            ) from error


class _Pickler(pickle.Pickler):
    """A pickler that sends functions which all ranks have as their indices."""

    def __init__(self, file: io.BytesIO, functions: Sequence[Any]) -> None:
        super().__init__(file)
        self._indices = {id(f): i for i, f in enumerate(functions)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._indices.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, functions: Sequence[Any]) -> None:
        super().__init__(file)
        self._functions = functions

    def persistent_load(self, pid: int) -> Any:
        return self._functions[pid]


@contextlib.contextmanager
def root_pool(
    *functions: Callable[..., Any],
    comm: Communicator | None = None,
    schedule: Schedule = Static(),  # noqa: B008  frozen
    throw: bool = True,
) -> Iterator[RootPool | None]:
    """Open a pool for a program that only rank 0 runs (collective).

    Rank 0 gets the pool and computes jobs together with the other ranks. Only rank 0 calls `put`,
    `map`, `sum` and the functions that they return. The other ranks serve it until rank 0 leaves
    the `with` block, and then get None.

    Parameters
    ----------
    functions
        The functions that the root will map, the same on all ranks. A function at the top level of
        a module, which all ranks can import, need not be given.
    comm, schedule, throw
        As for `pool`.

    Returns
    -------
    A context manager that gives the pool on rank 0 and None on the other ranks.

    Raises
    ------
    TypeError
        On rank 0, if it maps a function that the other ranks do not have.
    RuntimeError
        If `root_pool` is called inside another one of the same communicator, or if a function of
        the pool is called after the `with` block.

    Notes
    -----
    Derivatives have any order and any mode, because Jacobians travel with the results. With
    `derivatives="adjoint"` they are in reverse mode only.

    Examples
    --------
    >>> import jax
    >>> from mpigrad import jobs
    >>> def misfit(params, item_params, item):
    ...     return (params - item) ** 2
    >>> with jobs.root_pool(misfit) as pool:
    ...     if pool is not None:
    ...         f = pool.sum(misfit, pool.put([1.0, 2.0, 6.0]))
    ...         x = 0.0
    ...         for _ in range(20):
    ...             x = x - 0.1 * jax.grad(f)(x)
    ...         print(f"{x:.3f}")
    3.000
    """
    comm = resolve(comm)
    if comm.slot in _active:
        raise RuntimeError(
            "root_pool: cannot be called inside another root_pool of the same communicator, "
            "whose pool the other ranks serve. Use the outer pool."
        )
    root = RootPool(comm.dup(), functions, schedule, throw)
    if root.comm.rank != 0:
        root.serve()
        root.close()
        yield None
        return
    _active.add(comm.slot)
    try:
        yield root
    finally:
        _active.discard(comm.slot)
        root.close()
