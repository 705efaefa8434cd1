"""A timeline of the operations of all ranks, and a table of their costs.

`MPIGRAD_TRACE=trace.json` writes Chrome trace events, which https://ui.perfetto.dev opens: one
process for each rank, one span for each operation, with its source line, bytes, partner or root,
and communicator. Each rank writes its own file while it runs, so the files remain if the job is
ended. At a normal end they are merged into one. `mpigrad launch --profile` (or MPIGRAD_PROFILE=1)
prints the table at the end of the program.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.guard import call_at_job_end
from mpigrad.profiling.table import RankRecord, Total, table
from mpigrad.runtime.call_sites import describe, neighbors_by_call
from mpigrad.runtime.native import library

__all__ = ["start"]

EVENTS = 200_000  # default of MPIGRAD_TRACE_EVENTS: events per rank (56 bytes each)
_PAUSE = 0.25  # seconds between two writes
_PATIENCE = 10.0  # seconds for which ranks wait for each other at the end
_SAME_HOST = pathlib.Path("/proc/sys/kernel/random/boot_id")


class _Totals(ctypes.Structure):
    """All calls of one operation on one line (native/guard/trace.cc)."""

    _fields_ = (
        ("operation", ctypes.c_char_p),
        ("site", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("ns", ctypes.c_int64),
        ("longest_ns", ctypes.c_int64),
    )


@functools.cache
def start() -> None:
    """Start to record if MPIGRAD_TRACE or MPIGRAD_PROFILE is set (collective)."""
    path, profile = os.environ.get("MPIGRAD_TRACE"), os.environ.get("MPIGRAD_PROFILE") == "1"
    if not path and not profile:
        return
    world = Communicator(MPI.COMM_WORLD).mpi
    recorder = _Recorder(world, path, profile)
    call_at_job_end(recorder.end)


class _Recorder:
    """Records the trace of this rank."""

    def __init__(self, world: MPI.Intracomm, path: str | None, profile: bool) -> None:
        self.world, self.profile = world, profile
        self.rank, self.size = world.rank, world.size
        self.path = pathlib.Path(path).absolute() if path else None
        self.part = self._part(self.rank) if self.path else None
        lib = self.lib = library()
        lib.mpigrad_trace_start.argtypes = [ctypes.c_int64]
        lib.mpigrad_trace_events.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        lib.mpigrad_trace_totals.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        lib.mpigrad_trace_write.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
        lib.mpigrad_trace_communicator.argtypes = [ctypes.c_int64]
        for name in ("calls", "count", "totals"):
            getattr(lib, f"mpigrad_trace_{name}").restype = ctypes.c_int64
        lib.mpigrad_trace_communicator.restype = ctypes.c_uint64  # the type of mpi4py's handles
        self._prepare()
        self.zero_ns, self.offset_ns = self._clock()
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._write_on, daemon=True, name="mpigrad-trace")
        lib.mpigrad_trace_start(_limit())
        if self.part:
            self._writer.start()

    def _part(self, rank: int) -> pathlib.Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")

    def _prepare(self) -> None:
        """Create a file with the name of this rank. Raise an error on all ranks if one fails."""
        trouble = ""
        if self.part:
            name = {"name": f"rank {self.rank} on {MPI.Get_processor_name()}"}
            about = [
                {"name": "process_name", "ph": "M", "pid": self.rank, "args": name},
                {
                    "name": "process_sort_index",
                    "ph": "M",
                    "pid": self.rank,
                    "args": {"sort_index": self.rank},
                },
            ]
            try:
                if self.rank == 0 and self.path and self.path.is_dir():
                    raise IsADirectoryError("it is a directory")
                self.part.write_text("[\n" + "".join(f"{json.dumps(e)},\n" for e in about))
            except OSError as error:
                trouble = f"rank {self.rank}: {error}"
        troubles = [t for t in self.world.allgather(trouble) if t]
        if troubles:
            raise ImportError(
                f"mpigrad: MPIGRAD_TRACE={self.path} cannot be written ({troubles[0]}). Set it to "
                "a file in an existing directory."
            )

    def _clock(self) -> tuple[int, int]:
        """Return (zero of the timeline, offset of this clock from rank 0's) in nanoseconds."""
        host = _SAME_HOST.read_text() if _SAME_HOST.exists() else MPI.Get_processor_name()
        self.world.Barrier()
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        zero = self.world.bcast(now)
        # Ranks of one host read the same clock. Across hosts, they have just left a barrier.
        offset = 0 if len(set(self.world.allgather(host))) == 1 else now - zero
        return zero, offset

    def _write(self) -> None:
        if self.part:
            zero = self.zero_ns + self.offset_ns
            self.lib.mpigrad_trace_write(os.fsencode(self.part), self.rank, zero)

    def _write_on(self) -> None:
        while not self._stop.wait(_PAUSE):
            self._write()

    def end(self) -> None:
        """Write the remaining events. If all ranks end, merge the files and print the table."""
        if self._writer.is_alive():
            self._stop.set()
            self._writer.join()
        self._write()
        calls, kept = self.lib.mpigrad_trace_calls(), self.lib.mpigrad_trace_count()
        if not self._all_ranks_end():
            return
        world = self.world
        most = world.allreduce(calls - kept, op=MPI.MAX)
        if self.rank == 0 and most > 0:
            _say(
                f"the trace has only the first {_limit()} operations of each rank; times of a "
                "profile include all. Set MPIGRAD_TRACE_EVENTS to record more."
            )
        if self.profile:
            gathered = world.gather(self._record(kept))
            if gathered is not None:
                print(table(gathered), file=sys.stderr, flush=True)
        if self.path and self.rank == 0:  # last: large files take time
            try:
                self._merge(self.path)
            except OSError as error:
                _say(
                    f"the trace could not be written to {self.path} ({error}). Open the files of "
                    f"the ranks instead: {self._part(0).name}, ..."
                )
        world.Barrier()  # another rank may end the job next: not before rank 0 has written all

    def _all_ranks_end(self) -> bool:
        """Return True if all ranks end normally. A rank that failed does not take part."""
        request = self.world.Ibarrier()
        limit = time.monotonic() + _PATIENCE
        while not request.Test():
            if time.monotonic() > limit:
                return False
            time.sleep(0.001)
        return True

    def _merge(self, path: pathlib.Path) -> None:
        parts = [self._part(r) for r in range(self.size)]
        if not all(part.exists() for part in parts):
            return  # they are on other hosts, and each can be opened separately
        with path.open("w") as out:
            out.write("[\n")
            for line, following in itertools.pairwise([*_lines(parts), ""]):
                out.write(line if following else line.removesuffix(",\n") + "\n")
            out.write("]\n")
        for part in parts:
            part.unlink()
        _say(f"trace of {self.size} ranks: {path} (open it in https://ui.perfetto.dev)")

    def _record(self, n: int) -> RankRecord:
        """Return the record of this rank: its first `n` events and the totals of all."""
        raw = np.empty((n, 7), np.int64)  # the fields of TraceEvent, in native/guard/trace.h
        self.lib.mpigrad_trace_events(raw.ctypes.data, n)
        pointers, numbers = np.unique(raw[:, 0], return_inverse=True)
        count = self.lib.mpigrad_trace_totals(None, 0)
        totals = (_Totals * count)()
        self.lib.mpigrad_trace_totals(totals, count)
        return RankRecord(
            names=np.array([ctypes.string_at(int(p)).decode() for p in pointers])[numbers],
            start=raw[:, 1] - self.offset_ns,
            end=raw[:, 2] - self.offset_ns,
            slot=raw[:, 3],
            site=raw[:, 4],
            peer=raw[:, 6],
            communicators=self._communicators(raw[:, 3]),
            totals=[
                Total(
                    t.operation.decode(),
                    t.site,
                    describe(abs(t.site)),
                    t.calls,
                    t.bytes,
                    t.ns * 1e-9,
                )
                for t in totals
            ],
            neighbors=neighbors_by_call,
        )

    def _communicators(self, slots: np.ndarray) -> dict[int, tuple[tuple[int, ...], int]]:
        """Return the ranks of each slot's communicator, and its index among equal groups."""
        world = MPI.COMM_WORLD.Get_group()
        groups: dict[int, tuple[tuple[int, ...], int]] = {}
        for slot in range(int(slots.max(initial=-1)) + 1):
            comm = MPI.Comm.fromhandle(self.lib.mpigrad_trace_communicator(slot))
            # The members of a communicator that was freed are not known any more.
            group = world if comm == MPI.COMM_NULL else comm.Get_group()
            ranks = tuple(MPI.Group.Translate_ranks(group, range(group.size), world))
            groups[slot] = (ranks, sum(other == ranks for other, _ in groups.values()))
        return groups


def _lines(parts: Sequence[pathlib.Path]) -> Iterator[str]:
    for part in parts:
        with part.open() as file:
            yield from itertools.islice(file, 1, None)


def _limit() -> int:
    text = os.environ.get("MPIGRAD_TRACE_EVENTS", str(EVENTS))
    if not text.isdecimal() or int(text) < 1:
        raise ImportError(
            f"mpigrad: MPIGRAD_TRACE_EVENTS must be a number of operations, at least 1, got "
            f"{text!r}. Set it to {EVENTS}, for example."
        )
    return int(text)


def _say(text: str) -> None:
    print(f"mpigrad: {text}", file=sys.stderr, flush=True)
