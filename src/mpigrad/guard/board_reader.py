"""The board in words: what a rank is doing, with its arguments and the user's source line."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from mpi4py import MPI

from mpigrad.guard import board as b
from mpigrad.runtime.native import (
    DERIVATIVE_SPACES,
    MOVED_FOR,
    NO_REDUCTION,
    NO_ROOT,
    REDUCTIONS,
    own_reductions,
)

__all__ = ["Member", "Reader"]

# XLA's numbers of element types.
_DTYPES = {
    **{1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64"},
    **{6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64", 10: "float16", 11: "float32"},
    **{12: "float64", 15: "complex64", 16: "bfloat16", 18: "complex128"},
}
_OPS = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
_OPS += ("MAXLOC", "MINLOC")
_SHOWN = 4  # messages of one operation, or arrays of one pytree, that are written out
_WORD = 2**64 - 1
_FRESH = 2_000_000_000  # ns: a watchdog that has not looked for longer does not come to it


@dataclasses.dataclass(frozen=True)
class Member:
    """A rank of a communicator: its slot on the board, and its number in the communicator."""

    slot: int
    entry: int
    rank: int


def words(raw: bytes) -> str:
    return bytes(raw).split(b"\0")[0].decode(errors="replace")


def layout(part: Any) -> str:
    """float32[3,4] of a contract or a message; "" where it has no array."""
    if int(part["dtype"]) == 0:
        return ""
    dims = ",".join(str(int(n)) for n in part["dims"][: min(int(part["rank"]), b.DIMS)])
    return f"{_DTYPES.get(int(part['dtype']), 'an array')}[{dims}]"


def same_layout(x: Any, y: Any, free: int = 0) -> bool:
    rank = min(int(x["rank"]), b.DIMS)
    return (
        int(x["dtype"]) == int(y["dtype"])
        and int(x["rank"]) == int(y["rank"])
        and list(x["dims"][free:rank]) == list(y["dims"][free:rank])
    )


def same_tree(x: Any, y: Any, one_array: bool = False) -> bool:
    """Whether pytrees agree, as far as is known; with `one_array` it agrees with all (board.h)."""
    a, b = int(x["tree"]), int(y["tree"])
    return a == b or min(a, b) < one_array


def contract_words(contract: Any, site: str) -> str:
    """allreduce(op=SUM) of float32[3] at prog.py:12."""
    terms = []
    for i in range(int(contract["terms"])):
        name, value = words(contract["names"][i]), int(contract["values"][i])
        if name == "op" and value != NO_REDUCTION:
            terms.append(f"op={_reduction(value)}")
        elif name != "op" and not (name == "root" and value == NO_ROOT):
            terms.append(f"{name}={value}")
    n = int(contract["counts"])
    if int(contract["counts_kind"]) == b.SAME_COUNTS:
        terms.append(f"counts={_tuple(contract['sends'][:n])}")
    elif int(contract["counts_kind"]) == b.PAIR_COUNTS:
        terms.append(f"sendcounts={_tuple(contract['sends'][:n])}")
        terms.append(f"recvcounts={_tuple(contract['receives'][:n])}")
    arguments = f"({', '.join(terms)})" if terms else ""
    array = layout(contract)
    what = f"{words(contract['operation'])}{arguments}{' of ' if array else ''}{array}"
    return f"{what} at {site}"


def _shortened(leaves: list[str]) -> str:
    more = f", … {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    return ", ".join(leaves[:_SHOWN]) + more


def first_differences(trees: list[list[str]]) -> list[str]:
    """Of several pytrees: for each the words for its first array that is not the others'."""
    for i in range(max(map(len, trees), default=0)):
        arrays = [leaves[i] if i < len(leaves) else "nothing more" for leaves in trees]
        if len(set(arrays)) > 1 and all(trees) and (i >= _SHOWN):
            return [f", in place {i + 1} {array}" for array in arrays]
        if len(set(arrays)) > 1:
            break
    return ["" for _ in trees]


def _reduction(slot: int) -> str:
    known = (*REDUCTIONS, *MOVED_FOR)
    if slot < len(known):
        return next(name for name in _OPS if getattr(MPI, name) == known[slot])
    return f"reduction({own_reductions.get(slot, 'another function')})"


def channel_hash(identity: int, peer: int, tag: int) -> int:
    h = identity * 0x9E3779B97F4A7C15 & _WORD  # as in native/mpi/messages.cc
    h ^= peer * 0xC2B2AE3D27D4EB4F & _WORD
    h ^= tag * 0x165667B19E3779F9 & _WORD
    return h ^ (h >> 29)


class Reader:
    """Reads one look at the board; ranks are numbers of slots."""

    def __init__(self, slots: Any) -> None:
        self.slots = slots

    def world(self, r: int) -> int:
        return int(self.slots[r]["world_rank"])

    def site(self, r: int, site: int) -> str:
        known = 0 < abs(site) < b.SITES
        text = words(self.slots[r]["sites"][abs(site)]) if known else "an unknown line"
        if leaves := self.leaves(r, site):
            text += f" (pytree: {_shortened(leaves)})"
        return f"the adjoint of {text}" if site < 0 else text

    def leaves(self, r: int, site: int) -> list[str]:
        """The arrays of the pytree that travels as one at a site of rank r: ['a'] float32[3], …"""
        begin = int(self.slots[r]["tree_of"][abs(site)]) if abs(site) < b.SITES else 0
        if not begin:
            return []
        text = self.slots[r]["trees"][begin - 1 :].tobytes().split(b"\0", 1)[0]
        return re.split(r"(?<=\]), ", text.decode(errors="replace"))

    def entry(self, r: int) -> Any:
        """The entry of the communicator that rank r's operation is on."""
        return self.slots[r]["entries"][int(self.slots[r]["entry"])]

    def messages(self, r: int, way: str) -> Any:
        """What rank r's operation under way sends, or receives ("send", "receive")."""
        slot = self.slots[r]
        under_way = int(slot["state"]) == b.IN_OPERATION and int(slot["kind"]) == b.MESSAGES_ONLY
        return slot[way][: int(slot[f"{way}s"]) if under_way else 0]

    @functools.cache  # noqa: B019 (a reader lives for one look)
    def members(self, identity: int) -> dict[int, Member]:
        """The members of a communicator that are on this board, by their rank in it."""
        found = {}
        for r, slot in enumerate(self.slots):
            entries = slot["entries"][: int(slot["entries_used"])]
            for i in (entries["id"] == identity).nonzero()[0]:
                member = Member(r, int(i), int(entries[i]["rank"]))
                found[member.rank] = member
        return found

    def unknown(self, member: Member) -> bool:
        """Whether nobody can say which messages a member has received."""
        slot = self.slots[member.slot]
        return bool(slot["untracked"] or slot["entries"][member.entry]["open"])

    def channel(self, r: int, identity: int, peer: int, tag: int) -> Any | None:
        """Rank r's counts of messages to and from `peer`."""
        channels = self.slots[r]["channels"]
        start = channel_hash(identity, peer, tag)
        for i in range(64):
            channel = channels[(start + i) % b.CHANNELS]
            if int(channel["id"]) == 0:
                return None
            key = (int(channel["id"]), int(channel["peer"]), int(channel["tag"]))
            if key == (identity, peer, tag):
                return channel
        return None

    def message(self, r: int, identity: int, peer: int, tag: int, ordinal: int) -> Any | None:
        """The announcement of the message that rank r sent to `peer` as number `ordinal`."""
        for message in self.slots[r]["message"]:
            part = message["part"]
            key = (int(message["id"]), int(part["peer"]), int(part["tag"]), int(part["ordinal"]))
            if key == (identity, peer, tag, ordinal):
                return message
        return None

    # ---- words ----

    def tag(self, entry: int, tag: int) -> str:
        """The tag that the program has given to a message of the communicator with this entry."""
        if tag < 0:
            return "any tag"
        return f"tag {tag // DERIVATIVE_SPACES if entry % 2 else tag}"

    def partner(self, identity: int, rank: int) -> str:
        if rank < 0:
            return "any rank"
        member = self.members(identity).get(rank)
        return f"rank {self.world(member.slot)}" if member else f"rank {rank} of its communicator"

    def contract(self, r: int, contract: Any) -> str:
        """The words of a contract of rank r."""
        return contract_words(contract, self.site(r, int(contract["site"])))

    def operation(self, r: int) -> str:
        """The operation that rank r is in, or was in last."""
        slot = self.slots[r]
        kind, name = int(slot["kind"]), words(slot["operation"])
        where = self.site(r, int(slot["site"]))
        if kind == b.COLLECTIVE:
            entry = self.entry(r)
            for contract in entry["contracts"]:
                if int(contract["sequence"]) == int(entry["sequence"]):
                    return self.contract(r, contract)
        if kind == b.MESSAGES_ONLY:
            identity = int(self.entry(r)["id"])
            entry = int(slot["entry"])
            under_way = [
                *(("to", p) for p in slot["send"][: int(slot["sends"])]),
                *(("from", p) for p in slot["receive"][: int(slot["receives"])]),
            ]
            parts = [
                f"{layout(p) or 'a message'} {way} {self.partner(identity, int(p['peer']))} "
                f"({self.tag(entry, int(p['tag']))})"
                for way, p in under_way
            ]
            derivatives = [int(p["tag"]) % DERIVATIVE_SPACES for _, p in under_way]
            if entry % 2 and int(slot["site"]) > 0 and max(derivatives, default=0) > 1:
                where = f"the tangent of {where}"
            more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
            if parts:
                return f"{name} of {', '.join(parts[:_SHOWN])}{more} at {where}"
        return f"{name} at {where}"

    def handled(self, r: int) -> str:
        """The exception that rank r handles while it waits, which may be why it is there."""
        text = words(self.slots[r]["handling"])
        return f", while it handles {text}" if text else ""

    def state(self, r: int, now_ns: int, gone: str = "") -> str:
        """What rank r does now, and since when."""
        slot = self.slots[r]
        seconds = max(0.0, (now_ns - int(slot["since_ns"])) * 1e-9)
        last = f", after {self.operation(r)}" if words(slot["operation"]) else ""
        if gone:
            return gone + last
        if int(slot["state"]) == b.IN_OPERATION:
            return f"has waited {seconds:.0f} s in {self.operation(r)}{self.handled(r)}"
        if int(slot["elsewhere_since_ns"]):
            seconds = (now_ns - int(slot["elsewhere_since_ns"])) * 1e-9
            where = self.site(r, int(slot["elsewhere_site"]))
            return f"has waited {seconds:.0f} s in {words(slot['elsewhere'])} at {where}"
        if not last:
            return f"never came: it has called no operation{self.line(r, now_ns)}"
        return f"never came: in no operation since {seconds:.0f} s{self.line(r, now_ns)}{last}"

    def line(self, r: int, now_ns: int) -> str:
        """The line of the program that rank r executes, as its watchdog has seen it."""
        slot = self.slots[r]
        if not slot["line"] or int(slot["line_ns"]) < int(slot["since_ns"]):
            return ""
        fresh = now_ns - int(slot["line_ns"]) < _FRESH
        return f" ({'now' if fresh else 'last seen'} at {words(slot['line'])})"


def _tuple(values: Any) -> str:
    return "(" + ", ".join(str(int(v)) for v in values) + ")"
