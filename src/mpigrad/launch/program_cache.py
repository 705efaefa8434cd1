"""Compiled programs that `mpigrad run` stores, so that the next run of the case starts sooner.

JAX looks up a program by all that it is compiled from: the program itself with its constants, the
versions of JAX and XLA, and XLA's flags. So a program that another version of mpigrad or of the
application makes is another entry, and the program of an entry is never out of date. JAX's own
files are not safe for several ranks: a reader may see half of a file, and a file that was cut off
stays. Therefore JAX gets the cache of this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import stat
import time
from typing import Any

import jax

from mpigrad.operations._jax_private import module_of, optional

__all__ = ["ProgramCache", "store_programs"]

_MOST_RANKS = 64  # with more, reading many small files takes longer than compiling
_MOST_BYTES = 256 * 1024**2
_LEFT_OVER = 3600.0  # seconds after which an unfinished file is nobody's
_PROCESSOR = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),  # x86-64
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),  # ARM
}


class ProgramCache:
    """A directory of compiled programs, with the two methods that JAX calls.

    Each file begins with the SHA-256 of the rest, and appears whole under its name, so that any
    number of ranks and jobs may read and write. A damaged file is removed, and its program compiled
    again. If a file cannot be written, because the disk is full for example, nothing more is
    written.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._path = directory  # JAX's name
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
        with contextlib.suppress(OSError):
            if hashlib.sha256(program).digest() != digest:
                file.unlink()
                return None
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

    def clear(self) -> None:
        """Do nothing: jax.clear_caches is about the memory of this process."""

    def _file(self, key: str) -> pathlib.Path:
        return self._path / hashlib.sha256(key.encode()).hexdigest()

    def _prune(self) -> None:
        """Remove the programs that were not used for the longest time, of all processors."""
        if self._pruned:
            return
        self._pruned = True
        found = []
        for file in self._path.parent.glob("*/*"):
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


def store_programs(ranks: int) -> pathlib.Path | None:
    """Let JAX store the compiled programs of this process, and use the stored ones.

    MPIGRAD_PROGRAMS names the directory, or is `off`. Default: mpigrad/programs in the user's
    directory of caches. Nothing is stored if the user has chosen a cache of JAX, if there are more
    than 64 ranks, on GPUs, or if others may write to the directory: a stored program is executed.

    Parameters
    ----------
    ranks
        The number of ranks of the job.

    Returns
    -------
    pathlib.Path | None
        The directory of this processor's programs, or None.

    Examples
    --------
    >>> import os
    >>> from mpigrad.launch.program_cache import store_programs
    >>> os.environ["MPIGRAD_PROGRAMS"] = "off"
    >>> store_programs(2)
    """
    choice = os.environ.get("MPIGRAD_PROGRAMS", "")
    settings: Any = jax.config
    if choice == "off" or settings.jax_compilation_cache_dir or ranks > _MOST_RANKS:
        return None
    if optional("compilation_cache.get_file_cache") is None or jax.default_backend() != "cpu":
        return None
    processor = _processor()
    if processor is None:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = pathlib.Path(choice or pathlib.Path(home) / "mpigrad" / "programs").expanduser()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
    except (OSError, RuntimeError):  # the user has no home
        return None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    directory = base.absolute() / processor
    module_of("compilation_cache.get_file_cache").get_file_cache = lambda path: (
        ProgramCache(directory),
        path,
    )
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return directory


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
