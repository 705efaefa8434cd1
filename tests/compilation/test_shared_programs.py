"""Programs that ranks share: nobody waits for a rank that does not come, and no error is raised."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.compilation import compiler
from mpigrad.compilation import program_store as shared_programs
from mpigrad.compilation.compiler import Patience, _Request
from mpigrad.compilation.program_store import ProgramStore, SharedPrograms
from mpigrad.guard.watchdog import current_activity

pytestmark = pytest.mark.ranks(1)

KEY, OTHER = bytes(range(32)), bytes(32)
BEGIN = 4096
# Another process: it locks the key, and then works, sleeps or is stopped.
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("locked", flush=True)
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    pass
fcntl.lockf(file, fcntl.LOCK_UN, 1, int(sys.argv[2]))
time.sleep(60)
"""


@pytest.fixture
def file(tmp_path) -> Iterator[pathlib.Path]:
    path = tmp_path / "board"
    path.write_bytes(b"board")
    yield path
    assert path.read_bytes()[:BEGIN].rstrip(b"\0") == b"board"


@pytest.fixture
def shared(file) -> Iterator[SharedPrograms]:
    descriptor = os.open(file, os.O_RDWR)
    yield SharedPrograms(descriptor, BEGIN)
    os.close(descriptor)


@pytest.fixture
def hold(file) -> Iterator[Callable[[float], subprocess.Popen[str]]]:
    """Start a process that holds the lock of KEY and works for some seconds."""
    started = []

    def start(seconds: float) -> subprocess.Popen[str]:
        place = str(BEGIN + shared_programs._place_of(KEY))
        words = [sys.executable, "-IS", "-c", HOLDER, str(file), place, str(seconds)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={})
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def request(shared: SharedPrograms | None, store: Any = None) -> _Request:
    """A request for a program that is a text."""
    return _Request(KEY, "jit_f", shared, store, bytes.decode, str.encode)


def test_programs_are_published_and_read(shared, file):
    assert shared.read(KEY) is None
    shared.publish(KEY, b"program" * 1000)
    shared.publish(OTHER, b"")
    reader = SharedPrograms(os.dup(shared._file), BEGIN)
    assert [reader.read(KEY), reader.read(OTHER)] == [b"program" * 1000, b""]
    assert reader.read(bytes(31) + b"1") is None
    whole = file.read_bytes()
    place = whole.index(b"program") + 3
    file.write_bytes(whole[:place] + b"?" + whole[place + 1 :])
    assert reader.read(KEY) is None  # damaged
    reader.publish(KEY, b"new")
    assert [reader.read(KEY), shared.read(KEY)] == [b"new", b"new"]
    os.close(reader._file)


def test_one_rank_compiles_and_the_others_read(shared):
    seen = []

    def compile_here() -> str:
        seen.append(current_activity())
        assert shared.is_held_here(KEY)
        return "program"

    assert [request(shared).compile(compile_here) for _ in range(3)] == ["program"] * 3
    assert seen == ["compiling jit_f"]
    assert not shared.is_held_here(KEY)
    assert current_activity() == ""


def test_stored_programs_are_shown_to_the_other_ranks(shared, tmp_path):
    store = ProgramStore(tmp_path / "kind")
    assert request(None, store).compile(lambda: "program") == "program"
    assert request(shared, store).compile(pytest.fail) == "program"
    assert shared.read(KEY) == b"program"
    (stored,) = (tmp_path / "kind").iterdir()
    stored.write_bytes(b"?")
    assert request(None, store).compile(lambda: "again") == "again"
    assert store.get(KEY.hex()) == b"again"


def test_a_rank_that_dies_is_not_awaited(shared, hold):
    holder = hold(30.0)
    assert shared.holder(KEY) == holder.pid
    threading.Timer(0.3, holder.kill).start()
    start = time.monotonic()
    assert request(shared).compile(lambda: "program") == "program"
    assert 0.2 < time.monotonic() - start < 20
    assert shared.read(KEY) == b"program"


def test_a_rank_that_works_is_awaited_and_one_that_is_stopped_is_not(shared, hold, monkeypatch):
    monkeypatch.setattr(compiler, "_STALLED", 0.5)
    monkeypatch.setattr(compiler, "_LOOK", 0.05)
    hold(1.2)
    start = time.monotonic()
    assert request(shared).compile(lambda: "program") == "program"
    assert time.monotonic() - start > 1.0
    shared.publish(KEY, b"?")  # a later record counts
    stopped = hold(30.0)
    os.kill(stopped.pid, signal.SIGSTOP)
    request_of_key = request(shared)
    monkeypatch.setattr(shared, "read", lambda _: None)
    start = time.monotonic()
    assert request_of_key.compile(lambda: "own") == "own"
    assert 0.4 < time.monotonic() - start < 8  # and not half of MPIGRAD_TIMEOUT


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(compiler, "_LOOK", 0.0)
    assert not Patience(0.0).lasts(os.getpid())
    monkeypatch.setattr(compiler, "_BLIND", 0.05)
    patience = Patience(100.0)
    assert patience.lasts(0)
    time.sleep(0.1)
    assert not patience.lasts(0)  # of an unknown process, in another container for example


def test_an_error_of_the_compiler_is_raised_and_nobody_waits(shared, hold):
    with pytest.raises(ValueError, match="no such instruction"):
        request(shared).compile(lambda: (_ for _ in ()).throw(ValueError("no such instruction")))
    hold(30.0)  # another rank compiles the same program, by itself
    assert request(shared).compile(lambda: "program") == "program"


def test_a_program_that_cannot_be_written_or_read_is_compiled_by_each_rank(shared, hold):
    compiled = []
    for load, save in ((bytes.decode, lambda _: b""), (lambda _: None, str.encode)):
        of_rank = [_Request(KEY, "jit_f", shared, None, load, save) for _ in range(2)]
        for one in of_rank:
            one.compile(lambda: compiled.append(1) or "program")
        shared._places.clear()
        shared._seen = shared_programs._HEADER.size
    assert len(compiled) == 4
    hold(30.0)
    assert request(shared).compile(lambda: "program") == "program"


def test_threads_read_what_another_rank_publishes(shared):
    other_rank = SharedPrograms(os.dup(shared._file), BEGIN)
    keys = [number.to_bytes(32, "big") for number in range(1, 301)]
    missed = []

    def read() -> None:
        for key in keys:
            end = time.monotonic() + 10
            while shared.read(key) != key * 9 and time.monotonic() < end:
                pass
            missed.extend([key] * (shared.read(key) != key * 9))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for key in keys:
        other_rank.publish(key, key * 9)
    for thread in threads:
        thread.join()
    assert not missed


def test_arrays_that_a_program_closes_over_are_counted():
    values = np.arange(1000.0, dtype=np.float32)
    program = jax.jit(lambda x: x * values + jnp.ones((500, 500))[0, 0])
    constants = compiler._bytes_of_constants(program.lower(1.0).compiler_ir())
    assert 8000 <= constants < 9000  # not those of which all entries are equal


def test_a_program_that_is_too_large_ends_nothing(shared, monkeypatch):
    monkeypatch.setattr(shared_programs, "_MOST_OF_ONE", 100)
    shared.publish(OTHER, bytes(101))
    assert shared.read(OTHER) == b""
    shared.publish(KEY, bytes(100))
    assert shared.read(KEY) == bytes(100)
    assert not shared.closed


@pytest.mark.parametrize("cause", ["limit", "disk"])
def test_without_space_nobody_waits(shared, file, hold, monkeypatch, cause):
    request(shared).compile(lambda: "program")
    if cause == "limit":
        monkeypatch.setattr(shared, "_most", 100)
    else:
        write = os.pwrite

        def full(descriptor: int, data: Any, offset: int) -> int:
            if len(data) > 40:
                raise OSError(28, "No space left on device")
            return write(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
    shared.publish(OTHER, b"program")
    assert shared.closed
    other_rank = SharedPrograms(os.dup(shared._file), BEGIN)
    assert other_rank.closed
    assert other_rank.read(OTHER) is None
    assert other_rank.read(KEY) == b"program"
    monkeypatch.setattr(shared, "read", lambda _: None)
    hold(30.0)
    assert request(shared).compile(lambda: "own") == "own"
    os.close(other_rank._file)


def test_a_descriptor_that_the_program_has_closed_is_not_used(file, tmp_path):
    descriptor = os.open(file, os.O_RDWR)
    shared = SharedPrograms(descriptor, BEGIN)
    shared.publish(KEY, b"program")
    (tmp_path / "results").write_bytes(b"results")
    results = os.open(tmp_path / "results", os.O_RDWR)
    os.dup2(results, descriptor)
    shared.publish(OTHER, b"program")
    assert shared.read(KEY) is None
    assert shared.holder(KEY) == 0
    assert request(shared).compile(lambda: "own") == "own"
    assert shared.closed
    assert (tmp_path / "results").read_bytes() == b"results"
    os.close(results)
    os.close(descriptor)
