"""Stored programs: any rank and job may read and write them, and a wrong one is never used."""

from __future__ import annotations

import os
import pathlib

import pytest

from launching import mpigrad
from mpigrad.compilation import compiler, program_store, store_programs
from mpigrad.compilation.program_store import ProgramStore
from tiers import ALL

PROGRAM = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
import mpigrad as mg
from mpigrad.compilation import store_programs
from mpigrad.compilation.compiler import EVENT

found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
directory = store_programs()
comm = mg.default_communicator()
grid = mg.Grid((6, 6), (1.0, 1.0))

def share(x):
    padded = mg.halo_exchange(x, grid, width=1, boundary="edge")
    total = mg.allreduce(padded[:-2, 1:-1] * float(sys.argv[1]), comm=comm)
    return jnp.sum(jnp.tanh(total * x) ** 2)

x = jnp.full(grid.local_shape, 0.3 + comm.rank)
value, gradient = mg.jit(mg.value_and_grad(share, loss="share"))(x)
text = comm.mpi.gather((value.item().hex(), [g.hex() for g in gradient.ravel().tolist()]))
shared = found.count(EVENT + "from_store") + found.count(EVENT + "from_other_rank")
hits = comm.mpi.gather(shared)
misses = comm.mpi.gather(found.count(EVENT + "compiled"))
if comm.rank == 0:
    print(text)
    print(hits, misses, directory is not None)
"""


@pytest.mark.ranks(1)
def test_stored_programs_are_read_whole_or_not_at_all(tmp_path, monkeypatch):
    cache = ProgramStore(tmp_path / "kind")
    assert cache.get("a") is None
    cache.put("a", b"program" * 100)
    assert cache.get("a") == b"program" * 100
    assert cache.get("b") is None
    (file,) = (tmp_path / "kind").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:40], whole[:50] + b"?" + whole[51:]):
        file.write_bytes(damaged)
        assert cache.get("a") is None
        assert not file.exists()
        cache.put("a", b"new")  # it heals
        assert cache.get("a") == b"new"
    file.write_bytes(whole[:-1])
    with (
        monkeypatch.context() as patch
    ):  # another rank has removed it, or the directory is read-only
        patch.setattr(
            pathlib.Path, "unlink", lambda self: (_ for _ in ()).throw(OSError(2, "gone"))
        )
        assert cache.get("a") is None


@pytest.mark.ranks(1)
def test_a_full_or_unwritable_disk_is_no_error(tmp_path, monkeypatch):
    cache = ProgramStore(tmp_path / "kind")

    def full(self, content):
        with open(self, "wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", full)
        cache.put("a", b"program")
    assert list((tmp_path / "kind").iterdir()) == []
    cache.put("a", b"program")  # nothing more is written
    assert cache.get("a") is None
    (tmp_path / "file").write_text("")
    ProgramStore(tmp_path / "file" / "kind").put("a", b"program")


@pytest.mark.ranks(1)
def test_programs_that_are_not_used_are_removed(tmp_path, monkeypatch):
    others = tmp_path / "results" / "run1.h5", tmp_path / ("0" * 16) / "main.py"
    for file in others:  # of the user, and old
        file.parent.mkdir()
        file.write_bytes(bytes(3000))
        os.utime(file, (1e9, 1e9))
    cache = ProgramStore(tmp_path / ("0" * 16))
    for place, key in enumerate("abc"):
        cache.put(key, bytes(1000))
        os.utime(cache._file(key), (1e9 + place, 1e9 + place))
    assert cache.get("a") is not None  # used just now
    monkeypatch.setattr(program_store, "_MOST_BYTES", 2500)
    ProgramStore(tmp_path / ("1" * 16)).put("d", bytes(1000))
    assert all(file.exists() for file in others)
    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]


@pytest.mark.ranks(1)
def test_a_directory_that_others_may_write_to_is_not_used(tmp_path, monkeypatch):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for choice in (str(open_to_all), "off", "job", str(tmp_path / "file" / "x")):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MPIGRAD_PROGRAMS", choice)
        assert store_programs() is None
    monkeypatch.setenv("MPIGRAD_PROGRAMS", str(tmp_path / "own"))
    monkeypatch.setattr(compiler, "_MOST_RANKS", 0)
    assert store_programs() is None


@pytest.mark.launcher
@pytest.mark.long("two jobs, whose short twins are the tests above")
def test_stored_programs_give_the_same_bits(tmp_path):
    program, store = tmp_path / "program.py", tmp_path / "store"
    program.write_text(PROGRAM)

    def run(shift: str) -> tuple[str, str]:
        done = mpigrad("launch", "-n", 2, program, shift, MPIGRAD_PROGRAMS=str(store))
        assert done.returncode == 0 and "rror" not in done.stderr, done.stderr
        values, counts = done.stdout.splitlines()
        return values, counts

    first, counts = run("1.0")  # a rank may already find small programs of the other one
    assert counts.endswith("True") and not counts.endswith("[0, 0] True"), counts
    again, counts = run("1.0")
    assert again == first
    assert counts.endswith("[0, 0] True") and not counts.startswith("[0, 0]"), counts
    if not ALL:
        return
    for file in store.glob("*/*"):
        file.write_bytes(file.read_bytes()[:-3])
    damaged, counts = run("1.0")
    assert damaged == first
    assert not counts.endswith("[0, 0] True"), counts
    other, _ = run("1.5")  # a changed program is another one
    assert other != first


@pytest.mark.launcher
def test_an_application_may_still_choose_devices_and_a_cache_of_its_own(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, jax\n"
        "from mpigrad.compilation import store_programs\n"
        "assert store_programs() is not None\n"
        'jax.config.update("jax_num_cpu_devices", 2)  # an error once the backend has started\n'
        'jax.config.update("jax_compilation_cache_dir", sys.argv[1])\n'
        'jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)\n'
        "print(len(jax.devices()), jax.jit(lambda x: x + 1)(1.0))\n"
    )
    store, own = tmp_path / "store", tmp_path / "own"
    done = mpigrad("launch", "-n", 1, program, own, MPIGRAD_PROGRAMS=str(store))
    assert done.stdout.split() == ["2", "2.0"], done.stderr
    assert list(own.iterdir())
    assert not [file for file in store.rglob("*") if file.is_file()]
