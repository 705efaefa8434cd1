"""The stack of another thread: its files and lines.

Reading the frames of a running thread is not safe. jaxlib lets other threads run while it frees
arrays, in the middle of a function's return. At that moment `faulthandler` crashes CPython 3.12 and
3.13 with SIGSEGV, and `sys._current_frames` sometimes crashes CPython 3.11 later. The main thread
is therefore asked to report its own stack when that is safe (`Py_AddPendingCall`). If it does not
answer because it is inside native code, its frames are read from outside, with the function that is
safe for this version.
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
_PATIENCE = 0.02  # seconds to wait for the answer of the main thread

_THREAD = re.compile(rb"^(?:Current t|T)hread 0x([0-9a-f]+).*$", re.MULTILINE)
_PLACE = re.compile(rb'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_BYTES = 1 << 20


class _Question:
    """A question to the main thread, and its answer."""

    def __init__(self) -> None:
        self.answered = _thread.allocate_lock()
        self.answered.acquire()
        self.places: Places = []


_question: _Question | None = None


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _answer(_: int | None) -> int:
    """Report the stack, in the main thread, between two instructions of its program."""
    global _question
    question, _question = _question, None
    if question is not None:
        question.places = _walk(sys._getframe().f_back)
        question.answered.release()
    return 0


def places_of_main() -> Places:
    """Return the stack of the main thread as (file, line) pairs, innermost first, at most 100.

    Only one thread may call this at a time.
    """
    global _question
    question = _Question()
    waits, _question = _question is not None, question  # the last question is still unanswered
    asked = waits or ctypes.pythonapi.Py_AddPendingCall(_answer, None) == 0
    if asked and question.answered.acquire(timeout=_PATIENCE):
        return question.places
    return places(threading.main_thread().ident or 0)


def places(thread: int) -> Places:
    """Return the stack of a thread inside native code as (file, line) pairs, innermost first.

    At most 100 pairs. `thread` is the identity of the thread.
    """
    if sys.version_info >= (3, 12):
        return _walk(sys._current_frames().get(thread))
    # Opened each time: a program that closes all files would free its descriptor for another file.
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
    stack: Places = []
    while frame is not None and len(stack) < _DEPTH:
        stack.append((frame.f_code.co_filename, frame.f_lineno or 0))  # type: ignore[attr-defined]
        frame = frame.f_back  # type: ignore[attr-defined]
    return stack


def _path(escaped: bytes) -> str:
    """Decode a path in which characters beyond ASCII are escaped as in a Python string."""
    return escaped.decode("unicode_escape" if b"\\" in escaped else "ascii", errors="replace")
