"""Misuse of a pool is an error on every rank, and the pool works afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad import jobs
from mpigrad.communicator import Communicator, default_communicator

pytestmark = pytest.mark.ranks(2)


def product(params: Any, item_params: Any, item: Any) -> Any:
    return params * item


def test_ranks_that_put_differently(comm: Communicator) -> None:
    class Local(NamedTuple):  # which pickle can't send
        x: float

    pool = jobs.pool(comm)
    items = [Local(1.0), Local(2.0)]
    assert pool.put(items).jobs == 2  # nothing has to be sent
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        pool.put(items if comm.rank == 0 else None)
    schedule = jobs.Dynamic() if comm.rank == 0 else jobs.Static()
    with pytest.raises(ValueError, match="schedule and everywhere must be the same"):
        pool.put([1.0, 2.0], schedule=schedule)
    data = pool.put([1.0, 2.0] if comm.rank == 0 else None, schedule=schedule)
    assert data.dynamic and data.everywhere
    pool.close()


def test_rejects_items_of_another_pool_and_raises_errors_of_measure(comm: Communicator) -> None:
    def bad(params: Any, item_params: Any, item: Any) -> Any:
        raise LookupError("no such table")

    pool = jobs.pool(comm)
    one = pool.put([1.0])  # kept on rank 0 alone
    with pytest.raises((LookupError, RuntimeError), match="no such table"):
        pool.measure(bad, one, 1.0)
    inner = pool.sum(product, one)
    with pytest.raises(jobs.JobError, match="everywhere=True"):
        pool.sum(lambda s, m, r: inner(s), pool.put([1.0, 2.0]))(1.0)
    with pytest.raises(ValueError, match="a pool of other ranks"):
        jobs.pool(default_communicator().split(comm.rank)).sum(product, one)
    few = pool.put([np.ones(2), np.ones(3)], block=100)
    assert all(bucket.block == 1 for bucket in few.buckets)


def test_rejects_closures_over_traced_values(comm: Communicator) -> None:
    """Cotangents of other ranks' jobs would not arrive at a value that `fn` closes over."""
    pool = jobs.pool(comm)
    data = pool.put([np.ones(2), np.ones(2)])

    def loss(x: Any) -> Any:
        return jnp.sum(pool.map(lambda params, item_params, item: x * item, data)(1.0))

    with pytest.raises(jobs.JobError, match="closes over traced values"):
        jax.grad(loss)(2.0)


def test_results_of_weak_type(comm: Communicator) -> None:
    """Python scalars from some jobs have the dtype of the other results."""
    pool = jobs.pool(comm)
    data = pool.put([np.ones(0), np.ones(2)])
    total = pool.sum(lambda s, m, r: s * jnp.sum(r) if len(r) else 0.0, data)
    assert jax.grad(total)(3.0) == 2.0


def test_after_the_end_of_a_pool(comm: Communicator) -> None:
    with jobs.pool(comm) as pool:
        f = pool.sum(product, pool.put([1.0, 2.0, 3.0], schedule=jobs.Dynamic(), block=1))
        later = pool.start(f, 2.0)
    assert later.result() == 12.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="the pool is closed"):
        f(2.0)


def test_started_evaluations_use_the_callers_precision(comm: Communicator) -> None:
    pool = jobs.pool(comm)
    with jax.enable_x64(False):
        data = pool.put([np.ones(2, "float32")] * 2)
        assert pool.start(pool.sum(product, data), 1.0).result().dtype == "float32"
    pool.close()


def test_misuse_by_the_root(comm: Communicator) -> None:
    with jobs.root_pool(product, comm=comm) as pool:
        if pool is not None:
            data = pool.put([1.0, 2.0])
            assert pool.measure(product, data, 1.0).shape == (2,)
            with pytest.raises(RuntimeError, match="inside another root_pool"):
                jobs.root_pool(product, comm=comm).__enter__()
            f = pool.sum(product, data)
            assert f(2.0) == 6.0
    if pool is not None:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="the other ranks have stopped serving"
        ):
            f(2.0)


def test_put_while_a_program_is_traced(comm: Communicator) -> None:
    """put works in a program, but not in a job, which ranks may trace unequally often."""
    pool = jobs.pool(comm)
    double = jax.jit(lambda x: 2 * pool.sum(product, pool.put([3.0]))(x))
    assert double(2.0) == 12.0
    data = pool.put([1.0])
    for what in ("put", "measure"):

        def bad(params: Any, item_params: Any, item: Any, what: str = what) -> Any:
            more = ([3.0],) if what == "put" else (product, data, 1.0)
            getattr(pool, what)(*more)
            return params

        with pytest.raises(jobs.JobError, match="cannot be called inside a job"):
            pool.sum(bad, data)(1.0)
