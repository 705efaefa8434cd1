"""The timeline and the profile of a job of two ranks."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from launching import PROGRAMS, mpigrad
from mpigrad.profiling.trace import RankRecord, Total, rows, table, waiting_ns

TRACED, HALOS = PROGRAMS / "traced.py", PROGRAMS / "halos.py"


def spans(text: str) -> dict[int, list[dict[str, Any]]]:
    """Return the operations of each rank in a trace."""
    events = json.loads(text)
    found: dict[int, list[dict[str, Any]]] = {e["pid"]: [] for e in events}
    for event in events:
        if event["ph"] == "X":
            found[event["pid"]].append(event)
    return found


@pytest.mark.launcher
def test_a_trace_that_cannot_be_written_at_the_end_is_a_warning(tmp_path: pathlib.Path) -> None:
    """It has no more operations than the limit, but the profile has all."""
    path = tmp_path / "trace.json"
    path.symlink_to("/dev/full")
    settings = {"MPIGRAD_TRACE": str(path), "MPIGRAD_TRACE_EVENTS": "5"}
    done = mpigrad("launch", "-n", 2, "--profile", TRACED, **settings)
    assert done.returncode == 0, done.stderr
    assert f"the trace could not be written to {path}" in done.stderr
    assert "the first 5 operations of each rank" in done.stderr
    for rank in (0, 1):
        part = (tmp_path / f"trace.rank{rank}.json").read_text().rstrip()
        assert len(spans(part.removesuffix(",") + "]")[rank]) == 5
    barriers = next(line for line in done.stderr.splitlines() if line.startswith("barrier"))
    assert barriers.split()[2] == "2"  # on each of two lines, one call on each rank


@pytest.mark.launcher
def test_trace_and_profile(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    done = mpigrad("launch", "-n", 2, "--profile", TRACED, MPIGRAD_TRACE=str(path))
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]  # the ranks' parts are merged
    ranks = spans(path.read_text())
    forward = ["allreduce", "send", "bcast"], ["allreduce", "recv", "bcast"]
    backward = ["reduce", "recv", "allreduce"], ["reduce", "send", "allreduce"]
    for rank in (0, 1):
        once = [*forward[rank], *(f"{name} (adjoint)" for name in backward[rank])]
        names = [e["name"] for e in ranks[rank]]
        assert names == [*once, "barrier", *once, "barrier"]
        lines = TRACED.read_text().splitlines()
        for event in ranks[rank]:
            file, _, number = event["args"]["line"].rpartition(":")
            assert file.endswith("traced.py")
            operation = event["name"].removesuffix(" (adjoint)")
            if event["cat"] == "forward":
                assert f"mg.{operation}(" in lines[int(number) - 1]
        starts = [e["ts"] for e in ranks[rank]]
        ends = [e["ts"] + e["dur"] for e in ranks[rank]]
        assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))
    allreduce, sent, cast = ranks[0][:3]
    assert allreduce["args"]["bytes"] == sent["args"]["bytes"] == 400
    assert (sent["args"]["partner"], ranks[1][1]["args"]["partner"]) == (1, 0)
    assert cast["args"]["root"] == 1
    assert cast["args"]["communicator"] != allreduce["args"]["communicator"]
    # One clock: an allreduce ends on no rank before the other has begun it.
    again = [ranks[rank][7] for rank in (0, 1)]
    assert max(e["ts"] for e in again) <= min(e["ts"] + e["dur"] for e in again)
    assert again[1]["ts"] - again[0]["ts"] > 0.3e6  # rank 1 slept

    head = next(i for i, line in enumerate(done.stderr.splitlines()) if "waiting max" in line)
    printed = done.stderr.splitlines()[head + 2 :]
    rows = [line.split() for line in printed if line.startswith("allreduce ")]
    (forward_row,) = [row for row in rows if row[1] != "(adjoint)"]
    assert forward_row[2:5] == ["4", "1.56", "KiB"]  # two calls on each rank
    assert any(line.startswith("recv (adjoint)") for line in printed)


@pytest.mark.launcher
@pytest.mark.cases("2", reason="test_waiting_for_neighbours has three ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_halo_exchanges_have_their_name_and_waiting_times(
    ranks: int, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "trace.json"
    done = mpigrad("launch", "-n", ranks, "--profile", HALOS, MPIGRAD_TRACE=str(path))
    assert done.returncode == 0, done.stderr
    assert "neighbor_alltoallv" not in done.stderr
    printed = [line.split() for line in done.stderr.splitlines() if line.startswith("halo")]
    assert {line[0] for line in printed} == {"halo_exchange(width=1)"}
    assert ["(adjoint)" in line for line in printed].count(True) == 1
    assert len(printed) == 2
    assert all(line[-1].endswith("s") for line in printed)  # a time, and not "-"
    names = [event["name"] for event in spans(path.read_text())[0]]
    once = ["halo_exchange(width=1)", "halo_exchange(width=1) (adjoint)"]
    assert [name for name in names if "halo" in name] == 2 * once


@pytest.mark.launcher
def test_a_job_that_fails_leaves_its_ranks_traces(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    done = mpigrad("launch", "-n", 2, TRACED, "fail", MPIGRAD_TRACE=str(path))
    assert done.returncode != 0
    for rank in (0, 1):
        text = (tmp_path / f"trace.rank{rank}.json").read_text()
        complete = text[: text.rindex(",")] + "]"  # viewers do without the end
        assert len(spans(complete)[rank]) == 13


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MPIGRAD_TRACE": "/nowhere/trace.json"}, "in an existing directory"),
        pytest.param(
            {"MPIGRAD_PROFILE": "1", "MPIGRAD_TRACE_EVENTS": "all"},
            "must be a number of operations",
            marks=pytest.mark.full("starts a job for one error text"),
        ),
    ],
)
def test_rejects_invalid_settings(variables: dict[str, str], said: str) -> None:
    done = mpigrad("launch", "-n", 1, TRACED, **variables)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.launcher
@pytest.mark.full("test_a_trace_that_cannot_be_written_at_the_end_is_a_warning has the limit, too")
def test_more_operations_than_the_limit(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    done = mpigrad(
        "launch", "-n", 2, "--profile", TRACED, MPIGRAD_TRACE=str(path), MPIGRAD_TRACE_EVENTS="5"
    )
    assert done.returncode == 0, done.stderr
    assert "the first 5 operations of each rank" in done.stderr
    assert {len(events) for events in spans(path.read_text()).values()} == {5}
    barriers = next(line for line in done.stderr.splitlines() if line.startswith("barrier"))
    assert barriers.split()[2] == "2"  # on each of two lines, one call on each rank


def made_up(calls: list[tuple[str, int, int, int]], group: tuple[int, ...] = (0, 1)) -> RankRecord:
    """Create a rank's record of calls (name, start, end, peer), in seconds."""
    names, start, end, peer = zip(*calls, strict=True)
    sites = [1 if name != "send" else 2 for name in names]
    totals = [
        Total(name, site, "p.py:1", 1, 8, e - s)
        for (name, s, e, _), site in zip(calls, sites, strict=True)
    ]
    second = 10**9
    return RankRecord(
        np.array(names), second * np.array(start), second * np.array(end),
        np.zeros(len(calls), int), np.array(sites), np.array(peer), {0: (group, 0)}, totals,
    )  # fmt: skip


@pytest.mark.ranks(1)
def test_waiting() -> None:
    early = made_up([("allreduce", 0, 6, -1), ("send", 7, 8, 1), ("sendrecv", 9, 12, 1)])
    late = made_up([("allreduce", 4, 6, -1), ("recv", 6, 8, 0), ("sendrecv", 11, 12, 0)])
    waits = [w / 1e9 for w in waiting_ns([early, late])]
    np.testing.assert_array_equal(waits[0], [4, np.nan, 2])
    np.testing.assert_array_equal(waits[1], [0, 1, 0])
    found = {row.operation: row for row in rows([early, late])}
    assert next(iter(found)) == "allreduce"
    np.testing.assert_array_equal(found["allreduce"].waiting, [4, 0])
    np.testing.assert_array_equal(found["allreduce"].seconds, [6, 2])
    assert found["send"].waiting is None
    assert "allreduce p.py:1 2 16 B 6.00 s 4.00 s 4.00 s 2.00 s" in " ".join(
        table([early, late]).split()
    )


@pytest.mark.ranks(1)
def test_waiting_for_neighbours() -> None:
    """Ranks 0, 1, 2 in a row. Rank 1 is late in the first exchange, rank 2 in its adjoint."""
    group, name = (0, 1, 2), "halo_exchange(width=1)"
    starts = [(0, 10), (5, 10), (1, 18)]
    rows_of = []
    for rank, (first, second) in enumerate(starts):
        record = made_up([(name, first, 8, -1), (name, second, 20, -1)], group)
        record.site[1] = -1
        peers = [r for r in (rank - 1, rank + 1) if r in group]
        # From rank 2 a message comes in the adjoint only.
        record.neighbors[name, 0, 1] = tuple((r, r != 2, True) for r in peers)
        rows_of.append(record)
    waits = [w / 1e9 for w in waiting_ns(rows_of)]
    np.testing.assert_array_equal(waits, [[5, 0], [0, 8], [4, 0]])
    rows_of[2].neighbors.clear()  # its calls are unknown, and rank 1 waits for one
    waits = [w / 1e9 for w in waiting_ns(rows_of)]
    np.testing.assert_array_equal(waits, [[5, 0], [0, np.nan], [np.nan] * 2])


@pytest.mark.ranks(1)
def test_waiting_is_unknown_if_operations_do_not_match() -> None:
    one = made_up([("allreduce", 0, 6, -1), ("barrier", 7, 8, -1)])
    other = made_up([("allreduce", 4, 6, -1)])
    assert all(np.isnan(w).all() for w in waiting_ns([one, other]))
