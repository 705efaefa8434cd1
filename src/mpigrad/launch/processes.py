"""The processes of a job, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import pathlib

__all__ = ["marked", "outliving"]

# What launchers start between themselves and the ranks.
_HELPERS = ("hydra", "prte", "orted", "mpiexec")


def marked(mark: bytes) -> list[int]:
    """Other processes than this which have `mark` in their environment (a dead one has none)."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def outliving(mpiexec: int, mark: bytes) -> list[tuple[int, str]]:
    """Number and name of the processes that ranks have started, once all ranks have ended.

    Ranks are below `mpiexec`, and what a rank leaves behind is below nobody of the job. Empty while
    a rank is there.
    """
    left = []
    for pid in marked(mark):
        name = _name(pid)
        if pid == mpiexec or not name or name.startswith(_HELPERS):  # or it has ended meanwhile
            continue
        if _below(pid, mpiexec):
            return []
        left.append((pid, name))
    return left


def _below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = _parent(pid)
    return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name before it may have blanks and brackets.
        text = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
        return int(text.rpartition(b")")[2].split()[1])
    return 0
