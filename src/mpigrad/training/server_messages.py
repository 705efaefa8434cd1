"""The messages between a parameter server and its workers: one flat buffer for each message."""

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
from mpigrad.training.flat_buffer import FlatBuffer
from mpigrad.training.strategy import Session, StepError

__all__ = ["OVER", "Arrival", "Channel", "Kind", "RemoteError", "act"]

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
