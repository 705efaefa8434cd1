"""The board, and messages of the user between operations."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import shlex
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from launching import PROGRAMS, command, run
from mpigrad.communicator import Communicator
from mpigrad.guard import board as b
from mpigrad.guard.board_reader import Reader
from mpigrad.guard.failure import current_board


def test_every_rank_is_on_the_board_and_no_file_is_left(comm: Communicator) -> None:
    board = current_board()
    assert sorted(int(r) for r in board.slots["world_rank"]) == list(range(comm.size))
    pids = comm.mpi.allgather(os.getpid())
    assert sorted(int(pid) for pid in board.slots["pid"]) == sorted(pids)
    # With several ranks it is a mapped file, which has been deleted.
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    files = [line for line in maps if "/mpigrad-" in line and "rw-s" in line]
    assert all(line.endswith("(deleted)") for line in files)
    assert bool(files) == (comm.size > 1)


def test_operations_are_counted(comm: Communicator) -> None:
    board, own = current_board(), comm.dup()
    slot = board.slots[board.own_index]
    entry = slot["entries"][own.slot % b.ENTRIES]
    assert len(set(own.mpi.allgather(int(entry["id"])))) == 1
    before = int(entry["sequence"])
    serial = int(slot["serial"])
    mg.allreduce(jnp.ones(3), comm=own)
    mg.jit(lambda x: jax.lax.fori_loop(0, 5, lambda i, y: mg.bcast(y, comm=own), x))(jnp.ones(2))
    assert int(entry["sequence"]) == before + 6
    assert int(slot["serial"]) == serial + 12  # each begins and ends
    contract = entry["contracts"][(before + 6) % b.CONTRACTS]
    assert bytes(contract["operation"]).split(b"\0")[0] == b"bcast"
    assert int(slot["state"]) == b.IN_PYTHON
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(3):
        mg.sendrecv(jnp.ones(2), right, left, 5, 5, comm=own)
    to, back = (
        Reader(board.slots).channel(board.own_index, int(entry["id"]), peer, 5)
        for peer in (right, left)
    )
    assert to is not None
    assert back is not None
    assert int(to["sent"]) == int(back["posted"]) == int(back["received"]) == 3


def test_communicators_have_different_identities(comm: Communicator) -> None:
    """Two groups have the same slot numbers, but no identity in common."""
    board, parts = current_board(), comm.split(comm.rank % 2)
    identity = int(board.slots[board.own_index]["entries"][parts.slot % b.ENTRIES]["id"])
    found = comm.mpi.allgather((comm.rank % 2, identity))
    assert len(set(found)) == len({identity for _, identity in found}) == min(comm.size, 2)


def test_mpi4py_messages_between_operations(comm: Communicator) -> None:
    """Call mpi4py between compiled programs, and inside them from a callback."""
    world = MPI.COMM_WORLD
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def theirs(x: Any) -> Any:
        return np.asarray(world.sendrecv(np.asarray(x), right, source=left), np.float64)

    @mg.jit
    def f(x: Any) -> Any:
        step = lambda y, _: (mg.sendrecv(y, right, left), None)
        y = jax.lax.scan(step, x, length=20)[0]
        z = jax.pure_callback(theirs, jax.ShapeDtypeStruct((), jnp.float64), y)
        return mg.allreduce(z) + 0 * y

    expected = sum(range(comm.size))
    for _ in range(5):
        y = f(jnp.float64(comm.rank))
        assert world.sendrecv(comm.rank, right, source=left) == left
        assert float(y) == expected


def full(monkeypatch: pytest.MonkeyPatch, *directories: str) -> None:
    """Let these directories have no space."""
    reserve = os.posix_fallocate

    def refuse(file: int, begin: int, size: int) -> None:
        if os.path.dirname(os.readlink(f"/proc/self/fd/{file}")) in directories:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse)


@pytest.mark.ranks(1)
def test_the_memory_of_the_board_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without memory behind it would end a rank when it is touched."""
    temporary = os.path.realpath(tempfile.gettempdir())
    size = b.HEADER.itemsize + 2 * b.SLOT.itemsize
    for others, expected in (((), "/dev/shm"), (("/dev/shm",), temporary)):
        full(monkeypatch, *others)
        path, file = b._create(size, 2)
        try:
            os.close(file)
            assert os.path.dirname(os.path.realpath(path)) == expected
            status = os.stat(path)
            entries = 2 * b.ENTRIES * b.ENTRY.itemsize
            assert status.st_size == size
            assert size - entries <= 512 * status.st_blocks < size
        finally:
            os.unlink(path)
    full(monkeypatch, "/dev/shm", temporary)
    made, make = [], tempfile.mkstemp  # other jobs make files there at the same time

    def record(**where: Any) -> tuple[int, str]:
        made.append(make(**where))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkstemp", record)
    assert b._create(size, 2) == ("", -1)
    assert len(made) == 2 and not any(os.path.exists(path) for _, path in made)


@pytest.mark.ranks(1)
def test_boards_of_dead_ranks_are_removed(tmp_path: pathlib.Path) -> None:
    """A board that is in use, a new one and other files stay."""
    dead, used, new, other = (
        tmp_path / f"{b._PREFIX}{n}" for n in ("dead", "used", "new", "other")
    )
    other = other.with_name("mpigrad-other")
    for path in (dead, used, new, other):
        path.write_bytes(b"1")
        os.utime(path, (0, 0) if path != new else None)
    with used.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        b._remove_leftovers(str(tmp_path))
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
            p.name for p in (used, new, other)
        )


@pytest.mark.ranks(2, 3)
def test_a_communicator_without_space_on_the_board(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank alone finds no space, and all ranks get the error."""
    if comm.rank == comm.size - 1:
        full(monkeypatch, "/dev/shm", os.path.realpath(tempfile.gettempdir()))
    with pytest.raises(MemoryError, match=f"rank {comm.size - 1}'s host"):
        comm.dup()
    monkeypatch.undo()
    assert float(mg.allreduce(1.0, comm=comm.dup())) == comm.size


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("allowed", "crowded"), [((0, 1), True), ((0, 1, 2), False)])
def test_processors_that_ranks_may_use(allowed: tuple[int, ...], crowded: bool) -> None:
    """Each of three ranks may be bound to one processor."""

    class Near:
        size = 3

        def allgather(self, own: set[int]) -> list[set[int]]:
            return [{allowed[r % len(allowed)]} for r in range(self.size)]

    near: Any = Near()
    assert b._is_crowded(near) is crowded


@pytest.mark.launcher
@pytest.mark.cases("24", reason="a board in another directory: ..._memory_of_the_board_is_reserved")
@pytest.mark.parametrize("mebibytes", [1, 24])
def test_a_full_dev_shm(mebibytes: int) -> None:
    """From the beginning, and filled by somebody after the start."""
    mount = f"mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm"
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace of their own")
    words = shlex.join(command("launch", "-n", 2, PROGRAMS / "full_shared_memory.py"))
    done = run([*alone, f"{mount} && exec {words}"])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: {720 * (1 - rank) + 21240 + 8:g}" in done.stdout
