"""The watchdog of a rank: a thread that looks at the board while an operation waits."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable

from mpigrad.guard import board as b
from mpigrad.guard.board_reader import Reader
from mpigrad.guard.cross_host import RollCall
from mpigrad.guard.thread_stacks import places_of_main
from mpigrad.guard.wait_graph import Finding, diagnose, grouped
from mpigrad.runtime.call_sites import program_line
from mpigrad.runtime.native import UNTIMED, Record, record

__all__ = ["Watchdog", "gone", "where"]

# Seconds that nothing may change on the board before ranks are said to wait for ever. The proof is
# exact; the time is for what no proof knows.
_PATIENCE = 5.0
_PATIENCE_GUARDED = 0.3
_LATE = 1.0  # seconds by which a busy machine may wake a thread
# Linux's number of the system call by which a thread waits for another one.
_FUTEX = {"x86_64": "202", "aarch64": "98", "ppc64le": "221"}.get(platform.machine())


def gone(board: b.Board, r: int) -> str:
    """Why the rank of slot r will not go on, or ""."""
    slot = board.slots[r]
    if int(slot["state"]) == b.ENDED:
        return "has ended"
    return "has died" if _process_state(board, r) in {"", "Z", "X"} else ""


def _process_state(board: b.Board, r: int) -> str:
    """The letter by which Linux says what a process does; "" where there is none."""
    slot = board.slots[r]
    if r == board.mine or int(slot["namespace"]) != int(board.slots[board.mine]["namespace"]):
        return "R"  # as far as is known
    try:
        status = pathlib.Path(f"/proc/{int(slot['pid'])}/stat").read_text().rpartition(")")[2]
    except OSError:
        return ""
    return status.split()[0]


def _works(thread: threading.Thread) -> bool:
    """Whether the program ends after this thread, which waits for something else than a thread."""
    if thread is threading.main_thread() or thread.daemon or _FUTEX is None:
        return False
    try:
        call = pathlib.Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0]
    except OSError:  # not known
        return False
    return call != _FUTEX


def stopped(board: b.Board, r: int) -> str:
    """That the process of the rank of slot r does not run, or ""."""
    return (
        ", and its process is stopped (SIGSTOP)" if _process_state(board, r) in {"T", "t"} else ""
    )


_TIME = re.compile(r"^(has waited|never came: in no operation since) (\d+) s")


def where(board: b.Board) -> list[str]:
    """Where the ranks of a board are, in lines: one for those whose times alone differ."""
    reader, now = Reader(board.slots), _now()
    slots = range(len(board.ranks))
    states = [reader.state(r, now, gone(board, r)) + stopped(board, r) for r in slots]
    times: dict[str, list[int]] = {}
    for state in states:
        if found := _TIME.match(state):
            times.setdefault(_TIME.sub(r"\1", state), []).append(int(found[2]))

    def spanned(state: str) -> str:
        """With the times of all ranks in the same place."""
        same = times.get(_TIME.sub(r"\1", state), [0])
        low, high = min(same), max(same)
        return _TIME.sub(rf"\1 {low} to {high} s", state) if low < high else state

    return grouped(
        (f"rank {rank}", spanned(s)) for rank, s in zip(board.ranks, states, strict=True)
    )


class Watchdog:
    """Ends waiting for ever: by a proof that it is for ever, or by the time limit.

    Parameters
    ----------
    board
        Of this host.
    seconds
        The time limit of one operation; 0: none.
    guarded
        Operations wait on the board: the error is raised there, on every rank.
    end_job
        Called with the text of an error that cannot be raised, or with what makes it.
    others
        For asking the other hosts, where there are any.
    """

    NAME = "mpigrad-watch"  # of the thread

    def __init__(
        self,
        board: b.Board,
        seconds: float,
        guarded: bool,
        end_job: Callable[[str | Callable[[], str]], None],
        others: RollCall | None,
    ) -> None:
        self.board, self.seconds, self.guarded = board, seconds, guarded
        self.end_job, self.others = end_job, others
        self.patience = _PATIENCE_GUARDED if guarded else _PATIENCE
        self.tick = 0.1 if guarded else min(0.5, seconds / 4 or 0.5)
        self._seen: dict[int, int] = {}  # ranks found waiting for ever, and since when
        self._since = 0.0
        self._refused: dict[int, int] = {}
        self._last = (0, False), 0  # what the last look found, and since when
        self._lost = 0.0  # seconds of the present operation in which this process stood still

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name=self.NAME).start()

    def _run(self) -> None:
        now, last = record(), _now()
        while True:
            time.sleep(self.tick)
            # A job that is suspended for an hour has not waited for an hour.
            still, last = (_now() - last) * 1e-9 - self.tick - _LATE, _now()
            self._lost += max(still, 0.0)
            start = self._start(now)
            waited = (_now() - start) * 1e-9 - self._lost if start else 0.0
            self._note_elsewhere(start)
            # The working directory may be gone, and an exception's own text may raise another.
            with contextlib.suppress(Exception):
                if not start:
                    self._note_line()
            with contextlib.suppress(Exception):
                self._note_handling(waited >= self.patience / 2)
            if waited < self.patience / 2:
                continue
            if self.seconds and waited >= self.seconds and not now.unlimited:
                self.end_job(functools.partial(self._report, waited))
            finding = diagnose(self.board.slots, lambda r: gone(self.board, r), _now())
            if finding is not None and self._certain(finding):
                self._raise(finding)

    def _start(self, now: Record) -> int:
        """When the operation under way has begun, or 0: as it says, or since it was seen first."""
        start = now.start_ns  # read first: an idle look lends its time to no operation
        mine = self.board.slots[self.board.mine]
        seen = int(mine["serial"]) + now.calls, start != 0
        last, begun = self._last
        if seen != last:
            self._last = seen, (begun := _now())
            self._lost = 0.0
            mine["since_ns"] = begun
        if start in (0, UNTIMED):
            return begun if start else 0
        # Where it has met with a standstill, from the end of that.
        return max(start, begun - int(self.tick * 1e9))

    def _note_elsewhere(self, start: int) -> None:
        """Show the others a call that no handler announces, such as a solver's."""
        mine, now = self.board.slots[self.board.mine], record()
        inside = start and int(mine["state"]) != b.IN_OPERATION
        if inside and now.operation:
            mine["elsewhere"], mine["elsewhere_site"] = now.operation[: b.NAME - 1], now.site
        if inside or int(mine["elsewhere_since_ns"]):
            mine["elsewhere_since_ns"] = start if inside else 0

    def _note_line(self) -> None:
        """Show the others what this rank does while it is in no operation."""
        mine = self.board.slots[self.board.mine]
        if stack := places_of_main():
            mine["line"] = program_line(stack).encode(errors="replace")[: b.TEXT - 1]
            mine["line_ns"] = _now()
            inside = stack[0][0] == threading.__file__
            mine["line_waits"] = inside and not any(map(_works, threading.enumerate()))

    def _note_handling(self, waits: bool) -> None:
        """Show the others why this rank may have left its way: an operation in `finally`."""
        mine = self.board.slots[self.board.mine]
        if not waits:
            if mine["handling"]:
                mine["handling"] = b""
            return
        error: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
        error = error[1] if isinstance(error, tuple) else error  # before Python 3.12
        if isinstance(error, BaseException):
            *_, frame = [None, *traceback.extract_tb(error.__traceback__)]
            place = f" at {os.path.basename(frame.filename)}:{frame.lineno}" if frame else ""
            said = " ".join(f"{type(error).__name__}: {error}".split()).encode(errors="replace")
            end = place.encode(errors="replace")[-b.TEXT // 2 :]
            mine["handling"] = said[: b.TEXT - 1 - len(end)] + end

    def _certain(self, finding: Finding) -> bool:
        """Whether it is for this rank to say it, and nothing has changed for a while."""
        if self.board.mine != min(finding.stuck) or finding.stuck == self._refused:
            return False
        if finding.stuck != self._seen:
            self._seen, self._since = finding.stuck, time.monotonic()
        return time.monotonic() - self._since >= self.patience / 2  # of the half that is over

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
            fault["serials"][sorted(finding.concerns)] = -1  # its next operation
            for r, serial in finding.stuck.items():
                fault["serials"][r] = serial
            fault["ids"][:] = 0
            fault["ids"][: len(finding.communicators)] = finding.communicators[: b.FAULT_IDS]
            fault["text"] = finding.text.encode()[: b.FAULT_TEXT - 1]
            header["faults"] += 1  # from here on they see it
        self._refused = finding.stuck

    def _report(self, waited: float) -> str:
        """Where every rank is; "" where another host says it."""
        here = functools.partial(where, self.board)
        found = self.others.where(here) if self.others else (here(), [])
        if found is None:
            return ""
        lines, missing = found
        remedy = (
            "Look for a rank that leaves out an operation, or calls another in its place; where "
            "ranks only need longer, set MPIGRAD_TIMEOUT."
        )
        if missing:
            remedy = (
                f"Look at {', '.join(missing)}: stopped, or cut off from this host. A run that has "
                "saved goes on from there on the hosts that are left."
            )
        return (
            f"mpigrad: an operation has waited {waited:.0f} s (MPIGRAD_TIMEOUT={self.seconds:g}); "
            "ending all ranks:\n" + "\n".join(lines) + f"\n{remedy}"
        )


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
