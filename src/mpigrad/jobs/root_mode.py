"""Pools that the root drives: it runs the program, and the other ranks serve it.

The root's compiled programs tell the others which of the known evaluations comes next, and then
both run the same messages; so what the root does with its functions (jit, grad, scan, loops that
end when they end) is nobody else's concern. What an evaluation is, the others learn when the root
traces it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, resolve
from mpigrad.jobs.context import Job
from mpigrad.jobs.failures import forget
from mpigrad.jobs.items import Data
from mpigrad.jobs.pool import Pool
from mpigrad.jobs.schedules import Schedule, Static
from mpigrad.operations.collectives import bcast
from mpigrad.operations.custom import custom_operation
from mpigrad.operations.jit import jit

__all__ = ["root_driven"]

_TAG = 1
_driving: set[int] = set()  # communicators of which this rank is the root
_NAPS = (1e-5, 1e-3)  # seconds between two looks, while the root is busy with us and when it is not


@dataclass(frozen=True)
class _Put:
    block: int | None
    schedule: Schedule
    everywhere: bool


@dataclass(frozen=True)
class _Define:
    """Evaluation `number`: a job, its data by number, and the types of its arguments."""

    number: int
    job: Job
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


class DrivenPool(Pool):
    """The pool that `root_driven` gives to the root."""

    def __init__(
        self,
        comm: Communicator,
        functions: Sequence[Callable[..., Any]],
        schedule: Schedule,
        on_error: Any,
    ) -> None:
        super().__init__(comm, schedule, on_error)
        self._functions = functions
        self._channel = MPI.Intracomm(comm.mpi).Dup()
        self._serving = True
        self._data: list[Data] = []
        self._evaluations = 0
        self._run = custom_operation(self._announce, lambda ct, mpi: ct)

    # ---- the root ----

    def _tell(self, message: Any) -> None:
        if not self._serving:
            raise RuntimeError("the other ranks have left: the `with` of root_driven has ended")
        if self.comm.size == 1:
            return
        parcel = io.BytesIO()
        try:
            _Pickler(parcel, self._functions).dump(message)
        except Exception as error:
            raise TypeError(
                "a job of a pool that the root drives must be known to the other ranks: give its "
                f"function to root_driven(function, ...), or take one of a module ({error})"
            ) from error
        for rank in range(1, self.comm.size):
            self._channel.Send([parcel.getvalue(), MPI.BYTE], rank, _TAG)

    def _announce(self, x: np.ndarray, mpi: MPI.Intracomm) -> np.ndarray:
        self._tell(_Run(int(x[0])))
        return x

    def put(
        self,
        records: Any,
        *,
        schedule: Schedule | None = None,
        block: int | None = None,
        everywhere: bool = False,
    ) -> Data:
        self._settle()
        self._tell(_Put(block, schedule or self.schedule, everywhere))
        data = super().put(records, schedule=schedule, block=block, everywhere=everywhere)
        self._data.append(data)
        return data

    def measure(
        self, fn: Callable[..., Any], data: Data, shared: Any, per_job: Any = None
    ) -> np.ndarray:
        self._settle()
        arguments = jax.device_get((shared, per_job))
        self._tell(_Measure(fn, self._data.index(data), arguments))
        return super().measure(fn, data, *arguments)

    def close(self) -> None:
        if self._beside is not None:
            self._beside.shutdown()
        if self._serving and self.comm.rank == 0:
            self._tell(None)
        self._serving = False
        super().close()

    def _evaluate(self, data: Data, alone: bool, job: Job, shared: Any, per_job: Any) -> Any:
        if alone:
            return super()._evaluate(data, alone, job, shared, per_job)
        place = self._data.index(data)
        arguments = (shared, list(per_job))
        self._evaluations += 1
        number = self._evaluations
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        self._tell(_Define(number, job, place, types))
        self._run(jnp.full(1, number, "int32"), self.comm)
        return super()._evaluate(data, False, job, *bcast(arguments, 0, self.comm))

    def _transparent(self, data: Data, alone: bool) -> bool:
        return alone

    def _check_arguments(self, arguments: Any) -> None:
        pass  # the root's are the only ones

    # ---- the others ----

    def serve(self) -> None:
        """Do what the root says, until it leaves."""
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
                self._watch.failures = None
                forget()
                try:
                    programs[message.number]()
                except jax.errors.JaxRuntimeError:
                    if self._watch.failures is None:  # of this rank alone
                        raise

    def _program(self, defined: _Define) -> Callable[[], Any]:
        data = self._data[defined.data]

        def run(arguments: Any) -> tuple[()]:
            evaluate = super(DrivenPool, self)._evaluate
            evaluate(data, False, defined.job, *bcast(arguments, 0, self.comm))
            return ()

        compiled = jit(run)
        nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), defined.types)
        return lambda: compiled(nothing)

    def _hear(self) -> Any:
        status, naps = MPI.Status(), 0
        while not self._channel.Iprobe(0, _TAG, status):
            naps += 1
            time.sleep(_NAPS[naps > 2000])
        parcel = bytearray(status.Get_count(MPI.BYTE))
        self._channel.Recv([parcel, MPI.BYTE], 0, _TAG)
        try:
            return _Unpickler(io.BytesIO(parcel), self._functions).load()
        except (AttributeError, ImportError) as error:
            raise TypeError(
                f"rank {self.comm.rank} does not know what the root uses in a job: give functions "
                f"to root_driven(function, ...), on all ranks ({error})"
            ) from error


class _Pickler(pickle.Pickler):
    """Functions that all ranks have been given are sent as their numbers."""

    def __init__(self, file: io.BytesIO, functions: Sequence[Any]) -> None:
        super().__init__(file)
        self._numbers = {id(f): i for i, f in enumerate(functions)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, functions: Sequence[Any]) -> None:
        super().__init__(file)
        self._functions = functions

    def persistent_load(self, pid: int) -> Any:
        return self._functions[pid]


@contextlib.contextmanager
def root_driven(
    *functions: Callable[..., Any],
    comm: Communicator | None = None,
    schedule: Schedule = Static(),  # noqa: B008  frozen
    on_error: Literal["raise", "nan"] = "raise",
) -> Iterator[DrivenPool | None]:
    """A pool for a program that rank 0 runs alone (collective).

    Rank 0 gets the pool, does jobs with the others, and is alone to call `put`, `map`, `sum` and
    what they return. The other ranks stay inside until it leaves the `with`, and get None:

    >>> with jobs.root_driven(fn) as pool:  # doctest: +SKIP
    ...     if pool is not None:
    ...         f = pool.sum(fn, pool.put(records))
    ...         ...

    Parameters
    ----------
    functions
        Those that the root will map: all ranks give the same. Functions of modules, which all ranks
        can import, need not be given.
    comm, schedule, on_error
        As for `pool`.

    Notes
    -----
    Jacobians travel with results, unless `derivatives="adjoint"` is asked for, which is for reverse
    mode.
    """
    comm = resolve(comm)
    if comm.slot in _driving:
        raise RuntimeError("root_driven inside root_driven: the other ranks serve the outer pool")
    driven = DrivenPool(comm.dup(), functions, schedule, on_error)
    if driven.comm.rank != 0:
        driven.serve()
        driven.close()
        yield None
        return
    _driving.add(comm.slot)
    try:
        yield driven
    finally:
        _driving.discard(comm.slot)
        driven.close()
