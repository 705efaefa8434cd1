"""The watchdog of a rank: a thread that reads the board while an operation waits."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import faulthandler
import functools
import math
import os
import pathlib
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from mpigrad.guard import board as b
from mpigrad.guard.board_reader import Reader
from mpigrad.guard.cross_host import HostQuery
from mpigrad.guard.wait_graph import Finding, diagnose, grouped, suspect
from mpigrad.runtime.call_sites import program_line, utf8, utf8_end
from mpigrad.runtime.native import UNTIMED, Record, record

__all__ = [
    "Watchdog",
    "activity",
    "current_activity",
    "end_reason",
    "places",
    "places_of_main",
    "rank_states",
]

# ---- The activity of a rank outside of operations, for the reports of the guard ----


# The activities of the main thread, the outer ones first: functions that return a text.
_activities: list[Callable[[], str]] = []


def current_activity() -> str:
    """Return the text of the main thread's activity, or ""."""
    activities = _activities[-1:]
    return activities[0]() if activities else ""


@contextlib.contextmanager
def activity(text: str | Callable[[], str]) -> Iterator[None]:
    """Show a text in reports while this block runs in the main thread.

    `text` may be a function that returns the text. The watchdog calls it in a thread of its own.

    Examples
    --------
    >>> from mpigrad.guard.watchdog import activity, current_activity
    >>> with activity("compiling jit_step"):
    ...     current_activity()
    'compiling jit_step'
    >>> current_activity()
    ''
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _activities.append(text if callable(text) else lambda: text)
    try:
        yield
    finally:
        _activities.pop()


# ---- The stack of another thread: its files and lines ----
#
# Reading the frames of a running thread is not safe. jaxlib lets other threads run while it frees
# arrays, in the middle of a function's return. At that moment `faulthandler` crashes CPython 3.12
# and 3.13 with SIGSEGV, and `sys._current_frames` sometimes crashes CPython 3.11 later. The main
# thread is therefore asked to report its own stack when that is safe (`Py_AddPendingCall`). If it
# does not answer because it is inside native code, its frames are read from outside, with the
# function that is safe for this version.


Places = list[tuple[str, int]]

_DEPTH = 100
_STACK_PATIENCE = 0.02  # seconds to wait for the answer of the main thread

_THREAD = re.compile(rb"^(?:Current t|T)hread 0x([0-9a-f]+).*$", re.MULTILINE)
_PLACE = re.compile(rb'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_BYTES = 1 << 20


class _Question:
    """A question to the main thread, and its answer."""

    def __init__(self) -> None:
        self.answered = _thread.allocate_lock()
        self.answered.acquire()
        self.places: Places = []


_question: _Question | None = None


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _answer(_: int | None) -> int:
    """Report the stack, in the main thread, between two instructions of its program."""
    global _question
    question, _question = _question, None
    if question is not None:
        question.places = _walk(sys._getframe().f_back)
        question.answered.release()
    return 0


def places_of_main() -> Places:
    """Return the stack of the main thread as (file, line) pairs, innermost first, at most 100.

    Only one thread may call this at a time.
    """
    global _question
    question = _Question()
    waits, _question = _question is not None, question  # the last question is still unanswered
    asked = waits or ctypes.pythonapi.Py_AddPendingCall(_answer, None) == 0
    if asked and question.answered.acquire(timeout=_STACK_PATIENCE):
        return question.places
    return places(threading.main_thread().ident or 0)


def places(thread: int) -> Places:
    """Return the stack of a thread inside native code as (file, line) pairs, innermost first.

    At most 100 pairs. `thread` is the identity of the thread.
    """
    if sys.version_info >= (3, 12):
        return _walk(sys._current_frames().get(thread))
    # Opened each time: a program that closes all files would free its descriptor for another file.
    file = os.memfd_create("mpigrad-stacks")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        _, *parts = _THREAD.split(os.pread(file, _BYTES, 0))
    finally:
        os.close(file)
    for identity, stack in zip(parts[::2], parts[1::2], strict=True):
        if int(identity, 16) == thread:
            return [(_path(name), int(line)) for name, line in _PLACE.findall(stack)]
    return []


def _walk(frame: object) -> Places:
    stack: Places = []
    while frame is not None and len(stack) < _DEPTH:
        stack.append((frame.f_code.co_filename, frame.f_lineno or 0))  # type: ignore[attr-defined]
        frame = frame.f_back  # type: ignore[attr-defined]
    return stack


def _path(escaped: bytes) -> str:
    """Decode a path in which characters beyond ASCII are escaped as in a Python string."""
    return escaped.decode("unicode_escape" if b"\\" in escaped else "ascii", errors="replace")


# ---- The watchdog of a rank: a thread that reads the board while an operation waits ----


# Seconds without a change on the board before a deadlock is reported. The proof is exact. The time
# is a margin for effects that the proof does not cover.
_PATIENCE = 5.0
_PATIENCE_GUARDED = 0.3
# After a mismatch that MPI forgave: seconds for a collective, and elements that move in a second.
_SUSPECT, _SLOWEST = 10.0, 1e6
_ASLEEP = 20.0  # seconds without a look, after which a report says so
_LATE = 1.0  # seconds by which a busy machine may delay a thread
# The number of Linux's system call by which a thread waits for another thread.
_FUTEX = {"x86_64": "202", "aarch64": "98", "ppc64le": "221"}.get(platform.machine())


def end_reason(board: b.Board, r: int) -> str:
    """Return "has ended" or "has died" if the rank of slot r is gone, or ""."""
    slot = board.slots[r]
    if int(slot["state"]) == b.ENDED:
        return "has ended"
    return "has died" if _process_state(board, r) in {"", "Z", "X"} else ""


def _process_state(board: b.Board, r: int) -> str:
    """Return Linux's letter for the state of the process of slot r.

    "" only if it certainly does not exist. A process that cannot be looked at, because this one has
    no file descriptors for example, is assumed to run.
    """
    slot = board.slots[r]
    if r == board.own_index or int(slot["namespace"]) != int(
        board.slots[board.own_index]["namespace"]
    ):
        return "R"  # unknown: assumed to run
    try:
        status = pathlib.Path(f"/proc/{int(slot['pid'])}/stat").read_bytes().rpartition(b")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return "R"
    return status.split()[0].decode()


def _works(thread: threading.Thread) -> bool:
    """Return True if Python waits for this thread at its end, and the thread may be working.

    A thread that waits for another thread does not work.
    """
    if thread is threading.main_thread() or thread.daemon or _FUTEX is None:
        return False
    try:
        call = pathlib.Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0]
    except OSError:  # unknown
        return False
    return call != _FUTEX


def stop_note(board: b.Board, r: int) -> str:
    """Return a note if the process of the rank of slot r is stopped, or ""."""
    state = _process_state(board, r)
    return ", and its process is stopped (SIGSTOP)" if state in {"T", "t"} else ""


def watchdog_note(board: b.Board, r: int, now_ns: int) -> str:
    """Return a note if the watchdog of the rank of slot r has not looked for a while, or ""."""
    slot = board.slots[r]
    away = (now_ns - int(slot["watched_ns"])) * 1e-9
    if not int(slot["watched_ns"]) or away < _ASLEEP or int(slot["state"]) == b.ENDED:
        return ""
    return f", and its watchdog has not run for {away:.0f} s"


_TIME = re.compile(r"^(has waited|has not called an operation for) (\d+) s")


def rank_states(board: b.Board) -> list[str]:
    """Return lines with the states of the ranks of a board.

    Ranks whose states differ only in their times share one line.
    """
    reader, now = Reader(board.slots), _now()
    slots = range(len(board.ranks))
    states = []
    for r in slots:
        gone = end_reason(board, r)
        note = "" if gone else stop_note(board, r) or watchdog_note(board, r, now)
        states.append(reader.state(r, now, gone) + note)
    times: dict[str, list[int]] = {}
    for state in states:
        if match := _TIME.match(state):
            times.setdefault(_TIME.sub(r"\1", state), []).append(int(match[2]))

    def spanned(state: str) -> str:
        """Replace the time by the range of times of all ranks in the same state."""
        same = times.get(_TIME.sub(r"\1", state), [0])
        low, high = min(same), max(same)
        return _TIME.sub(rf"\1 {low} to {high} s", state) if low < high else state

    return grouped(
        (f"rank {rank}", spanned(s)) for rank, s in zip(board.ranks, states, strict=True)
    )


class Watchdog:
    """Ends deadlocks: when they are proved, or at the time limit.

    Parameters
    ----------
    board
        The board of this host.
    seconds
        The time limit of one operation (0: unlimited).
    guarded
        True if operations wait on the board, so that an error can be raised there on every rank.
    end_job
        Called with the text of an error that cannot be raised, or with a function that returns it.
    host_query
        For the states of ranks on other hosts. None if there is one host.
    """

    NAME = "mpigrad-watch"  # of the thread

    def __init__(
        self,
        board: b.Board,
        seconds: float,
        guarded: bool,
        end_job: Callable[[str | Callable[[], str]], None],
        host_query: HostQuery | None,
    ) -> None:
        self.board, self.seconds, self.guarded = board, seconds, guarded
        self.end_job, self.host_query = end_job, host_query
        self.patience = _PATIENCE_GUARDED if guarded else _PATIENCE
        self.tick = 0.1 if guarded else min(0.5, seconds / 4 or 0.5)
        self._seen: dict[int, int] = {}  # the last finding: slot -> serial number
        self._since = 0.0
        self._refused: dict[int, int] = {}
        self._last = (0, False), 0  # the state at the last look, and since when it holds
        self._lost = 0.0  # seconds of the current operation in which this process was suspended
        self._halted = math.inf  # since when another rank is stopped, or its host does not answer
        self._asked = 0.0  # when the other hosts were last asked
        self._lost_hosts = False  # whether one of them did not answer
        self._errors = 0  # of this thread

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name=self.NAME).start()

    def _run(self) -> None:
        if self.host_query is not None and self.board.own_index == 0:
            with contextlib.suppress(Exception):  # no file descriptors, for example
                self.host_query.lost_hosts(must_answer=False)  # finds those that can be reached
        now, last = record(), _now()
        while True:
            time.sleep(self.tick)
            # The time for which a job is suspended does not count.
            still, last = (_now() - last) * 1e-9 - self.tick - _LATE, _now()
            self._lost += max(still, 0.0)
            try:
                self._look(now)
            except Exception:  # whatever it is: this thread must go on, and the user must know
                self._say_once(traceback.format_exc())

    def _look(self, now: Record) -> None:
        """Look at the board once, and end the job if it waits for ever."""
        self.board.slots[self.board.own_index]["watched_ns"] = _now()
        start = self._start(now)
        waited = (_now() - start) * 1e-9 - self._lost if start else 0.0
        # The working directory may not exist, and formatting an exception may raise another.
        with contextlib.suppress(Exception):
            if not start:
                self._note_line()
        with contextlib.suppress(Exception):
            self._note_handling(waited >= self.patience / 2)
        if waited < self.patience / 2:
            return
        limit = min(self.seconds, self._suspect_limit())
        halted = self._halted_seconds() if now.unlimited else waited
        if self.seconds and min(waited, halted) >= limit:
            self.end_job(functools.partial(self._report, waited, limit))
        finding = diagnose(self.board.slots, lambda r: end_reason(self.board, r), _now())
        if finding is not None and self._certain(finding):
            self._raise(finding)

    def _halted_seconds(self) -> float:
        """Return for how long another rank of this host has been stopped, or a host was lost."""
        others = set(range(len(self.board.ranks))) - {self.board.own_index}
        if not any(stop_note(self.board, r) for r in others) and not self._a_host_is_lost():
            self._halted = math.inf
            return 0.0
        self._halted = min(self._halted, now := time.monotonic())
        return now - self._halted

    def _a_host_is_lost(self) -> bool:
        """Return True if another host did not answer when it was last asked.

        The first rank of a host that waits asks, a few times within the limit.
        """
        slots, me = self.board.slots, self.board.own_index
        first = int((slots["state"] == b.IN_OPERATION).argmax())
        if self.host_query is None or not self.seconds or first != me:
            return False
        now = time.monotonic()
        if now - self._asked >= self.seconds / 4:
            # All ranks of a solve are in native code, so that their watchdogs answer. A rank that
            # serves others may hold Python's lock for any time.
            solves = bytes(slots[me]["operation"]) == b"solve"
            self._lost_hosts = bool(self.host_query.lost_hosts(must_answer=solves))
            self._asked = time.monotonic()
        return self._lost_hosts

    def _suspect_limit(self) -> float:
        """Return the time limit of a collective after a mismatch that MPI forgave (else infinity).

        Such a program is wrong, but the collective may be under way. It has time for its data.
        """
        finding = suspect(self.board.slots, self.board.own_index)
        if finding is None or any(stop_note(self.board, r) for r in finding.members):
            return math.inf
        return _SUSPECT + finding.elements / _SLOWEST

    def _say_once(self, error: str) -> None:
        """Print the first error of this thread."""
        if self._errors == 0:
            rank = self.board.ranks[self.board.own_index]
            with contextlib.suppress(Exception):
                sys.stderr.write(
                    f"mpigrad: the watchdog of rank {rank} goes on after an error. Report this as "
                    f"a bug of mpigrad:\n{error}"
                )
        self._errors += 1

    def _start(self, now: Record) -> int:
        """Return when the current operation began (as recorded, or first seen), or 0."""
        start = now.start_ns  # read first, so that an idle look gives no start to a later operation
        slot = self.board.slots[self.board.own_index]
        seen = int(slot["serial"]) + now.calls, start != 0
        last, begun = self._last
        if seen != last:
            self._last = seen, (begun := _now())
            self._lost = 0.0
            slot["since_ns"] = begun
        if start in (0, UNTIMED):
            return begun if start else 0
        # If the process was suspended, count from the end of the suspension.
        return max(start, begun - int(self.tick * 1e9))

    def _note_line(self) -> None:
        """Write the line of the program to the board while this rank is outside operations."""
        slot = self.board.slots[self.board.own_index]
        if stack := places_of_main():
            doing = f", {text}" if (text := current_activity()) else ""
            end = utf8(doing, b.TEXT // 2)
            slot["line"] = utf8(program_line(stack), b.TEXT - 1 - len(end)) + end
            slot["line_ns"] = _now()
            inside = stack[0][0] == threading.__file__
            slot["line_waits"] = inside and not any(map(_works, threading.enumerate()))

    def _note_handling(self, waits: bool) -> None:
        """Write the exception that this rank handles while it waits to the board.

        An operation in `finally` or `except` is a common cause of a mismatch.
        """
        slot = self.board.slots[self.board.own_index]
        if not waits:
            if slot["handling"]:
                slot["handling"] = b""
            return
        error: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
        error = error[1] if isinstance(error, tuple) else error  # before Python 3.12
        if isinstance(error, BaseException):
            *_, frame = [None, *traceback.extract_tb(error.__traceback__)]
            place = f" at {os.path.basename(frame.filename)}:{frame.lineno}" if frame else ""
            end = utf8_end(place, b.TEXT // 2)
            text = " ".join(f"{type(error).__name__}: {error}".split())
            slot["handling"] = utf8(text, b.TEXT - 1 - len(end)) + end

    def _certain(self, finding: Finding) -> bool:
        """Return True if this rank has to report the finding, and it has held long enough."""
        if self.board.own_index != min(finding.stuck) or finding.stuck == self._refused:
            return False
        if finding.stuck != self._seen:
            self._seen, self._since = finding.stuck, time.monotonic()
        return time.monotonic() - self._since >= self.patience / 2  # the other half is over

    def _raise(self, finding: Finding) -> None:
        if not (self.guarded and finding.refusable):
            self.end_job(finding.text)
            return
        with self.board.locked():
            serials = {r: int(self.board.slots[r]["serial"]) for r in finding.stuck}
            if serials != finding.stuck:
                return
            header = self.board.header
            fault = header["fault"][int(header["faults"]) % b.FAULTS]
            fault["serials"][:] = 0
            fault["serials"][sorted(finding.concerns)] = -1  # their next operation
            for r, serial in finding.stuck.items():
                fault["serials"][r] = serial
            fault["ids"][:] = 0
            fault["ids"][: len(finding.communicators)] = finding.communicators[: b.FAULT_IDS]
            fault["text"] = utf8(finding.text, b.FAULT_TEXT - 1)
            self.board.publish_verdict()
        self._refused = finding.stuck

    def _report(self, waited: float, limit: float) -> str:
        """Return the report with the states of all ranks ("" if another host reports)."""
        own_states = functools.partial(rank_states, self.board)
        query = self.host_query
        try:
            report = query.rank_states(own_states) if query else (own_states(), [])
        except Exception as error:  # no file descriptors, for example: the job ends nevertheless
            report = [f"(the states of the ranks cannot be read: {error!r})"], []
        if report is None:
            return ""
        lines, missing = report
        finding = suspect(self.board.slots, self.board.own_index)
        remedy = (
            "Find the rank that skips an operation or calls another one. If the ranks only need "
            "more time, set MPIGRAD_TIMEOUT to more seconds."
        )
        if missing:
            remedy = (
                f"Check {', '.join(missing)}: stopped, or cut off from this host. A run with saves "
                "can be restarted on the other hosts."
            )
        why = f"MPIGRAD_TIMEOUT={self.seconds:g}"
        if any(stop_note(self.board, r) for r in range(len(self.board.ranks))):
            remedy = "Let the stopped process go on (kill -CONT), or start the job again."
        if finding is not None:
            why = why if limit == self.seconds else "after an earlier mismatch"
            *more, remedy = finding.lines
            lines = [*lines, *more]
        ending = "; ending all ranks" if len(self.board.ranks) > 1 or query else ""
        return f"mpigrad: an operation has waited {waited:.0f} s ({why}){ending}:\n" + "\n".join(
            [*lines, remedy]
        )


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
