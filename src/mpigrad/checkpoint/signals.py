"""Requests to a long computation to save and end, by a signal or by a file.

`mpigrad run` and `mpigrad launch` create the file at the first Ctrl-C. A batch system sends
SIGTERM or SIGUSR1 some time before the job's end.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interruption", "listen"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interruption:
    """The state of a rank that listens for requests to end. `listen` makes it.

    Examples
    --------
    >>> import os, signal
    >>> from mpigrad.checkpoint import listen
    >>> with listen() as interruption:
    ...     os.kill(os.getpid(), signal.SIGUSR1)
    ...     print(interruption.requested())
    True
    """

    def __init__(self, stop_file: pathlib.Path | None) -> None:
        self._stop_file = stop_file
        self._signalled = False

    def requested(self) -> bool:
        """Return whether this rank was asked to end.

        Ranks may answer differently: call it on one rank and broadcast the answer.
        """
        if not self._signalled and self._stop_file is not None:
            self._signalled = self._stop_file.exists()
        return self._signalled

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C ends the program now
        self._signalled = True


@contextlib.contextmanager
def listen() -> Iterator[Interruption]:
    """Record SIGTERM, SIGINT, SIGUSR1 and the launcher's request instead of ending at once.

    Use it in a `with` statement. The former signal handlers return at its end. In a thread other
    than the main thread only the launcher's file is read, because Python allows signal handlers
    only in the main thread.

    Examples
    --------
    >>> import mpigrad as mg
    >>> from mpigrad.checkpoint import listen
    >>> comm = mg.default_communicator()
    >>> with listen() as interruption:
    ...     for i in range(3):
    ...         if comm.mpi.bcast(interruption.requested()):  # rank 0 decides
    ...             break
    >>> i
    2
    """
    name = os.environ.get("MPIGRAD_STOP_FILE")
    stop_file = pathlib.Path(name) if name else None
    stop = Interruption(stop_file)
    if stop_file is not None:
        # The launcher waits only for jobs that listen. The directory does not exist on other hosts
        # than the launcher's.
        with contextlib.suppress(OSError):
            stop_file.with_name("listening").touch()
    signals = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop._note) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
