"""Compiled programs that a job stores on disk, so that the next job starts sooner.

A program is found by everything that it is compiled from: its text with its constants, the versions
of JAX and XLA, and XLA's flags. If mpigrad or the application changes a program, the program is
another entry. So an entry is never out of date.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import stat
import time

__all__ = ["ProgramStore", "directory_of_programs"]

_MOST_BYTES = 256 * 1024**2
_LEFT_OVER = 3600.0  # seconds after which an unfinished file is nobody's
_OURS = re.compile(r"[0-9a-f]{16}/[0-9a-f]{64}(\..*)?")  # a directory and a file of this module
_PROCESSOR = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),  # x86-64
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),  # ARM
}


class ProgramStore:
    """A directory of compiled programs.

    Each file begins with the SHA-256 of the rest, and gets its name when it is complete, so that
    any number of ranks and jobs may read and write. A damaged file is removed, and its program is
    compiled again. If a file cannot be written, because the disk is full for example, nothing more
    is written.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._path = directory
        self._writes = True
        self._pruned = False

    def get(self, key: str) -> bytes | None:
        """Return the stored program, or None."""
        file = self._file(key)
        try:
            content = file.read_bytes()
        except OSError:
            return None
        digest, program = content[:32], content[32:]
        if hashlib.sha256(program).digest() != digest:
            with contextlib.suppress(OSError):  # another rank may remove it, too
                file.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return program

    def put(self, key: str, value: bytes) -> None:
        """Store a program."""
        if not self._writes:
            return
        file = self._file(key)
        unfinished = file.with_name(f"{file.name}.{os.uname().nodename}.{os.getpid()}")
        try:
            self._prune()
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_bytes(hashlib.sha256(value).digest() + value)
            unfinished.replace(file)
        except OSError:
            self._writes = False
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def _file(self, key: str) -> pathlib.Path:
        return self._path / hashlib.sha256(key.encode()).hexdigest()

    def _prune(self) -> None:
        """Remove the programs that were not used for the longest time, of all processors."""
        if self._pruned:
            return
        self._pruned = True
        found = []
        # The directory may be one that holds other files of the user.
        files = self._path.parent.glob("*/*")
        for file in (f for f in files if _OURS.fullmatch(f"{f.parent.name}/{f.name}")):
            with contextlib.suppress(OSError):  # another rank may remove it, too
                status = file.stat()
                if file.suffix and time.time() - status.st_mtime > _LEFT_OVER:
                    file.unlink()
                found.append((status.st_mtime, status.st_size, file))
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= _MOST_BYTES:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            total -= size


def directory_of_programs(choice: str) -> pathlib.Path | None:
    """Return the directory of this processor's programs, which is made if it does not exist.

    Parameters
    ----------
    choice
        The directory of all processors. Default (""): mpigrad/programs in the user's directory of
        caches.

    Returns
    -------
    pathlib.Path | None
        None if the directory cannot be used. For example, others may write to it: a stored program
        is executed.

    Examples
    --------
    >>> from mpigrad.compilation.program_store import directory_of_programs
    >>> directory_of_programs("/dev/null/programs")
    """
    processor = _processor()
    if processor is None:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        base = pathlib.Path(choice or pathlib.Path(home) / "mpigrad" / "programs").expanduser()
        for folder in [base] if choice else [base.parent, base]:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
    except (OSError, RuntimeError):  # the user has no home
        return None
    return base.absolute() / processor


def _processor() -> str | None:
    """Return a name for the kind of this processor, as XLA compiles for it, or None."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return None
    first = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    lines = sorted(
        f"{name.strip()}={value}" for name, _, value in first if name.strip() in _PROCESSOR
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else None
