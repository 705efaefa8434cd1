"""Texts from the board: the operation of a rank, with its arguments and the user's source line."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.guard import board as b
from mpigrad.runtime.native import (
    DERIVATIVE_SPACES,
    MOVED_FOR,
    NO_REDUCTION,
    NO_ROOT,
    REDUCTIONS,
    TAG_LIMIT,
    own_reductions,
)

__all__ = ["Member", "Reader"]

# XLA's ids of element types.
_DTYPES = {
    **{1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64"},
    **{6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64", 10: "float16", 11: "float32"},
    **{12: "float64", 15: "complex64", 16: "bfloat16", 18: "complex128"},
}
_OPS = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
_OPS += ("MAXLOC", "MINLOC")
_SHOWN = 4  # at most this many messages of an operation, or arrays of a pytree, are listed
_WORD = 2**64 - 1
_FRESH = 2_000_000_000  # ns: an older look of the watchdog is "last seen", not "now"


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of a communicator: its slot on the board, entry in the slot, and rank."""

    slot: int
    entry: int
    rank: int


def decode(raw: bytes) -> str:
    return bytes(raw).split(b"\0")[0].decode(errors="replace")


def layout(part: Any) -> str:
    """Return dtype and shape of a contract or message, as float32[3,4] ("" without an array)."""
    if int(part["dtype"]) == 0:
        return ""
    dims = ",".join(str(int(n)) for n in part["dims"][: min(int(part["rank"]), b.DIMS)])
    return f"{_DTYPES.get(int(part['dtype']), 'an array')}[{dims}]"


def same_layout(x: Any, y: Any, free: int = 0, leading_ones: bool = True) -> bool:
    """Return True if dtypes and shapes are equal, except `free` axes and `leading_ones`."""
    p, q = (_shape(part, leading_ones) for part in (x, y))
    return int(x["dtype"]) == int(y["dtype"]) and len(p) == len(q) and p[free:] == q[free:]


def _shape(part: Any, leading_ones: bool) -> list[int]:
    rank = int(part["rank"])
    shape = list(map(int, part["dims"][: min(rank, b.DIMS)])) + [0] * max(rank - b.DIMS, 0)
    while not leading_ones and shape[:1] == [1] and rank <= b.DIMS:
        del shape[0]
    return shape


def same_tree(x: Any, y: Any, one_array: bool = False) -> bool:
    """Return True if the pytrees are equal or unknown.

    With `one_array`, a plain array also matches any pytree (see board.h).
    """
    a, b = int(x["tree"]), int(y["tree"])
    return a == b or min(a, b) < one_array


def steps_differ(x: Any, y: Any) -> bool:
    """Return True if two ranks are in the same while loops, whose conditions read other numbers."""
    loop, numbers = int(x["loop"]), int(x["loop_numbers"])
    return loop != 0 and loop == int(y["loop"]) and numbers != int(y["loop_numbers"])


def contract_text(contract: Any, site: str) -> str:
    """Return the text of a contract: allreduce(op=SUM) of float32[3] at prog.py:12."""
    terms = []
    for i in range(int(contract["terms"])):
        name, value = decode(contract["names"][i]), int(contract["values"][i])
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
    operation = f"{decode(contract['operation'])}{arguments}{' of ' if array else ''}{array}"
    return f"{operation} at {site}"


def _shortened(leaves: list[str]) -> str:
    more = f", … {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    return ", ".join(leaves[:_SHOWN]) + more


def differing_leaves(trees: list[list[str]]) -> list[str]:
    """Return, for each of several pytrees, a text for the first array in which they differ.

    The text is "" if the site's text already shows that array.
    """
    for i in range(max(map(len, trees), default=0)):
        arrays = [leaves[i] if i < len(leaves) else "missing" for leaves in trees]
        if len(set(arrays)) > 1 and all(trees) and (i >= _SHOWN):
            return [f", leaf {i + 1}: {array}" for array in arrays]
        if len(set(arrays)) > 1:
            break
    return ["" for _ in trees]


def _reduction(slot: int) -> str:
    predefined = (*REDUCTIONS, *MOVED_FOR)
    if slot < len(predefined):
        return next(name for name in _OPS if getattr(MPI, name) == predefined[slot])
    return f"reduction({own_reductions.get(slot, 'another function')})"


def channel_hash(identity: int, peer: int, tag: int) -> int:
    h = identity * 0x9E3779B97F4A7C15 & _WORD  # as in native/mpi/messages.cc
    h ^= peer * 0xC2B2AE3D27D4EB4F & _WORD
    h ^= tag * 0x165667B19E3779F9 & _WORD
    return h ^ (h >> 29)


class Reader:
    """Reads the board once. A rank `r` is the index of a slot."""

    def __init__(self, slots: Any) -> None:
        self.slots = slots

    def world(self, r: int) -> int:
        return int(self.slots[r]["world_rank"])

    def site(self, r: int, site: int) -> str:
        on_board = 0 < abs(site) < b.SITES
        text = decode(self.slots[r]["sites"][abs(site)]) if on_board else "an unknown line"
        if leaves := self.leaves(r, site):
            text += f" (pytree: {_shortened(leaves)})"
        return f"the adjoint of {text}" if site < 0 else text

    def leaves(self, r: int, site: int) -> list[str]:
        """Return the arrays of the pytree sent at a site of rank r: ["['a'] float32[3]", …]."""
        begin = int(self.slots[r]["tree_of"][abs(site)]) if abs(site) < b.SITES else 0
        if not begin:
            return []
        text = self.slots[r]["trees"][begin - 1 :].tobytes().split(b"\0", 1)[0]
        return re.split(r"(?<=\]), ", text.decode(errors="replace"))

    def entry(self, r: int) -> Any:
        """Return the entry of the communicator of rank r's operation."""
        return self.slots[r]["entries"][int(self.slots[r]["entry"])]

    def messages(self, r: int, way: str) -> Any:
        """Return the messages that rank r's current operation sends or receives.

        `way` is "send" or "receive".
        """
        slot = self.slots[r]
        in_messages = int(slot["state"]) == b.IN_OPERATION and int(slot["kind"]) == b.MESSAGES_ONLY
        return slot[way][: int(slot[f"{way}s"]) if in_messages else 0]

    @functools.cache  # noqa: B019 (a reader is short-lived)
    def members(self, identity: int) -> dict[int, Member]:
        """Return the members of a communicator that are on this board, by their rank in it."""
        members = {}
        for r, slot in enumerate(self.slots):
            entries = slot["entries"][: int(slot["entries_used"])]
            for i in (entries["id"] == identity).nonzero()[0]:
                member = Member(r, int(i), int(entries[i]["rank"]))
                members[member.rank] = member
        return members

    def counts_unknown(self, member: Member) -> bool:
        """Return True if it is unknown which messages a member has received."""
        slot = self.slots[member.slot]
        return bool(slot["counts_invalid"] or slot["entries"][member.entry]["open"])

    def channel(self, r: int, identity: int, peer: int, tag: int) -> Any | None:
        """Return rank r's counts of messages to and from `peer`, or None."""
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
        """Return the announcement of message `ordinal` from rank r to `peer`, or None."""
        for message in self.slots[r]["message"]:
            part = message["part"]
            key = (int(message["id"]), int(part["peer"]), int(part["tag"]), int(part["ordinal"]))
            if key == (identity, peer, tag, ordinal):
                return message
        return None

    # ---- texts ----

    def tag(self, entry: int, tag: int) -> str:
        """Return " (tag 3)", the tag that the program gave to a message of this communicator.

        It is "" if the tag is one of mpigrad's own.
        """
        if tag < 0:
            return " (any tag)"
        program_tag = tag // DERIVATIVE_SPACES if entry % 2 else tag
        return f" (tag {program_tag})" if program_tag <= TAG_LIMIT else ""

    def partner(self, identity: int, rank: int) -> str:
        """Return the text of a partner: its rank in MPI_COMM_WORLD, if known."""
        if rank < 0:
            return "any rank"
        member = self.members(identity).get(rank)
        return f"rank {self.world(member.slot)}" if member else f"rank {rank} of its communicator"

    def contract(self, r: int, contract: Any) -> str:
        """Return the text of a contract of rank r."""
        return contract_text(contract, self.site(r, int(contract["site"])))

    def operation(self, r: int) -> str:
        """Return the text of the current or last operation of rank r."""
        slot = self.slots[r]
        kind, name = int(slot["kind"]), decode(slot["operation"])
        line = self.site(r, int(slot["site"]))
        if kind == b.COLLECTIVE:
            entry = self.entry(r)
            for contract in entry["contracts"]:
                if int(contract["sequence"]) == int(entry["sequence"]):
                    return self.contract(r, contract)
        if kind == b.MESSAGES_ONLY:
            identity = int(self.entry(r)["id"])
            entry = int(slot["entry"])
            messages = [
                *(("to", p) for p in slot["send"][: int(slot["sends"])]),
                *(("from", p) for p in slot["receive"][: int(slot["receives"])]),
            ]
            parts = [
                f"{layout(p) or 'a message'} {way} {self.partner(identity, int(p['peer']))}"
                + self.tag(entry, int(p["tag"]))
                for way, p in messages
            ]
            derivatives = [int(p["tag"]) % DERIVATIVE_SPACES for _, p in messages]
            if entry % 2 and int(slot["site"]) > 0 and max(derivatives, default=0) > 1:
                line = f"the tangent of {line}"
            more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
            if parts:
                return f"{name} of {', '.join(parts[:_SHOWN])}{more} at {line}"
        return f"{name} at {line}"

    def loop_note(self, r: int) -> str:
        """Return a text for the while loop that rank r is in, with what its condition reads, or "".

        Only loops whose conditions read floating-point numbers are known, and only with the guard.
        """
        slot = self.slots[r]
        count = int(slot["loop_reads"])
        if not count or int(slot["state"]) != b.IN_OPERATION:
            return ""
        numbers = [_number(x) for x in slot["loop_numbers"][:count]]
        line = self.site(r, int(slot["loop_site"]))
        return f", in the while_loop at {line}, whose condition reads {', '.join(numbers)}"

    def exception_note(self, r: int) -> str:
        """Return a text for the exception that rank r handles while it waits, or ""."""
        text = decode(self.slots[r]["handling"])
        return f", while handling {text}" if text else ""

    def state(self, r: int, now_ns: int, gone: str = "") -> str:
        """Return a text for the state of rank r: its operation or line, and for how long.

        `gone` is "has ended" or "has died" if the rank is gone.
        """
        slot = self.slots[r]
        seconds = max(0.0, (now_ns - int(slot["since_ns"])) * 1e-9)
        last = f"; last operation: {self.operation(r)}" if decode(slot["operation"]) else ""
        if gone:
            return gone + (last or ", after importing mpigrad")
        if int(slot["state"]) == b.IN_OPERATION:
            return f"has waited {seconds:.0f} s in {self.operation(r)}{self.exception_note(r)}"
        if not last:
            return f"has not called any operation yet{self.line(r, now_ns)}"
        return f"has not called an operation for {seconds:.0f} s{self.line(r, now_ns)}{last}"

    def line(self, r: int, now_ns: int) -> str:
        """Return a text for the line of the program that rank r executes, or ""."""
        slot = self.slots[r]
        if not slot["line"] or int(slot["line_ns"]) < int(slot["since_ns"]):
            return ""
        fresh = now_ns - int(slot["line_ns"]) < _FRESH
        return f" ({'now' if fresh else 'last seen'} at {decode(slot['line'])})"


def _number(x: np.float64) -> str:
    """Return the shortest text of a number that may have been a float32."""
    single = np.float32(x)
    return str(single if single == x else x)


def _tuple(values: Any) -> str:
    return "(" + ", ".join(str(int(v)) for v in values) + ")"
