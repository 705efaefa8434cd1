"""What runs where: the rule by which a test is in `make test`, and on how many ranks.

`make test` runs a test on 2 ranks, because a collective test proves nothing on one. Marks say more:

- `ranks(1, 3)`: the test has a meaning on 1 and 3 ranks only. `make test` takes 2 of them, or else
  the smallest above 1.
- `thin(3, reason=...)`: `make test` takes these numbers. Several numbers need the reason: 1 if one
  rank takes another path, 3 if sizes are uneven or a rank has two neighbours, 4 if ranks form a
  plane.
- `cases("scan-jit", "*-grad", reason=...)`: `make test` runs these cases of a parametrized test.
- `full("reason")`: `make test` leaves the test out.
- `long("reason")`: the test takes more than 5 processor seconds, and has a short twin.
- `launcher`, `waits`: the test starts MPI itself (and mostly waits), in a session of one process.
- `torch`: `make test-torch` runs it.

`make test-full` (MPIGRAD_ALL_TESTS=1) runs every case on each number of `ranks`, by default 1 to 4.
"""

from __future__ import annotations

import fnmatch
import os
import pathlib
import re

import pytest

ALL = os.environ.get("MPIGRAD_ALL_TESTS") == "1"
TORCH = os.environ.get("MPIGRAD_TORCH") == "1"
EVERY = (1, 2, 3, 4)
MARKERS = (
    "ranks(*counts): the test has a meaning at these numbers of ranks only",
    "thin(*counts, reason=...): make test runs it at these numbers",
    "cases(*patterns, reason=...): make test runs these cases",
    "full(reason): make test leaves it out",
    "long(reason): takes more than 5 processor seconds",
    "torch: needs PyTorch",
    "launcher: starts MPI itself",
    "waits: starts MPI itself, and mostly waits",
)


def numbers_of_ranks(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of ranks that a test runs on, without a look at its case."""
    marker = item.get_closest_marker("ranks")
    possible = marker.args if marker else EVERY
    if ALL:
        return possible
    if marker := item.get_closest_marker("thin"):
        return marker.args
    return (2,) if 2 in possible else (min((n for n in possible if n > 1), default=1),)


def case_of(item: pytest.Item) -> str:
    """Return the case of a parametrized test, as pytest writes it between brackets."""
    return item.name.partition("[")[2].removesuffix("]")


def in_make_test(item: pytest.Item) -> bool:
    """Return True if `make test` runs this case of the test."""
    if item.get_closest_marker("full"):
        return False
    marks = item.iter_markers("cases")
    return all(any(fnmatch.fnmatchcase(case_of(item), p) for p in m.args) for m in marks)


def runs(item: pytest.Item, size: int) -> bool:
    """Return True if a test runs in a session of this size."""
    if item.get_closest_marker("torch") and not TORCH:
        return False
    if not (ALL or in_make_test(item)):
        return False
    return bool(item.get_closest_marker("launcher")) or size in numbers_of_ranks(item)


def has_reason(mark: pytest.Mark) -> bool:
    """Return True if a mark that needs a reason has one."""
    words = mark.args[:1] if mark.name in {"full", "long"} else (mark.kwargs.get("reason"),)
    few = mark.name == "thin" and len(mark.args) == 1
    return few or any(isinstance(word, str) and word.strip() for word in words)


def check_marks(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise an error that names marks without a reason, and cases that do not exist."""
    # Of a test that is named by a case, or of a choice by -k, not all cases are here.
    whole = not config.option.keyword and not any("::" in word for word in config.args)
    wrong = set()
    cases: dict[str, set[str]] = {}
    patterns: dict[str, set[str]] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        cases.setdefault(function, set()).add(case_of(item))
        for mark in item.iter_markers():
            if mark.name in {"full", "long", "thin", "cases"} and not has_reason(mark):
                wrong.add(f"{function}: {mark.name} needs a reason")
            if mark.name == "cases" and whole:
                patterns.setdefault(function, set()).update(mark.args)
    for function, wanted in patterns.items():
        unknown = [p for p in wanted if not fnmatch.filter(cases[function], p)]
        wrong |= {f"{function}: cases has {p!r}, and no case is called so" for p in unknown}
    if wrong:
        listed = "\n  ".join(sorted(wrong))
        raise pytest.UsageError(f"the marks of these tests are wrong (tests/tiers.py):\n  {listed}")


_NUMBERS = re.compile(r"\b(?:ranks|thin)\(([^()]*(?:\([^()]*\))?[^()]*)\)")
_ONLY_LAUNCHER = re.compile(r"^pytestmark = \[?pytest\.mark\.launcher", re.M)


def may_run(file: pathlib.Path, ranks: int) -> bool:
    """Return False if no test of a file runs on this many ranks (0: tests that start MPI).

    Read from the text, because importing all files takes longer than many of their tests.
    """
    text = file.read_text()
    if ranks == 0:
        return "mark.launcher" in text
    if _ONLY_LAUNCHER.search(text):
        return False
    if ALL or ranks == 2:
        return True
    return any(str(ranks) in words or "*" in words for words in _NUMBERS.findall(text))
