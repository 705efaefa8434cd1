"""What a parameter server and its workers send each other: one flat buffer for each message."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.communicator import Communicator, waiting

__all__ = ["Arrival", "Channel", "Flat", "Kind"]

_UNIT = np.dtype(np.int64)  # MPI counts in 32 bits: messages of up to 16 GiB
_HEADER = 8  # units: version, weight, loss, and some to spare
_LINE = 64  # arrays begin at multiples of this, in bytes from the beginning
_AWAKE = 2e-4  # seconds for which one who waits keeps its processor


class Kind(enum.IntEnum):
    """What a message is; MPI's tag."""

    GRADIENT = 1  # of the loss of a batch, at some version of the parameters
    DONE = 2  # the worker has no more batches
    FAILED = 3  # an error, from a worker or from the server
    PARAMETERS = 4  # and their version


class Flat:
    """A header and arrays in one buffer, which is one message.

    Parameters
    ----------
    like
        One-dimensional arrays, for their sizes and dtypes.

    Attributes
    ----------
    header
        Version of the parameters, weight of the batch, its loss; of float64.
    arrays
        Views of the buffer.
    """

    def __init__(self, like: Sequence[NDArray[Any]]) -> None:
        starts, end = [], _HEADER * _UNIT.itemsize
        for array in like:
            starts.append(end)
            end += -(-array.nbytes // _LINE) * _LINE
        self.buffer = np.zeros(end // _UNIT.itemsize, _UNIT)
        self.header = self.buffer[:3].view(np.float64)
        raw = self.buffer.view(np.uint8)
        self.arrays = [
            raw[start : start + array.nbytes].view(array.dtype)
            for start, array in zip(starts, like, strict=True)
        ]

    def part(self, whole: bool) -> NDArray[np.int64]:
        """What is sent: all of it, or the header alone."""
        return self.buffer if whole else self.buffer[:_HEADER]


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A message that has come, and has not been received yet."""

    kind: Kind
    source: int
    size: int  # bytes
    message: MPI.Message

    def into(self, flat: Flat) -> None:
        """Receive it."""
        self.message.Recv([flat.buffer, MPI.INT64_T])

    def content(self) -> Any:
        """Receive it, and unpickle it."""
        raw = bytearray(self.size)
        self.message.Recv([raw, MPI.BYTE])
        return pickle.loads(raw) if raw else None


class Channel:
    """Messages between a server and its workers, apart from all others (made by all together)."""

    def __init__(self, comm: Communicator) -> None:
        self.mpi = MPI.Intracomm(comm.mpi).Dup()

    def send(self, flat: Flat, kind: Kind, *ranks: int, whole: bool = True) -> None:
        """To some ranks at once; returns when the buffer may be changed."""
        message = [flat.part(whole), MPI.INT64_T]
        with waiting(f"sending {kind.name.lower()}"):
            MPI.Request.Waitall([self.mpi.Isend(message, rank, kind) for rank in ranks])

    def send_object(self, content: Any, kind: Kind, rank: int) -> None:
        """Anything small that can be pickled."""
        raw = pickle.dumps(content) if content is not None else b""
        with waiting(f"sending {kind.name.lower()}"):
            self.mpi.Send([raw, MPI.BYTE], rank, kind)

    def poll(self, source: int = MPI.ANY_SOURCE) -> Arrival | None:
        """The next message, if one is there.

        A matched probe tells the sender and the size before anything is received: no receive of
        another message can come between, and two messages of one sender never overtake each other.
        """
        status = MPI.Status()
        message = self.mpi.Improbe(source, MPI.ANY_TAG, status)
        if message is None:
            return None
        return Arrival(Kind(status.tag), status.source, status.Get_count(MPI.BYTE), message)

    def wait(self, what: str, source: int = MPI.ANY_SOURCE) -> Arrival:
        """The next message. Who waits for long leaves its processor to those who compute."""
        if (arrival := self.poll(source)) is not None:
            return arrival
        start = time.monotonic()
        with waiting(what):
            while (arrival := self.poll(source)) is None:
                waited = time.monotonic() - start
                if waited > _AWAKE:
                    time.sleep(min(waited / 10, 1e-3))
        return arrival
