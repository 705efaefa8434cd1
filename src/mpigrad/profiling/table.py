"""The profile: calls, bytes and time of each operation on each source line, over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpigrad.runtime.call_sites import Neighbors

__all__ = ["RankRecord", "Row", "Total", "rows", "table", "waiting_ns"]

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
    found = [np.full(len(r.start), np.nan) for r in records]
    places: dict[tuple[tuple[int, ...], int], dict[int, np.ndarray]] = defaultdict(dict)
    for rank, record in enumerate(records):
        for slot, identity in record.communicators.items():
            places[identity][rank] = np.flatnonzero(record.slot == slot)

    def late(rank: int, mine: np.ndarray, when: np.ndarray) -> None:
        record = records[rank]
        longest = record.end[mine] - record.start[mine]
        found[rank][mine] = np.clip(when - record.start[mine], 0, longest)

    for (members, _), where in places.items():
        together = {r: p[np.isin(records[r].names[p], COLLECTIVES)] for r, p in where.items()}
        calls = [records[r].names[together[r]] for r in members if r in together]
        if len(calls) == len(members) and all(np.array_equal(c, calls[0]) for c in calls):
            last = np.max([records[r].start[together[r]] for r in members], axis=0)
            for r in members:
                late(r, together[r], last)
        for r, mine, source, theirs in _received(records, members, where):
            n = min(len(mine), len(theirs))
            late(r, mine[:n], records[source].start[theirs[:n]])
        exchanges = {r: _exchanges(records[r], p) for r, p in where.items()}
        for r, calls_with in exchanges.items():
            last = records[r].start.astype(float)
            for peer, (mine, receives) in calls_with.items():
                source = members[peer]
                theirs, _ = exchanges.get(source, {}).get(members.index(r), _NO_CALLS)
                begun = records[source].start[theirs] if len(theirs) == len(mine) else np.nan
                last[mine] = np.maximum(last[mine], np.where(receives, begun, -np.inf))
            for mine, _ in calls_with.values():
                late(r, mine, last[mine])
    return found


_NO_CALLS = np.zeros(0, int), np.zeros(0, bool)


def _exchanges(record: RankRecord, places: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return for each neighbour the exchanges with it, and whether a message comes from it."""
    found: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    names = {name for name, _, _ in record.neighbors}
    for i in places[np.isin(record.names[places], [*names])]:
        key = str(record.names[i]), int(record.slot[i]), abs(int(record.site[i]))
        for peer, forward, adjoint in record.neighbors.get(key, ()):
            found[peer].append((int(i), adjoint if record.site[i] < 0 else forward))
    return {
        peer: (np.array([i for i, _ in calls]), np.array([receives for _, receives in calls]))
        for peer, calls in found.items()
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
    found = []
    for (name, line), by_rank in totals.items():
        seconds, waiting = np.zeros(len(records)), np.zeros(len(records))
        for rank, parts in by_rank.items():
            for t in parts:
                record = records[rank]
                mine = (record.names == t.operation) & (record.site == t.site)
                inside = np.sum(record.end[mine] - record.start[mine])
                seconds[rank] += t.seconds
                # Estimated from the recorded operations, scaled to all.
                share = np.sum(waits[rank][mine]) / inside if inside else np.nan
                waiting[rank] += share * t.seconds
        every = [t for parts in by_rank.values() for t in parts]
        known = not np.isnan(waiting).any()
        calls, moved = sum(t.calls for t in every), sum(t.bytes for t in every)
        found.append(Row(name, line, calls, moved, seconds, waiting if known else None))
    return sorted(found, key=lambda row: -row.seconds.max())


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
