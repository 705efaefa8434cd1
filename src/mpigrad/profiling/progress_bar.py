"""A progress line on rank 0 for long runs."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

__all__ = ["Progress", "duration"]


def duration(seconds: float) -> str:
    """Format seconds for a reader: 8 s, 3 min 20 s, 2 h 05 min."""
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
    """The progress of an iteration, shown by rank 0 only.

    On a terminal, one line is overwritten. In a file or a batch job, plain lines are written every
    few seconds. The launcher sets MPIGRAD_TERMINAL=1 for a terminal. Without this variable, output
    counts as a terminal if it is one and mpiexec did not start this rank: Open MPI's mpiexec gives
    its ranks a terminal even if their output goes to a file.

    Parameters
    ----------
    total
        Number of iterations, of each stage if there are several.
    rank
        This rank.
    stream
        Output stream (default: standard output).
    interval
        Seconds between plain lines. A live line is updated at most ten times a second.
    stages
        Number of stages. The time left is that of all of them.
    """

    def __init__(
        self,
        total: int,
        rank: int = 0,
        stream: TextIO | None = None,
        interval: float = 5.0,
        stages: int = 1,
    ) -> None:
        self._total = total
        self._before = 0  # iterations of the earlier stages
        self._later = (stages - 1) * total  # iterations of the later stages
        self._stream = sys.stdout if stream is None else stream
        self._shown = rank == 0
        self._live = _is_terminal(self._stream)
        self._interval = 0.1 if self._live else interval
        self._start = time.monotonic()
        self._done: list[tuple[int, float]] = []  # iterations and times, from the first one on
        self._half = 0  # place in it, after which the time per iteration is measured
        self._written = -float("inf")
        self._width = 0

    def update(self, iteration: int, **numbers: float) -> None:
        """Show that `iteration` is done, with numbers such as loss=..., gradient=...."""
        if not self._shown:
            return
        now = time.monotonic()
        seconds = self._seconds_left(iteration, now)
        left = "" if seconds is None else f"  {duration(seconds)} left"
        if now - self._written < self._interval and iteration < self._total:
            return
        self._written = now
        values = "".join(f"  {name} {value:.3e}" for name, value in numbers.items())
        self._write(f"iteration {iteration}/{self._total}{values}{left}")

    def next_stage(self) -> None:
        """Begin the next stage, whose iterations are counted from 0 again."""
        self.close()
        self._before = self._done[-1][0] if self._done else 0
        self._later -= self._total

    def _seconds_left(self, iteration: int, now: float) -> float | None:
        """Return the time left, by the time per iteration in the last half of the iterations.

        The first iteration compiles, and the first ones of a sampler or a line search may cost many
        times as much as the others.
        """
        count = self._before + iteration
        if count > (self._done[-1][0] if self._done else 0):
            self._done.append((count, now))
            first = self._done[0][0]
            while self._half + 1 < len(self._done) and (
                self._done[self._half + 1][0] - first <= (count - first) / 2
            ):
                self._half += 1
        if len(self._done) < 2:
            return None
        (since, then), (last, latest) = self._done[self._half], self._done[-1]
        return (latest - then) / (last - since) * (self._total - iteration + self._later)

    def close(self, message: str = "") -> None:
        """End the live line, if there is one, and write a final line."""
        if not self._shown:
            return
        if self._live and self._width:
            self._stream.write("\n")
        self._width = 0
        if message:
            self._stream.write(message + "\n")
        self._stream.flush()

    def elapsed(self) -> float:
        """Return the seconds since this object was created."""
        return time.monotonic() - self._start

    def _write(self, line: str) -> None:
        if self._live:
            # A line that wraps cannot be overwritten.
            line = line[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
