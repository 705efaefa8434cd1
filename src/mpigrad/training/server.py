"""A parameter server: rank 0 updates the parameters, and the other ranks compute gradients."""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
import pickle
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.communicator import BlockingCall, Communicator
from mpigrad.guard import end_job
from mpigrad.training.flat_buffer import FlatBuffer, combine
from mpigrad.training.history import StepRecord
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.strategy import FAILED, STOP, Run, Session, StepError, Strategy
from mpigrad.training.synchronous import Synchronous

__all__ = [
    "OVER",
    "Arrival",
    "Channel",
    "Kind",
    "ParameterServer",
    "RemoteError",
    "ServerLoop",
    "Versions",
    "WorkerLoop",
    "act",
]

# ---- The bound on the staleness of gradients: when a parameter server may update ----


@dataclasses.dataclass
class Versions:
    """The version of the parameters at which each worker computes, and the arrived gradients.

    The version is the count of updates. The *staleness* of a gradient is the count of updates
    between the parameters at which it was computed and the parameters that it changes. A worker
    that has parameters and has not sent a gradient is *outstanding*. A gradient that no update has
    used yet is *pending*.

    No staleness exceeds `bound`, because the server makes no update that would let an outstanding
    worker's gradient exceed it. Let a worker compute at version v. An update at version V needs
    V - v < bound for all outstanding workers. With the bound 0 every update waits for all workers.

    Attributes
    ----------
    bound
        The largest staleness, 0 or more.
    version
        The version of the server's parameters.
    outstanding, pending
        For each worker the version at which its gradient is computed.
    """

    bound: int
    version: int
    outstanding: dict[int, int]
    pending: dict[int, int] = dataclasses.field(default_factory=dict)

    def arrive(self, worker: int, version: int) -> None:
        """Record that a worker's gradient has arrived, computed at that version."""
        del self.outstanding[worker]
        self.pending[worker] = version

    def leave(self, worker: int) -> None:
        """Record that a worker sends no more gradients."""
        del self.outstanding[worker]

    @property
    def workers(self) -> list[int]:
        """The workers that have not left."""
        return sorted(self.outstanding | self.pending)

    @property
    def ready(self) -> bool:
        """True if the pending gradients may be used now."""
        late = (self.version - v >= self.bound for v in self.outstanding.values())
        return bool(self.pending) and not any(late)

    def staleness(self) -> dict[int, int]:
        """Return the staleness of each pending gradient if it were used now, by worker."""
        return {worker: self.version - self.pending[worker] for worker in sorted(self.pending)}

    def use(self, *, changed: bool = True) -> None:
        """Record that the pending gradients were used, and whether they `changed` parameters."""
        self.version += changed
        self.pending.clear()

    def give(self, workers: Iterable[int]) -> None:
        """Record that workers receive the current parameters."""
        self.outstanding.update(dict.fromkeys(workers, self.version))


# ---- The messages between a parameter server and its workers: one flat buffer for each
# message


OVER = 1 << 16  # a bit besides those of a session's wishes: the training is over
_AWAKE = 2e-4  # seconds of busy waiting before the thread sleeps


class Kind(enum.IntEnum):
    """The kind of a message, which is its MPI tag. Comments list the numbers of its header."""

    GRADIENT = 1  # its version, the batch's weight and mean loss, the worker's wishes
    UNUSED = 2  # parameters on which the worker's losses do not depend from now on
    DONE = 3  # the end of the worker's batches
    FAILED = 4  # an error of a worker or of the server
    PARAMETERS = 5  # their version, and the bits of the next action of all ranks


def act(then: int, session: Session) -> bool:
    """Do the server's action on all ranks (collective), and return True if training is over."""
    wishes = then & ~OVER  # also after the last update, because its callback may have failed
    return (wishes > 0 and session.act(wishes)) or then & OVER > 0


@dataclasses.dataclass(frozen=True)
class RemoteError:
    """An error that is sent to other ranks, on which its type may not exist."""

    rank: int
    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RemoteError:
        text = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__name__, str(error), text)

    def error(self) -> Exception:
        """Return the exception that other ranks raise."""
        kind = FloatingPointError if self.kind == "FloatingPointError" else StepError
        return kind(f"rank {self.rank} has failed: {self}")

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.traceback}"


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A message that has arrived, and must be received.

    Attributes
    ----------
    kind, source
        The MPI tag and the rank of the sender.
    size
        Size in bytes.
    """

    kind: Kind
    source: int
    size: int
    message: MPI.Message

    def into(self, flat: FlatBuffer) -> None:
        """Receive the message into a buffer. If only a header arrives, the rest is not changed."""
        self.message.Recv([flat.message, MPI.DOUBLE])

    def content(self) -> Any:
        """Receive an object that `Channel.send_object` sent."""
        raw = bytearray(self.size)
        self.message.Recv([raw, MPI.BYTE])
        return pickle.loads(raw)

    def drop(self) -> None:
        """Receive the message and discard it."""
        self.message.Recv([bytearray(self.size), MPI.BYTE])


class Channel:
    """The messages between a server and its workers, on a communicator of their own."""

    def __init__(self, comm: Communicator) -> None:
        self._mpi = comm.mpi

    def send(self, flat: FlatBuffer, kind: Kind, *ranks: int, whole: bool = True) -> None:
        """Send a buffer, or its header only, to some ranks at once.

        The memory may be changed after the call.
        """
        message = flat.message if whole else flat.header
        with BlockingCall(f"sending {kind.name.lower()} in training"):
            MPI.Request.Waitall(
                [self._mpi.Isend([message, MPI.DOUBLE], rank, kind) for rank in ranks]
            )

    def send_object(self, content: Any, kind: Kind, rank: int) -> None:
        """Send a small object as a pickle."""
        with BlockingCall(f"sending {kind.name.lower()} in training"):
            self._mpi.Send([pickle.dumps(content), MPI.BYTE], rank, kind)

    def poll(self, source: int = MPI.ANY_SOURCE) -> Arrival | None:
        """Return the next message if one has arrived.

        A matched probe gives the sender and the size before the message is received, and no other
        receive can take the message. Messages of one sender arrive in order.
        """
        status = MPI.Status()
        message = self._mpi.Improbe(source, MPI.ANY_TAG, status)
        if message is None:
            return None
        return Arrival(Kind(status.tag), status.source, status.Get_count(MPI.BYTE), message)

    def wait(self, what: str, source: int = MPI.ANY_SOURCE, *, unlimited: bool = False) -> Arrival:
        """Wait for the next message, if `unlimited` without the time limit of the watchdog."""
        arrival = self.poll(source)
        if arrival is None:
            with BlockingCall(what, unlimited=unlimited):
                arrival = self.poll_for(math.inf, source)
        assert arrival is not None
        return arrival

    def poll_for(self, seconds: float, source: int = MPI.ANY_SOURCE) -> Arrival | None:
        """Return the next message if one arrives in time.

        A long wait sleeps, so that other processes can use the processor.
        """
        start = time.monotonic()
        while (arrival := self.poll(source)) is None:
            waited = time.monotonic() - start
            if waited > seconds:
                return None
            if waited > _AWAKE:
                time.sleep(min(waited / 10, 1e-3))
        return arrival


# ---- The loop of a worker of a parameter server ----


SERVER = 0


class WorkerLoop(Run):
    """The run of a rank that computes gradients, see `ParameterServer`."""

    keeps_state = False

    def __init__(self, replica: Replica, comm: Communicator, *, drop: bool) -> None:
        self.shard = comm.rank - 1, comm.size - 1
        self._replica, self._channel, self._rank = replica, Channel(comm), comm.rank
        self._drop = drop
        self._unused: frozenset[int] = frozenset()  # as last sent to the server

    def train(self, batches: Iterator[Batch], session: Session) -> None:
        replica, working = self._replica, True
        while True:
            what = "the parameters of the server" if working else "the end of the training"
            arrival = self._channel.wait(what, SERVER, unlimited=not working)
            if arrival.kind is Kind.FAILED:
                raise arrival.content().error()
            arrival.into(replica.values)
            replica.write()
            self.step_number, then = (int(number) for number in replica.values.header[:2])
            if act(then, session):
                return
            working = working and self._work(batches, session)

    def _work(self, batches: Iterator[Batch], session: Session) -> bool:
        """Send the gradient of one batch, or tell the server the end and return False."""
        replica, channel = self._replica, self._channel
        try:
            batch = next(batches, None)
            if batch is None:
                channel.send_object(None, Kind.DONE, SERVER)
                return False
            weight, loss = replica.weight(batch), 0.0
            if weight > 0:
                loss, self.computed = replica.gradient(batch, weight), True
                self._check()
        except (Exception, SystemExit) as error:
            channel.send_object(RemoteError.of(error, self._rank), Kind.FAILED, SERVER)
            if self._drop and isinstance(error, Exception):
                return False
            raise
        if weight > 0 and replica.unused != self._unused:
            self._unused = replica.unused
            channel.send_object(self._unused, Kind.UNUSED, SERVER)
        wishes = session.wishes() & STOP if session.attentive else 0
        replica.gradients.header[:4] = self.step_number, weight, loss, wishes
        channel.send(replica.gradients, Kind.GRADIENT, SERVER, whole=weight > 0)
        return True

    def _check(self) -> None:
        """Raise an error if the gradient has a non-finite number."""
        gradients = self._replica.gradients
        for number, section in enumerate(gradients.sections):
            nonfinite: list[tuple[int, list[int]]] = []
            combine([section], 1.0, section, nonfinite=nonfinite)  # changes nothing
            if nonfinite:
                raise FloatingPointError(
                    f"trainer: a gradient at the parameters of step {self.step_number} is not "
                    f"finite: {gradients.parameter_at(number, nonfinite[0][0]).name} "
                    f"(from rank {self._rank}). Check the batch and the loss."
                )


# ---- The loop of the server of a parameter server ----


# After a failure, workers may finish their batch within this many seconds, or within this many
# times the longest batch so far, whichever is longer.
_PATIENCE, _TIMES = 5.0, 3


class ServerLoop(Run):
    """The run of the rank that updates the parameters, see `ParameterServer`.

    A worker is in one of four states. It is outstanding (it computes), its gradient is pending, it
    is held (its gradient was used, and it has not received new parameters yet), or it is idle (its
    batches have ended).
    """

    keeps_state = True

    def __init__(
        self, replica: Replica, comm: Communicator, *, bound: int, scale: bool, drop: bool
    ) -> None:
        self.shard = 0, 0
        self._replica, self._channel = replica, Channel(comm)
        self._bound, self._scale, self._drop = bound, scale, drop
        self._workers = range(1, comm.size)
        # Workers send the buffer of `gradient` itself, so the server's buffers have its layout.
        layout = replica.parameters, replica.gradients.order
        self._mail = {worker: FlatBuffer(*layout) for worker in self._workers}
        self._unused: dict[int, frozenset[int]] = dict.fromkeys(self._workers, frozenset())
        self._versions = Versions(bound, 0, {})
        self._held: list[int] = []
        self._idle: list[int] = []
        self._failed: list[RemoteError] = []
        self._asked = 0  # bits of the workers' wishes
        self._given: dict[int, float] = {}  # when a worker received the parameters
        self._longest = 0.0  # seconds from then to its gradient
        self._busy = 0.0  # seconds of messages and sums since the last update

    def train(self, batches: Iterator[Batch], session: Session) -> None:
        del batches  # only the workers have batches
        self._versions = Versions(self._bound, self.step_number, {})
        self._held, self._idle, self._failed, self._asked = list(self._workers), [], [], 0
        self._replica.read()
        over = session.steps is not None and self.step_number >= session.steps
        self._give(OVER if over else 0)  # a failed run may have left workers at different steps
        while not over:
            try:
                then = self._serve(session)
            except Exception as error:
                self._tell(error)
                raise
            # Here no worker waits for a message, and all ranks raise an error of `act`.
            over = act(then, session)

    def updates_of(self, batches: int) -> int:
        return batches * len(self._workers) if self._bound > 0 else batches

    def _serve(self, session: Session) -> int:
        """Serve until a collective action is due, and return its bits."""
        versions, then = self._versions, 0
        while versions.outstanding or versions.pending:
            if then and not versions.outstanding:
                if then & FAILED:
                    break
                then |= self._update(session)  # a save must not lose computed gradients
            elif then or self._waits(session):
                self._receive(self._channel.wait("a gradient of any worker"))
            elif (arrival := self._channel.poll()) is not None:
                self._receive(arrival)
            else:
                then = self._update(session)
                if not then:
                    self._give()
        if not then and len(self._failed) == len(self._workers):
            raise StepError(
                "trainer: all workers of the parameter server have failed. Correct these errors:\n"
                + "\n".join(f"rank {failure.rank}: {failure}" for failure in self._failed)
            )
        then = then or OVER
        self._give(then)
        return then

    def _waits(self, session: Session) -> bool:
        """Return True if the next update needs another gradient (the last one needs all)."""
        versions = self._versions
        last = versions.version + 1 == session.steps
        return not versions.ready or (last and len(versions.outstanding) > 0)

    def _receive(self, arrival: Arrival) -> None:
        start, worker, versions = time.perf_counter(), arrival.source, self._versions
        if arrival.kind is Kind.GRADIENT:
            mail = self._mail[worker]
            arrival.into(mail)
            self._asked |= int(mail.header[3])
            self._longest = max(self._longest, start - self._given[worker])
            versions.arrive(worker, int(mail.header[0]))
        elif arrival.kind is Kind.UNUSED:
            self._unused[worker] = arrival.content()
        else:
            failure: RemoteError | None = arrival.content()
            versions.leave(worker)
            if failure is not None:
                self._failed.append(failure)
                if not self._drop:
                    raise failure.error()
                print(
                    f"mpigrad: the parameter server continues without rank {worker}: {failure}",
                    file=sys.stderr,
                    flush=True,
                )
            self._idle.append(worker)
        self._busy += time.perf_counter() - start

    def _update(self, session: Session) -> int:
        """Make an update with all pending gradients, and return the bits of the next action."""
        start, replica, versions = time.perf_counter(), self._replica, self._versions
        staleness = versions.staleness()
        used = [worker for worker in staleness if self._mail[worker].header[1] > 0]
        versions.use(changed=bool(used))
        self._held += staleness
        if not used:
            return 0
        weights, losses = ([float(self._mail[worker].header[i]) for worker in used] for i in (1, 2))
        samples = math.fsum(weights)
        norm = self._combine(used, [staleness[worker] for worker in used], samples)
        self._busy += time.perf_counter() - start
        replica.update(frozenset.intersection(*(self._unused[worker] for worker in used)))
        replica.read()
        self.step_number = versions.version
        session.note(
            StepRecord(
                step=self.step_number,
                loss=math.fsum(w * x for w, x in zip(weights, losses, strict=True)) / samples,
                samples=samples,
                seconds=self.clock(),
                gradient_norm=norm,
                communication=self._busy,
                exposed=self._busy,
                staleness=tuple(staleness[worker] for worker in used),
            )
        )
        self._busy = 0.0
        then = self._asked | (session.wishes() if session.attentive else 0)
        return then | OVER if self.step_number == session.steps else then

    def _combine(self, used: list[int], staleness: list[int], samples: float) -> float:
        """Write the mean gradient into the replica and return its norm."""
        gradients, square = self._replica.gradients, 0.0
        mail = [self._mail[worker] for worker in used]
        for flat, s in zip(mail, staleness, strict=True):
            if self._scale and s > 0:
                flat.multiply(1 / (1 + s))
        for number, out in enumerate(gradients.sections):
            nonfinite: list[tuple[int, list[int]]] = []
            pieces = [flat.sections[number] for flat in mail]
            square += combine(pieces, 1 / samples, out, nonfinite=nonfinite)
            if nonfinite:  # although each term is finite
                raise FloatingPointError(
                    f"trainer: step {self._versions.version} is not made, because its gradient is "
                    f"not finite: {gradients.parameter_at(number, nonfinite[0][0]).name} "
                    f"(the sum of ranks {', '.join(map(str, used))}). Use a smaller learning rate, "
                    "or scale the loss."
                )
        if not math.isfinite(square):  # squares overflow in the dtype of the numbers
            with np.errstate(over="ignore"):
                square = math.fsum(
                    float(np.sum(np.square(section, dtype=np.float64)))
                    for section in gradients.sections
                )
            if math.isinf(square):
                raise FloatingPointError(
                    f"trainer: step {self._versions.version} is not made, because its gradient is "
                    "too large: the sum of squares overflows float64. Use a smaller learning rate, "
                    "or scale the loss."
                )
        return math.sqrt(square)

    def _give(self, then: int = 0) -> None:
        """Send the parameters and the bits of the next action to all waiting workers."""
        start, versions, values = time.perf_counter(), self._versions, self._replica.values
        workers = [*self._held, *versions.pending]
        versions.use(changed=False)
        values.header[:2] = versions.version, then
        self._channel.send(values, Kind.PARAMETERS, *workers, *(self._idle if then else ()))
        versions.give(workers)
        self._held, now = [], time.perf_counter()
        self._given.update(dict.fromkeys(workers, now))
        self._busy += now - start

    def _tell(self, error: Exception) -> None:
        """Send the error to all workers that have not failed, or end the job."""
        failure = RemoteError.of(error, 0) if self._drop or not self._failed else self._failed[0]
        versions = self._versions
        end = time.monotonic() + max(_PATIENCE, _TIMES * self._longest)
        for worker in (*self._held, *versions.pending, *self._idle):
            self._channel.send_object(failure, Kind.FAILED, worker)
        while versions.outstanding:  # until they have finished their batches
            arrival = self._channel.poll_for(end - time.monotonic())
            if arrival is None:
                end_job(f"{failure}mpigrad: rank {failure.rank} failed; ending all ranks")
                return
            if arrival.kind is Kind.UNUSED:
                self._unused[arrival.source] = arrival.content()
                continue
            arrival.drop()
            versions.leave(arrival.source)
            if self._drop or arrival.kind is not Kind.FAILED:
                self._channel.send_object(failure, Kind.FAILED, arrival.source)


# ---- A parameter server: rank 0 updates the parameters, and the other ranks compute gradients


@dataclasses.dataclass(frozen=True)
class ParameterServer(Strategy):
    """Update the parameters on rank 0 with the gradients of the other ranks, as they arrive.

    A worker computes a gradient at the last parameters that it received, sends it, and waits for
    new parameters. The server makes an update with the mean of all gradients that have arrived,
    weighted by samples. The *staleness* of a gradient is the count of updates between the
    parameters at which it was computed and the parameters that it changes. No staleness exceeds
    the bound: the server waits for workers whose gradient would become too old by the next update.

    On one rank this strategy is `Synchronous()`.

    Attributes
    ----------
    staleness
        The bound, 0 or more. With 0 the run has the same bits as `Synchronous` on as many ranks as
        there are workers. With more than 0 two runs differ.
    scale_by_staleness
        True to divide each gradient by 1 + its staleness (after Zhang, Gupta, Lian and Liu,
        "Staleness-aware async-SGD for distributed deep learning", 2016).
    throw
        What follows if a worker's batch fails. True: the training ends on all ranks with that
        error. False: the server prints the error, and the run continues without that worker as
        long as another worker is left.

    Raises
    ------
    ValueError, TypeError
        If an attribute is out of range.

    Notes
    -----
    The bound is that of Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", 2013.

    Examples
    --------
    >>> import numpy as np
    >>> import optax
    >>> from mpigrad import training
    >>> x = np.linspace(0, 1, 32)
    >>> loss = lambda params, x, y: ((params["a"] * x - y) ** 2).mean()
    >>> strategy = training.ParameterServer(staleness=2)
    >>> trainer = training.trainer({"a": np.float32(0.0)}, optax.sgd(1.0), loss, strategy)
    >>> history = trainer.run(training.Batches(32, 8, epochs=20, take=lambda i: (x[i], 3 * x[i])))
    >>> print(len(history.records), round(float(trainer.model["a"]), 3))
    80 3.0
    """

    staleness: int = 0
    scale_by_staleness: bool = False
    throw: bool = True

    def __post_init__(self) -> None:
        if operator.index(self.staleness) < 0:
            raise ValueError(
                f"ParameterServer: staleness must not be negative, got {self.staleness}. Pass 0 or "
                "a larger bound."
            )
        if not isinstance(self.throw, bool):
            raise TypeError(
                f"ParameterServer: throw must be True or False, got {self.throw!r}. False drops a "
                "worker whose batch fails."
            )

    def start(self, replica: Replica, comm: Communicator) -> Run:
        if comm.size == 1:
            return Synchronous().start(replica, comm)
        if comm.rank > 0:
            return WorkerLoop(replica, comm, drop=not self.throw)
        return ServerLoop(
            replica,
            comm,
            bound=operator.index(self.staleness),
            scale=self.scale_by_staleness,
            drop=not self.throw,
        )
