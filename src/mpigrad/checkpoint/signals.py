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
_outermost: Interruption | None = None


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

    @contextlib.contextmanager
    def hold_grace_time(self) -> Iterator[None]:
        """Let the launcher wait while the block runs. Its grace time begins after that.

        Use it on rank 0, in a `with` statement, for work that cannot hear a request and must not be
        lost: the report of a run, or the compilation of its first iteration. A second Ctrl-C and
        the time limit still end the job.

        Examples
        --------
        >>> from mpigrad.checkpoint import listen
        >>> with listen() as interruption:
        ...     with interruption.hold_grace_time():
        ...         report = "what there is"
        """
        if self._stop_file is None:
            yield
            return
        held = self._stop_file.with_name("held")
        with contextlib.suppress(OSError):
            held.touch()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                held.unlink()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C ends the program now
        self._signalled = True


@contextlib.contextmanager
def listen() -> Iterator[Interruption]:
    """Record SIGTERM, SIGINT, SIGUSR1 and the launcher's request instead of ending at once.

    Use it in a `with` statement. The former signal handlers return at its end. Inside of another
    `listen`, for example in `minimize` with a checkpoint, both give the same object. So a request
    ends the whole program and not only the part that was running. In a thread other than the main
    thread only the launcher's file is read, because Python allows signal handlers only in the main
    thread.

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
    global _outermost
    if _outermost is not None:
        yield _outermost
        return
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
    _outermost = stop
    try:
        yield stop
    finally:
        _outermost = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
