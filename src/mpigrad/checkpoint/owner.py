"""The process that writes into a directory of saves, and whether it still lives."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import socket
from typing import Self

__all__ = ["Owner"]

_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process that can be found again.

    Attributes
    ----------
    host
        The name of its host.
    kernel
        A digest of the boot of this host and of the name space of its process numbers: processes
        with the same digest see each other in /proc.
    pid, start
        Its number, and the time of its start in clock ticks since the boot.
    """

    host: str
    kernel: str
    pid: int
    start: int

    @classmethod
    def this_process(cls) -> Self:
        """Return the process that calls this."""
        view = f"{_BOOT.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
        kernel = hashlib.sha256(view.encode()).hexdigest()[:12]
        pid = os.getpid()
        return cls(socket.gethostname()[:64], kernel, pid, _start_of(pid))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the process of a text that `str` has made, or None."""
        words = text.strip().split(" ")
        if len(words) != 4 or not (words[2].isdecimal() and words[3].isdecimal()):
            return None
        return cls(words[0], words[1], int(words[2]), int(words[3]))

    def __str__(self) -> str:
        return f"{self.host} {self.kernel} {self.pid} {self.start}"

    def lives(self) -> bool | None:
        """Return whether the process lives, or None if that cannot be seen from here."""
        if self.kernel != Owner.this_process().kernel:
            return None
        try:
            return _start_of(self.pid) == self.start
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:  # this process has no file descriptors, for example
            return None


def _start_of(pid: int) -> int:
    """Return the start of a process. Its name, in parentheses, may have spaces.

    Raises
    ------
    ProcessLookupError
        If it has ended, also if nobody has asked for its exit code yet.
    """
    text = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
    state, *fields = text.rpartition(b")")[2].split()
    if state in (b"Z", b"X"):
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[18])
