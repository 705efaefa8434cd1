"""Compiled programs that the ranks of a host share, and that a job stores on disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import re
import stat
import struct
import threading
import time

__all__ = [
    "ProgramStore",
    "SharedPrograms",
    "directory_of_programs",
]

# ---- Compiled programs that the ranks of a host share while their job runs ----
#
# The programs lie behind the board, in the board's file. The file has no name any more, so
# nothing is left behind, also if all ranks are killed. Records are only appended:
#
#     header    end of the records, closed (1: nothing more is written)
#     record    _MAGIC, length of the content, key, SHA-256 of these two and the content, content
#     ...
#
# A reader takes no lock: a record is complete before the end of the records moves. A writer locks
# the header. The locks are those of POSIX (`fcntl`), which the kernel releases if their process
# dies. A child process does not inherit them.


_HEADER = struct.Struct("<QQ")
_RECORD = struct.Struct("<8sQ32s32s")
_MAGIC = b"mpigrad1"
_MOST_SHARED_BYTES = 128 * 1024**2
_MOST_OF_ONE = 8 * 1024**2  # a larger program is compiled by each rank
_PART = 4  # the programs may take one part in this many of the space that is free at the start
_BUSY = 1.0  # seconds for which a writer waits for another writer
# A lock of fcntl covers bytes of the file, which need not exist. Those of keys begin here.
_KEYS = 1 << 40
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux


class SharedPrograms:
    """Programs by their keys, and a lock for each key.

    Errors of the file system are not raised: `closed` becomes True, and each rank compiles its
    programs.

    Parameters
    ----------
    file
        A descriptor of the file, open for reading and writing.
    begin
        The offset in bytes at which the programs begin.
    """

    def __init__(self, file: int, begin: int) -> None:
        self._file, self._begin = file, begin
        status = os.fstat(file)
        self._identity = status.st_dev, status.st_ino
        self._seen = _HEADER.size  # records before this offset are in `_places`
        self._places: dict[bytes, tuple[int, int]] = {}
        system = os.fstatvfs(file)
        self._most = min(_MOST_SHARED_BYTES, system.f_bavail * system.f_frsize // _PART)
        self._threads, self._reading = threading.Lock(), threading.RLock()
        self._held: set[bytes] = set()
        self._broken = False

    @property
    def closed(self) -> bool:
        """True if ranks cannot publish any more. Then nobody should wait for a program."""
        return self._end()[1]

    def read(self, key: bytes) -> bytes | None:
        """Return the program with this key of 32 bytes, or None. b"": it cannot be shared."""
        with self._reading, contextlib.suppress(OSError):
            self._scan()
            place = self._places.get(key)
            if place is None:
                return None
            offset, length = place
            record = self._pread(_RECORD.size + length, offset)
            if len(record) == _RECORD.size + length:
                magic, _, _, digest = _RECORD.unpack_from(record)
                content = record[_RECORD.size :]
                if magic == _MAGIC and digest == _digest(key, content):
                    return content
            self._places.pop(key, None)  # damaged
        return None

    def publish(self, key: bytes, content: bytes) -> None:
        """Show a program to the other ranks. b"": it cannot be shared, so that nobody waits."""
        if not self._threads.acquire(timeout=_BUSY):  # of a signal handler, for example
            return
        try:
            if self._lock(0, _BUSY):
                try:
                    self._append(key, content)
                finally:
                    self._unlock(0)
        except OSError:
            self._broken = True
        finally:
            self._threads.release()

    def try_lock(self, key: bytes) -> bool:
        """Lock a key for this process. Returns False if another process, or a thread, has it."""
        if key in self._held:
            return False
        self._held.add(key)
        locked = False
        try:
            locked = self._lock(_place_of(key))
        except OSError:
            self._broken = True
        finally:
            if not locked:
                self._held.discard(key)
        return locked

    def unlock(self, key: bytes) -> None:
        """Unlock a key, if this process has it."""
        if key in self._held:
            self._held.discard(key)
            with contextlib.suppress(OSError):
                self._unlock(_place_of(key))

    def is_held_here(self, key: bytes) -> bool:
        """Return True if a thread of this process has the lock of this key."""
        return key in self._held

    def holder(self, key: bytes) -> int:
        """Return the id of the process that has locked this key, or 0 if it is not known."""
        place = self._begin + _place_of(key)
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        try:
            self._check()
            kind, *_, process = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, request))
        except OSError:
            return 0
        return max(process, 0) if kind != fcntl.F_UNLCK else 0

    # ---- the file ----

    def _append(self, key: bytes, content: bytes) -> None:
        end, closed = self._end()
        if len(content) > _MOST_OF_ONE:
            content = b""
        size = _RECORD.size + len(content)
        if closed:
            return
        if end + size > self._most:
            self._pwrite(_HEADER.pack(end, 1), 0)
            return
        record = _RECORD.pack(_MAGIC, len(content), key, _digest(key, content)) + content
        try:
            self._pwrite(record, end)
            self._pwrite(_HEADER.pack(end + size, 0), 0)
        except OSError:  # no space
            with contextlib.suppress(OSError):
                self._pwrite(_HEADER.pack(end, 1), 0)
            raise

    def _end(self) -> tuple[int, bool]:
        """Return the end of the records, and whether nothing more is written."""
        if self._broken:
            return self._seen, True
        try:
            header = self._pread(_HEADER.size, 0)
        except OSError:
            self._broken = True
            return self._seen, True
        end, closed = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        return max(end, _HEADER.size), bool(closed)

    def _scan(self) -> None:
        """Note the places of the records that other ranks have added."""
        end, _ = self._end()
        while self._seen < end:
            header = self._pread(_RECORD.size, self._seen)
            if len(header) < _RECORD.size:
                return
            magic, length, key, _ = _RECORD.unpack(header)
            if magic != _MAGIC:  # not visible yet
                return
            self._places[key] = self._seen, length
            self._seen += _RECORD.size + length

    def _check(self) -> None:
        """Raise an error if the program has closed the file, and the descriptor is of another."""
        status = os.fstat(self._file)
        if (status.st_dev, status.st_ino) != self._identity:
            raise OSError(errno.EBADF, "the descriptor belongs to another file")

    def _pread(self, size: int, offset: int) -> bytes:
        self._check()
        return os.pread(self._file, size, self._begin + offset)

    def _pwrite(self, data: bytes, offset: int) -> None:
        self._check()
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file, left, self._begin + offset)
            left, offset = left[written:], offset + written

    def _lock(self, place: int, seconds: float = 0.0) -> bool:
        """Lock one byte. Returns False if it is not free within this time."""
        start = time.monotonic()
        while True:
            self._check()
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._begin + place)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            else:
                return True
            if time.monotonic() - start >= seconds:
                return False
            time.sleep(1e-3)

    def _unlock(self, place: int) -> None:
        self._check()
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._begin + place)


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.sha256(len(content).to_bytes(8, "little") + key + content).digest()


def _place_of(key: bytes) -> int:
    """Return the offset of the byte that is locked for a key."""
    return _KEYS + int.from_bytes(key[:6], "little")


# ---- Compiled programs that a job stores on disk, so that the next job starts sooner ----
#
# A program is found by everything that it is compiled from: its text with its constants, the
# versions of JAX and XLA, and XLA's flags. If mpigrad or the application changes a program, the
# program is another entry. So an entry is never out of date.


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
        entries = []
        # The directory may be one that holds other files of the user.
        files = self._path.parent.glob("*/*")
        for file in (f for f in files if _OURS.fullmatch(f"{f.parent.name}/{f.name}")):
            with contextlib.suppress(OSError):  # another rank may remove it, too
                status = file.stat()
                if file.suffix and time.time() - status.st_mtime > _LEFT_OVER:
                    file.unlink()
                entries.append((status.st_mtime, status.st_size, file))
        total = sum(size for _, size, _ in entries)
        for _, size, file in sorted(entries):
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
