"""Several starts, several stages, and pictures of what they did."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad import optimize
from mpigrad.communicator import Communicator


@pytest.fixture
def directory(tmp_path: pathlib.Path, comm: Communicator) -> pathlib.Path:
    return comm.mpi.bcast(tmp_path)


@pytest.mark.ranks(1, 2)
def test_the_best_of_several_starts(comm: Communicator, directory: pathlib.Path) -> None:
    def two_wells(x: Any) -> Any:
        return (jnp.sum((x**2 - 1) ** 2) + 0.3 * jnp.sum(x)) / comm.size

    starts = [np.array([2.0]), np.array([np.inf]), np.array([-0.5])]
    found = optimize.multi_start(two_wells, starts, history=directory / "run.jsonl")
    assert found.solutions[1] is None
    assert found.best is found.solutions[2]
    assert found.solutions[0].loss > found.best.loss + 0.5
    np.testing.assert_allclose(found.best.value, -1.0355, atol=1e-3)
    with pytest.raises(RuntimeError, match="the loss of none of 1 starts"):
        optimize.multi_start(two_wells, starts[1:2])
    if comm.rank == 0:
        assert sorted(p.name for p in directory.glob("*.jsonl")) == [
            "run-0.jsonl", "run-1.jsonl", "run-2.jsonl",
        ]  # fmt: skip
        with (directory / "run-2.jsonl").open("a") as file:
            file.write('{"iteration": 99, "lo')  # of a run that is under way
        picture = optimize.draw_history(directory / "run-2.jsonl", directory / "run.png")
        assert picture.png == (directory / "run.png").read_bytes()
        assert picture.png.startswith(b"\x89PNG")
        assert optimize.draw_history(found.best.history, by="seconds").png != picture.png
        with pytest.raises(ValueError, match="no record"):
            optimize.draw_history([])
        with pytest.raises(ValueError, match="by='time'"):
            optimize.draw_history(found.best.history, by="time")


@pytest.mark.ranks(1, 2)
def test_stages_lead_where_one_does_not(comm: Communicator) -> None:
    """From a smooth objective to a wavy one, on grids of 4 and then 8 points."""

    def wavy(height: float) -> Any:
        def f(x: Any) -> Any:
            bumps = height * (1 - jnp.cos(9 * (x - 1)))
            return jnp.sum((x - 1) ** 2 + bumps) / comm.size

        return f

    finer = lambda stage, x: np.repeat(np.asarray(x), 2)
    first, second = optimize.stages(
        [wavy(0.0), wavy(0.3)], np.full(4, 3.0), optimize.LBFGS(memory=4), between=finer
    )
    assert first.value.shape == (4,)
    assert second.value.shape == (8,)
    np.testing.assert_allclose(second.value, 1.0, atol=1e-5)
    alone = optimize.minimize(wavy(0.3), np.full(8, 3.0), optimize.LBFGS(memory=4))
    assert alone.loss > 0.1
    with pytest.raises(ValueError, match="2 objectives and 1 methods"):
        optimize.stages([wavy(0.0)] * 2, np.zeros(1), [optimize.LBFGS()])
