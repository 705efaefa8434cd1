"""The board: shared memory in which each rank of a host writes its current operation.

Native handlers write the board, and the guard reads it. The layout is that of native/guard/board.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.runtime.mpi_library import gpu_aware
from mpigrad.runtime.native import library

__all__ = ["Board", "register", "share"]

TEXT, NAME, DIMS, TERMS, COUNTS, PARTS = 160, 32, 8, 4, 32, 32
SITES, ENTRIES, CHANNELS, MESSAGES, CONTRACTS, TREES = 4096, 1 << 14, 1024, 128, 8, 1 << 18
LOOP_NUMBERS = 4
RANKS, FAULTS, FAULT_IDS, FAULT_TEXT = 512, 4, 8, 16384

# States of a rank, and kinds of operation.
ABSENT, IN_PYTHON, IN_OPERATION, ENDED, FAILED = range(5)
UNKNOWN, COLLECTIVE, MESSAGES_ONLY = range(3)
IN_MPI, WAITS, HANDED_OVER = range(3)
NO_COUNTS, SAME_COUNTS, PAIR_COUNTS = range(3)


def _numbers(names: str, *arrays: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [*((name, "i8") for name in names.split()), *arrays]


PART = np.dtype(
    _numbers(
        "peer tag ordinal awaited counted dtype rank tree loop loop_numbers", ("dims", "i8", DIMS)
    )
)
CONTRACT = np.dtype(
    _numbers(
        "sequence site dtype rank free_dims terms counts_kind counts tree loop loop_numbers",
        ("dims", "i8", DIMS),
        ("values", "i8", TERMS),
        ("sends", "i8", COUNTS),
        ("receives", "i8", COUNTS),
        ("names", "S8", TERMS),
        ("operation", f"S{NAME}"),
        ("name", "i8"),
    )
)
REPORT = np.dtype([("world_rank", "i8"), ("contract", CONTRACT), ("site", f"S{TEXT}")])
ENTRY = np.dtype(_numbers("id rank size sequence open", ("contracts", CONTRACT, CONTRACTS)))
CHANNEL = np.dtype(_numbers("id peer tag sent posted received"))
MESSAGE = np.dtype(_numbers("id site", ("operation", f"S{NAME}"), ("part", PART)))
SLOT = np.dtype(
    _numbers(
        "world_rank pid namespace entries_used sites_used state since_ns serial kind polling entry "
        "site counts_invalid failure_seen sends receives messages faults",
        ("operation", f"S{NAME}"),
        ("handling", f"S{TEXT}"),
        ("line_ns", "i8"),
        ("line", f"S{TEXT}"),
        ("line_waits", "i8"),
        ("watched_ns", "i8"),
        ("loop_site", "i8"),
        ("loop_reads", "i8"),
        ("loop_numbers", "f8", LOOP_NUMBERS),
        ("send", PART, PARTS),
        ("receive", PART, PARTS),
        ("entries", ENTRY, ENTRIES),
        ("channels", CHANNEL, CHANNELS),
        ("message", MESSAGE, MESSAGES),
        ("sites", f"S{TEXT}", SITES),
        ("trees_used", "i8"),
        ("tree_of", "i8", SITES),
        ("trees", "u1", TREES),
    )
)
FAULT = np.dtype([("serials", "i8", RANKS), ("ids", "i8", FAULT_IDS), ("text", f"S{FAULT_TEXT}")])
HEADER = np.dtype(_numbers("ranks cause faults", ("fault", FAULT, FAULTS)))


def _offset(dtype: np.dtype, name: str) -> int:
    fields: Any = dtype.fields
    return fields[name][1]


@dataclasses.dataclass(frozen=True)
class Board:
    """The shared memory of the ranks of this host. `slots[own_index]` belongs to this rank."""

    header: Any  # structured scalar array of HEADER
    slots: Any  # (ranks on this host,) of SLOT
    own_index: int
    ranks: tuple[int, ...]  # the rank in MPI_COMM_WORLD of each slot
    lock: int | None = None  # descriptor of a file for locking (None: the board is private)
    threads: threading.RLock = dataclasses.field(default_factory=threading.RLock, repr=False)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock that excludes the other threads of this rank and the other ranks of the host.

        The file's lock belongs to the process, so threads need one of their own.
        """
        with self.threads:
            if self.lock is None:
                yield
                return
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.lock, fcntl.LOCK_UN)

    def publish_verdict(self) -> None:
        """Show the verdict that was written in the next place to all ranks of this host.

        A store of NumPy has no order on processors with weak memory: a rank could see the count
        before the verdict.
        """
        address = self.header.__array_interface__["data"][0] + _offset(HEADER, "faults")
        library().mpigrad_publish_verdict(ctypes.c_void_p(address))

    def claim(self) -> bool:
        """Return True if this rank is the first of its host to report why the job ends."""
        with self.locked():
            if int(self.header["cause"]) not in (0, self.own_index + 1):
                return False
            self.header["cause"] = self.own_index + 1
            return True


def view(address: int, dtype: np.dtype, count: int) -> Any:
    memory: Any = (ctypes.c_char * (dtype.itemsize * count)).from_address(address)
    return np.frombuffer(memory, dtype, count)


def _declare(lib: ctypes.CDLL) -> None:
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.mpigrad_header_bytes.restype = lib.mpigrad_slot_bytes.restype = integer
    lib.mpigrad_board_bytes.restype = integer
    lib.mpigrad_share_sums.argtypes = [integer, ctypes.c_int]
    lib.mpigrad_set_crowded.argtypes = [ctypes.c_bool]
    lib.mpigrad_way_of_sum.argtypes = [integer, integer]
    lib.mpigrad_map_board.restype = pointer
    lib.mpigrad_map_board.argtypes = [ctypes.c_char_p, integer]
    lib.mpigrad_use_board.restype = lib.mpigrad_slots.restype = pointer
    lib.mpigrad_use_board.argtypes = [pointer, ctypes.c_int, ctypes.c_int, integer, integer]
    lib.mpigrad_set_members.argtypes = [
        integer, integer, ctypes.c_int, ctypes.c_int, pointer, pointer,
    ]  # fmt: skip


_host_indices: dict[int, int] = {}  # world rank -> slot, for the ranks of this host
_board_file: list[int] = []  # the descriptor of the board's file, if it is shared
_communicator_ids = itertools.count(1)


def share(lib: ctypes.CDLL) -> Board:
    """Create the board of this host (collective over all ranks). No file is left behind."""
    _declare(lib)
    if (lib.mpigrad_header_bytes(), lib.mpigrad_slot_bytes()) != (HEADER.itemsize, SLOT.itemsize):
        raise ImportError(
            "mpigrad: the native library has another board layout than this version of mpigrad. "
            "Build it again with `make setup`."
        )
    world = MPI.COMM_WORLD
    memory, lock, host = None, None, [world.rank]
    if world.size > 1:
        near = world.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            if near.size > 1:
                memory, lock = _map(lib, near)
            if memory is not None:
                lib.mpigrad_set_crowded(_is_crowded(near))
                host = near.allgather(world.rank)
        finally:
            near.Free()
    _board_file.extend([lock] if lock is not None else [])
    _host_indices.update((rank, index) for index, rank in enumerate(host))
    own_index = host.index(world.rank)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    header = lib.mpigrad_use_board(memory, own_index, len(host), world.rank, namespace)
    return Board(
        view(header, HEADER, 1).reshape(()),
        view(lib.mpigrad_slots(), SLOT, len(host)),
        own_index,
        tuple(host),
        lock,
    )


def _map(lib: ctypes.CDLL, near: MPI.Comm) -> tuple[int | None, int | None]:
    """Map memory that the ranks of `near` share, and open a descriptor for locking.

    Returns (None, None) if that is impossible, or with MPIGRAD_BOARD=0 (as between hosts).
    """
    size = lib.mpigrad_board_bytes(near.size)
    path, made = "", -1
    wanted = os.environ.get("MPIGRAD_BOARD", "1") != "0" and near.size <= RANKS
    if near.rank == 0 and wanted:
        path, made = _create(size, near.size)
    path = near.bcast(path)
    memory, lock = None, None
    if path:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            memory = lib.mpigrad_map_board(path.encode(), size)
    everybody = near.allreduce(int(memory is not None), MPI.MIN) == 1
    if near.rank == 0 and path:
        os.unlink(path)
        os.close(made)
    return (memory, lock) if everybody else (None, None)


_ENTRIES_BEGIN = _offset(SLOT, "entries")
_ENTRIES_END = _ENTRIES_BEGIN + ENTRIES * ENTRY.itemsize


def _slot_begin(index: int) -> int:
    return HEADER.itemsize + index * SLOT.itemsize


_PREFIX = "mpigrad-board-"
_NEW = 60.0  # seconds in which a file may not have its lock yet


def _remove_leftovers(directory: str) -> None:
    """Remove the boards of ranks that were killed before they had unlinked their board.

    Such a file takes memory until the machine starts again. Whoever makes a board holds a lock on
    its file until the file is unlinked. The system releases the lock of a process that ends.
    """
    for entry in os.scandir(directory):
        if not entry.name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):  # it is another user's, in use, or gone
            file = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(file).st_mtime > _NEW:
                    os.unlink(entry.path)
            finally:
                os.close(file)


def _create(size: int, ranks: int) -> tuple[str, int]:
    """Create the file of a board and reserve its memory.

    Returns its path and a descriptor with a lock, or "" and -1 without space. Close the descriptor
    when the file is unlinked.

    Other programs may fill the file system later. A page that was not reserved would then end the
    first rank that touches it. The entries of communicators are reserved when they are made.
    """
    for directory in ("/dev/shm", tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            _remove_leftovers(directory)
            file, path = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.truncate(file, size)
                begin = 0
                for index in range(ranks):
                    _reserve(file, begin, _slot_begin(index) + _ENTRIES_BEGIN)
                    begin = _slot_begin(index) + _ENTRIES_END
                _reserve(file, begin, size)
            except OSError:  # no space, or a limit of this user
                os.unlink(path)
                os.close(file)
                continue
            return path, file
    return "", -1


def _reserve(file: int, begin: int, end: int) -> None:
    os.posix_fallocate(file, begin, end - begin)


def _reserve_entry(board_file: int, index: int, slot: int) -> bool:
    """Reserve the memory of a communicator on the board. Returns False without space."""
    begin = _slot_begin(index) + _ENTRIES_BEGIN + slot * ENTRY.itemsize
    try:
        _reserve(board_file, begin, begin + ENTRY.itemsize)
    except OSError:
        return False
    return True


def _is_crowded(near: MPI.Comm) -> bool:
    """Return True if the ranks of this host share fewer processors than they are.

    A container or a cpuset may allow fewer processors than the host has.
    """
    allowed = near.allgather(os.sched_getaffinity(0))
    return len(set().union(*allowed)) < near.size


def register(lib: ctypes.CDLL, slot: int, rank: int, gather: Any) -> None:
    """Register a new communicator of this rank. `gather` is an allgather over its members."""
    on_device = gpu_aware() == "all"  # the CPU cannot read the arrays of sums
    wanted = os.environ.get("MPIGRAD_SHARED_MEMORY", "1") != "0" and not on_device
    me = MPI.COMM_WORLD.rank
    reserved = not _board_file or _reserve_entry(_board_file[0], _host_indices[me], slot)
    place = (me, slot, next(_communicator_ids), wanted, reserved)
    places: Sequence[tuple[int, int, int, bool, bool]] = gather(place)
    if full := [p[0] for p in places if not p[4]]:
        raise MemoryError(
            "Communicator: there is no space for another communicator in the shared memory of "
            f"rank {full[0]}'s host (/dev/shm or the temporary directory). Free space there, or "
            "set MPIGRAD_BOARD=0."
        )
    first = places[0]
    identity = 1 + (first[0] << 32) + first[2]  # unique in the job: rank 0 and its counter
    size = len(places)
    array = ctypes.c_int * size
    indices = array(*(_host_indices.get(p[0], -1) for p in places))
    slots = array(*(p[1] for p in places))
    _declare(lib)
    lib.mpigrad_set_members(slot, identity, rank, size, indices, slots)
    lib.mpigrad_share_sums(slot, all(p[3] for p in places))
