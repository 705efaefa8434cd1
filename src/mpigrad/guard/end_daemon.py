"""End the daemon of a job whose ranks have ended, if it does not end and serves no other job.

python end_daemon.py PID NAME MARK SECONDS

A rank that ends the job starts this script as a process of its own: a daemon that waits for a host
which does not answer would live for ever. It imports nothing of mpigrad.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time


def is_alive(daemon: int, name: str) -> bool:
    """Return True if the process exists and has this name."""
    try:
        return pathlib.Path(f"/proc/{daemon}/comm").read_text().strip() == name
    except OSError:
        return False


def serves_others(daemon: int, mark: str) -> bool:
    """Return True if a child of the daemon has no such variable, or cannot be looked at."""
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            if parent != daemon:
                continue
            if mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                return True
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except OSError:
            return True
    return False


def main() -> None:
    """Wait for the daemon, and end it if it is of this job alone."""
    daemon, name, mark, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    others = serves_others(daemon, mark)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(1.0, seconds / 4))
        if not is_alive(daemon, name):
            return
    if not others and not serves_others(daemon, mark):
        os.kill(daemon, signal.SIGKILL)


if __name__ == "__main__":
    main()
