"""Memory that the other ranks of this host can read and write."""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import uuid
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.communicator import Communicator

__all__ = ["Memory"]

_NAME = "mpigrad-training"
_TOKEN = 16  # bytes
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Memory:
    """Zero-initialised memory, in an anonymous file if the system has `memfd_create`.

    Parameters
    ----------
    size
        Size in bytes, at least 16.

    Attributes
    ----------
    bytes
        The memory, shape (max(size, 16),), aligned to a page.
    """

    bytes: NDArray[np.uint8]

    def __init__(self, size: int) -> None:
        self._file, size = -1, max(size, _TOKEN)
        try:
            self._file = os.memfd_create(_NAME)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self.bytes = _mapped(self._file, size)
        except (AttributeError, OSError):  # no memfd_create: memory of this rank only
            self._file = -1
            self.bytes = np.zeros(size, np.uint8)

    def map_all(self, comm: Communicator) -> list[NDArray[np.uint8] | None]:
        """Map every rank's memory, or None for ranks on another host (collective).

        The memories of all ranks have the same size. Two ranks map each other's memory, or neither
        does.
        """
        before = self.bytes[:_TOKEN].copy()
        token = uuid.uuid4().bytes
        self.bytes[:_TOKEN] = np.frombuffer(token, np.uint8)
        boot = _BOOT.read_text() if _BOOT.exists() else token.hex()
        everybody = comm.mpi.allgather((boot, os.getpid(), self._file, token))
        found: list[NDArray[np.uint8] | None] = [None] * comm.size
        for rank, (there, process, file, expected) in enumerate(everybody):
            if rank == comm.rank:
                found[rank] = self.bytes
            elif there == boot and file >= 0 and self._file >= 0:
                found[rank] = _opened(process, file, self.bytes.size, expected)
        seen = comm.mpi.allgather([memory is not None for memory in found])
        self.bytes[:_TOKEN] = before  # all ranks have read the token
        return [m if seen[rank][comm.rank] else None for rank, m in enumerate(found)]


def _opened(process: int, file: int, size: int, token: bytes) -> NDArray[np.uint8] | None:
    path = f"/proc/{process}/fd/{file}"
    with contextlib.suppress(OSError):
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None  # a process of another container has this number here
        handle = os.open(path, os.O_RDWR)
        try:
            if os.fstat(handle).st_size != size:
                return None
            memory = _mapped(handle, size)
        finally:
            os.close(handle)
        if memory[:_TOKEN].tobytes() == token:
            return memory
    return None


def _mapped(file: int, size: int) -> NDArray[Any]:
    return np.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_SHARED), np.uint8)
