"""`make test-peers` finds unexpected failures, unexpected passes and stale entries."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import pytest

pytestmark = pytest.mark.ranks(1)
PEERS = pathlib.Path(__file__).resolve().parents[1] / "peers"


@pytest.fixture(scope="module")
def peers() -> dict[str, Any]:
    return runpy.run_path(str(PEERS / "run.py"))


def test_each_difference_has_its_reason(peers: dict[str, Any]) -> None:
    listed = peers["differences"](PEERS / "differences.toml")
    assert listed
    assert all(len(one.reason) > 20 for one in listed)


def test_compare(peers: dict[str, Any]) -> None:
    listed = [peers["Difference"](("tests/a.py::*",), (2, 3), "a reason")]
    found = {
        "tests/a.py::test_1": ("failed", "rank 0: wrong"),
        "tests/a.py::test_2": ("skipped", ""),
        "tests/b.py::test_3": ("passed", ""),
    }
    assert peers["compare"](found, listed, 2) == ([], {"passed": 1, "skipped": 1, "differ": 1})
    (unexpected,), _ = peers["compare"](found, listed, 1)
    assert unexpected == "tests/a.py::test_1 on 1 ranks: failed, rank 0: wrong"
    found["tests/a.py::test_1"] = ("passed", "")
    (unexpected,), _ = peers["compare"](found, listed, 3)
    assert "test_1 on 3 ranks: passed, but is in differences.toml" in unexpected
    found = {"tests/b.py::test_3": ("not run", "rank 1: ")}
    (not_run, stale), _ = peers["compare"](found, listed, 2)
    assert "test_3 on 2 ranks: not run" in not_run
    assert "there is no such test" in stale


def test_outcomes_are_the_worst_of_all_ranks(peers: dict[str, Any], tmp_path: pathlib.Path) -> None:
    lines = '{{"test": "t", "outcome": "{}", "text": "{}"}}\n'
    (tmp_path / "rank0.jsonl").write_text(lines.format("not run", "") + lines.format("passed", ""))
    (tmp_path / "rank1.jsonl").write_text(lines.format("not run", "") + lines.format("failed", "e"))
    assert peers["outcomes"](tmp_path, 2) == {"t": ("failed", "rank 1: e")}
    (tmp_path / "rank1.jsonl").write_text(lines.format("not run", ""))
    assert peers["outcomes"](tmp_path, 2) == {"t": ("not run", "rank 1: ")}
