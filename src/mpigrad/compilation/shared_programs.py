"""Compiled programs that the ranks of a host share while their job runs.

The programs lie behind the board, in the board's file. The file has no name any more, so nothing is
left behind, also if all ranks are killed. Records are only appended:

    header    end of the records, closed (1: nothing more is written)
    record    _MAGIC, length of the content, key, SHA-256 of these two and the content, content
    ...

A reader takes no lock: a record is complete before the end of the records moves. A writer locks the
header. The locks are those of POSIX (`fcntl`), which the kernel releases if their process dies. A
child process does not inherit them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import threading
import time

__all__ = ["SharedPrograms"]

_HEADER = struct.Struct("<QQ")
_RECORD = struct.Struct("<8sQ32s32s")
_MAGIC = b"mpigrad1"
_MOST_BYTES = 128 * 1024**2
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
        self._most = min(_MOST_BYTES, system.f_bavail * system.f_frsize // _PART)
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
