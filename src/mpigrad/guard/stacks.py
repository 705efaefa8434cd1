"""Where another thread is: files and lines.

`sys._current_frames` makes objects of the frames of a thread that runs, and now and then CPython
3.11 crashes afterwards. What is made for crashes makes none: it writes text.
"""

from __future__ import annotations

import faulthandler
import os
import re

__all__ = ["Stacks"]

_THREAD = re.compile(rb"^(?:Current t|T)hread 0x([0-9a-f]+).*$", re.MULTILINE)
_PLACE = re.compile(rb'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_BYTES = 1 << 17


class Stacks:
    """Reads the stacks of this process's threads."""

    def __init__(self) -> None:
        self._file = os.memfd_create("mpigrad-stacks")

    def places(self, thread: int) -> list[tuple[str, int]]:
        """(file, line) of what the thread of this identity executes, the innermost first."""
        os.lseek(self._file, 0, os.SEEK_SET)
        os.ftruncate(self._file, 0)
        faulthandler.dump_traceback(self._file, all_threads=True)
        _, *parts = _THREAD.split(os.pread(self._file, _BYTES, 0))
        for identity, stack in zip(parts[::2], parts[1::2], strict=True):
            if int(identity, 16) == thread:
                return [(_path(file), int(line)) for file, line in _PLACE.findall(stack)]
        return []


def _path(escaped: bytes) -> str:
    """A path, whose characters beyond ASCII are written as in a text of Python."""
    return escaped.decode("unicode_escape" if b"\\" in escaped else "ascii", errors="replace")
