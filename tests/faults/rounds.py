"""Rounds with one fault of input or output each: `rounds.py FOLDER SEED FIRST COUNT [saves]`.

Run it on ranks, with the library of faults.c in LD_PRELOAD. Each round starts from whole saves,
arms one fault on one rank, and saves, loads, resumes, or writes a report or a history. Then the
fault is gone, and the invariants are checked:

- all ranks have gone on, or all have raised an error that names a file of the folder;
- no whole save was removed, except older than `keep` others that are whole;
- an index of pieces finds all of them;
- the newest whole save is found, with every value as it was written;
- the same Store can save again, and leaves no other files.

A round depends on SEED and on its number alone, so `rounds.py FOLDER SEED NUMBER 1` repeats it.
With `saves` there are no reports and histories, and nothing is compiled for them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import faulthandler
import hashlib
import io
import json
import os
import pathlib
import random
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.checkpoint import Checkpoint, Store, manifest
from mpigrad.communicator import default_communicator
from mpigrad.grid import Grid

jax.config.update("jax_enable_x64", True)  # before any array
SAVES = sys.argv[5:] == ["saves"]
if not SAVES:
    from mpigrad.io import write_vtk, write_zarr
    from mpigrad.optimize import LBFGS, Objective, minimize
    from mpigrad_apps import fitting, report
    from mpigrad_apps.output_directory import prepare_output

    objective = Objective(lambda x: jnp.sum((x - 1.0) ** 4), jnp.zeros(3), replicated=True)
    picture = report.Picture("dot", "A dot.", b"\x89PNG")

KINDS = ("open", "read", "write", "fsync", "rename", "close", "unlink", "mkdir")
DONE_BUT = -1000  # the call is done, and reports an error
SHORT = -1  # half of the bytes
FULL = (errno.ENOSPC, errno.EDQUOT)
ERRORS = {
    "open": (*FULL, errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES),
    "read": (errno.EIO, errno.ESTALE, SHORT),
    "write": (*FULL, errno.EIO, errno.ESTALE, SHORT),
    "fsync": (*FULL, errno.EIO),
    "rename": (*FULL, errno.EIO, errno.ESTALE, errno.EACCES, DONE_BUT - errno.EIO,
               DONE_BUT - errno.ENOENT),
    "close": (*FULL, errno.EIO),
    "unlink": (errno.EIO, errno.ESTALE, errno.EACCES),
    "mkdir": (*FULL, errno.EIO, errno.EACCES),
}  # fmt: skip
FOREVER = 1_000_000
LIMIT = 60.0  # seconds of a round. Ranks that wait for each other do not end by themselves
KEEP = 2

manifest._PAUSES = (0.001, 0.002, 0.003)  # between attempts to read
comm = default_communicator()
library = ctypes.CDLL(None)
library.faults_calls.restype = library.faults_hits.restype = ctypes.c_long


# ---- states ----


def state(step: int) -> dict[str, Any]:
    """Return this rank's part of the state after a step."""
    rows = np.arange(50.0) + 100 * comm.rank + step
    return {"x": rows, "w": jnp.arange(5.0) * step, "n": step}


LAYOUT = {"x": True, "w": False, "n": False}


def equal(a: Any, b: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def whole_saves(directory: pathlib.Path) -> dict[int, tuple[int, str]]:
    """Return step and identity of each save whose files all have their hashes.

    It shares no code with the library.
    """
    found = {}
    for save in directory.iterdir() if directory.exists() else ():
        name = re.fullmatch(r"save-(\d+)", save.name)
        if name is None:
            continue
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            text = json.loads((save / "manifest.json").read_text())
            body = text["manifest"]
            hashes = [
                hashlib.sha256((save / f["name"]).read_bytes()).hexdigest() for f in body["files"]
            ]
            digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            if digest == text["sha256"] and hashes == [f["sha256"] for f in body["files"]]:
                found[int(name[1])] = body["step"], body["identity"]
    return found


def make_templates(folder: pathlib.Path) -> None:
    """Write the directories that rounds start from."""
    for name, steps in (("plain", 2), ("damaged", 3)):
        store = Store(folder / name / "saves", comm, keep=9)
        for step in range(1, steps + 1):
            store.save(step, state(step), LAYOUT, {"about": {}, "extra": None})
    comm.mpi.Barrier()
    if comm.rank == 0:
        for name in ("plain", "damaged"):
            (folder / name / "saves" / ".owner").unlink()
        file = folder / "damaged" / "saves" / "save-000003" / "rank00001.bin"
        file.write_bytes(file.read_bytes()[:-1] + b"\7")
    comm.mpi.Barrier()


# ---- what a round does ----

Way = Callable[[pathlib.Path], "Store | None"]
grid = Grid((6, 4), (1.0, 1.0), comm)


def save(directory: pathlib.Path) -> Store:
    store = Store(directory / "saves", comm, keep=KEEP, resume=True)
    STORES.append(store)
    store.save(5, state(5), LAYOUT, {"about": {}, "extra": None})
    return store


def load(directory: pathlib.Path) -> Store:
    store = Store(directory / "saves", comm, keep=KEEP, resume=True)
    STORES.append(store)
    saved = store.load(state(0), LAYOUT)
    assert saved is not None and equal(saved.tree, state(saved.step)), saved
    return store


def resume(directory: pathlib.Path) -> Store:
    with Checkpoint(directory / "saves", every=1, keep=KEEP, resume=True).start(comm) as session:
        STORES.append(session.store)
        saved = session.load(state(0), LAYOUT)
        assert saved is not None and equal(saved.tree, state(saved.step)), saved
        for step in (saved.step + 1, saved.step + 2):
            if session.decide(step).save:
                session.save(step, state(step), LAYOUT)
    return session.store


def write_report(directory: pathlib.Path) -> None:
    prepare_output(report.Table("a", {}), directory / "out", comm)
    fields = {"u": np.ones(grid.local_shape)}
    write_zarr(directory / "out/fields.zarr", grid, fields)
    write_vtk(directory / "out/fields.pvti", grid, fields)
    with fitting.raise_on_all_ranks(comm):
        if comm.rank == 0:
            report.write_report(directory / "out", "T", "S", [picture], [report.Table("a", {})])


def write_history(directory: pathlib.Path) -> None:
    """Minimise with a history and saves, and write the history of an application."""
    minimize(
        objective, jnp.zeros(3), LBFGS(2), max_steps=2, history=directory / "history.jsonl",
        checkpoint=Checkpoint(directory / "run", every=1), throw=False,
    )  # fmt: skip
    fitting.prepare_training(directory, comm, resume=False)
    history = fitting._History(directory / "history.jsonl", comm)
    for i in range(2):
        with fitting.raise_on_all_ranks(comm):
            history.add(fitting.TrainingRecord(i, 1.0, 1.0, 1, 1.0, 1.0, None))


WAYS: dict[str, tuple[str, Callable[[pathlib.Path], Any]]] = {
    "save": ("plain", save),
    "load": ("plain", load),
    "resume": ("plain", resume),
    "resume from a damaged save": ("damaged", resume),
    "report": ("plain", write_report),
    "history": ("plain", write_history),
}
WEIGHTS = [5, 3, 5, 4, 2, 1]  # reports and histories take longer
if SAVES:
    WAYS, WEIGHTS = dict(list(WAYS.items())[:4]), WEIGHTS[:4]
STORES: list[Store] = []  # those of this round


# ---- rounds ----


class Violation(Exception):
    """A round after which an invariant does not hold."""


def attempt(way: Callable[[pathlib.Path], Any], directory: pathlib.Path) -> str:
    """Return the text of the error, or nothing."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            way(directory)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def start(folder: pathlib.Path, template: str) -> pathlib.Path:
    directory = folder / "round"
    if comm.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(folder / template, directory)
    STORES.clear()
    comm.mpi.Barrier()
    return directory


def counts_of_calls(folder: pathlib.Path, name: str) -> list[list[int]]:
    """Return how many calls of each kind each rank makes without a fault."""
    template, way = WAYS[name]
    directory = start(folder, template)
    library.faults_set(-1, ctypes.c_long(1), ctypes.c_long(0), 0)
    library.faults_watch(os.fsencode(directory))
    failed = attempt(way, directory)
    counts = [library.faults_calls(kind) for kind in range(len(KINDS))]
    library.faults_watch(None)
    assert not failed, failed
    return comm.mpi.allgather(counts)


def play(folder: pathlib.Path, name: str, fault: tuple[int, int, int, int, int]) -> tuple[str, int]:
    """Play one round. Return its outcome and how often the fault has struck."""
    template, way = WAYS[name]
    rank, kind, k, times, error = fault
    directory = start(folder, template)
    saves = directory / "saves"
    before = whole_saves(saves)
    if comm.rank == rank:
        library.faults_set(kind, ctypes.c_long(k), ctypes.c_long(times), error)
        library.faults_watch(os.fsencode(directory))
    failed = attempt(way, directory)
    hits = library.faults_hits() if comm.rank == rank else 0
    library.faults_watch(None)
    outcomes = comm.mpi.allgather((failed, hits))
    failures, hits = [f for f, _ in outcomes], max(h for _, h in outcomes)
    if any(failures) and not all(failures):
        raise Violation(f"some ranks raise and others go on: {failures}")
    if any(str(directory) not in text for text in failures if text):
        raise Violation(f"the error names no file: {failures}")
    for index in directory.glob("out/*.pvti"):
        pieces = re.findall(r'Source="(.*)"', index.read_text())
        if len(pieces) != comm.size or not all((index.parent / piece).exists() for piece in pieces):
            raise Violation(f"{index} has not all of {pieces}")
    after = whole_saves(saves)
    for number, what in before.items():
        newer = sum(other > number for other in after)
        if after.get(number) != what and newer < KEEP:
            raise Violation(f"save {number} was removed: {before} before, {after} after")
    check_next_run(saves, after, unlinking=KINDS[kind] == "unlink")
    return ("raised" if failed else "went on") if hits else "not reached", hits


def check_next_run(
    saves: pathlib.Path, whole: dict[int, tuple[int, str]], *, unlinking: bool
) -> None:
    """The newest whole save is found without the fault, and saves can follow it."""
    with contextlib.redirect_stderr(io.StringIO()):
        store = Store(saves, comm, keep=KEEP)
        saved = store.load(state(0), LAYOUT)
        if saved is None or saved.step != whole[max(whole)][0] or not equal(
            saved.tree, state(saved.step)
        ):  # fmt: skip
            raise Violation(f"found {saved}, and {whole} are whole")
        own = next((s for s in STORES if s.directory == saves), store)
        if min(comm.mpi.allgather(own is not store)):
            store = own
        path = store.save(9, state(9), LAYOUT, {"about": {}, "extra": None})
        comm.mpi.Barrier()
        names = {p.name for p in saves.iterdir()}
        expected = {p.name for p in saves.glob("save-*")} | {".owner"}
        rejected = {p.name for p in saves.glob("rejected-*")}
        # An empty file stays.
        seen = {p.name for p in saves.glob(".seen-by-all-*")} if unlinking else set()
        if names != expected | rejected | seen or path.name not in names:
            raise Violation(f"files are left over: {sorted(names - expected)}")
        saved = store.load(state(0), LAYOUT)
        if saved is None or saved.step != 9 or not equal(saved.tree, state(9)):
            raise Violation(f"found {saved} after the next save")


def main() -> int:
    folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    numbers = range(int(sys.argv[3]), int(sys.argv[3]) + int(sys.argv[4]))
    make_templates(folder)
    calls = {name: counts_of_calls(folder, name) for name in WAYS}
    descriptors = len(os.listdir("/proc/self/fd"))
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    struck, bad = 0, 0
    for number in numbers:
        dice = random.Random(f"{seed} {number}")
        name = dice.choices(list(WAYS), WEIGHTS)[0]
        rank = dice.randrange(comm.size)
        kinds = [i for i in range(len(KINDS)) if calls[name][rank][i]]
        if not kinds:
            continue
        kind = dice.choice(kinds)
        k = dice.randint(1, calls[name][rank][kind])
        error = dice.choice(ERRORS[KINDS[kind]])
        times = dice.choice((1, 1, 2, 3, FOREVER))
        what = error if error > DONE_BUT else DONE_BUT - error
        called = "short" if error == SHORT else errno.errorcode[what]
        text = (
            f"round {number} of seed {seed}: {name}: rank {rank}, {KINDS[kind]} {k} of "
            f"{calls[name][rank][kind]}, {called}{' although done' * (error < DONE_BUT)}, "
            f"{times} times"
        )
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if comm.rank == 0:
            (folder / "current").write_text(text)
        try:
            outcome, hits = play(folder, name, (rank, kind, k, times, error))
        except Exception as violation:
            outcome, hits = "WRONG", 1
            if comm.rank == 0 or not isinstance(violation, Violation):
                print(f"{text}\n  {type(violation).__name__}: {violation}", flush=True)
            if not isinstance(violation, Violation):
                raise
            bad += 1
        outcomes[name][outcome] += 1
        struck += hits > 0
    faulthandler.cancel_dump_traceback_later()
    more = len(os.listdir("/proc/self/fd")) - descriptors
    if more > 3:
        print(f"rank {comm.rank}: {more} file descriptors were not closed", flush=True)
        bad += 1
    if comm.rank == 0:
        for name, counter in outcomes.items():
            print(f"  {name}: " + ", ".join(f"{n} {what}" for what, n in counter.most_common()))
        print(
            f"seed {seed}: {struck} faults struck in {len(numbers)} rounds, {bad} wrong", flush=True
        )
    return min(1, comm.mpi.allreduce(bad))


sys.exit(main())
