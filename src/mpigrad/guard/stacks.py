"""Where another thread is: files and lines.

`sys._current_frames` makes objects of the frames of a thread that runs, and now and then CPython
3.11 crashes afterwards. What is made for crashes makes none: it writes text.
"""

from __future__ import annotations

import faulthandler
import os
import re

__all__ = ["places"]

_THREAD = re.compile(rb"^(?:Current t|T)hread 0x([0-9a-f]+).*$", re.MULTILINE)
_PLACE = re.compile(rb'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_BYTES = 1 << 20


def places(thread: int) -> list[tuple[str, int]]:
    """(file, line) of what the thread of this identity executes, the innermost first.

    At most 100; nothing where there are more than 100 threads.
    """
    # Not kept: who closes all files would let another one have its number.
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


def _path(escaped: bytes) -> str:
    """A path, whose characters beyond ASCII are written as in a text of Python."""
    return escaped.decode("unicode_escape" if b"\\" in escaped else "ascii", errors="replace")
