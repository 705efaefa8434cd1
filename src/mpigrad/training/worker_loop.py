"""The loop of a worker of a parameter server."""

from __future__ import annotations

from collections.abc import Iterator

from mpigrad.communicator import Communicator
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.server_messages import Channel, Kind, RemoteError, act
from mpigrad.training.strategy import STOP, Run, Session
from mpigrad.training.summation import combine

__all__ = ["WorkerLoop"]

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
