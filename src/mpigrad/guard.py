"""Nobody hangs: a failing rank ends all ranks, and a watchdog ends those that wait too long."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import traceback
from types import TracebackType

from mpi4py import MPI

from mpigrad.communicator import record
from mpigrad.operations.sites import describe

__all__ = ["install", "timeout_seconds"]

_GRACE = 2.0  # seconds for the other ranks to say where they are, before the job is ended


def timeout_seconds() -> float:
    """MPIGRAD_TIMEOUT: how long one operation may wait (seconds, default 300, 0 for ever)."""
    text = os.environ.get("MPIGRAD_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ImportError(
            f"mpigrad: MPIGRAD_TIMEOUT={text!r} is not a number of seconds (0: no limit)"
        )
    return seconds


@functools.cache
def install() -> None:
    """Watch this rank from now on. With one rank there is nobody to wait for."""
    seconds = timeout_seconds()
    if MPI.COMM_WORLD.size == 1:
        return
    previous = sys.excepthook

    def end_all_ranks(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        sys.stdout.flush()
        if kind is KeyboardInterrupt:
            previous(kind, value, trace)
        else:
            text = "".join(traceback.format_exception(kind, value, trace))
            rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
            sys.stderr.write(f"{text}mpigrad: rank {rank} of {size} failed; ending all ranks\n")
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(130 if kind is KeyboardInterrupt else 1)

    sys.excepthook = end_all_ranks
    if seconds > 0:
        threading.Thread(target=_watch, args=(seconds,), daemon=True, name="mpigrad-watch").start()


def _watch(seconds: float) -> None:
    now = record()
    pause = min(1.0, seconds / 4)
    while True:
        time.sleep(pause)
        start = now.start_ns
        if start == 0:
            continue
        waited = (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - start) * 1e-9
        if waited < seconds:
            continue
        operation = now.operation.decode() if now.operation else "an operation"
        world = MPI.COMM_WORLD
        sys.stderr.write(
            f"mpigrad: rank {world.rank} of {world.size} has waited {waited:.0f} s in {operation} "
            f"at {describe(now.site)} (MPIGRAD_TIMEOUT={seconds:g}). A rank that prints no such "
            "line never came: look for a rank that leaves out this operation, or calls another "
            "in its place.\n"
        )
        sys.stderr.flush()
        time.sleep(_GRACE)
        world.Abort(1)
