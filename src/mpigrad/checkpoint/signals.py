"""Ask a long computation to save and end: by a signal, or by a file.

>>> with interruption.listen() as stop:  # doctest: +SKIP
...     for i in range(iterations):
...         ...
...         if comm.mpi.bcast(stop.requested()):  # one rank decides for all
...             break

`mpigrad run` and `mpigrad launch` create the file at the first Ctrl-C; a batch system sends
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
    """Whether this rank has been asked to end."""

    def __init__(self, stop_file: pathlib.Path | None) -> None:
        self._stop_file = stop_file
        self._signalled = False

    def requested(self) -> bool:
        """Answer for this rank: ask on one rank and broadcast, so that all ranks agree."""
        if not self._signalled and self._stop_file is not None:
            self._signalled = self._stop_file.exists()
        return self._signalled

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: now
        self._signalled = True


@contextlib.contextmanager
def listen() -> Iterator[Interruption]:
    """Note SIGTERM, SIGINT, SIGUSR1 and the launcher's request instead of dying of them.

    In a thread other than the main one only the launcher's file is looked at: Python allows
    signal handlers in the main thread alone. The former handlers return at the end.
    """
    name = os.environ.get("MPIGRAD_STOP_FILE")
    stop_file = pathlib.Path(name) if name else None
    stop = Interruption(stop_file)
    if stop_file is not None:
        # The launcher waits for those who listen, and for nobody else. On another machine than
        # the launcher's the directory does not exist.
        with contextlib.suppress(OSError):
            stop_file.with_name("listening").touch()
    signals = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop._note) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
