"""Programs that only rank 0 runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from job_cases import arguments, curve, equal_bits, items, misfit, serial_map, serial_sum

from helpers import close
from mpigrad import jobs
from mpigrad.communicator import Communicator


@pytest.mark.full("the other tests of this file run the same protocol")
def test_root_alone(comm: Communicator) -> None:
    every, (params, item_params) = items(ragged=True), arguments()
    with jobs.root_pool(comm=comm) as pool:
        if pool is not None:
            data = pool.put(every, block=2)
            f = pool.sum(misfit, data)
            serial = serial_sum(misfit, every)
            gradient = lambda f: jax.value_and_grad(f, (0, 1))
            close(f(params, item_params), serial(params, item_params), 1e-12)
            want = jax.jit(gradient(serial))(params, item_params)
            close(jax.jit(gradient(f))(params, item_params), want, 1e-12)
            later = pool.start(f, params, item_params)
            # What comes next waits for it.
            again = pool.sum(misfit, pool.put(every[:2]))(params, item_params[:2])
            close(later.result(), serial(params, item_params), 1e-12)
            close(again, serial_sum(misfit, every[:2])(params, item_params[:2]), 1e-12)
            # A loop whose length nobody knows, and a batch.
            goal = 0.9 * f(params, item_params)
            step = lambda x: x - 0.01 * jax.grad(f, 1)(params, x)
            descend = jax.jit(lambda x: jax.lax.while_loop(lambda x: f(params, x) > goal, step, x))
            assert f(params, descend(item_params)) <= goal
            chains = jnp.stack([item_params, item_params * 2])
            batch = lambda f: jax.vmap(jax.value_and_grad(f), (None, 0))
            close(jax.jit(batch(f))(params, chains), jax.jit(batch(serial))(params, chains), 1e-12)
    assert (pool is None) == (comm.rank > 0)


@pytest.mark.ranks(2)
def test_adjoint(comm: Communicator) -> None:
    every, (params, item_params) = items(ragged=True), arguments()
    with jobs.root_pool(comm=comm) as pool:
        if pool is not None:
            data = pool.put(every, block=2, schedule=jobs.Dynamic())
            f = pool.map(curve, data, derivatives="adjoint")
            loss = lambda f: lambda s, p: sum(jnp.sum(jnp.sin(y)) for y in f(s, p))
            both = lambda f: jax.jit(jax.grad(loss(f), (0, 1)))(params, item_params)
            close(both(f), both(serial_map(curve, every)), 1e-12)


@pytest.mark.full("test_jobs has second derivatives, and test_adjoint the protocol of the root")
@pytest.mark.ranks(2)
def test_second_derivatives(comm: Communicator) -> None:
    every, (params, item_params) = items(ragged=True), arguments()
    with jobs.root_pool(comm=comm) as pool:
        if pool is not None:
            data = pool.put(every, block=2, schedule=jobs.Dynamic())
            g = pool.sum(misfit, data)
            hessian = lambda g: jax.jit(jax.hessian(g))(params, item_params)
            close(hessian(g), hessian(serial_sum(misfit, every)), 1e-12)


@pytest.mark.ranks(2)
def test_errors_of_the_root(comm: Communicator) -> None:
    root = lambda params, item_params, item: jnp.sqrt(params * item_params * item)
    with jobs.root_pool(root, comm=comm) as pool:
        if pool is not None:
            data = pool.put([1.0, 2.0, 3.0])
            f = pool.map(root, data)
            for _ in range(3):
                with pytest.raises(jobs.JobError, match="job 1 on rank"):
                    f(1.0, jnp.asarray([1.0, -1.0, 1.0]))
                equal_bits(f(1.0, jnp.ones(3)), np.sqrt([1.0, 2.0, 3.0]))
            with pytest.raises(TypeError, match="a list of items"):
                pool.put("text")
            with pytest.raises(TypeError, match="cannot be sent to the other ranks"):
                pool.map(lambda s, m, r: s, data)(1.0)
            equal_bits(f(1.0, jnp.ones(3)), np.sqrt([1.0, 2.0, 3.0]))
