"""The loop of the server of a parameter server."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator

import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.guard import end_job
from mpigrad.training.flat_buffer import FlatBuffer
from mpigrad.training.history import StepRecord
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.server_messages import OVER, Arrival, Channel, Kind, RemoteError, act
from mpigrad.training.server_versions import Versions
from mpigrad.training.strategy import FAILED, Run, Session, StepError
from mpigrad.training.summation import combine

__all__ = ["ServerLoop"]

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
