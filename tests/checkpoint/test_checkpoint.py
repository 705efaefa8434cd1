"""Restart files: states are read as they were written, on any ranks; damaged files are not."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

from mpigrad.checkpoint import (
    Checkpoint,
    Store,
    Stripes,
    leaf_from_bytes,
    leaf_to_bytes,
    manifest,
)
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.optimize import minimize
from mpigrad.runtime import sync_directory

ROWS = 11


def names(directory: pathlib.Path) -> list[str]:
    """Return what a user sees in a directory of saves."""
    return sorted(p.name for p in directory.iterdir() if p.name != ".owner")


@pytest.fixture
def directory(tmp_path: pathlib.Path, comm: Communicator) -> pathlib.Path:
    """An empty directory, the same on every rank."""
    return comm.mpi.bcast(tmp_path)


def rows(comm: Communicator) -> slice:
    """Return this rank's rows of ROWS: uneven, and the second of four ranks has none."""
    ends = {1: [11], 2: [4, 11], 3: [1, 8, 11], 4: [5, 5, 9, 11]}[comm.size]
    return slice(ends[comm.rank - 1] if comm.rank else 0, ends[comm.rank])


def state(comm: Communicator, fill: float = 1.0) -> tuple[Any, Any]:
    """Return (state, layout) with leaves of all kinds.

    The global state is the same on any number of ranks. `fill=0` gives another state with the same
    shapes.
    """
    grid = Grid((7, 5), (1.0, 1.0), comm)
    mine = rows(comm)
    x = np.random.default_rng(3).standard_normal((ROWS, 3))
    x[6, 1] = np.nan
    field = np.random.default_rng(4).standard_normal((2, *grid.shape))
    memory = np.random.default_rng(5).standard_normal((4, ROWS))
    tree = {
        "cells": jnp.asarray(fill * field[:, *grid.slices]),
        "x": jnp.asarray(fill * x[mine]),
        "memory": (jnp.asarray(fill * memory[:, mine], "bfloat16"), np.arange(ROWS)[mine]),
        "network": {
            "w": jnp.asarray(fill * x[:2], "float32"),
            "key": jax.random.key(17 if fill else 0),
            "keys": jax.random.split(jax.random.key(3 if fill else 0), 2),
            "weak": jnp.asarray(2.5 * fill),
            "mask": jnp.asarray([True, False, bool(fill)]),
            "z": np.asarray([1 + 2j, fill], ">c16"),
        },
        "count": 10**30 if fill else 0,
        "rate": 0.1 if fill else 0.0,
        "going": bool(fill),
        "nothing": None,
    }
    layout = {
        "cells": grid, "x": True, "memory": (Stripes(-1), True), "network": False,
        "count": False, "rate": False, "going": False, "nothing": False,
    }  # fmt: skip
    return tree, layout


def bits(leaf: Any) -> tuple[Any, ...]:
    if not hasattr(leaf, "dtype"):
        return type(leaf), repr(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    native = np.asarray(leaf).dtype.newbyteorder("=")
    weak = getattr(leaf, "weak_type", False)
    return native, leaf.shape, weak, np.asarray(leaf).astype(native).tobytes()


def assert_same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert bits(a) == bits(b)
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)


@pytest.mark.thin(3)
def test_everything_comes_back_bit_for_bit_on_any_ranks(comm, directory):
    tree, layout = state(comm)
    store = Store(directory, comm)
    assert store.load(tree, layout) is None
    for step in (3, 5, 8):
        store.save(step, tree, layout, extra={"loss": [0.1, float("inf")], "at": (step, None)})
    comm.mpi.Barrier()  # rank 0 removes the oldest one
    assert names(directory) == ["save-000002", "save-000003"]

    saved = Store(directory, comm).load(*state(comm, fill=0.0))
    assert saved is not None
    assert (saved.step, saved.rejections) == (8, ())
    assert saved.extra == {"loss": [0.1, float("inf")], "at": [8, None]}
    assert_same(saved.tree, tree)
    for ranks in range(comm.size - 1, 0, -1):
        part = comm.split(0 if comm.rank < ranks else None)
        if part:
            fewer = Store(directory, part)
            found = fewer.load(*state(part, fill=0.0))
            assert found is not None
            assert found.step == 8 + comm.size - 1 - ranks
            assert_same(found.tree, state(part)[0])
            fewer.save(found.step + 1, found.tree, state(part)[1])
        comm.mpi.Barrier()
    # all ranks read the state that one rank has written
    last = Store(directory, comm).load(*state(comm, fill=0.0))
    assert last is not None
    assert last.step == 8 + comm.size - 1
    assert_same(last.tree, tree)


@pytest.mark.ranks(3)
def test_another_layout_redistributes(comm, directory):
    """Read stripes as the global array on every rank, and back."""
    x = np.arange(24.0).reshape(6, 4)
    mine = np.array_split(x, comm.size)[comm.rank]
    store = Store(directory, comm)
    store.save(1, {"x": mine}, True)
    whole = store.load({"x": np.zeros((6, 4))}, False)
    assert whole is not None
    assert np.array_equal(whole.tree["x"], x)
    store.save(2, whole.tree)
    columns = np.array_split(x, comm.size, axis=1)[comm.rank]
    again = store.load({"x": np.zeros_like(columns)}, Stripes(1))
    assert again is not None
    assert np.array_equal(again.tree["x"], columns)


# ---- damaged saves ----


def _edit(path: pathlib.Path, change: Any) -> None:
    path.write_bytes(change(path.read_bytes()))


def _flip(data: bytes) -> bytes:
    """Flip one bit of an array."""
    at = len(data) - 20
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _other_format(data: bytes) -> bytes:
    return data.replace(b"mpigrad restart 1", b"mpigrad restart 9")


def _rehashed(data: bytes) -> bytes:
    """Return a manifest of a later version, with the right hash."""
    body = json.loads(_other_format(data))["manifest"]
    return json.dumps({"manifest": body, "sha256": manifest._digest(body)}).encode()


def _of_another_save(save: pathlib.Path) -> None:
    last = max(save.glob("rank*.bin")).name
    shutil.copy(save.with_name("save-000001") / last, save / last)


def _of_another_rank(save: pathlib.Path) -> None:
    first, *_, last = sorted(save.glob("rank*.bin"))
    shutil.copy(first, last)


DAMAGES = {
    "truncated": (lambda save, last: _edit(save / last, lambda d: d[:-8]), "is truncated"),
    "header only": (lambda save, last: _edit(save / last, lambda d: d[:50]), "is truncated"),
    "empty": (lambda save, last: _edit(save / last, lambda d: b""), "is truncated: 0 bytes"),
    "longer": (lambda save, last: _edit(save / last, lambda d: d + b"0"), "is damaged"),
    "one bit": (lambda save, last: _edit(save / last, _flip), "SHA-256 differs from the manifest"),
    "missing": (lambda save, last: (save / last).unlink(), "cannot be read: No such file"),
    "another save's": (lambda save, last: _of_another_save(save), "belongs to another save"),
    "manifest truncated": (
        lambda save, last: _edit(save / "manifest.json", lambda d: d[: len(d) // 2]),
        "manifest.json is truncated or damaged",
    ),
    "manifest changed": (
        lambda save, last: _edit(save / "manifest.json", lambda d: d.replace(b"float64", b"int64")),
        "manifest.json is damaged",
    ),
    "manifest missing": (
        lambda save, last: (save / "manifest.json").unlink(),
        "manifest.json cannot be read",
    ),
    "manifest foreign": (
        lambda save, last: _edit(save / "manifest.json", lambda d: b'{"manifest": {"a": 1}}'),
        "is not a manifest of mpigrad",
    ),
    "manifest of a later version": (
        lambda save, last: _edit(save / "manifest.json", _rehashed),
        "has format 'mpigrad restart 9'",
    ),
}


def test_damaged_saves_are_rejected_by_name(comm, directory, capfd):
    """For each damage: the file is named, the save before is read, and the next save works."""
    x, zero = np.arange(10.0 * comm.rank, 10.0 * comm.rank + 10), np.zeros(10)
    last = f"rank{comm.size - 1:05d}.bin"
    for name, (damage, message) in DAMAGES.items():
        here = directory / name
        store = Store(here, comm)
        store.save(1, x, True)
        store.save(2, x + 1, True)
        if comm.rank == 0:
            damage(here / "save-000002", last)
        comm.mpi.Barrier()
        store = Store(here, comm)
        saved = store.load(zero, True)
        assert saved is not None
        assert saved.step == 1
        assert np.array_equal(saved.tree, x)
        (why,) = saved.rejections
        assert message in why, name
        assert ("manifest" if "manifest" in name else last) in why
        assert (message in capfd.readouterr().err) == (comm.rank == 0)
        store.save(3, x + 2, True)
        comm.mpi.Barrier()
        assert names(here) == ["rejected-000002", "save-000001", "save-000003"]
        saved = Store(here, comm).load(zero, True)
        assert saved is not None
        assert (saved.step, saved.rejections) == (3, ())
        comm.mpi.Barrier()
    if comm.rank == 0:
        for save in here.glob("save-*"):
            (save / "manifest.json").unlink()
    comm.mpi.Barrier()
    with pytest.raises(ValueError, match=r"all saves in .* are damaged:"):
        Store(here, comm).load(zero, True)


@pytest.mark.ranks(2)
def test_files_of_ranks_are_not_exchanged(comm, directory):
    store = Store(directory, comm)
    store.save(1, np.full(4, comm.rank), True)
    if comm.rank == 0:
        _of_another_rank(directory / "save-000001")
    comm.mpi.Barrier()
    with pytest.raises(ValueError, match=r"rank00001.bin belongs to another save: .* rank 0, and"):
        store.load(np.zeros(4, int), True)


@pytest.mark.ranks(1, 3)
def test_a_full_disk_leaves_the_last_save(comm, directory, monkeypatch):
    store = Store(directory, comm)
    store.save(1, np.full(4, comm.rank), True)
    if comm.rank == comm.size - 1:

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(manifest.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        store.save(2, np.full(4, comm.rank + 10), True)
    monkeypatch.undo()
    comm.mpi.Barrier()
    assert names(directory) == ["save-000001"]
    comm.mpi.Barrier()
    store.save(3, np.full(4, comm.rank + 20), True)
    saved = store.load(np.zeros(4, int), True)
    assert saved is not None
    assert saved.step == 3


class Failing:
    """A function that raises an error the first `times` times that a path matches."""

    def __init__(self, function: Any, matches: Any, number: int, times: int) -> None:
        self.function, self.matches, self.number, self.times = function, matches, number, times

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if self.times and self.matches(pathlib.Path(str(path))):
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number), str(path))
        return self.function(path, *args, **kwargs)


@pytest.mark.cases(
    f"*-{errno.EMFILE}", f"*-{errno.ESTALE}", reason="the code does not distinguish the numbers"
)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["manifest.json", "rank00000.bin"])
def test_saves_that_cannot_be_read_are_neither_skipped_nor_removed(
    comm, directory, monkeypatch, number, name
):
    """An error of the machine says nothing about the save. One that passes is not even noticed."""
    monkeypatch.setattr(manifest, "_PAUSES", (0.0, 0.0))
    store = Store(directory, comm, keep=1)
    x = np.full(4, comm.rank)
    store.save(1, x, True)
    failing = Failing(open, lambda path: path.name == name, number, 2)
    monkeypatch.setattr("builtins.open", failing)
    monkeypatch.setattr("io.open", failing)
    saved = store.load(np.zeros(4, int), True)
    assert saved is not None
    assert np.array_equal(saved.tree, x)
    failing.times = 9
    with pytest.raises(OSError, match=rf"{name} cannot be read, after 3 attempts: .*was removed"):
        store.load(np.zeros(4, int), True)
    failing.times = 0
    comm.mpi.Barrier()
    store.save(2, x + 1, True)
    comm.mpi.Barrier()
    assert names(directory) == ["save-000002"]
    saved = store.load(np.zeros(4, int), True)
    assert saved is not None
    assert (saved.step, saved.rejections) == (2, ())


def test_an_error_behind_the_rename_leaves_a_store_that_works(comm, directory, monkeypatch):
    store = Store(directory, comm)
    store.save(1, np.zeros(2))
    for step, broken in ((2, "sync"), (3, "rename")):
        if broken == "sync":
            failing = Failing(sync_directory, lambda path: path == directory, errno.EIO, 1)
            monkeypatch.setattr("mpigrad.checkpoint.store.sync_directory", failing)
            with pytest.raises(OSError, match="save-000002 is complete, but the disk does not"):
                store.save(step, np.full(2, float(step)))
        else:
            # A server that answers the same request twice.
            def rename(old: Any, new: Any, rename: Any = os.rename) -> None:
                rename(old, new)
                if pathlib.Path(new).name == "save-000003":
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory")

            monkeypatch.setattr("os.rename", rename)
            store.save(step, np.full(2, float(step)))
        monkeypatch.undo()
        comm.mpi.Barrier()
        saved = store.load(np.zeros(2))
        assert saved is not None
        assert saved.step == step
    store.save(4, np.full(2, 4.0))
    comm.mpi.Barrier()
    assert names(directory) == ["save-000003", "save-000004"]


@pytest.mark.ranks(1, 2)
def test_rejects_invalid_arguments_on_every_rank(comm, directory):
    grid, tree = Grid((6, 4), (1.0, 1.0), comm), {"a": np.zeros((2, 3)), "b": 1}
    store = Store(directory / "run", comm)
    for error, message, arguments in (
        (ValueError, "not a pytree prefix of the tree", (1, tree, {"a": True})),
        (
            ValueError,
            r"\['b'\] has shape \(\), but its layout is Stripes\(axis=0\)",
            (1, tree, {"a": True, "b": True}),
        ),
        (ValueError, r"layout is Stripes\(axis=2\)", (1, tree["a"], Stripes(2))),
        (ValueError, "Put the axes of the tile last", (1, np.zeros((1, 1)), grid)),
        (TypeError, "is of type float, expected False, True", (1, tree, 1.5)),
        (TypeError, r"\['c'\]: expected an array or a number, got str", (1, {"c": "text"})),
        (TypeError, "numeric or boolean dtype, got object", (1, np.array([None]))),
        (TypeError, "step must be an integer .* got step=1.5", (1.5, tree)),
        (TypeError, "extra must fit into JSON, .* of type set", (1, tree, False, {1, 2})),
    ):
        with pytest.raises(error, match=message):
            store.save(*arguments)
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Store(directory / "run", comm, keep=0)
    for options in ({"every": 0}, {"minutes": -1.0}):
        with pytest.raises(ValueError, match="must be positive or None"):
            Checkpoint(directory, **options)
    if comm.rank == 0:
        (directory / "file").touch()
    comm.mpi.Barrier()
    with pytest.raises(OSError, match="exists"):
        Store(directory / "file", comm)
    assert list((directory / "run").iterdir()) == []

    store.save(1, tree, {"a": True, "b": False})
    with pytest.raises(ValueError) as raised:
        store.load({"a": np.zeros((2, 3), "float32"), "c": 1.0}, {"a": True, "c": False})
    shape = (2 * comm.size, 3)
    assert f"['a'] float64 {shape} in the file, ['a'] float32 {shape} in this run" in str(
        raised.value
    )
    assert "['b'] Python int in the file, ['c'] Python float in this run" in str(raised.value)
    other = Store(directory / "run", comm, resume=True)
    other.save(2, tree, {"a": True, "b": False})
    with pytest.raises(OSError, match="save-000002 was written by another run"):
        store.save(3, tree, {"a": True, "b": False})


@pytest.mark.ranks(2)
def test_rejects_states_that_differ_between_ranks(comm, directory, tmp_path):
    mine = np.arange(3.0) + comm.rank
    store = Store(directory, comm)
    with pytest.raises(ValueError, match=r"the tree differs between ranks 0 and 1"):
        store.save(1, mine)
    with pytest.raises(ValueError, match=r"is 0 on rank 0, .* is 1 on rank 1"):
        store.save(1, {"n": comm.rank})
    with pytest.raises(ValueError, match=r"float64 \(2, 0\)\, stripes.* \(2, 1\)"):
        store.save(1, np.zeros((2, comm.rank)), True)
    with pytest.raises(ValueError, match="1 leaves on rank 0 and 2 on rank 1"):
        store.save(1, [mine] * (1 + comm.rank), True)
    with pytest.raises(OSError, match="rank 1 does not see"):
        Store(tmp_path / str(comm.rank), comm)
    alone = Communicator(MPI.COMM_SELF)
    with pytest.raises(ValueError, match="another communicator than the restart files"):
        store.save(1, np.zeros(4), Grid((4,), (1.0,), alone))


# ---- the schedule ----


@pytest.mark.ranks(1, 3)
def test_rank_0_decides_and_a_signal_to_any_rank_stops(comm, directory, monkeypatch, capfd):
    with Checkpoint(directory, every=4, minutes=None).start(comm) as saving:
        saved = [i for i in range(1, 10) if saving.decide(i).save]
        assert saved == [4, 8]
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        decision = saving.decide(9)
        assert decision.stop
        assert decision.save
        saving.save(9, {"x": np.zeros(2)})
        capfd.readouterr()
        found = saving.load({"x": np.ones(2)})
        assert found is not None
        assert found.step == 9
        said = f"mpigrad: continuing from {directory}, step 9\n"
        assert capfd.readouterr().err == said * (comm.rank == 0)
    with Checkpoint(directory, every=4, resume=True).start(comm, 1) as saving:
        saved = [i for i in range(3, 30, 3) if saving.decide(i).save]
        assert saved == [6, 9, 12, 18, 21, 24]  # the first at or after each multiple
        assert saving.load({"x": np.ones(2)}) is not None
        assert not saving.decide(11).save
    now = [1000.0]
    monkeypatch.setattr("mpigrad.checkpoint.schedule.time.monotonic", lambda: now[0])
    with contextlib.ExitStack() as stack:
        saving = stack.enter_context(Checkpoint(directory, minutes=2.0, resume=True).start(comm))
        assert not saving.decide(1).save
        now[0] += 121.0 * (comm.rank == 0)  # the clocks of other ranks do not count
        assert saving.decide(2) == type(decision)(save=True, stop=False)
        saving.save(2, {"x": np.zeros(2)})
        assert not saving.decide(3).save
    fingerprint = {"data": (1, 2)}
    again = Checkpoint(directory, signals=False, fingerprint=fingerprint, resume=True)
    with again.start(comm) as saving:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert not saving.decide(1).stop
        with pytest.raises(ValueError, match=r"data is None in its fingerprint and \[1, 2\] in"):
            saving.load({"x": np.ones(3)})  # the fingerprint is compared first
        saving.save(3, {"x": np.zeros(2)}, extra="mine")
        found = saving.load({"x": np.ones(2)})
        assert found is not None
        assert found.extra == "mine"


# ---- a run that is started again ----


@pytest.mark.ranks(1, 2, 3)
def test_an_earlier_run_is_neither_continued_nor_replaced_unasked(comm, directory):
    """A store, a loop and `minimize` refuse it in the same words, which name step and date."""

    def written() -> list[str]:
        comm.mpi.Barrier()
        return names(directory)

    tree = {"x": np.zeros(2)}
    first = Store(directory, comm)
    for step in (10, 20, 30):
        first.save(step, tree)
    before = written()
    comm.mpi.Barrier()
    date = time.strftime("%Y-%m-%d %H:")
    remedies = "Use resume=True to continue it, overwrite=True to replace it, or another directory."
    loop = Checkpoint(directory, every=1)
    attempts = {
        "Store.save": lambda: Store(directory, comm).save(0, tree),
        "Checkpoint": lambda: loop.start(comm).__enter__(),
    }
    for name, attempt in attempts.items():
        with pytest.raises(FileExistsError) as raised:
            attempt()
        begin = f"{name}: {directory} has an earlier run with the last step 30 of {date}"
        assert str(raised.value).startswith(begin)
        assert str(raised.value).removesuffix(" (found on rank 0)").endswith(remedies)
    with pytest.raises(FileExistsError, match=r"^Checkpoint: .* last step 30 of .*resume=True"):
        minimize(lambda x: jnp.sum(x**2), np.ones(2), replicated=True, checkpoint=loop, comm=comm)
    assert written() == before

    Store(directory, comm, resume=True).save(31, tree)
    loaded = Store(directory, comm)
    assert loaded.load(tree) is not None
    loaded.save(32, tree)
    assert written() == ["save-000004", "save-000005"]
    with dataclasses.replace(loop, overwrite=True).start(comm) as session:
        assert session.load(tree) is None
        assert written() == ["save-000004", "save-000005"]  # until the first save is complete
        session.save(1, tree)
        assert written() == ["save-000006"]
        session.save(2, tree)
        assert written() == ["save-000006", "save-000007"]
    with pytest.raises(ValueError, match="expected resume or overwrite, got both"):
        Store(directory, comm, resume=True, overwrite=True)
    with pytest.raises(ValueError, match="expected resume or overwrite, got both"):
        Checkpoint(directory, resume=True, overwrite=True)


@pytest.mark.ranks(1)
def test_bytes_of_leaves_that_do_not_fit():
    with pytest.raises(TypeError, match="leaf_to_bytes: expected an array or random keys, got 3"):
        leaf_to_bytes(3.5)
    with pytest.raises(ValueError, match=r"leaf_from_bytes: expected 24 bytes for float64.*got 16"):
        leaf_from_bytes(leaf_to_bytes(np.zeros(2)), like=np.zeros(3))
