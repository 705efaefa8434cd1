"""A plugin of pytest that writes the outcome of each test on this rank, line by line."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from mpi4py import MPI

FOLDER = "MPIGRAD_PEER_OUTCOMES"


class _Outcomes:
    def __init__(self) -> None:
        folder = pathlib.Path(os.environ[FOLDER])
        self.file = (folder / f"rank{MPI.COMM_WORLD.rank}.jsonl").open("w", buffering=1)

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:  # a test that never ends has this line alone
            self._write(item.nodeid, "not run", "")

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped or report.when == "call":
            text = str(report.longrepr) if report.failed else ""
            self._write(report.nodeid, report.outcome, text)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", str(report.longrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._write("", "ended", "")
        session.exitstatus = 0  # the outcomes are compared outside: no rank ends the others

    def _write(self, test: str, outcome: str, text: str) -> None:
        line: dict[str, Any] = {"test": test, "outcome": outcome, "text": text}
        print(json.dumps(line), file=self.file)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Outcomes())
