"""Note which lines of src/ each test executes, also in the jobs that it starts.

`tests/lines/run.py` puts this folder on PYTHONPATH. Every process appends to a file of its own: `T`
and a test, then the lines that the test executes. Needs Python 3.12 (PEP 669).
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import CodeType

SOURCES = os.environ.get("MPIGRAD_LINES_OF", "") + "/"
FOLDER = os.environ.get("MPIGRAD_LINES_IN", "")


class Recorder:
    """Writes a line at once, because a job may be killed."""

    def __init__(self) -> None:
        self.tool, self.events = sys.monitoring.COVERAGE_ID, sys.monitoring.events
        self.open()
        os.register_at_fork(after_in_child=self.open)
        sys.monitoring.use_tool_id(self.tool, "mpigrad lines")
        sys.monitoring.register_callback(self.tool, self.events.PY_START, self.function)
        sys.monitoring.register_callback(self.tool, self.events.LINE, self.line)
        sys.monitoring.set_events(self.tool, self.events.PY_START)

    def open(self) -> None:
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self.file = os.open(f"{FOLDER}/{os.getpid()}", flags, 0o644)
        os.write(self.file, f"T {os.environ.get('MPIGRAD_LINES_TEST', '')}\n".encode())

    def function(self, code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(SOURCES):
            sys.monitoring.set_local_events(self.tool, code, self.events.LINE)
        return sys.monitoring.DISABLE

    def line(self, code: CodeType, number: int) -> object:
        with contextlib.suppress(OSError):  # the test has closed all files
            os.write(self.file, f"{code.co_filename[len(SOURCES) :]}:{number}\n".encode())
        return sys.monitoring.DISABLE

    def begin(self, test: str) -> None:
        """Note what follows for this test."""
        os.environ["MPIGRAD_LINES_TEST"] = test
        os.write(self.file, f"T {test}\n".encode())
        sys.monitoring.restart_events()


if FOLDER and sys.version_info >= (3, 12):
    sys.modules["executed_lines"] = Recorder()  # type: ignore[assignment]  # tests/session.py
