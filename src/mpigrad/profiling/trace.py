"""A timeline of the operations of all ranks, and the table of their costs."""

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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.guard import call_at_job_end
from mpigrad.runtime.call_sites import Neighbors, describe, neighbors_by_call
from mpigrad.runtime.native import library

__all__ = [
    "RankRecord",
    "Row",
    "Total",
    "rows",
    "start",
    "table",
    "waiting_ns",
]

# ---- The profile: calls, bytes and time of each operation on each source line, over all ranks


# Operations in which every rank of the communicator takes part.
COLLECTIVES = (
    *("allgather", "allgatherv", "allreduce", "alltoall", "alltoallv", "barrier", "bcast"),
    *("exscan", "gather", "gatherv", "one_sided", "redistribute", "reduce", "reduce_scatter"),
    *("reduce_scatterv", "scan", "scatter", "scatterv"),
)


@dataclass(frozen=True)
class Total:
    """All calls of one operation on one line, on one rank."""

    operation: str
    site: int  # negative: in the adjoint
    line: str
    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class RankRecord:
    """The operations of one rank in order, as arrays. Times are nanoseconds of a common clock.

    `peer` is a root or a partner, as a rank of its communicator. `communicators` gives for each
    slot the world ranks of its members, and its index among the communicators of these ranks.
    `neighbors` has the neighbours of exchanges, by operation, slot and site.
    """

    names: np.ndarray
    start: np.ndarray
    end: np.ndarray
    slot: np.ndarray
    site: np.ndarray
    peer: np.ndarray
    communicators: dict[int, tuple[tuple[int, ...], int]]
    totals: list[Total]
    neighbors: dict[tuple[str, int, int], Neighbors] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One operation on one line: sums over ranks, and the time of each rank in seconds.

    `waiting` is the part of `seconds` before the last rank, or the sender, began the operation.
    It is None if unknown.
    """

    operation: str
    line: str
    calls: int
    bytes: int
    seconds: np.ndarray
    waiting: np.ndarray | None


def waiting_ns(records: Sequence[RankRecord]) -> list[np.ndarray]:
    """Return for each rank how long each operation waited for other ranks (NaN: unknown)."""
    waits = [np.full(len(r.start), np.nan) for r in records]
    places: dict[tuple[tuple[int, ...], int], dict[int, np.ndarray]] = defaultdict(dict)
    for rank, record in enumerate(records):
        for slot, identity in record.communicators.items():
            places[identity][rank] = np.flatnonzero(record.slot == slot)

    def late(rank: int, indices: np.ndarray, when: np.ndarray) -> None:
        record = records[rank]
        longest = record.end[indices] - record.start[indices]
        waits[rank][indices] = np.clip(when - record.start[indices], 0, longest)

    for (members, _), where in places.items():
        together = {r: p[np.isin(records[r].names[p], COLLECTIVES)] for r, p in where.items()}
        calls = [records[r].names[together[r]] for r in members if r in together]
        if len(calls) == len(members) and all(np.array_equal(c, calls[0]) for c in calls):
            last = np.max([records[r].start[together[r]] for r in members], axis=0)
            for r in members:
                late(r, together[r], last)
        for r, indices, source, source_indices in _received(records, members, where):
            n = min(len(indices), len(source_indices))
            late(r, indices[:n], records[source].start[source_indices[:n]])
        exchanges = {r: _exchanges(records[r], p) for r, p in where.items()}
        for r, calls_with in exchanges.items():
            last = records[r].start.astype(float)
            for peer, (indices, receives) in calls_with.items():
                source = members[peer]
                source_indices, _ = exchanges.get(source, {}).get(members.index(r), _NO_CALLS)
                begun = (
                    records[source].start[source_indices]
                    if len(source_indices) == len(indices)
                    else np.nan
                )
                last[indices] = np.maximum(last[indices], np.where(receives, begun, -np.inf))
            for indices, _ in calls_with.values():
                late(r, indices, last[indices])
    return waits


_NO_CALLS = np.zeros(0, int), np.zeros(0, bool)


def _exchanges(record: RankRecord, places: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return for each neighbour the exchanges with it, and whether a message comes from it."""
    by_peer: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    names = {name for name, _, _ in record.neighbors}
    for i in places[np.isin(record.names[places], [*names])]:
        key = str(record.names[i]), int(record.slot[i]), abs(int(record.site[i]))
        for peer, forward, adjoint in record.neighbors.get(key, ()):
            by_peer[peer].append((int(i), adjoint if record.site[i] < 0 else forward))
    return {
        peer: (np.array([i for i, _ in calls]), np.array([receives for _, receives in calls]))
        for peer, calls in by_peer.items()
    }


def _received(
    records: Sequence[RankRecord], members: tuple[int, ...], where: dict[int, np.ndarray]
) -> Iterator[tuple[int, np.ndarray, int, np.ndarray]]:
    """Iterate over (rank, its receives from a source, the source, its sends to the rank)."""

    def calls(rank: int, name: str, peer: int | None = None) -> np.ndarray:
        p, record = where[rank], records[rank]
        chosen = record.names[p] == name
        if peer is not None:
            chosen &= record.peer[p] == peer
        return p[chosen]

    for here, rank in enumerate(members):
        for there, source in enumerate(members):
            if rank in where and source in where:
                yield rank, calls(rank, "recv", there), source, calls(source, "send", here)
        if rank not in where:
            continue
        # A sendrecv records only its source: it is assumed to match the same call of that rank.
        both = calls(rank, "sendrecv")
        for there in np.unique(records[rank].peer[both]):
            source = members[there] if there >= 0 else rank
            theirs = calls(source, "sendrecv") if source in where else both[:0]
            if len(theirs) == len(both):
                chosen = records[rank].peer[both] == there
                yield rank, both[chosen], source, theirs[chosen]


def rows(records: Sequence[RankRecord]) -> list[Row]:
    """Return a row for each operation on each line, the longest first."""
    waits = waiting_ns(records)
    totals: dict[tuple[str, str], dict[int, list[Total]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in enumerate(records):
        for t in record.totals:
            name = t.operation + (" (adjoint)" if t.site < 0 else "")
            totals[name, t.line][rank].append(t)
    result = []
    for (name, line), by_rank in totals.items():
        seconds, waiting = np.zeros(len(records)), np.zeros(len(records))
        for rank, parts in by_rank.items():
            for t in parts:
                record = records[rank]
                mask = (record.names == t.operation) & (record.site == t.site)
                inside = np.sum(record.end[mask] - record.start[mask])
                seconds[rank] += t.seconds
                # Estimated from the recorded operations, scaled to all.
                share = np.sum(waits[rank][mask]) / inside if inside else np.nan
                waiting[rank] += share * t.seconds
        every = [t for parts in by_rank.values() for t in parts]
        known = not np.isnan(waiting).any()
        calls, moved = sum(t.calls for t in every), sum(t.bytes for t in every)
        result.append(Row(name, line, calls, moved, seconds, waiting if known else None))
    return sorted(result, key=lambda row: -row.seconds.max())


def table(records: Sequence[RankRecord]) -> str:
    """Return the profile as text."""
    head = ("operation", "line", "calls", "bytes", "time max", "mean", "waiting max", "mean")
    lines: list[tuple[str, ...]] = [head]
    for row in rows(records):
        waiting = row.waiting
        lines.append(
            (
                row.operation,
                row.line,
                f"{row.calls:,}",
                _size(row.bytes),
                _time(row.seconds.max()),
                _time(row.seconds.mean()),
                "-" if waiting is None else _time(waiting.max()),
                "-" if waiting is None else _time(waiting.mean()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            word.ljust(width) if i < 2 else word.rjust(width)
            for i, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    ranks = len(records)
    title = f"mpigrad: operations of {ranks} rank{'s' * (ranks > 1)}; times of the slowest and mean"
    return "\n".join([title, texts[0], "-" * len(texts[0]), *texts[1:]])


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


# ---- A timeline of the operations of all ranks, and a table of their costs ----
#
# `MPIGRAD_TRACE=trace.json` writes Chrome trace events, which https://ui.perfetto.dev opens: one
# process for each rank, one span for each operation, with its source line, bytes, partner or
# root, and communicator. Each rank writes its own file while it runs, so the files remain if the
# job is ended. At a normal end they are merged into one. `mpigrad launch --profile` (or
# MPIGRAD_PROFILE=1) prints the table at the end of the program.


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
