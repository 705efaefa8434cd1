"""Who waits for whom: proves from the board that ranks wait for ever, and says why.

A rank *may go on* when it computes, or when everything that its operation waits for is there or may
still come from a rank that may go on. What is known of an operation is exact (collectives are
numbered for each communicator, messages are counted by partner and tag); where something is not
known (a partner on another host, messages that nobody counts, a call of mpi4py's), the rank may
go on. Those left over wait for ever.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from mpigrad.guard import board as b
from mpigrad.guard.board_reader import (
    Reader,
    contract_words,
    first_differences,
    layout,
    same_layout,
    same_tree,
    words,
)

__all__ = ["Finding", "diagnose", "disagreement", "grouped"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Ranks that wait for ever (slot -> serial number of the operation) and the error to raise."""

    stuck: dict[int, int]
    concerns: frozenset[int]
    communicators: list[int]
    text: str
    refusable: bool  # all of them wait on the board, so that the error can be raised there


@dataclasses.dataclass(frozen=True)
class _Mismatch:
    """Why something that is there will never do."""

    lines: tuple[tuple[str, str], ...]  # (who, what)
    head: str
    remedy: str


class _Unknown(Exception):
    """Nothing can be said of this operation."""


_DISAGREE = "the ranks do not agree"
_PAIRS = "What a rank receives from another must be what that one sends to it."
_ORDER = "Every rank of a communicator must call the same operations in the same order."
_ADJOINTS = (
    "If this is jax.grad or jax.vjp: a rank whose operand is constant sends no adjoint message. "
    "Use mpigrad.grad or mpigrad.vjp, which send it on every rank."
)


class _Wait:
    """What the operation of rank r waits for."""

    def __init__(self, reader: Reader, r: int) -> None:
        self.reader, self.r = reader, r
        self.slot = reader.slots[r]
        self.polling = bool(self.slot["polling"])
        self.entry = reader.entry(r)
        self.identity = int(self.entry["id"])
        self.members = reader.members(self.identity)
        self.needs: list[frozenset[int]] = []  # of each set one rank must go on to something else
        self.partners: set[int] = set()  # these must be able to go on together with this rank
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
        number = int(self.entry["sequence"])
        self._compare(number)
        # All have come, and it does not end: an earlier one may have been another operation
        # elsewhere, that MPI took for this.
        for earlier in range(number - 1, max(0, number - b.CONTRACTS), -1):
            if not self.needs:
                self._compare(earlier)

    def _compare(self, number: int) -> None:
        mine = self.entry["contracts"][number % b.CONTRACTS]
        if int(mine["sequence"]) != number:
            return
        for member in self.members.values():
            if member.slot == self.r:
                continue
            entry = self.reader.slots[member.slot]["entries"][member.entry]
            if int(entry["sequence"]) < number:
                self.needs.append(frozenset({member.slot}))
                continue
            theirs = entry["contracts"][number % b.CONTRACTS]
            if int(theirs["sequence"]) != number:
                continue
            if remedy := _difference(mine, theirs):
                self._disagree(number, remedy)
        if int(mine["counts_kind"]) == b.PAIR_COUNTS and not self._pairs_agree(number):
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
                lines.append((f"rank {self.reader.world(member.slot)}", "not there yet"))
        trees = [self.reader.leaves(slot, int(contract["site"])) for slot, contract in there]
        for (slot, contract), leaf in zip(there, first_differences(trees), strict=True):
            what = self.reader.contract(slot, contract) + leaf + self.reader.handled(slot)
            lines.append((f"rank {self.reader.world(slot)}", what))
        return _Mismatch(tuple(sorted(lines, key=_rank_of)), _DISAGREE, remedy)

    def _receives(self) -> None:
        me, open_ = int(self.entry["rank"]), bool(self.entry["open"])

        def fits(message: Any, part: Any) -> bool:
            return not self.polling or open_ or _fits(message["part"], part)

        for part in self.reader.messages(self.r, "receive"):
            source, tag = int(part["peer"]), int(part["tag"])
            sources = [source] if source >= 0 else list(range(int(self.entry["size"])))
            if any(s not in self.members for s in sources):
                raise _Unknown
            slots = [self.members[s].slot for s in sources]
            if any(self.reader.slots[s]["untracked"] for s in slots):
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
                if first is not None:  # it is taken before any that has not been sent yet
                    self.needs.append(frozenset())
                    self._does_not_fit(self.members[first].slot, nexts[first])
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
            self._does_not_fit(slots[0], message)

    def _does_not_fit(self, sender: int, message: Any) -> None:
        part = message["part"]
        site = self.reader.site(sender, int(message["site"]))
        me = int(self.entry["rank"])
        to = self.reader.partner(self.identity, me)
        tag = self.reader.tag(self.members[me].entry, int(part["tag"]))
        places = (sender, int(message["site"])), (self.r, int(self.slot["site"]))
        sent, taken = first_differences([self.reader.leaves(*place) for place in places])
        self.mismatch = self.mismatch or _Mismatch(
            (
                (
                    f"rank {self.reader.world(sender)}",
                    f"{words(message['operation'])} of {layout(part)} to {to} ({tag}) at {site}"
                    + sent,
                ),
                (f"rank {self.reader.world(self.r)}", self.reader.operation(self.r) + taken),
            ),
            "a message is not what its receiver expects",
            "Give the receiver the shape and dtype that the sender sends, leaf by leaf.",
        )

    def _together(self, r: int, way: str, me: int, part: Any) -> None:
        """The message belongs to an operation that itself waits on the board."""
        other = self.reader.slots[r]
        if not other["polling"] or int(self.reader.entry(r)["id"]) != self.identity:
            return
        key = (me, int(part["tag"]), int(part["ordinal"]))
        for p in self.reader.messages(r, way):
            if (int(p["peer"]), int(p["tag"]), int(p["ordinal"])) == key:
                self.partners.add(r)

    def _uncertain(self, source: int, slot: int, tag: int) -> bool:
        """Whether it is not known which message of `source` a receive of any tag takes next."""
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
        """The oldest message that rank `source` has announced and this one has not received."""
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
            if member is None or self.reader.unknown(member):
                raise _Unknown
            channel = self.reader.channel(member.slot, self.identity, me, int(part["tag"]))
            if channel is not None and int(channel["posted"]) >= int(part["ordinal"]):
                self._together(member.slot, "receive", me, part)
                continue
            receives = self.reader.messages(member.slot, "receive")
            if any(int(p["peer"]) < 0 or int(p["tag"]) < 0 for p in receives):
                continue
            self.needs.append(frozenset({member.slot}))


def _fits(sent: Any, expected: Any) -> bool:
    known = int(sent["dtype"]) and int(expected["dtype"])
    return not known or (same_layout(sent, expected) and same_tree(sent, expected, one_array=True))


def _difference(x: Any, y: Any) -> str:
    """What to do about two contracts that differ; "" where they agree."""
    if words(x["operation"]) != words(y["operation"]) or int(x["terms"]) != int(y["terms"]):
        return _ORDER
    for i in range(int(x["terms"])):
        if int(x["values"][i]) != int(y["values"][i]):
            return f"Give the same {words(x['names'][i])} on every rank."
    if int(x["dtype"]) != int(y["dtype"]):
        return "Give arrays of the same dtype on every rank, for instance by x.astype."
    if not same_layout(x, y, int(x["free_dims"])) or int(x["free_dims"]) != int(y["free_dims"]):
        return "Give arrays of the same shape on every rank."
    if not same_tree(x, y):
        return "Give pytrees of the same structure, with the same shapes, on every rank."
    n, kind = int(x["counts"]), int(x["counts_kind"])
    if n != int(y["counts"]) or kind != int(y["counts_kind"]):
        return "Give the same counts on every rank."
    if kind == b.SAME_COUNTS and list(x["sends"][:n]) != list(y["sends"][:n]):
        return "Give the same counts on every rank."
    return ""


def diagnose(slots: Any, gone: Callable[[int], str], now_ns: int) -> Finding | None:
    """The ranks of this board that wait for ever, or None.

    Parameters
    ----------
    slots
        The slots of a `Board`.
    gone
        Of a slot's number: "has ended" and the like, or "" while the process may go on.
    now_ns
        The time, on the clock of the board.
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
    while True:
        more = {r for r in waits.keys() - going if all(n & going for n in waits[r].needs)}
        while alone := {r for r in more if not waits[r].partners <= going | more}:
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


def disagreement(told: Any, board: b.Board | None = None) -> str:
    """The error where the members of a communicator, by rank, have told different contracts.

    With the board of this host, pytrees of its ranks are told in full.
    """
    ranks = [int(t["world_rank"]) for t in told]
    places = {} if board is None else {rank: i for i, rank in enumerate(board.ranks)}
    reader = Reader(None if board is None else board.slots)
    trees = [
        reader.leaves(places[rank], int(t["contract"]["site"])) if rank in places else []
        for rank, t in zip(ranks, told, strict=True)
    ]
    sites = [
        reader.site(places[rank], int(t["contract"]["site"])) if leaves else words(t["site"])
        for rank, t, leaves in zip(ranks, told, trees, strict=True)
    ]
    lines = [
        (f"rank {rank}", contract_words(t["contract"], site) + leaf)
        for rank, t, site, leaf in zip(ranks, told, sites, first_differences(trees), strict=True)
    ]
    first = told[0]["contract"]
    remedies = [_difference(first, t["contract"]) for t in told]
    return _mismatched(_Mismatch(tuple(lines), _DISAGREE, next((r for r in remedies if r), _PAIRS)))


def _mismatched(m: _Mismatch) -> str:
    return "\n".join([f"mpigrad: {m.head}:", *grouped(m.lines), m.remedy, *_hint(m.lines)])


def _hint(lines: Iterable[tuple[str, str]]) -> list[str]:
    """What to do if an adjoint message is among them."""
    return [_ADJOINTS] * any("the adjoint of " in text for _, text in lines)


def _deadlocked(
    reader: Reader, stuck: dict[int, _Wait], gone: Callable[[int], str], now_ns: int
) -> str:
    needed = {r for w in stuck.values() for need in w.needs for r in need}
    ended = sorted(r for r in needed - stuck.keys() if gone(r))
    identities = sorted({w.identity for w in stuck.values()})
    lines = []
    for r, wait in stuck.items():
        which = f"on communicator {identities.index(wait.identity) + 1}, "
        where = which if len(identities) > 1 else ""
        what = f"{where}in {reader.operation(r)}{reader.handled(r)}"
        lines.append((f"rank {reader.world(r)}", what))
    lines += [(f"rank {reader.world(r)}", reader.state(r, now_ns, gone(r))) for r in ended]
    sent = list(itertools.chain.from_iterable(_unreceived(reader, w) for w in stuck.values()))
    lines += sent
    if ended:
        head = "ranks wait for one that is gone"
        remedy = "Let every rank make the calls that others wait for, before it ends."
    else:
        head = "ranks wait for each other, for ever"
        kinds = {int(w.slot["kind"]) for w in stuck.values()}
        remedy = _ORDER
        if sent:
            remedy = "A receive names the sender and the tag of the send that it waits for."
        elif kinds == {b.MESSAGES_ONLY}:
            remedy = (
                "Let one of them send first and another receive first, or use sendrecv; each "
                "receive needs a send of the same tag on the rank that it names."
            )
    shown = grouped(sorted(lines, key=_rank_of))
    return "\n".join([f"mpigrad: {head}:", *shown, remedy, *_hint(lines)])


def _unreceived(reader: Reader, wait: _Wait) -> list[tuple[str, str]]:
    """Messages for a waiting rank that it does not receive."""
    if int(wait.slot["kind"]) != b.MESSAGES_ONLY:
        return []
    me, found = int(wait.entry["rank"]), []
    for member in wait.members.values():
        under_way = reader.messages(member.slot, "send")
        for message in reader.slots[member.slot]["message"]:
            part = message["part"]
            if int(message["id"]) != wait.identity or int(part["peer"]) != me:
                continue
            if any(p == part for p in under_way):
                continue
            taken = reader.channel(wait.r, wait.identity, member.rank, int(part["tag"]))
            if taken is None or int(taken["posted"]) < int(part["ordinal"]):
                found.append(
                    (
                        f"rank {reader.world(member.slot)}",
                        f"has sent {layout(part)} to rank {reader.world(wait.r)} with "
                        f"{reader.tag(member.entry, int(part['tag']))}, not received, by "
                        f"{words(message['operation'])} at "
                        f"{reader.site(member.slot, int(message['site']))}",
                    )
                )
    return found


def _rank_of(line: tuple[str, str]) -> int:
    return int(line[0].split()[1])


def grouped(lines: Iterable[tuple[str, str]]) -> list[str]:
    """("rank 3", text) as lines, ranks with the same text in one: "  ranks 1-3, 7: text"."""
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
