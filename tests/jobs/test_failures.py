"""Failed jobs: the errors that the caller gets, and pools that work afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad import jobs
from mpigrad.communicator import Communicator


def simulate(x: Any) -> Any:
    """A simulator that is not written in JAX."""
    if x < 0:
        raise FloatingPointError(f"no step is small enough at {float(x):g}")
    return np.sqrt(x)


def failing(params: Any, item_params: Any, item: Any) -> Any:
    """Raise an exception if the product is negative."""
    return jobs.host_call(simulate, jnp.zeros(()), params * item_params * item)


def nan(params: Any, item_params: Any, item: Any) -> Any:
    """Return NaN if the product is negative."""
    return jnp.sqrt(params * item_params * item)


@pytest.mark.parametrize(
    "fn",
    [
        failing,
        pytest.param(nan, marks=pytest.mark.full("exceptions reach the ranks as NaN, too")),
    ],
)
def test_failures_reach_every_rank(fn: Any, comm: Communicator) -> None:
    pool = jobs.pool(comm)
    data = pool.put([float(i) for i in range(7)], block=2)
    good = jnp.ones(7)
    bad = good.at[2].set(-1).at[5].set(-2)
    f, total = pool.map(fn, data), pool.sum(fn, data)
    for _ in range(3):  # the pool stays usable
        for g in (f, total):
            with pytest.raises(jobs.JobError) as caught:
                g(2.0, bad)
            failures = caught.value.failures
            assert [failure.job for failure in failures] == [2, 5]
            assert [failure.rank for failure in failures] == [
                int(data.owners[1]),
                int(data.owners[2]),
            ]
            params, item_params, item = failures[1].inputs
            assert (params, item_params, item) == (2.0, -2.0, 5.0)
            text = str(caught.value)
            assert "2 of 7 jobs failed" in text and "job 5 on rank" in text
            if fn is failing:
                assert failures[0].kind == "FloatingPointError"
                assert failures[0].message == "no step is small enough at -4"
                assert "in simulate" in failures[0].traceback and "in simulate" in text
            else:
                assert failures[0].kind == "NaN"
        np.testing.assert_allclose(f(2.0, good), np.sqrt(2.0 * np.arange(7)))
        np.testing.assert_allclose(total(2.0, good), np.sqrt(2.0 * np.arange(7)).sum())
    # In a program of the user's own, the text comes with JAX's error.
    with pytest.raises(jax.errors.JaxRuntimeError, match="2 of 7 jobs failed"):
        jax.jit(lambda x: 3 * total(2.0, x))(bad)
    np.testing.assert_allclose(f(2.0, good)[1], np.sqrt(2.0))


def test_nan_on_request(comm: Communicator) -> None:
    pool = jobs.pool(comm, throw=False)
    data = pool.put([float(i) for i in range(5)])
    bad = jnp.ones(5).at[3].set(-1)
    ys = pool.map(failing, data)(1.0, bad)
    np.testing.assert_array_equal(np.isnan(ys), np.arange(5) == 3)
    assert np.isnan(pool.sum(nan, data)(1.0, bad))


@pytest.mark.ranks(2)
def test_nan_in_a_gradient(comm: Communicator) -> None:
    pool = jobs.pool(comm)
    f = pool.sum(nan, pool.put([1.0, 2.0, 3.0]))
    value = jax.jit(jax.value_and_grad(f))
    with pytest.raises(jax.errors.JaxRuntimeError, match="job 1 on rank"):
        value(2.0, jnp.asarray([1.0, -1.0, 1.0]))
    np.testing.assert_allclose(value(2.0, jnp.ones(3))[0], np.sqrt([2, 4, 6]).sum())


@pytest.mark.ranks(2)
def test_errors_of_tracing(comm: Communicator) -> None:
    pool = jobs.pool(comm)
    data = pool.put([np.ones(2), np.ones(3), np.ones(4)])

    def refuses(params: Any, item_params: Any, item: Any) -> Any:
        if len(item) > 2:
            raise LookupError(f"no table of length {len(item)}")
        return params

    with pytest.raises(jobs.JobError, match="no table of length 3") as caught:
        pool.sum(refuses, data)(1.0)
    assert [failure.job for failure in caught.value.failures] == [1, 2]
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(jobs.JobError, match="expected floating-point results"):
        pool.sum(lambda s, m, r: jobs.host_call(int, jnp.zeros((), int), s), data)(1.0)


@pytest.mark.full("rare cases of the messages that test_failures_reach_every_rank checks")
@pytest.mark.ranks(2)
def test_each_failure_has_its_own_message(comm: Communicator) -> None:
    """The message is not that of an earlier program, and batches with good members have one."""
    bad = jnp.asarray([1.0, -1.0])
    lenient, pool = jobs.pool(comm, throw=False), jobs.pool(comm)
    lenient.map(failing, lenient.put([1.0, 2.0]))(1.0, bad)
    with pytest.raises(jobs.JobError) as caught:
        pool.map(nan, pool.put([1.0, 2.0]))(1.0, bad)
    assert [failure.kind for failure in caught.value.failures] == ["NaN"]

    def pair(params: Any, item_params: Any, item: Any) -> Any:
        return failing(params, item_params, item) * jnp.ones(2)  # a batch is more than one message

    f = pool.map(pair, pool.put([1.0, 2.0]))
    with pytest.raises(jobs.JobError, match="no step is small enough at -2"):
        jax.vmap(f, (None, 0))(1.0, jnp.stack([jnp.ones(2), bad]))
    infinite = pool.sum(lambda s, m, r: s * r / 0.0, pool.put([1.0, -1.0]))
    with pytest.raises(jobs.JobError, match="infinities of both signs"):
        infinite(1.0)
    with pytest.raises(Exception, match="no step is small enough"):  # outside a job
        jobs.host_call(simulate, jnp.zeros(()), -1.0)


@pytest.mark.ranks(2)
def test_messages_from_nested_pools_and_compiled_functions(comm: Communicator) -> None:
    """The messages name the outer job, also if a compiled function serves several traces."""
    pool = jobs.pool(comm)
    root = jax.jit(lambda x: jobs.host_call(simulate, jnp.zeros(()), x))
    inner = pool.sum(lambda x, _, r: root(x * r), pool.put([1.0, 4.0], everywhere=True))
    data = pool.put([1.0, 1.0, 1.0, -2.0])
    for make in (pool.map, pool.sum):
        f = make(lambda params, _, item: inner(params * item) + root(params), data)
        with pytest.raises(jobs.JobError) as caught:
            f(1.0)
        (failure,) = caught.value.failures
        assert (failure.job, failure.kind) == (3, "FloatingPointError")
        assert failure.message in (f"no step is small enough at {x}" for x in (-2, -8))
    np.testing.assert_allclose(pool.sum(lambda s, m, r: root(s), data)(4.0), 8)
