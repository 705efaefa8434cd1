"""The pytest session of one rank: `python tests/session.py DIRECTORY pytest-arguments…`.

Every rank keeps a diary in DIRECTORY (one JSON object a line), from which `run.py` knows who was
where when something went wrong, and how much processor time each test took. Rank 0's output is
shown, the output of the others goes to files.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import pytest
from mpi4py import MPI


def processor_seconds() -> float:
    """Return the processor time of this process, and of its children that have ended."""
    return sum(os.times()[:4])


class Diary:
    """Notes the start and outcome of each test, and keeps the ranks together between tests."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = path.open("w")
        self._long: set[str] = set()
        self._before = 0.0
        self._deadline = float(os.environ.get("MPIGRAD_TEST_DEADLINE", "inf"))  # make quick
        self._session: pytest.Session | None = None
        # A rank that fails must not go on to the next test while others wait in this one: their
        # messages would meet the wrong partners. On a communicator of its own, like mpigrad's.
        self._world = MPI.COMM_WORLD.Dup()

    def note(self, **entry: Any) -> None:
        print(json.dumps({"time": time.time(), **entry}), file=self._file, flush=True)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._long = {i.nodeid for i in session.items if i.get_closest_marker("long")}
        self.note(collected=len(session.items), cpu=processor_seconds())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(test=report.nodeid, outcome="failed", text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(start=nodeid)
        if lines := sys.modules.get("executed_lines"):
            lines.begin(nodeid)
        self._before = processor_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            text = report.longreprtext if report.failed else ""
            self.note(test=report.nodeid, outcome=report.outcome, text=text)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        cpu = processor_seconds() - self._before  # before waiting for the others
        late = self._world.allreduce(time.time() > self._deadline, MPI.LOR)  # and nobody goes on
        if late and self._session is not None:
            self._session.shouldstop = "out of time"
        self.note(end=nodeid, cpu=cpu, long=nodeid in self._long)


def main() -> int:
    """Run pytest; 0 when the session came to its end, whatever its tests said."""
    directory, *arguments = sys.argv[1:]
    rank = MPI.COMM_WORLD.rank
    if rank > 0:
        log = os.open(f"{directory}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    diary = Diary(pathlib.Path(directory) / f"rank{rank}.jsonl")
    code = pytest.main([*arguments, "-p", "no:cacheprovider"], plugins=[diary])
    diary.note(finished=int(code), cpu=processor_seconds())
    MPI.COMM_WORLD.Barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
