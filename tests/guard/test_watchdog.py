"""The watchdog: waiting times without a clock in operations, and states of processes."""

from __future__ import annotations

import errno
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpigrad.guard import board as b
from mpigrad.guard import watchdog
from mpigrad.guard.watchdog import end_reason, places, stop_note
from mpigrad.runtime.call_sites import program_line
from mpigrad.runtime.native import UNTIMED, Record


def test_start_of_an_operation_is_found_by_repeated_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = np.zeros(1, b.SLOT)
    board = b.Board(np.zeros((), b.HEADER), slots, 0, (0,))
    dog = watchdog.Watchdog(board, 300.0, False, lambda text: None, None)
    record = Record()

    def look(time: int) -> int:
        monkeypatch.setattr(watchdog, "_now", lambda: time)
        return dog._start(record)

    assert look(100) == 0  # in Python
    assert look(200) == 0
    record.start_ns = UNTIMED  # its serial number is not on the board yet
    assert look(5000) == 5000
    slots[0]["serial"] += 1
    assert look(5100) == 5100
    assert look(9000) == 5100
    assert int(slots[0]["since_ns"]) == 5100
    record.calls += 1  # another one, with no look between
    assert look(9500) == 9500
    record.start_ns = 7  # one that says itself since when
    assert look(9900) == 7
    record.start_ns = 0
    assert look(9950) == 0
    assert int(slots[0]["since_ns"]) == 9950
    record.start_ns = 10_000  # and the process stood still before this was seen
    assert look(9 * 10**9) == 9 * 10**9 - 5 * 10**8


def test_a_zombie_has_died() -> None:
    slots, namespace = np.zeros(2, b.SLOT), os.stat("/proc/self/ns/pid").st_ino
    slots["state"], slots["namespace"] = b.IN_PYTHON, namespace
    board = b.Board(None, slots, 0, (0, 1))
    with subprocess.Popen(["sleep", "60"]) as process:
        slots[1]["pid"] = process.pid
        assert end_reason(board, 1) == ""
        process.send_signal(signal.SIGSTOP)
        _wait_for(lambda: "SIGSTOP" in stop_note(board, 1))
        assert end_reason(board, 1) == ""
        assert "and its process is stopped (SIGSTOP)" in watchdog.rank_states(board)[1]
        process.kill()  # a zombie, while nobody waits for it
        _wait_for(lambda: end_reason(board, 1) == "has died")
        assert pathlib.Path(f"/proc/{process.pid}").exists()
    assert end_reason(board, 1) == "has died"
    slots[1]["namespace"] += 1  # of a container of its own: its number says nothing
    assert end_reason(board, 1) == ""
    slots[1]["state"] = b.ENDED
    assert end_reason(board, 1) == "has ended"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_process_that_cannot_be_looked_at_has_not_died(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    slots = np.zeros(2, b.SLOT)
    slots["state"], slots["namespace"] = b.IN_PYTHON, os.stat("/proc/self/ns/pid").st_ino
    slots["pid"] = os.getpid()
    board = b.Board(None, slots, 0, (0, 1))

    def fail(path: pathlib.Path) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pathlib.Path, "read_bytes", fail)
    assert end_reason(board, 1) == ""
    assert stop_note(board, 1) == ""
    monkeypatch.undo()
    slots[1]["pid"] = 2**22 + 1  # more than Linux's largest
    assert end_reason(board, 1) == "has died"


def test_a_name_that_is_not_text_does_not_matter() -> None:
    """A program may set its name to any bytes, such as half of a character."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xc3(', 0, 0, 0); time.sleep(60)"
    slots = np.zeros(2, b.SLOT)
    slots["state"], slots["namespace"] = b.IN_PYTHON, os.stat("/proc/self/ns/pid").st_ino
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        stat = pathlib.Path(f"/proc/{process.pid}/stat")
        _wait_for(lambda: b"\xc3" in stat.read_bytes())
        slots[1]["pid"] = process.pid
        assert end_reason(b.Board(None, slots, 0, (0, 1)), 1) == ""
        process.kill()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_watchdog_survives_errors_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looks, ends = [], []
    slots = np.zeros(1, b.SLOT)
    board = b.Board(np.zeros((), b.HEADER), slots, 0, (0,))
    dog = watchdog.Watchdog(board, 300.0, False, ends.append, None)
    dog.tick = 0.001

    def look(now: Record) -> None:
        looks.append(now)
        if len(looks) > 20:
            raise SystemExit  # ends the thread
        raise KeyError("a torn value")

    monkeypatch.setattr(dog, "_look", look)
    monkeypatch.setattr(watchdog, "record", Record)
    dog.start()
    _wait_for(lambda: len(looks) > 20)
    error = capfd.readouterr().err
    assert error.count("the watchdog of rank 0 goes on after an error") == 1
    assert "KeyError: 'a torn value'" in error
    assert ends == []


def test_a_report_that_cannot_be_made_ends_the_job_nevertheless() -> None:
    class Query:
        def rank_states(self, own_states: Callable[[], list[str]]) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    board = b.Board(np.zeros((), b.HEADER), np.zeros(1, b.SLOT), 0, (0,))
    query: Any = Query()
    dog = watchdog.Watchdog(board, 300.0, False, lambda text: None, query)
    report = dog._report(301.0, 300.0)
    assert "an operation has waited 301 s" in report
    assert "Too many open files" in report


def test_a_report_names_ranks_whose_watchdog_does_not_run() -> None:
    """Python's lock may be held, or the thread may have died."""
    slots, now = np.zeros(2, b.SLOT), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    slots["state"], slots["pid"] = b.IN_PYTHON, os.getpid()
    slots["namespace"] = os.stat("/proc/self/ns/pid").st_ino
    slots["watched_ns"] = now - 10**9, now - 60 * 10**9
    first, second = watchdog.rank_states(b.Board(None, slots, 0, (0, 1)))
    assert "watchdog" not in first
    assert "rank 1" in second
    assert second.endswith("and its watchdog has not run for 60 s")


def test_the_lock_excludes_threads(tmp_path: pathlib.Path) -> None:
    """flock belongs to the open file, and so to all threads."""
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    board = b.Board(np.zeros((), b.HEADER), np.zeros(1, b.SLOT), 0, (0,), lock)
    inside: list[int] = []
    worst = []

    def enter(number: int) -> None:
        for _ in range(20):
            with board.locked():
                inside.append(number)
                worst.append(len(inside))
                time.sleep(1e-4)
                inside.remove(number)

    threads = [threading.Thread(target=enter, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(lock)
    assert max(worst) == 1


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_line_of_the_program_and_not_of_a_library() -> None:
    found = []

    def hook(pairs: list[tuple[str, int]]) -> None:
        stack = places(threading.get_ident())[2:]
        assert "/json/" in stack[0][0]
        found.append(program_line(stack))

    frame = inspect.currentframe()
    assert frame is not None
    json.loads('{"a": 1}', object_pairs_hook=hook, cls=_InPython)
    assert found == [f"tests/guard/test_watchdog.py:{frame.f_lineno - 1}"]


class _InPython(json.JSONDecoder):
    """A decoder in Python, because the C decoder does not create frames."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


@pytest.mark.ranks(1)
def test_packages_of_another_environment_are_not_the_users_lines() -> None:
    package = os.path.join("/elsewhere", "lib", "site-packages", "solver", "loop.py")
    assert program_line([(package, 7), ("/home/user/program.py", 3)]).endswith("program.py:3")
