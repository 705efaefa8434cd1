"""Maps and sums over jobs equal the serial program, with the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from job_cases import (
    N,
    arguments,
    curve,
    equal_bits,
    items,
    misfit,
    moments,
    serial_map,
    serial_sum,
)

import mpigrad as mg
from helpers import close
from mpigrad import jobs
from mpigrad.communicator import Communicator, default_communicator
from mpigrad.runtime.native import record

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def alone() -> Communicator:
    """A communicator of this rank alone."""
    return default_communicator().split(default_communicator().rank)


def derivatives(f: Any) -> Any:
    """Value, gradient and Hessian of a scalar function."""
    both = (0, 1)
    hessian = jax.jacfwd(jax.grad(f, both), both)
    return lambda *x: (f(*x), jax.grad(f, both)(*x), hessian(*x))


@pytest.mark.long("it compiles two Hessians; test_first_example is short")
def test_sum_of_numbers(comm: Communicator, alone: Communicator) -> None:
    every, x = items(ragged=True), arguments()
    f, g = (pool.sum(misfit, pool.put(every, block=2)) for pool in map(jobs.pool, (comm, alone)))
    found = jax.jit(derivatives(f))(*x)
    # Second derivatives differ in the last bit at most.
    equal_bits(found[:2], jax.jit(lambda *x: (g(*x), jax.grad(g, (0, 1))(*x)))(*x))
    close(found, jax.jit(derivatives(serial_sum(misfit, every)))(*x), TOLERANCE)


def test_map_of_curves(comm: Communicator, alone: Communicator) -> None:
    every, x = items(ragged=True), arguments()
    w = [jnp.cos(jnp.arange(len(r["t"])) + i) for i, r in enumerate(every)]
    found = []
    for f in (
        *(pool.map(curve, pool.put(every)) for pool in map(jobs.pool, (comm, alone))),
        serial_map(curve, every),
    ):
        loss = lambda *x, f=f: sum(jnp.sum(a * y**2) for a, y in zip(w, f(*x), strict=True))
        found.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(*x))
    equal_bits(*found[:2])
    close(found[0], found[2], TOLERANCE)


def test_stan_shapes(comm: Communicator) -> None:
    """Job n returns 2 + n values, ten jobs."""
    pool = jobs.pool(comm)
    data = pool.put([np.zeros(2 + n) for n in range(10)])
    f = pool.map(lambda params, item_params, item: params * jnp.ones_like(item) + item_params, data)
    ys = f(2.0, jnp.arange(10.0))
    assert [y.shape for y in ys] == [(2 + n,) for n in range(10)]
    equal_bits(ys, [np.full(2 + n, 2.0 + n) for n in range(10)])
    assert len(data.buckets) == 10


def test_first_example(comm: Communicator) -> None:
    """f(a, b) = a + b² at (1, 2r) on rank r: gradients (1, 4r)."""
    pool = jobs.pool(comm)
    f = pool.map(lambda a, b, _: a + b**2, pool.put([None] * comm.size))
    b = 2.0 * jnp.arange(comm.size)
    by_a, by_b = jax.jacrev(f, (0, 1))(jnp.asarray(1.0), b)
    equal_bits(f(1.0, b), 1 + b**2)
    equal_bits(by_a, np.ones(comm.size))
    equal_bits(by_b, np.diag(4.0 * np.arange(comm.size)))


@pytest.mark.long("it compiles a batch in a loop; test_the_gradient_of_a_batch is short")
def test_chains_and_seeds(comm: Communicator) -> None:
    """Batched chains in a loop, a loss that is seeded on one rank, and the transpose of a map.

    Ranks without jobs are batched like rank 0.
    """
    every, (params, item_params) = items(), arguments()
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)
    pool = jobs.pool(comm)
    data = pool.put(every, block=3)

    def serial(fn: Any) -> Any:
        each = jax.vmap(fn, (None, 0, 0))
        return lambda *x: jax.tree.map(lambda y: jnp.sum(y, 0), each(*x, stack))

    def descent(f: Any) -> Any:
        gradient = jax.vmap(jax.value_and_grad(f, (0, 1)), (None, 0))

        def step(x: Any, _: Any) -> Any:
            value, (by_params, by_item_params) = gradient(params, x)
            return x - 0.01 * by_item_params, (value, by_params)

        return jax.jit(lambda x: jax.lax.scan(step, x, None, 3))

    chains = jnp.stack([item_params, item_params + 0.1, item_params * 2])
    few = pool.put(every, block=N)
    close(descent(pool.sum(misfit, few))(chains), descent(serial(misfit))(chains), 1e-12)

    g = pool.sum(moments, data)
    loss = lambda g: lambda x: jnp.sum(jnp.sin(g(x, item_params)["m"]))
    want = jax.jit(jax.value_and_grad(loss(serial(moments))))(params)
    seeded = mg.jit(mg.value_and_grad(loss(g), loss="replicated", replicated=0))
    close(seeded(params), want, 1e-12)
    # Tangents and cotangents that differ between ranks: one linear map and its transpose.
    mg.dot_test(lambda x: g(x, item_params)["m"], params)


@pytest.mark.full("test_chains_and_seeds batches a rank without jobs, too")
@pytest.mark.ranks(2)
def test_a_rank_without_jobs_is_batched(comm: Communicator) -> None:
    """Plain jax.vmap batches counts and booleans, too."""
    pool = jobs.pool(comm)
    f = pool.map(
        lambda s, m, r: {"y": s * m * r, "n": (s * m > 1).astype("int32"), "large": s > 2},
        pool.put([3.0]),
    )
    item_params = jnp.asarray([2.0])
    got = jax.vmap(lambda s: f(s, item_params))(jnp.asarray([0.1, 5.0]))
    close(got["y"], np.array([[0.6], [30.0]]), 1e-14)
    equal_bits(got["n"], np.array([[0], [1]], "int32"))
    equal_bits(got["large"], np.array([[False], [True]]))
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, m, r: jax.random.normal(key, (2,)) * r
    drawn = jax.vmap(pool.map(draw, pool.put([3.0])))(keys, jnp.zeros((3, 1)))
    equal_bits(drawn, jax.vmap(lambda k: jax.random.normal(k, (1, 2)) * 3.0)(keys))


@pytest.mark.ranks(2)
def test_the_gradient_of_a_batch_grows_with_it(comm: Communicator) -> None:
    """The count of bytes is linear in the batch; a Jacobian of the batch would be quadratic."""
    pool = jobs.pool(comm)
    f = pool.sum(lambda s, m, r: jnp.sin(s * m) * r, pool.put([1.0, 2.0]))

    def loss(s: Any, m: Any) -> Any:
        return jnp.sum(jax.vmap(f)(s, m) ** 2)

    def sent(n: int) -> int:
        s, m = jnp.arange(1.0, n + 1), jnp.ones((n, 2))
        before = record().bytes
        by_s, by_m = mg.jit(jax.grad(loss, (0, 1)))(s, m)
        sin, cos = jnp.sin(s), jnp.cos(s)
        close(by_s, 18 * sin * cos, 1e-12)
        close(by_m, (6 * sin * s * cos)[:, None] * jnp.array([1.0, 2.0]), 1e-12)
        return record().bytes - before

    assert sent(16) < 9 * sent(2)


@pytest.mark.full("test_owners and test_booleans_are_counted cover each schedule alone")
def test_schedules_give_the_same_bits(comm: Communicator) -> None:
    every, x = items(), arguments()
    pool = jobs.pool(comm)
    found = []
    f = None
    for schedule in (
        jobs.Static(),
        jobs.Weighted(np.arange(N) ** 2.0),
        jobs.Weighted(pool.measure(misfit, pool.put(every, block=2), *x)),
        jobs.Dynamic(),
    ):
        f = pool.sum(misfit, pool.put(every, block=2, schedule=schedule))
        found.append(jax.jit(jax.value_and_grad(f, (0, 1)))(*x))
    for other in found[1:]:
        equal_bits(found[0], other)
    pool.close()


def test_owners() -> None:
    blocks = [np.array([i]) for i in range(10)]
    rank_of = lambda n, schedule, p=4: schedule.owners(blocks[:n], p).tolist()
    assert rank_of(10, jobs.Static()) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert rank_of(3, jobs.Static()) == [0, 1, 2]
    assert rank_of(5, jobs.Weighted([1, 1, 4, 1, 1]), 2) == [1, 1, 0, 1, 1]
    assert rank_of(4, jobs.Weighted([0, 0, 0, 0]), 2) == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="2 costs for 3 jobs"):
        rank_of(3, jobs.Weighted([1, 2]))
    with pytest.raises(ValueError, match="finite numbers"):
        jobs.Weighted([1, -1])


def test_few_jobs_and_wrong_sizes(comm: Communicator) -> None:
    pool = jobs.pool(comm)
    fn = lambda params, item_params, item: (
        params * item * (1 if item_params is None else item_params)
    )
    nothing = pool.put([])
    assert pool.map(fn, nothing)(2.0) == []
    assert pool.sum(fn, nothing)(2.0) == 0 and nothing.jobs == 0
    one = pool.put([np.arange(3.0)])
    equal_bits(pool.map(fn, one)(2.0), np.array([[0.0, 2.0, 4.0]]))
    equal_bits(jax.jacrev(pool.sum(fn, one))(2.0), np.arange(3.0))
    other = pool.put([1.0, 2.0])
    with pytest.raises(ValueError, match="a leading axis of length 2"):
        pool.map(fn, other)(2.0, jnp.ones(3))
    ragged = pool.put([np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="must have the same structure, shapes"):
        pool.sum(fn, ragged)(2.0)
    with pytest.raises(jobs.JobError, match="a job cannot communicate"):
        pool.sum(lambda s, m, r: mg.allreduce(s), other)(2.0)


@pytest.mark.ranks(2)
def test_booleans_are_counted(comm: Communicator) -> None:
    more = lambda params, item_params, item: item > params
    for schedule in (jobs.Static(), jobs.Dynamic()):
        with jobs.pool(comm, schedule=schedule) as pool:
            data = pool.put([1.0, 2.0, 3.0, 4.0], block=2)
            assert data.dynamic == (schedule == jobs.Dynamic())
            assert pool.sum(more, data)(1.5) == 3
            equal_bits(pool.map(more, data)(1.5), np.array([False, True, True, True]))


def test_put_sends_what_is_missing(comm: Communicator) -> None:
    every = [np.full(5, float(i)) for i in range(8)]
    given = None if comm.rank else every
    pool = jobs.pool(comm)
    total = lambda data: pool.sum(lambda s, m, r: s * jnp.sum(r), data)(1.0)
    first = pool.put(given, block=2)
    owned = np.sum(first.owners == comm.rank) * 2 * 5 * 8
    assert first.received == (owned if comm.rank else 0)
    assert pool.put(given, block=2).received == 0
    every[7][:] = 100.0  # in place: the snapshot stays, the change is seen
    changed = pool.put(given, block=2)
    assert changed.received == (80 if comm.size > 1 and changed.owners[3] == comm.rank else 0)
    assert total(first) == 5 * 28 and total(changed) == 5 * 121
    for bad, message in (
        (np.ones(3), "a list of items"),
        ([np.ones(2), "text"], "in item 1"),
    ):
        with pytest.raises(TypeError, match=message):
            pool.put(bad if comm.rank == 0 else None)
    if comm.size > 1:
        with pytest.raises(ValueError, match="rank 1 differs from rank 0"):
            pool.put([1.0, float(comm.rank)])


@pytest.mark.ranks(2)
def test_nested_pools_are_local(comm: Communicator) -> None:
    pool = jobs.pool(comm)
    inner = pool.sum(lambda x, _, r: jnp.sin(x * r), pool.put([1.0, 2.0, 3.0], everywhere=True))
    f = pool.sum(lambda x, m, r: r * inner(x * m), pool.put([5.0, 7.0]))
    m = jnp.asarray([0.3, 0.4])
    k = jnp.arange(1.0, 4.0)
    want = lambda x: jnp.sum(jnp.asarray([5.0, 7.0]) @ jnp.sin(x * m[:, None] * k))
    close(jax.value_and_grad(f)(1.1, m), jax.value_and_grad(want)(1.1), 1e-12)
    elsewhere = pool.sum(lambda x, _, r: x * r, pool.put([1.0, 2.0]))
    with pytest.raises(jobs.JobError, match="everywhere=True"):
        pool.sum(lambda x, m, r: elsewhere(x), pool.put([1.0, 2.0]))(1.0)
