"""Where another thread is: files and lines.

A look at the frames of a thread that runs is not safe. jaxlib lets other threads run while arrays
are freed, in the middle of a function's return: then `faulthandler` ends CPython 3.12 and 3.13 by
SIGSEGV, and `sys._current_frames` CPython 3.11 (now and then, afterwards). So the main thread is
asked to look at itself, at a moment when that is safe (`Py_AddPendingCall`). Only if it does not
answer, because it is inside native code, its frames are read from outside, by the one of the two
that is safe for this version.
"""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import os
import re
import sys
import threading

__all__ = ["places", "places_of_main"]

Places = list[tuple[str, int]]

_DEPTH = 100
_PATIENCE = 0.02  # seconds that the main thread has for its answer

_THREAD = re.compile(rb"^(?:Current t|T)hread 0x([0-9a-f]+).*$", re.MULTILINE)
_PLACE = re.compile(rb'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_BYTES = 1 << 20


class _Question:
    """What the main thread has been asked, and its answer."""

    def __init__(self) -> None:
        self.answered = _thread.allocate_lock()
        self.answered.acquire()
        self.places: Places = []


_question: _Question | None = None


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _answer(_: int | None) -> int:
    """Runs in the main thread, between two instructions of its program."""
    global _question
    question, _question = _question, None
    if question is not None:
        question.places = _walk(sys._getframe().f_back)
        question.answered.release()
    return 0


def places_of_main() -> Places:
    """(file, line) of what the main thread executes, the innermost first, at most 100.

    For one other thread at a time.
    """
    global _question
    question = _Question()
    waits, _question = _question is not None, question  # it has not even answered the last one
    asked = waits or ctypes.pythonapi.Py_AddPendingCall(_answer, None) == 0
    if asked and question.answered.acquire(timeout=_PATIENCE):
        return question.places
    return places(threading.main_thread().ident or 0)


def places(thread: int) -> Places:
    """(file, line) of what the thread of this identity executes, the innermost first.

    At most 100. For a thread that is inside native code.
    """
    if sys.version_info >= (3, 12):
        return _walk(sys._current_frames().get(thread))
    # Not kept: code that closes all files would let another one have its descriptor.
    file = os.memfd_create("mpigrad-stacks")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        _, *parts = _THREAD.split(os.pread(file, _BYTES, 0))
    finally:
        os.close(file)
    for identity, stack in zip(parts[::2], parts[1::2], strict=True):
        if int(identity, 16) == thread:
            return [(_path(name), int(line)) for name, line in _PLACE.findall(stack)]
    return []


def _walk(frame: object) -> Places:
    found: Places = []
    while frame is not None and len(found) < _DEPTH:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0))  # type: ignore[attr-defined]
        frame = frame.f_back  # type: ignore[attr-defined]
    return found


def _path(escaped: bytes) -> str:
    """A path, whose characters beyond ASCII are written as in a text of Python."""
    return escaped.decode("unicode_escape" if b"\\" in escaped else "ascii", errors="replace")
