"""SciPy's optimizers as methods of `minimize`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import mpigrad
from mpigrad import optimize
from mpigrad.communicator import Communicator

START = np.array([-1.2, 1.0, 0.7, 1.3, -0.4])
LOWER, UPPER = np.array([-2.0, -np.inf, 0.1, -1.0, -1.0]), 0.8


def rosenbrock(x: Any) -> Any:
    return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


@jax.jit
def serial(x: Any) -> Any:
    return jax.value_and_grad(rosenbrock)(x)


def own_rows(comm: Communicator, x: np.ndarray) -> np.ndarray:
    """Put all rows but one on the last rank; with many ranks some have no rows."""
    ends = [0, 1, *[1] * (comm.size - 2), len(x)] if comm.size > 1 else [0, len(x)]
    return x[ends[comm.rank] : ends[comm.rank + 1]]


def reference(name: str, start: np.ndarray, **settings: Any) -> tuple[Any, list[np.ndarray]]:
    """Run SciPy in one process. Return its result and the points to which it moved."""
    points = [start]

    def note(x: np.ndarray) -> None:
        if np.any(x != points[-1]):
            points.append(np.array(x))

    done = scipy.optimize.minimize(
        lambda x: tuple(map(np.asarray, serial(x))),
        start,
        jac=True,
        method=name,
        callback=note,
        **settings,
    )
    return done, points


@pytest.mark.parametrize(
    "sharded",
    [
        pytest.param(False, id="replicated"),
        pytest.param(
            True,
            id="sharded",
            marks=pytest.mark.full("the replicated case compares the same iterates"),
        ),
    ],
)
def test_iterates_are_those_of_serial_scipy(comm: Communicator, sharded: bool) -> None:
    """With bounds, by L-BFGS-B, and with Hessian products, by trust-ncg."""
    counts = [len(rows) for rows in comm.mpi.allgather(own_rows(comm, START))]
    cut = (lambda x: own_rows(comm, x)) if sharded else np.asarray
    join = (lambda x: np.concatenate(comm.mpi.allgather(x))) if sharded else np.asarray

    def share(x: Any) -> Any:
        whole = mpigrad.allgatherv(x, counts) if sharded else x
        return rosenbrock(whole) * (comm.rank + 1) / (comm.size * (comm.size + 1) / 2)

    objective = optimize.Objective(share, cut(START), sharded=sharded)
    points: list[np.ndarray] = []

    def run(method: optimize.SciPy) -> optimize.Solution:
        points.clear()
        note = lambda record, x: points.append(join(x))
        return optimize.minimize(objective, cut(START), method, rtol=0, callback=note)

    solution = run(optimize.SciPy("L-BFGS-B", bounds=(cut(LOWER), UPPER)))
    bounds = [(low, UPPER) for low in LOWER]
    compare(solution, points, *reference("L-BFGS-B", np.clip(START, LOWER, UPPER), bounds=bounds))
    options = {"gtol": 1e-9}
    solution = run(optimize.SciPy("trust-ncg", options=options))
    product = lambda x, v: jax.jvp(jax.grad(rosenbrock), (x,), (v,))[1]
    compare(solution, points, *reference("trust-ncg", START, options=options, hessp=product))
    assert solution.stats["products"] > 0


def compare(
    solution: optimize.Solution, points: list[np.ndarray], done: Any, expected: list[np.ndarray]
) -> None:
    for a, b in zip(points[:11], expected[:11], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(points[-1], done.x, rtol=1e-6)
    assert solution.result is optimize.Result.SUCCESSFUL
    assert solution.stats["loss"] == pytest.approx(done.fun, rel=1e-6, abs=1e-12)
    assert solution.stats["evaluations"] <= done.nfev + 1
    assert len(points) == len(solution.stats["history"])


@pytest.mark.ranks(2)
def test_ends_and_errors_reach_all_ranks(comm: Communicator) -> None:
    half = lambda x: rosenbrock(x) / 2
    objective = optimize.Objective(half, START, replicated=True)
    few = optimize.minimize(objective, START, optimize.SciPy("BFGS"), max_steps=3)
    assert few.result is optimize.Result.MAX_STEPS_REACHED
    assert few.stats["history"][-1].iteration == 3
    stop = lambda record, x: comm.rank == 1 and record.iteration == 2
    stopped = optimize.minimize(objective, START, optimize.SciPy("TNC"), callback=stop)
    assert stopped.result is optimize.Result.STOPPED
    # A gradient of the wrong sign: no line search succeeds.
    wrong_sign = lambda x: (serial(x)[0], -serial(x)[1])
    settings = {"value_and_grad": wrong_sign, "rtol": 0.0, "replicated": True}
    with pytest.raises(optimize.MinimizeError, match="SciPy's method ended without") as raised:
        optimize.minimize(None, START, optimize.SciPy("BFGS"), **settings)
    assert raised.value.solution.result is optimize.Result.SCIPY_FAILED
    failed = optimize.minimize(None, START, optimize.SciPy("BFGS"), throw=False, **settings)
    assert failed.result is optimize.Result.SCIPY_FAILED
    # An error of SciPy in its thread reaches all ranks.
    wrong = optimize.SciPy("BFGS", options={"xrtol": "small"})
    with pytest.raises(TypeError):
        optimize.minimize(objective, START, wrong)
    # So does an error of one rank in an evaluation.
    calls: list[int] = []

    def fails(x: Any) -> Any:
        calls.append(1)
        if comm.rank == 1 and len(calls) == 3:
            raise ArithmeticError("the mesh of rank 1 is empty")
        return serial(x)

    with pytest.raises(ArithmeticError, match="rank 1 is empty"):
        optimize.minimize(None, START, optimize.SciPy(), value_and_grad=fails, replicated=True)


@pytest.mark.ranks(2)
def test_rejects_invalid_settings(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="got 'Powell'"):
        optimize.SciPy("Powell")
    with pytest.raises(ValueError, match="CG does not support bounds"):
        optimize.SciPy("CG", bounds=(0, 1))
    with pytest.raises(ValueError, match="pair"):
        optimize.SciPy(bounds=(0, 1, 2))  # type: ignore[arg-type]
    last = np.where(np.arange(5) == 4, 2.0, 0.0)  # on the last rank's part of the unknowns
    for bounds in ((last, 1.0), (np.nan, 1.0)):
        with pytest.raises(ValueError, match="must be at most its upper bound"):
            optimize.minimize(rosenbrock, START, optimize.SciPy(bounds=bounds), replicated=True)
    with pytest.raises(ValueError, match="bounds do not fit"):
        wrong = optimize.SciPy(bounds=(np.zeros(3), None))
        optimize.minimize(rosenbrock, START, wrong, replicated=True)
