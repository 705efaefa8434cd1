"""The pytest session of one rank: `python tests/session.py DIRECTORY pytest-arguments…`.

Every rank keeps a diary in DIRECTORY (one JSON object a line), from which `run.py` knows who was
where when something went wrong. Rank 0's output is shown, that of the others goes to files.
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


class Diary:
    """Notes the start and outcome of each test, and keeps the ranks together between tests."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = path.open("w")
        # A rank that fails must not go on to the next test while others wait in this one: their
        # messages would meet the wrong partners. On a communicator of its own, like mpigrad's.
        self._world = MPI.COMM_WORLD.Dup()

    def note(self, **entry: Any) -> None:
        print(json.dumps({"time": time.time(), **entry}), file=self._file, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.note(collected=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(test=report.nodeid, outcome="failed", text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            text = report.longreprtext if report.failed else ""
            self.note(test=report.nodeid, outcome=report.outcome, text=text)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._world.Barrier()
        self.note(end=nodeid)


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
    diary.note(finished=int(code))
    MPI.COMM_WORLD.Barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
