"""Multi-start, continuation, and pictures of their histories."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpigrad import optimize
from mpigrad.checkpoint import Checkpoint
from mpigrad.communicator import Communicator
from mpigrad_apps.loss_history import draw_history


@pytest.fixture
def directory(tmp_path: pathlib.Path, comm: Communicator) -> pathlib.Path:
    return comm.mpi.bcast(tmp_path)


def test_the_best_of_several_starts(comm: Communicator, directory: pathlib.Path) -> None:
    def two_wells(x: Any) -> Any:
        return (jnp.sum((x**2 - 1) ** 2) + 0.3 * jnp.sum(x)) / comm.size

    starts = [np.array([2.0]), np.array([np.inf]), np.array([-0.5])]
    found = optimize.multi_start(
        two_wells, starts, replicated=True, history=directory / "run.jsonl"
    )
    assert found.solutions[1] is None
    assert found.best is found.solutions[2]
    assert found.solutions[0].stats["loss"] > found.best.stats["loss"] + 0.5
    np.testing.assert_allclose(found.best.value, -1.0355, atol=1e-3)
    with pytest.raises(RuntimeError, match="none of 1 starts has a finite loss"):
        optimize.multi_start(two_wells, starts[1:2], replicated=True)
    if comm.rank == 0:
        assert sorted(p.name for p in directory.glob("*.jsonl")) == [
            "run-0.jsonl", "run-1.jsonl", "run-2.jsonl",
        ]  # fmt: skip
        with (directory / "run-2.jsonl").open("a") as file:
            file.write('{"iteration": 99, "lo')  # a run that is still writing
        picture = draw_history(directory / "run-2.jsonl", directory / "run.png")
        assert picture.png == (directory / "run.png").read_bytes()
        assert picture.png.startswith(b"\x89PNG")
        assert draw_history(found.best.stats["history"], by="seconds").png != picture.png
        with pytest.raises(ValueError, match="the history is empty"):
            draw_history([])
        with pytest.raises(ValueError, match=r"by must be .* got 'time'"):
            draw_history(found.best.stats["history"], by="time")


@pytest.mark.thin(1)
def test_nan_is_not_the_best_and_a_signal_ends_all_starts(
    comm: Communicator, directory: pathlib.Path
) -> None:
    def f(x: Any) -> Any:
        return jnp.where(jnp.sum(x) > 5, jnp.nan, jnp.sum((x - 1) ** 2)) / comm.size

    starts = [np.array([4.9]), np.array([0.0])]
    away = optimize.Optax(optax.sgd(-0.5))
    found = optimize.multi_start(f, starts, away, replicated=True, max_steps=3)
    assert found.solutions[0].result is optimize.Result.NOT_FINITE
    assert found.best is found.solutions[1]

    with pytest.raises(optimize.NotFiniteError) as raised:
        optimize.continuation(
            [lambda x: jnp.sum(x**2) / comm.size, f],
            starts[0],
            [optimize.LBFGS(), optimize.Optax(optax.sgd(100.0))],
            replicated=True,
            max_steps=3,
        )
    assert len(raised.value.earlier) == 1
    assert raised.value.solution.stats["num_steps"] > 0

    def asks(record: Any, x: Any) -> None:  # in the iteration that converges
        if record.gradient_norm < 1e-6:
            os.kill(os.getpid(), signal.SIGTERM)

    once = optimize.multi_start(
        f, starts, replicated=True, callback=asks, checkpoint=Checkpoint(directory)
    )
    assert len(once.solutions) == 1 and once.best.stats["interrupted"]
    assert once.best.result is optimize.Result.SUCCESSFUL


@pytest.mark.thin(1)
def test_continuation_continues_after_a_restart(
    comm: Communicator, directory: pathlib.Path
) -> None:
    """A smooth objective on 4 points, then a wavy one on 8."""

    def wavy(height: float) -> Any:
        def f(x: Any) -> Any:
            bumps = height * (1 - jnp.cos(9 * (x - 1.05)))
            return jnp.sum((x - 1) ** 2 + bumps) / comm.size

        return f

    losses = lambda solution: [record.loss for record in solution.stats["history"]]
    finer = lambda stage, x: np.repeat(np.asarray(x), 2)
    run = functools.partial(
        optimize.continuation,
        [wavy(0.0), wavy(0.3)],
        np.full(4, 3.0),
        [optimize.LBFGSB(bounds=(-9.0, 9.0)), optimize.LBFGS(memory=4)],
        transfer=finer,
        replicated=True,
        checkpoint=Checkpoint(directory / "saved", every=1, resume=True),
    )
    # The first run is stopped in each stage.
    (stopped,) = run(callback=lambda record, x: record.iteration == 1)
    assert stopped.result is optimize.Result.STOPPED
    first, second = run(callback=lambda record, x: record.iteration == 1 and x.size == 8)
    assert [r.iteration for r in first.stats["history"]] == list(range(len(first.stats["history"])))
    assert losses(first)[:2] == losses(stopped)
    assert second.stats["history"][-1].iteration == 1
    again, second = run()
    assert losses(again) == losses(first)  # it was finished, so nothing is computed again
    assert second.stats["history"][-1].iteration > 1
    assert first.value.shape == (4,)
    assert second.value.shape == (8,)
    np.testing.assert_allclose(second.value, 1.0, atol=0.1)
    with pytest.raises(ValueError, match="2 objectives and 1 methods"):
        optimize.continuation([wavy(0.0)] * 2, np.zeros(1), [optimize.LBFGS()])
