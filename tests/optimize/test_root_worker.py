"""Serial optimizers on the root get the same values as in one process."""

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

START = {"a": np.array([-1.2, 1.0]), "b": np.array([[0.7], [1.3]])}


def rosenbrock(x: Any) -> Any:
    """In four dimensions, as a pytree."""
    y = jnp.concatenate([x["a"], x["b"].ravel()])
    return jnp.sum(100 * (y[1:] - y[:-1] ** 2) ** 2 + (1 - y[:-1]) ** 2)


def shared(comm: Communicator) -> Any:
    """Return Rosenbrock's function; the share of rank r is (r + 1) / (1 + 2 + ... + size)."""
    weight = (comm.rank + 1) / (comm.size * (comm.size + 1) / 2)
    return lambda x: weight * rosenbrock(x)


def flat(x: Any) -> Any:
    return rosenbrock(dict(a=x[:2], b=x[2:].reshape(2, 1)))


def serially(x: np.ndarray) -> tuple[float, np.ndarray]:
    value, gradient = _serial(dict(a=x[:2], b=x[2:].reshape(2, 1)))
    return float(value), np.concatenate([gradient["a"], gradient["b"].ravel()])


_serial = jax.jit(jax.value_and_grad(rosenbrock))
_product = jax.jit(lambda x, v: jax.jvp(jax.grad(flat), (x,), (v,))[1])
METHODS = ("CG", "BFGS", "L-BFGS-B", "Newton-CG")


def iterates(value_and_gradient: Any, hessp: Any, x0: Any, method: str) -> Any:
    found: list[np.ndarray] = []
    scipy.optimize.minimize(
        value_and_gradient, x0, jac=True, method=method, options={"maxiter": 10},
        hessp=hessp if method == "Newton-CG" else None,
        callback=lambda x: found.append(np.array(x)),
    )  # fmt: skip
    return np.array(found)


def test_scipy_takes_the_serial_steps(comm: Communicator) -> None:
    """Compare ten iterations to 1e-8, with the last rank as the root."""
    root = comm.size - 1
    with optimize.root_objective(shared(comm), START, root=root) as objective:
        assert bool(objective) == (comm.rank == root)
        if objective:
            ask = objective.value_and_gradient, objective.hessp, objective.x0
            found = {method: iterates(*ask, method) for method in METHODS}
            # The Hessian, by columns: forward over reverse over ranks.
            hessian = objective.hessian(objective.x0)
            of_tree = objective.hessp(START, START)
            objective.result = found, hessian, of_tree, objective.evaluations
    found, hessian, of_tree, evaluations = comm.mpi.bcast(objective.result, 0)
    assert evaluations > 40
    for method in METHODS:
        expected = iterates(serially, _product, objective.x0, method)
        assert len(expected) > 3
        np.testing.assert_allclose(found[method], expected, rtol=1e-8, atol=1e-10, err_msg=method)
    exact = jax.hessian(flat)(objective.x0)
    np.testing.assert_allclose(hessian, exact, rtol=1e-12, atol=1e-12)
    product = np.concatenate([of_tree["a"], of_tree["b"].ravel()])
    np.testing.assert_allclose(product, exact @ objective.x0, rtol=1e-12)


@pytest.mark.ranks(1, 2)
def test_evaluations_and_forms_of_results(comm: Communicator) -> None:
    calls: list[str] = []

    def both(x: Any) -> Any:
        calls.append("both")
        return _serial(x)

    def value(x: Any) -> Any:
        jax.debug.callback(lambda: calls.append("value"))
        return rosenbrock(x)

    with optimize.root_objective(value, START, loss="replicated", value_and_grad=both) as objective:
        if objective:
            value_at = objective.value(objective.x0)
            assert objective.value(START) == value_at
            assert type(value_at) is float
            assert objective.evaluations == 1
            gradient = objective.gradient(objective.x0)
            assert gradient.dtype == np.float64
            gradient[:] = 0  # an optimizer may change its arrays in place
            tree = objective.gradient(START)
            assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, START)
            np.testing.assert_allclose(tree["a"], _serial(START)[1]["a"])
            assert objective.value_and_gradient(START)[0] == pytest.approx(value_at, rel=1e-14)
            assert objective.evaluations == 2
            # A point of another structure is an error on the root only.
            with pytest.raises(ValueError, match="has another structure than x0"):
                objective.value(np.zeros(5))
            objective.result = jnp.arange(3.0)
    assert calls == ["value", "both"]
    np.testing.assert_array_equal(objective.result, np.arange(3.0))
    with pytest.raises(RuntimeError, match=r"after its `with` block|only rank 0 may call"):
        objective.value(np.zeros(4))


@pytest.mark.ranks(2)
def test_values_that_are_not_finite_reach_the_optimizer(comm: Communicator) -> None:
    """It shortens its step as in one process."""

    def f(x: Any) -> Any:
        return jnp.sum(x - jnp.log(x)) / comm.size  # NaN where x < 0

    x0 = np.array([8.0, 0.4])
    with optimize.root_objective(f, x0) as objective:
        if objective:
            value, gradient = objective.value_and_gradient(-x0)
            assert np.isnan(value)
            assert np.isfinite(gradient).all()
            objective.result = scipy.optimize.minimize(
                objective.value_and_gradient, x0, jac=True, method="L-BFGS-B"
            )
    whole = jax.jit(jax.value_and_grad(lambda x: jnp.sum(x - jnp.log(x))))
    serial = scipy.optimize.minimize(
        lambda x: tuple(map(np.asarray, whole(x))), x0, jac=True, method="L-BFGS-B"
    )
    assert objective.result.nfev == serial.nfev
    np.testing.assert_allclose(objective.result.x, serial.x, rtol=1e-8)


class Broken(Exception):
    """An error of the user's own."""


@pytest.mark.ranks(1, 2, 3)
def test_errors_reach_all_ranks_with_their_cause(comm: Communicator) -> None:
    last = comm.size - 1

    def both(x: Any) -> Any:
        if x[0] < 0 and comm.rank == last:
            raise Broken(f"no mesh for {x[0]}")
        return float(x @ x), 2 * x

    survived = False
    with (
        pytest.raises(KeyError, match="an optimizer") as caught,
        optimize.root_objective(None, np.ones(2), value_and_grad=both) as objective,
    ):
        if objective:
            # The optimizer may catch an error of an evaluation.
            with pytest.raises(Broken, match=r"no mesh for -1\.0"):
                objective.value(-np.ones(2))
            assert objective.value(np.ones(2)) == 2.0
            survived = True
            raise KeyError("an optimizer's mistake")
        raise AssertionError("workers raise before their block")
    assert survived == (comm.rank == 0)
    if comm.rank > 0:
        assert (
            "the optimizer failed that this rank evaluated for, on rank 0"
            in caught.value.__notes__[0]
        )
        assert "test_root_worker.py" in caught.value.__notes__[0]
    # An error of an evaluation that is not caught ends the block on all ranks.
    with pytest.raises(Broken), optimize.root_objective(None, np.ones(1), value_and_grad=both) as o:
        if o:
            o.gradient(-np.ones(1))
    # Results that cannot be sent.
    with (
        pytest.raises(TypeError, match="cannot be sent"),
        optimize.root_objective(None, np.ones(1), value_and_grad=both) as o,
    ):
        o.result = lambda: 0
    assert float(mpigrad.allreduce(jnp.ones(()))) == comm.size  # all ranks have left their block


@pytest.mark.ranks(2)
def test_unknowns_are_checked_before_work_starts(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="x0's leaves, shapes and dtypes must be the same"):
        optimize.root_objective(rosenbrock, np.ones(2 + comm.rank))
    with pytest.raises(TypeError, match="x0 has dtype complex128"):
        optimize.root_objective(rosenbrock, np.ones(2, complex if comm.rank else float))
    with pytest.raises(TypeError, match="f and value_and_grad are both None"):
        optimize.root_objective(None, np.ones(2))
