"""One line on rank 0 that says how far a long run has come."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

__all__ = ["Progress", "duration"]


def duration(seconds: float) -> str:
    """Seconds in the form that a reader takes in at a glance: 8 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _is_terminal(stream: TextIO) -> bool:
    asked = os.environ.get("MPIGRAD_TERMINAL")
    if asked is not None:
        return asked == "1"
    launched = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK"))
    return stream.isatty() and not launched


class Progress:
    """The progress of an iteration, shown by rank 0 and by nobody else.

    On a terminal one line is written over and over; elsewhere (a file, a batch job) plain lines,
    not more often than every few seconds. The launcher says which it is (MPIGRAD_TERMINAL=1: a
    terminal); without it, output is a terminal if it looks like one and no mpiexec started this
    rank: Open MPI's gives its ranks a terminal of its own, whatever becomes of their output.

    Parameters
    ----------
    total
        Number of iterations.
    rank
        This rank.
    stream
        Where to write; standard output if not given.
    interval
        Seconds between plain lines; a live line is written ten times a second at most.
    """

    def __init__(
        self, total: int, rank: int = 0, stream: TextIO | None = None, interval: float = 5.0
    ) -> None:
        self._total = total
        self._stream = sys.stdout if stream is None else stream
        self._shown = rank == 0
        self._live = _is_terminal(self._stream)
        self._interval = 0.1 if self._live else interval
        self._start = time.monotonic()
        self._begun: tuple[int, float] | None = None  # where the time per iteration is taken from
        self._written = -float("inf")
        self._width = 0

    def update(self, iteration: int, **numbers: float) -> None:
        """Say that `iteration` is done, with some numbers, for instance loss=..., gradient=...."""
        if not self._shown:
            return
        now = time.monotonic()
        left = ""
        if self._begun is None:
            if iteration > 0:  # the first iteration compiles: its time is not the others'
                self._begun = (iteration, now)
        elif iteration > self._begun[0]:
            each = (now - self._begun[1]) / (iteration - self._begun[0])
            left = f"  {duration(each * (self._total - iteration))} left"
        if now - self._written < self._interval and iteration < self._total:
            return
        self._written = now
        values = "".join(f"  {name} {value:.3e}" for name, value in numbers.items())
        self._write(f"iteration {iteration}/{self._total}{values}{left}")

    def close(self, message: str = "") -> None:
        """End the live line, if there is one, and write a last plain line."""
        if not self._shown:
            return
        if self._live and self._width:
            self._stream.write("\n")
        self._width = 0
        if message:
            self._stream.write(message + "\n")
        self._stream.flush()

    def elapsed(self) -> float:
        """Seconds since the progress was made."""
        return time.monotonic() - self._start

    def _write(self, line: str) -> None:
        if self._live:
            # A line that wraps cannot be written over.
            line = line[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
