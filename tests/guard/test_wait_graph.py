"""The wait graph, on boards that the tests write."""

from __future__ import annotations

import time
import types
from typing import Any

import numpy as np
import pytest

from mpigrad.guard import board as b
from mpigrad.guard.board_reader import Reader, channel_hash
from mpigrad.guard.wait_graph import Finding, diagnose, disagreement, grouped, suspect
from mpigrad.guard.watchdog import rank_states

pytestmark = pytest.mark.ranks(1)
WORLD = 77  # the identity of the communicator of all ranks
F32, F64 = 11, 12


class Ranks:
    """A board, with methods that write it as ranks do."""

    def __init__(self, n: int) -> None:
        self.slots: Any = np.zeros(n, b.SLOT)
        self.gone: dict[int, str] = {}
        self.communicator(WORLD, list(range(n)))
        for r, slot in enumerate(self.slots):
            slot["world_rank"], slot["state"] = 10 * r, b.IN_PYTHON
            slot["sites"][1] = f"prog.py:{r}".encode()
            slot["sites_used"] = 2

    def communicator(self, identity: int, members: list[int], size: int | None = None) -> None:
        for rank, r in enumerate(members):
            slot = self.slots[r]
            entry = slot["entries"][int(slot["entries_used"])]
            entry["id"], entry["rank"], entry["size"] = identity, rank, size or len(members)
            slot["entries_used"] += 1

    def enter(self, r: int, name: str, entry: int, kind: int, polling: bool) -> Any:
        slot = self.slots[r]
        slot["state"], slot["kind"], slot["entry"] = b.IN_OPERATION, kind, entry
        slot["operation"], slot["polling"], slot["site"] = name.encode(), polling, 1
        slot["serial"] += 1
        slot["sends"] = slot["receives"] = 0
        return slot

    def collective(self, r: int, name: str, entry: int = 0, polling: bool = False, **c: Any) -> Any:
        """Let rank r enter a collective operation."""
        slot = self.enter(r, name, entry, b.COLLECTIVE, polling)
        e = slot["entries"][entry]
        e["sequence"] += 1
        contract = e["contracts"][int(e["sequence"]) % b.CONTRACTS]
        contract["sequence"], contract["operation"] = e["sequence"], name.encode()
        contract["site"] = 1
        for key, value in c.items():
            contract[key][: len(value)] = value if isinstance(value, list) else [value]
        return contract

    def shaped(self, contract: Any, dtype: int, *dims: int) -> Any:
        contract["dtype"], contract["rank"] = dtype, len(dims)
        contract["dims"][: len(dims)] = dims
        return contract

    def channel(self, r: int, identity: int, peer: int, tag: int) -> Any:
        found = Reader(self.slots).channel(r, identity, peer, tag)
        if found is not None:
            return found
        start = channel_hash(identity, peer, tag)
        for i in range(64):
            channel = self.slots[r]["channels"][(start + i) % b.CHANNELS]
            if not channel["id"]:
                channel["id"], channel["peer"], channel["tag"] = identity, peer, tag
                return channel
        raise AssertionError

    def exchange(
        self,
        r: int,
        send: tuple[int, int, tuple[int, ...]] | None = None,
        receive: tuple[int, int, tuple[int, ...]] | None = None,
        *,
        long: bool = False,
        polling: bool = False,
    ) -> None:
        """Let rank r send to and receive from (peer, tag, shape)."""
        name = "sendrecv" if send and receive else "send" if send else "recv"
        slot = self.enter(r, name, 0, b.MESSAGES_ONLY, polling)
        for way, part, count in (("send", send, "sent"), ("receive", receive, "posted")):
            if part is None:
                continue
            peer, tag, shape = part
            p = slot[way][0]
            p["peer"], p["tag"], p["awaited"] = peer, tag, long or way == "receive"
            self.shaped(p, F32, *shape)
            slot[f"{way}s"] = 1
            if peer < 0 or tag < 0:
                continue
            channel = self.channel(r, WORLD, peer, tag)
            channel[count] += 1
            p["ordinal"] = channel[count]
            if way == "send":
                message = slot["message"][int(slot["messages"])]
                message["id"], message["site"], message["operation"] = WORLD, 1, name.encode()
                message["part"] = p
                slot["messages"] += 1

    def leave(self, r: int) -> None:
        """Complete the operation of rank r."""
        slot = self.slots[r]
        for p in slot["receive"][: int(slot["receives"])]:
            self.channel(r, WORLD, int(p["peer"]), int(p["tag"]))["received"] += 1
        slot["state"] = b.IN_PYTHON
        slot["serial"] += 1

    def find(self) -> Finding | None:
        return diagnose(self.slots, lambda r: self.gone.get(r, ""), 0)

    def stuck(self) -> list[int]:
        finding = self.find()
        return [] if finding is None else sorted(finding.stuck)


def text_of(ranks: Ranks) -> str:
    finding = ranks.find()
    assert finding is not None
    return finding.text


# ---- collectives ----


def test_no_deadlock_while_a_rank_computes() -> None:
    ranks = Ranks(3)
    assert ranks.stuck() == []
    ranks.collective(0, "allreduce")
    ranks.collective(1, "allreduce")
    assert ranks.stuck() == []
    ranks.collective(2, "allreduce")
    assert ranks.stuck() == []


def test_no_deadlock_after_a_rank_left_the_operation() -> None:
    ranks = Ranks(2)
    for r in (0, 1):
        ranks.collective(r, "bcast")
    ranks.leave(0)  # the root is done early,
    assert ranks.stuck() == []
    ranks.collective(0, "barrier")  # and waits in the next one
    assert ranks.stuck() == []


def test_a_rank_that_has_ended_is_a_deadlock() -> None:
    ranks = Ranks(3)
    ranks.collective(0, "allreduce")
    ranks.collective(2, "allreduce")
    ranks.gone[1] = "has ended"
    assert ranks.stuck() == [0, 2]
    text = text_of(ranks)
    assert "rank 10: has ended" in text
    assert "rank 0: in allreduce at prog.py:0" in text
    finding = ranks.find()
    assert finding is not None
    assert finding.concerns == {0, 2}


def test_different_operation_root_dtype_shape_or_count() -> None:
    def difference(**changes: Any) -> str:
        ranks = Ranks(2)
        for r in (0, 1):
            c = ranks.shaped(ranks.collective(r, "bcast"), F32, 3)
            c["terms"], c["names"][0], c["values"][0] = 1, b"root", 0
            c["counts_kind"], c["counts"], c["sends"][:2] = b.SAME_COUNTS, 2, (1, 2)
            for name, value in changes.items() if r else ():
                c[name] = value
        return text_of(ranks).splitlines()[-1] if ranks.find() else ""

    one = np.zeros(b.TERMS, "i8")
    one[0] = 1
    assert difference() == ""
    assert "same operations in the same order" in difference(operation=b"gather")
    assert difference(values=one) == "Pass the same root on every rank."
    assert "the same dtype" in difference(dtype=F64)
    assert "the same shape" in difference(dims=np.full(b.DIMS, 4))
    assert "the same shape" in difference(rank=2)
    assert "the same counts" in difference(sends=np.arange(b.COUNTS))
    # Dimensions after the rank mean nothing.
    beyond = np.array([3, *[9] * (b.DIMS - 1)])
    assert difference(dims=beyond) == ""


def test_a_mismatch_that_mpi_forgave_proves_nothing() -> None:
    """All ranks are in the next collective, which is long and will end."""
    ranks = Ranks(2)
    for r, dims in enumerate([(4,), (2, 2)]):
        ranks.shaped(ranks.collective(r, "allreduce"), F32, *dims)
        ranks.leave(r)
    for r in range(2):
        ranks.shaped(ranks.collective(r, "allreduce"), F32, 10**9)
    assert ranks.stuck() == []
    found = suspect(ranks.slots, 0)
    assert found is not None
    lines = "\n".join(found.lines)
    assert "may be an earlier collective, in which the ranks did not agree" in lines
    assert "float32[4]" in lines
    assert "float32[2,2]" in lines
    assert found.elements == 10**9  # it gets time for them
    agreeing = Ranks(2)
    for _ in range(2):
        for r in range(2):
            agreeing.shaped(agreeing.collective(r, "allreduce"), F32, 4)
    assert suspect(agreeing.slots, 0) is None


def test_different_numbers_of_rows_are_accepted() -> None:
    ranks = Ranks(2)
    for r in (0, 1):
        c = ranks.shaped(ranks.collective(r, "gatherv"), F32, 2 + r, 5)
        c["free_dims"] = 1
    assert ranks.stuck() == []
    ranks.slots[1]["entries"][0]["contracts"][1]["dims"][1] = 6
    assert ranks.stuck() == [0, 1]


def test_counts_of_pairs() -> None:
    ranks = Ranks(3)
    counts = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    for r in range(3):
        c = ranks.collective(r, "alltoallv", polling=True)
        c["counts_kind"], c["counts"] = b.PAIR_COUNTS, 3
        c["sends"][:3], c["receives"][:3] = counts[r], counts[:, r]
    assert ranks.stuck() == []
    c["receives"][1] = 9  # rank 2 expects more of rank 1 than that sends
    assert ranks.stuck() == [0, 1, 2]
    text = text_of(ranks)
    assert "sendcounts=(3, 4, 5), recvcounts=(1, 4, 7)" in text
    assert "Let recvcounts[i] on rank j be sendcounts[j] on rank i" in text


def test_a_communicator_with_members_on_other_hosts() -> None:
    ranks = Ranks(2)
    ranks.communicator(5, [0, 1], size=3)
    ranks.gone[1] = "has ended"
    ranks.collective(0, "allreduce", entry=1)
    assert ranks.stuck() == []


def test_communicators_in_different_order() -> None:
    ranks = Ranks(2)
    ranks.communicator(5, [1, 0])
    ranks.collective(0, "allreduce")
    ranks.collective(1, "allreduce", entry=1)
    assert ranks.stuck() == [0, 1]
    assert "rank 10: on communicator 1, in allreduce" in text_of(ranks)


def test_an_unknown_call_is_not_a_deadlock() -> None:
    ranks = Ranks(2)
    ranks.collective(0, "allreduce")
    ranks.enter(1, "recv", -1, b.UNKNOWN, polling=False)
    assert ranks.stuck() == []


# ---- messages ----


def test_a_message_on_its_way() -> None:
    ranks = Ranks(2)
    ranks.exchange(0, send=(1, 4, (3,)))
    ranks.leave(0)
    ranks.gone[0] = "has ended"
    ranks.exchange(1, receive=(0, 4, (3,)))
    assert ranks.stuck() == []
    ranks.leave(1)
    ranks.exchange(1, receive=(0, 4, (3,)))  # a second one never comes
    assert ranks.stuck() == [1]
    assert "in recv of float32[3] from rank 0 (tag 4) at prog.py:1" in text_of(ranks)


def test_a_sender_that_computes() -> None:
    ranks = Ranks(2)
    ranks.exchange(1, receive=(0, 0, (3,)))
    assert ranks.stuck() == []


def test_a_different_tag_is_a_deadlock() -> None:
    ranks = Ranks(2)
    ranks.exchange(0, send=(1, 1, (3,)))
    ranks.leave(0)
    ranks.collective(0, "barrier")
    ranks.exchange(1, receive=(0, 2, (3,)))
    assert ranks.stuck() == [0, 1]
    text = text_of(ranks)
    assert "rank 0: sent float32[3] to rank 10 (tag 1) by send at prog.py:0, not received" in text
    assert "the tag of the send" in text


def test_long_messages_wait_for_their_receiver() -> None:
    ranks = Ranks(2)
    ranks.exchange(0, send=(1, 0, (1000,)), long=True)
    assert ranks.stuck() == []  # rank 1 may still come
    ranks.exchange(1, receive=(0, 0, (1000,)))
    assert ranks.stuck() == []  # the message is under way
    ranks = Ranks(2)
    for r in (0, 1):
        ranks.exchange(r, send=(1 - r, 0, (1000,)), long=True)
    assert ranks.stuck() == [0, 1]
    assert "not received" not in text_of(ranks)


@pytest.mark.parametrize("polling", [False, True])
def test_a_ring_is_not_a_deadlock(polling: bool) -> None:
    ranks = Ranks(4)
    for r in range(4):
        right, left = (r + 1) % 4, (r - 1) % 4
        ranks.exchange(r, (right, 0, (3,)), (left, 0, (3,)), long=True, polling=polling)
        assert ranks.stuck() == []


def test_partners_of_a_refused_operation_are_refused() -> None:
    ranks = Ranks(3)
    for r, shape in enumerate([(2, 3), (3, 2), (3, 2)]):
        ranks.exchange(r, ((r + 1) % 3, 0, shape), ((r - 1) % 3, 0, shape), polling=True)
    # Rank 2 receives what it expects, but from an operation that cannot take place.
    assert ranks.stuck() == [0, 1, 2]
    assert "a message does not match its receive" in text_of(ranks)


def test_shapes_are_not_compared_without_the_guard() -> None:
    ranks = Ranks(2)
    ranks.exchange(0, send=(1, 0, (6,)))
    ranks.exchange(1, receive=(0, 0, (2, 3)))
    assert ranks.stuck() == []


def test_any_source_and_any_tag() -> None:
    ranks = Ranks(3)
    ranks.exchange(0, receive=(-1, -1, (3,)))
    assert ranks.stuck() == []
    ranks.gone[1] = "has ended"
    assert ranks.stuck() == []  # rank 2 may still send
    ranks.gone[2] = "has ended"
    assert ranks.stuck() == [0]
    assert "from any rank (any tag)" in text_of(ranks)
    ranks.exchange(2, send=(0, 8, (3,)))  # it did so before it ended
    assert ranks.stuck() == []


@pytest.mark.parametrize("tag", [-1, 8])
def test_any_source_while_a_receive_is_posted(tag: int) -> None:
    """It is unknown which receive takes the message, unless the posted one has another tag."""
    ranks = Ranks(2)
    ranks.exchange(1, send=(0, 8, (3,)))
    ranks.leave(1)
    ranks.gone[1] = "has ended"
    posted = ranks.channel(0, WORLD, 1, 8)
    posted["posted"] += 1
    ranks.exchange(0, receive=(-1, tag, (2,)), polling=True)
    assert ranks.stuck() == []
    posted["posted"] -= 1
    assert ranks.stuck() == [0]
    ranks.slots[1]["messages"] = b.MESSAGES + 1  # its announcement may be overwritten
    assert ranks.stuck() == []
    ranks.slots[1]["messages"] = 1
    ranks.channel(0, WORLD, 1, 7)["posted"] += 1
    assert ranks.stuck() == [0]


def test_uncounted_messages_prove_nothing() -> None:
    ranks = Ranks(2)
    ranks.slots[0]["counts_invalid"] = 1
    ranks.gone[0] = "has ended"
    ranks.exchange(1, receive=(0, 0, (3,)))
    assert ranks.stuck() == []


# ---- words ----


def test_lines_are_grouped() -> None:
    lines = [("rank 0", "a"), ("rank 1", "b"), ("rank 2", "b"), ("rank 3", "b"), ("rank 7", "b")]
    assert grouped(lines) == ["  rank 0: a", "  ranks 1-3, 7: b"]


def test_contracts_of_other_hosts() -> None:
    reports = np.zeros(2, b.REPORT)
    for r, (name, site) in enumerate([(b"gather", b"a.py:1"), (b"scatter", b"b.py:2")]):
        reports[r]["contract"]["operation"], reports[r]["site"] = name, site
    reports["world_rank"] = [3, 5]
    assert disagreement(reports) == (
        "mpigrad: the ranks do not agree:\n  rank 3: gather at a.py:1\n  rank 5: scatter at b.py:2"
        "\nCall the same operations in the same order on every rank of the communicator."
    )


def test_states() -> None:
    ranks = Ranks(3)
    second = 1_000_000_000
    reader = Reader(ranks.slots)
    assert reader.state(0, 0) == "has not called any operation yet"
    contract = ranks.shaped(ranks.collective(0, "reduce"), F64, 2, 3)
    contract["site"] = -1
    expected = "reduce of float64[2,3] at the adjoint of prog.py:0"
    assert reader.state(0, 7 * second) == f"has waited 7 s in {expected}"
    ranks.leave(0)
    idle = "has not called an operation for"
    assert reader.state(0, 2 * second) == f"{idle} 2 s; last operation: {expected}"
    ranks.slots[0]["line"], ranks.slots[0]["line_ns"] = b"prog.py:7", 3 * second
    assert (
        reader.state(0, 4 * second) == f"{idle} 4 s (now at prog.py:7); last operation: {expected}"
    )
    assert (
        reader.state(0, 9 * second)
        == f"{idle} 9 s (last seen at prog.py:7); last operation: {expected}"
    )
    assert reader.state(0, 0, "has died") == f"has died; last operation: {expected}"


def test_ranks_with_different_times_share_a_line() -> None:
    ranks = Ranks(4)
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for r, slot in enumerate(ranks.slots):
        slot["sites"][1] = b"prog.py:1"
        ranks.shaped(ranks.collective(r, "bcast"), F64, 2)
        slot["since_ns"], slot["namespace"] = now - (2 * r + 3) * 1_000_000_000, r
    ranks.slots[1]["sites"][1] = b"prog.py:2"
    board: Any = types.SimpleNamespace(slots=ranks.slots, ranks=(0, 1, 2, 3), own_index=0)
    assert rank_states(board) == [
        "  ranks 0, 2-3: has waited 3 to 9 s in bcast of float64[2] at prog.py:1",
        "  rank 1: has waited 5 s in bcast of float64[2] at prog.py:2",
    ]
