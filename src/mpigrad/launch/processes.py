"""Find the processes of a job by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import pathlib

__all__ = ["processes_with", "remaining_processes"]

# Processes between a launcher and its ranks.
_HELPERS = ("hydra", "prte", "orted", "mpiexec")


def processes_with(mark: bytes) -> list[int]:
    """Return the ids of other processes with `mark` in their environment (zombies do not)."""
    pids = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def remaining_processes(mpiexec: int, mark: bytes) -> list[tuple[int, str]]:
    """Return (id, name) of the processes that outlive all ranks, which started them.

    Ranks are descendants of `mpiexec`, and orphans are not. Empty while a rank is running.
    """
    left = []
    for pid in processes_with(mark):
        name = _name(pid)
        if pid == mpiexec or not name or name.startswith(_HELPERS):  # or it has just ended
            continue
        if _descends(pid, mpiexec):
            return []
        left.append((pid, name))
    return left


def _descends(pid: int, ancestor: int) -> bool:
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
        # The name in front may contain blanks and brackets.
        text = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
        return int(text.rpartition(b")")[2].split()[1])
    return 0
