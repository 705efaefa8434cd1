"""A request to stop, at whatever moment: the report of what there is, and what can be resumed."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from mpigrad import checkpoint
from mpigrad.launch.applications import application

CASES = {
    "acoustic": ({"cells": (16, 12), "shots": 2, "pml": 4}, "stopped after step"),
    "elastic": ({"cells": (16, 12), "shots": 2, "pml": 4, "frames": 0}, "stopped after step"),
    "heat": ({"cells": (8, 8), "duration": 0.01, "frames": 4}, "stopped at step 0"),
    "poisson": ({"cells": (8, 8)}, "stopped at iteration 0"),
}


@pytest.mark.cases("acoustic", "heat", reason="test_run.py of poisson stops iterations")
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_asked_to_stop_reports_what_there_is(comm, directory, name):
    """The signal of one rank arrives before the loop, and the run ends after its first turn."""
    values, ending = CASES[name]
    app = application(name)
    settings = app.settings_class()(out=directory, **values)
    with checkpoint.listen():
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        app.run_function()(settings, comm)
    comm.mpi.Barrier()
    assert ending in (directory / "report.html").read_text()
    if name == "acoustic":
        gathers = np.load(directory / "gathers.npz")["gathers"]
        assert gathers.shape[-1] > 0 and gathers.shape[:1] == (2,)
    if name == "poisson":
        assert any((directory / "restart" / "stage0").glob("save-*"))


@pytest.mark.cases("heat", reason="the shortest run")
@pytest.mark.parametrize("name", ["acoustic", "heat", "sgd"])
def test_the_launcher_waits_while_nothing_is_saved(comm, directory, monkeypatch, name):
    """Rank 0 holds the grace time in the first segment, frame or epoch, which compile."""
    held, requested = [], checkpoint.Interruption.requested

    def look(self):
        held.append((directory / "held").exists())
        return requested(self)

    monkeypatch.setenv("MPIGRAD_STOP_FILE", str(directory / "stop"))
    monkeypatch.setattr(checkpoint.Interruption, "requested", look)
    app = application(name)
    values = CASES[name][0] if name in CASES else {"epochs": 1, "mode": ("synchronous",)}
    app.run_function()(app.settings_class()(out=directory, **values), comm)
    assert comm.rank > 0 or (held[0] and held[-1] == (name != "sgd"))
    comm.mpi.Barrier()
    assert not (directory / "held").exists()
