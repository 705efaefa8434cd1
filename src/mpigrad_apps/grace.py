"""The work of a run that the launcher waits for after a request to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpigrad import checkpoint
from mpigrad.communicator import Communicator

__all__ = ["hold_grace_time"]


@contextlib.contextmanager
def hold_grace_time(comm: Communicator) -> Iterator[None]:
    """Let the launcher wait for this block on rank 0: a report, or a compilation before the loop.

    See `mpigrad.checkpoint.Interruption.hold_grace_time`.
    """
    if comm.rank > 0:
        yield
        return
    with checkpoint.listen() as stop, stop.hold_grace_time():
        yield
