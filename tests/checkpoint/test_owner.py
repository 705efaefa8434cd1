"""Two jobs in one directory of saves: nobody removes what another one writes."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from mpigrad.checkpoint import Store
from mpigrad.checkpoint.manifest import Owner


@pytest.fixture
def directory(tmp_path, comm):
    """An empty directory, the same on every rank."""
    return comm.mpi.bcast(tmp_path)


@pytest.fixture
def other(comm):
    """A process of rank 0 that lives, and its owner."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
    start = int(stat.rpartition(")")[2].split()[19])
    yield process, dataclasses.replace(Owner.this_process(), pid=process.pid, start=start)
    process.kill()
    process.wait()


def test_owner_is_read_as_it_was_written():
    owner = Owner.this_process()
    assert Owner.parse(str(owner)) == owner
    assert owner.lives() is True
    assert dataclasses.replace(owner, start=owner.start + 1).lives() is False
    assert dataclasses.replace(owner, kernel="another").lives() is None
    assert Owner.parse("half a li") is None


@pytest.mark.ranks(1)
def test_a_zombie_does_not_live(other):
    process, owner = other
    assert owner.lives() is True
    process.kill()  # nobody waits for it yet
    end = time.monotonic() + 10
    while owner.lives() and time.monotonic() < end:
        time.sleep(0.01)
    assert pathlib.Path(f"/proc/{process.pid}/stat").exists()
    assert owner.lives() is False


def test_a_rank_that_cannot_name_itself_fails_all_ranks(comm, directory, monkeypatch):
    """Rank 0 has no file descriptors, for example."""
    if comm.rank == 0:

        def fail() -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(Owner, "this_process", fail)
    with pytest.raises(OSError, match="Too many open files"):
        Store(directory, comm)


def test_two_jobs_that_live_do_not_share_a_directory(comm, directory, other):
    process, owner = other
    if comm.rank == 0:
        (directory / ".owner").write_text(f"{owner}\n")
    comm.mpi.Barrier()
    store = Store(directory, comm)
    with pytest.raises(OSError, match=r"process \d+ on \S+ writes its saves into"):
        store.save(1, np.zeros(2))
    process.kill()
    process.wait()
    store.save(1, np.zeros(2))
    if comm.rank == 0:  # a job of another host takes the directory
        elsewhere = dataclasses.replace(owner, kernel="another", host="node7")
        (directory / ".owner").write_text(f"{elsewhere}\n")
    comm.mpi.Barrier()
    with pytest.raises(OSError, match="on node7 writes its saves into"):
        store.save(2, np.zeros(2))
    store = Store(directory, comm, resume=True)  # a job that is started after that
    store.save(2, np.zeros(2))


@pytest.mark.parametrize("last", ["gone", "elsewhere", ""])
def test_a_save_without_an_owner_goes_if_the_last_owner_has_died(comm, directory, other, last):
    _, owner = other
    owners = {
        "gone": dataclasses.replace(owner, start=owner.start + 1),
        "elsewhere": dataclasses.replace(owner, kernel="another"),
    }
    if comm.rank == 0:
        (directory / ".unfinished-without-owner").mkdir()
        if last:
            (directory / ".owner").write_text(f"{owners[last]}\n")
    comm.mpi.Barrier()
    Store(directory, comm).save(1, np.zeros(2))
    comm.mpi.Barrier()
    assert bool(list(directory.glob(".unfinished-*"))) == (last != "gone")


def test_only_what_nobody_writes_is_removed(comm, directory, other):
    _, owner = other
    gone = dataclasses.replace(owner, start=owner.start + 1)
    elsewhere = dataclasses.replace(owner, kernel="another")
    if comm.rank == 0:
        for name, text in (("live", owner), ("gone", gone), ("new", elsewhere), ("old", elsewhere)):
            save = directory / f".unfinished-{name}"
            save.mkdir()
            (save / ".owner").write_text(f"{text}\n")
            (save / "rank00000.bin").write_bytes(b"half")
        (directory / ".removed-000001").mkdir()  # a job was killed while it removed an old save
        hours_ago = time.time() - 7200
        for path in (save / ".owner", save / "rank00000.bin", save):
            os.utime(path, (hours_ago, hours_ago))
    comm.mpi.Barrier()
    Store(directory, comm).save(1, np.zeros(2))
    comm.mpi.Barrier()
    left = sorted(p.name for p in directory.glob(".unfinished-*"))
    assert left == [".unfinished-live", ".unfinished-new"]
    assert not list(directory.glob(".removed-*"))
