"""What a parameter server and its workers send each other: one flat buffer for each message."""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle
import time
import traceback
from typing import Any

from mpi4py import MPI

from mpigrad.communicator import BlockingCall, Communicator
from mpigrad.training.flat_buffer import Flat
from mpigrad.training.strategy import Session, StepError

__all__ = ["OVER", "Arrival", "Channel", "Failure", "Kind", "act"]

OVER = 1 << 16  # beside a session's wishes: the training is over
_AWAKE = 2e-4  # seconds for which one who waits keeps its processor


class Kind(enum.IntEnum):
    """What a message is; MPI's tag. The numbers are those of its header."""

    GRADIENT = 1  # its version, the batch's weight and mean loss, what the worker wishes
    UNUSED = 2  # parameters that the worker's gradients do not depend on from now on
    DONE = 3  # the worker has no more batches
    FAILED = 4  # an error, of a worker or of the server
    PARAMETERS = 5  # their version, and bits of what all ranks do next


def act(then: int, session: Session) -> bool:
    """Do what the server wants of all ranks (collective); whether the training is over."""
    wishes = then & ~OVER  # of the last update, too: its callback may have failed
    return (wishes > 0 and session.act(wishes)) or then & OVER > 0


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error on its way to other ranks, where its type need not be known."""

    rank: int
    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        text = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__name__, str(error), text)

    def error(self) -> Exception:
        """What other ranks raise."""
        kind = FloatingPointError if self.kind == "FloatingPointError" else StepError
        return kind(f"rank {self.rank} has failed: {self}")

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.traceback}"


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A message that is there, and has to be received.

    Attributes
    ----------
    kind, source
        MPI's tag and the rank that sent it.
    size
        Bytes.
    """

    kind: Kind
    source: int
    size: int
    message: MPI.Message

    def into(self, flat: Flat) -> None:
        """Receive it; a header alone leaves the rest as it is."""
        self.message.Recv([flat.message, MPI.DOUBLE])

    def content(self) -> Any:
        """Receive what `Channel.tell` has sent."""
        raw = bytearray(self.size)
        self.message.Recv([raw, MPI.BYTE])
        return pickle.loads(raw)

    def drop(self) -> None:
        """Receive it, and forget it."""
        self.message.Recv([bytearray(self.size), MPI.BYTE])


class Channel:
    """The messages between a server and its workers, on a communicator of their own."""

    def __init__(self, comm: Communicator) -> None:
        self._mpi = comm.mpi

    def send(self, flat: Flat, kind: Kind, *ranks: int, whole: bool = True) -> None:
        """Send a header, and what follows it, to some ranks at once.

        When it returns, the memory may be changed.
        """
        message = flat.message if whole else flat.header
        with BlockingCall(f"sending {kind.name.lower()} in training"):
            MPI.Request.Waitall(
                [self._mpi.Isend([message, MPI.DOUBLE], rank, kind) for rank in ranks]
            )

    def tell(self, content: Any, kind: Kind, rank: int) -> None:
        """Send something small, as a pickle."""
        with BlockingCall(f"sending {kind.name.lower()} in training"):
            self._mpi.Send([pickle.dumps(content), MPI.BYTE], rank, kind)

    def poll(self, source: int = MPI.ANY_SOURCE) -> Arrival | None:
        """The next message, if one is there.

        A matched probe tells who has sent it and how long it is, before anything is received, and
        takes it out of the reach of other receives; messages of one sender come in their order.
        """
        status = MPI.Status()
        message = self._mpi.Improbe(source, MPI.ANY_TAG, status)
        if message is None:
            return None
        return Arrival(Kind(status.tag), status.source, status.Get_count(MPI.BYTE), message)

    def wait(self, what: str, source: int = MPI.ANY_SOURCE, *, unlimited: bool = False) -> Arrival:
        """The next message; `unlimited`: however long that takes."""
        arrival = self.poll(source)
        if arrival is None:
            with BlockingCall(what, unlimited=unlimited):
                arrival = self.poll_for(math.inf, source)
        assert arrival is not None
        return arrival

    def poll_for(self, seconds: float, source: int = MPI.ANY_SOURCE) -> Arrival | None:
        """The next message, if one comes in time.

        Who waits for long leaves the processor to those who compute.
        """
        start = time.monotonic()
        while (arrival := self.poll(source)) is None:
            waited = time.monotonic() - start
            if waited > seconds:
                return None
            if waited > _AWAKE:
                time.sleep(min(waited / 10, 1e-3))
        return arrival
