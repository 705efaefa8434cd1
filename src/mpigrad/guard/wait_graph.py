"""The wait graph: prove from the board that ranks are deadlocked, and explain why.

A rank *can continue* if it computes, or if everything that its operation waits for has arrived or
can still come from a rank that can continue. The board is exact: collectives are numbered for each
communicator, and messages are counted by partner and tag. If something is unknown (a partner on
another host, uncounted messages, a call of mpi4py), the rank is assumed to continue. All other
ranks are deadlocked.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from mpigrad.guard import board as b
from mpigrad.guard.board_reader import (
    Reader,
    contract_text,
    decode,
    differing_leaves,
    layout,
    same_layout,
    same_tree,
    steps_differ,
)

__all__ = ["Finding", "diagnose", "disagreement", "grouped", "suspect"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A proved deadlock or mismatch: its ranks (slot -> serial number of operation) and error."""

    stuck: dict[int, int]
    concerns: frozenset[int]
    communicators: list[int]
    text: str
    refusable: bool  # all ranks wait on the board, so the error can be raised there


@dataclasses.dataclass(frozen=True)
class _Mismatch:
    """Operations or messages that do not fit together."""

    lines: tuple[tuple[str, str], ...]  # ("rank 3", text)
    head: str
    remedy: str


class _Unknown(Exception):
    """It is unknown what this operation waits for."""


_DISAGREE = "the ranks do not agree"
_PAIRS = "Let recvcounts[i] on rank j be sendcounts[j] on rank i, for every pair of ranks."
_ORDER = "Call the same operations in the same order on every rank of the communicator."
_OVER_ALL = (
    "over all ranks: with norm=mpigrad.rms_norm in an adaptive integrator or a solver, or with "
    "mpigrad.allreduce."
)
_LOOP = (
    "The condition of this loop reads numbers that differ between the ranks, so each rank takes "
    f"steps of its own. Compute them {_OVER_ALL}"
)
_LEFT_LOOP = f"If ranks leave the while_loop at different steps, compute its condition {_OVER_ALL}"
_ADJOINTS = (
    "With jax.grad or jax.vjp, a rank whose operand is constant sends no adjoint message. If you "
    "use them, replace them by mpigrad.grad or mpigrad.vjp."
)


class _Wait:
    """The ranks and messages that the operation of rank r waits for."""

    def __init__(self, reader: Reader, r: int) -> None:
        self.reader, self.r = reader, r
        self.slot = reader.slots[r]
        self.polling = bool(self.slot["polling"])
        self.entry = reader.entry(r)
        self.identity = int(self.entry["id"])
        self.members = reader.members(self.identity)
        self.needs: list[frozenset[int]] = []  # one rank of each set must continue
        self.partners: set[int] = set()  # these must be able to continue together with this rank
        self.mismatch: _Mismatch | None = None
        kind = int(self.slot["kind"])
        if not self.identity:
            raise _Unknown
        if kind == b.COLLECTIVE:
            self._collective()
        elif kind == b.MESSAGES_ONLY:
            self._receives()
            self._sends()
        else:
            raise _Unknown

    def _collective(self) -> None:
        if len(self.members) < int(self.entry["size"]):
            raise _Unknown
        self._compare(int(self.entry["sequence"]))

    def earlier_mismatch(self) -> _Mismatch | None:
        """Return a mismatch of an earlier collective, which ended nevertheless.

        MPI may have matched it with a different operation of another rank, so that this one never
        ends. That is no proof: a long reduction takes its time, too.
        """
        number = int(self.entry["sequence"])
        if int(self.slot["kind"]) != b.COLLECTIVE or self.needs:
            return None
        for earlier in range(number - 1, max(0, number - b.CONTRACTS), -1):
            self._compare(earlier)
            if self.mismatch:
                break
        return self.mismatch

    def _compare(self, number: int) -> None:
        contract = self.entry["contracts"][number % b.CONTRACTS]
        if int(contract["sequence"]) != number:
            return
        for member in self.members.values():
            if member.slot == self.r:
                continue
            entry = self.reader.slots[member.slot]["entries"][member.entry]
            if int(entry["sequence"]) < number:
                self.needs.append(frozenset({member.slot}))
                continue
            other_contract = entry["contracts"][number % b.CONTRACTS]
            if int(other_contract["sequence"]) != number:
                continue
            if remedy := _difference(contract, other_contract):
                self._disagree(number, remedy)
        if int(contract["counts_kind"]) == b.PAIR_COUNTS and not self._pairs_agree(number):
            self._disagree(number, _PAIRS)

    def _pairs_agree(self, number: int) -> bool:
        contracts = {
            m.rank: self.reader.slots[m.slot]["entries"][m.entry]["contracts"][number % b.CONTRACTS]
            for m in self.members.values()
            if m.rank < b.COUNTS
        }
        there = {k: c for k, c in contracts.items() if int(c["sequence"]) == number}
        return all(
            x["sends"][j] == y["receives"][i] for i, x in there.items() for j, y in there.items()
        )

    def _disagree(self, number: int, remedy: str) -> None:
        self.needs.append(frozenset())
        self.mismatch = self.mismatch or self._different_contracts(number, remedy)

    def _different_contracts(self, number: int, remedy: str) -> _Mismatch:
        lines, there = [], []
        for member in self.members.values():
            entry = self.reader.slots[member.slot]["entries"][member.entry]
            contract = entry["contracts"][number % b.CONTRACTS]
            if int(contract["sequence"]) == number <= int(entry["sequence"]):
                there.append((member.slot, contract))
            else:
                lines.append((f"rank {self.reader.world(member.slot)}", "has not called it yet"))
        trees = [self.reader.leaves(slot, int(contract["site"])) for slot, contract in there]
        for (slot, contract), leaf in zip(there, differing_leaves(trees), strict=True):
            loop = self.reader.loop_note(slot) if remedy == _LOOP else ""
            note = loop + self.reader.exception_note(slot)
            what = self.reader.contract(slot, contract) + leaf + note
            lines.append((f"rank {self.reader.world(slot)}", what))
        return _Mismatch(tuple(sorted(lines, key=_rank_of)), _DISAGREE, remedy)

    def _receives(self) -> None:
        me, open_ = int(self.entry["rank"]), bool(self.entry["open"])

        def fits(message: Any, part: Any) -> bool:
            return not self.polling or open_ or _fits(message, part)

        for part in self.reader.messages(self.r, "receive"):
            source, tag = int(part["peer"]), int(part["tag"])
            sources = [source] if source >= 0 else list(range(int(self.entry["size"])))
            if any(s not in self.members for s in sources):
                raise _Unknown
            slots = [self.members[s].slot for s in sources]
            if any(self.reader.slots[s]["counts_invalid"] for s in slots):
                raise _Unknown
            if source < 0 or tag < 0:
                if any(self._uncertain(s, self.members[s].slot, tag) for s in sources):
                    raise _Unknown
                nexts: dict[int, Any] = {
                    s: self._next_message(s, self.members[s].slot, tag) for s in sources
                }
                fitting = [s for s, m in nexts.items() if m is not None and fits(m, part)]
                if len(fitting) == 1:
                    sent = nexts[fitting[0]]["part"]
                    self._together(self.members[fitting[0]].slot, "send", me, sent)
                if fitting:
                    continue
                self.needs.append(frozenset(slots))
                first = next((s for s, m in nexts.items() if m is not None), None)
                if first is not None:  # it is received before any later message
                    self.needs.append(frozenset())
                    self._does_not_fit(self.members[first].slot, nexts[first], part)
                continue
            channel = self.reader.channel(slots[0], self.identity, me, tag)
            if channel is None or int(channel["sent"]) < int(part["ordinal"]):
                self.needs.append(frozenset(slots))
                continue
            message = self.reader.message(slots[0], self.identity, me, tag, int(part["ordinal"]))
            if message is None or fits(message, part):
                self._together(slots[0], "send", me, part)
                continue
            self.needs.append(frozenset())
            self._does_not_fit(slots[0], message, part)

    def _does_not_fit(self, sender: int, message: Any, expected: Any) -> None:
        part = message["part"]
        site = self.reader.site(sender, int(message["site"]))
        me = int(self.entry["rank"])
        to = self.reader.partner(self.identity, me)
        tag = self.reader.tag(self.members[me].entry, int(part["tag"]))
        places = (sender, int(message["site"])), (self.r, int(self.slot["site"]))
        sent, taken = differing_leaves([self.reader.leaves(*place) for place in places])
        if steps_differ(part, expected):
            ranks = sorted((sender, self.r))
            lines = [self.reader.operation(r) + self.reader.loop_note(r) for r in ranks]
            names = [f"rank {self.reader.world(r)}" for r in ranks]
            step = _Mismatch(tuple(zip(names, lines, strict=True)), _DISAGREE, _LOOP)
            self.mismatch = self.mismatch or step
            return
        self.mismatch = self.mismatch or _Mismatch(
            (
                (
                    f"rank {self.reader.world(sender)}",
                    f"{decode(message['operation'])} of {layout(part)} to {to}{tag} at {site}"
                    + sent,
                ),
                (f"rank {self.reader.world(self.r)}", self.reader.operation(self.r) + taken),
            ),
            "a message does not match its receive",
            "Make the receive expect the shape and dtype that the sender sends, leaf by leaf.",
        )

    def _together(self, r: int, way: str, me: int, part: Any) -> None:
        """Note the partner if the message belongs to an operation that waits on the board too."""
        other = self.reader.slots[r]
        if int(other["polling"]) != b.WAITS or int(self.reader.entry(r)["id"]) != self.identity:
            return
        key = (me, int(part["tag"]), int(part["ordinal"]))
        if key in map(_key, self.reader.messages(r, way)):
            self.partners.add(r)

    def _uncertain(self, source: int, slot: int, tag: int) -> bool:
        """Return True if it is unknown which message of `source` a wildcard receive takes next."""
        me, sender = int(self.entry["rank"]), self.reader.slots[slot]
        channels = sender["channels"]
        some = channels[(channels["id"] == self.identity) & (channels["peer"] == me)]
        for channel in some:
            if tag >= 0 and int(channel["tag"]) != tag:
                continue
            taken = self.reader.channel(self.r, self.identity, source, int(channel["tag"]))
            received, posted = (
                (0, 0) if taken is None else (int(taken["received"]), int(taken["posted"]))
            )
            overwritten = int(sender["messages"]) > b.MESSAGES
            if int(channel["sent"]) > received and (overwritten or posted > received):
                return True
        return False

    def _next_message(self, source: int, slot: int, tag: int) -> Any | None:
        """Return the oldest announced message of `source` that this rank has not received."""
        me, sender = int(self.entry["rank"]), self.reader.slots[slot]
        count = int(sender["messages"])
        for n in range(max(0, count - b.MESSAGES), count):
            message = sender["message"][n % b.MESSAGES]
            part = message["part"]
            if int(message["id"]) != self.identity or int(part["peer"]) != me:
                continue
            if tag >= 0 and int(part["tag"]) != tag:
                continue
            taken = self.reader.channel(self.r, self.identity, source, int(part["tag"]))
            if int(part["ordinal"]) > (int(taken["received"]) if taken is not None else 0):
                return message
        return None

    def _sends(self) -> None:
        me = int(self.entry["rank"])
        for part in self.reader.messages(self.r, "send"):
            if not part["awaited"]:
                continue
            member = self.members.get(int(part["peer"]))
            if member is None or self.reader.counts_unknown(member):
                raise _Unknown
            channel = self.reader.channel(member.slot, self.identity, me, int(part["tag"]))
            if channel is not None and int(channel["posted"]) >= int(part["ordinal"]):
                self._together(member.slot, "receive", me, part)
                continue
            receives = self.reader.messages(member.slot, "receive")
            here = int(self.reader.entry(member.slot)["id"]) == self.identity
            if here and any(int(p["peer"]) < 0 or int(p["tag"]) < 0 for p in receives):
                continue
            self.needs.append(frozenset({member.slot}))


def _key(part: Any) -> tuple[int, int, int]:
    """Return what identifies a message of a rank. Dimensions beyond its rank are old numbers."""
    return int(part["peer"]), int(part["tag"]), int(part["ordinal"])


def _fits(message: Any, expected: Any) -> bool:
    """Return True if the message fits its receive (`same_message` in native/guard)."""
    sent, adjoint = message["part"], int(message["site"]) < 0
    comparable = int(sent["dtype"]) and int(expected["dtype"])
    return not comparable or (
        same_layout(sent, expected, leading_ones=not adjoint)
        and same_tree(sent, expected, one_array=True)
        and not steps_differ(sent, expected)
    )


def _difference(x: Any, y: Any) -> str:
    """Return the remedy for two contracts that differ, or "" if they are equal."""
    if decode(x["operation"]) != decode(y["operation"]) or int(x["terms"]) != int(y["terms"]):
        return _ORDER
    for i in range(int(x["terms"])):
        if int(x["values"][i]) != int(y["values"][i]):
            return f"Pass the same {decode(x['names'][i])} on every rank."
    if int(x["dtype"]) != int(y["dtype"]):
        return "Pass arrays of the same dtype on every rank, for example x.astype(...)."
    if not same_layout(x, y, int(x["free_dims"])) or int(x["free_dims"]) != int(y["free_dims"]):
        return "Pass arrays of the same shape on every rank."
    if not same_tree(x, y):
        return "Pass pytrees with the same structure and shapes on every rank."
    n, kind = int(x["counts"]), int(x["counts_kind"])
    if n != int(y["counts"]) or kind != int(y["counts_kind"]):
        return "Pass the same counts on every rank."
    if kind == b.SAME_COUNTS and list(x["sends"][:n]) != list(y["sends"][:n]):
        return "Pass the same counts on every rank."
    return _LOOP if steps_differ(x, y) else ""


def diagnose(slots: Any, gone: Callable[[int], str], now_ns: int) -> Finding | None:
    """Find ranks of this board that are deadlocked, or return None.

    Parameters
    ----------
    slots
        The slots of a `Board`.
    gone
        A function of a slot index: "has ended" or "has died", or "" while the process may continue.
    now_ns
        The time in nanoseconds, on the clock of the board.
    """
    reader = Reader(slots)
    waits: dict[int, _Wait] = {}
    for r, slot in enumerate(slots):
        if int(slot["state"]) != b.IN_OPERATION or int(slot["entry"]) < 0 or gone(r):
            continue
        try:
            waits[r] = _Wait(reader, r)
        except _Unknown:
            continue
    going = {r for r in range(len(slots)) if r not in waits and not gone(r)}
    # They lack a message, and hand over their own ones when a partner needs no others.
    helpers = {r for r, w in waits.items() if w.needs and all(w.needs)}
    while True:
        more = {r for r in waits.keys() - going if all(n & going for n in waits[r].needs)}
        while alone := {r for r in more if not waits[r].partners <= going | more | helpers}:
            more -= alone
        if not more:
            break
        going |= more
    stuck = {r: waits[r] for r in sorted(waits.keys() - going)}
    if not stuck:
        return None
    mismatch = next((w.mismatch for w in stuck.values() if w.mismatch), None)
    text = _mismatched(mismatch) if mismatch else _deadlocked(reader, stuck, gone, now_ns)
    members = {m.slot for w in stuck.values() for m in w.members.values()}
    return Finding(
        {r: int(slots[r]["serial"]) for r in stuck},
        frozenset(r for r in members | stuck.keys() if not gone(r)),
        sorted({w.identity for w in stuck.values()}),
        text,
        all(w.polling for w in stuck.values()),
    )


@dataclasses.dataclass(frozen=True)
class Suspicion:
    """An earlier mismatch that may be why a collective waits: lines of a report, and its size."""

    lines: list[str]
    elements: int  # of this rank's array in the collective that waits
    members: frozenset[int]  # slots


def suspect(slots: Any, r: int) -> Suspicion | None:
    """Return the earlier mismatch that may be why the collective of slot r waits, or None."""
    if int(slots[r]["state"]) != b.IN_OPERATION or int(slots[r]["entry"]) < 0:
        return None
    try:
        wait = _Wait(Reader(slots), r)
        mismatch = wait.earlier_mismatch()
    except _Unknown:
        return None
    if mismatch is None:
        return None
    contract = wait.entry["contracts"][int(wait.entry["sequence"]) % b.CONTRACTS]
    dims = contract["dims"][: min(int(contract["rank"]), b.DIMS)]
    head = "The cause may be an earlier collective, in which the ranks did not agree:"
    return Suspicion(
        [head, *grouped(mismatch.lines), mismatch.remedy],
        math.prod(max(int(n), 1) for n in dims),
        frozenset(m.slot for m in wait.members.values()),
    )


def disagreement(reports: Any, board: b.Board | None = None) -> str:
    """Return the error for members of a communicator (in rank order) whose contracts differ.

    With the board of this host, the pytrees of its ranks are listed in full.
    """
    ranks = [int(t["world_rank"]) for t in reports]
    places = {} if board is None else {rank: i for i, rank in enumerate(board.ranks)}
    reader = Reader(None if board is None else board.slots)
    trees = [
        reader.leaves(places[rank], int(t["contract"]["site"])) if rank in places else []
        for rank, t in zip(ranks, reports, strict=True)
    ]
    sites = [
        reader.site(places[rank], int(t["contract"]["site"])) if leaves else decode(t["site"])
        for rank, t, leaves in zip(ranks, reports, trees, strict=True)
    ]
    lines = [
        (f"rank {rank}", contract_text(t["contract"], site) + leaf)
        for rank, t, site, leaf in zip(ranks, reports, sites, differing_leaves(trees), strict=True)
    ]
    first = reports[0]["contract"]
    remedies = [_difference(first, t["contract"]) for t in reports]
    return _mismatched(_Mismatch(tuple(lines), _DISAGREE, next((r for r in remedies if r), _PAIRS)))


def _mismatched(m: _Mismatch) -> str:
    return "\n".join([f"mpigrad: {m.head}:", *grouped(m.lines), m.remedy, *_hint(m.lines)])


def _hint(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Return the advice for adjoint messages, if there is one among the lines."""
    return [_ADJOINTS] * any("the adjoint of " in text for _, text in lines)


def _deadlocked(
    reader: Reader, stuck: dict[int, _Wait], gone: Callable[[int], str], now_ns: int
) -> str:
    needed = {r for w in stuck.values() for need in w.needs for r in need}
    ended = sorted(r for r in needed - stuck.keys() if gone(r))
    identities = sorted({w.identity for w in stuck.values()})
    lines, loops = [], {""} if ended else set()
    for r, wait in stuck.items():
        which = f"on communicator {identities.index(wait.identity) + 1}, "
        prefix = which if len(identities) > 1 else ""
        loops.add(loop := reader.loop_note(r))
        text = f"{prefix}in {reader.operation(r)}{loop}{reader.exception_note(r)}"
        lines.append((f"rank {reader.world(r)}", text))
    lines += [(f"rank {reader.world(r)}", reader.state(r, now_ns, gone(r))) for r in ended]
    sent = list(itertools.chain.from_iterable(_unreceived(reader, w) for w in stuck.values()))
    lines += sent
    if ended:
        head = "deadlock: ranks wait for a rank that is gone"
        remedy = "Make every rank call the operations that others wait for before it ends."
    else:
        head = "deadlock: ranks wait for each other"
        kinds = {int(w.slot["kind"]) for w in stuck.values()}
        remedy = _ORDER
        if sent:
            remedy = "Pass each receive the source rank and the tag of the send that it waits for."
        elif kinds == {b.MESSAGES_ONLY}:
            remedy = (
                "Give each receive a send with the same tag on its source rank. Let one rank send "
                "first and the other receive first, or use sendrecv."
            )
    shown = grouped(sorted(lines, key=_rank_of))
    left = [_LEFT_LOOP] * (len(loops) > 1)
    return "\n".join([f"mpigrad: {head}:", *shown, remedy, *left, *_hint(lines)])


def _unreceived(reader: Reader, wait: _Wait) -> list[tuple[str, str]]:
    """List messages for a waiting rank that it does not receive."""
    if int(wait.slot["kind"]) != b.MESSAGES_ONLY:
        return []
    me, lines = int(wait.entry["rank"]), []
    for member in wait.members.values():
        current = [_key(part) for part in reader.messages(member.slot, "send")]
        for message in reader.slots[member.slot]["message"]:
            part = message["part"]
            if int(message["id"]) != wait.identity or int(part["peer"]) != me:
                continue
            if _key(part) in current:
                continue
            taken = reader.channel(wait.r, wait.identity, member.rank, int(part["tag"]))
            if taken is None or int(taken["posted"]) < int(part["ordinal"]):
                lines.append(
                    (
                        f"rank {reader.world(member.slot)}",
                        f"sent {layout(part)} to rank {reader.world(wait.r)}"
                        f"{reader.tag(member.entry, int(part['tag']))} by "
                        f"{decode(message['operation'])} at "
                        f"{reader.site(member.slot, int(message['site']))}, not received",
                    )
                )
    return lines


def _rank_of(line: tuple[str, str]) -> int:
    return int(line[0].split()[1])


def grouped(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines for pairs ("rank 3", text). Ranks with the same text share one line.

    For example "  ranks 1-3, 7: text".
    """
    by_text: dict[str, list[int]] = {}
    for line in lines:
        by_text.setdefault(line[1], []).append(_rank_of(line))
    return [f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]


def _ranks(ranks: list[int]) -> str:
    runs: list[list[int]] = []
    for r in sorted(set(ranks)):
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(set(ranks)) > 1)} {', '.join(parts)}"
