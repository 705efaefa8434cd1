"""Time loops: checkpoints change the memory of gradients, but not their values."""

import functools
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid, halo_exchange
from mpigrad.loops import Budget, Files, history, map_blocks, scan

N = 11
BUDGET = Budget(8)  # two chunks of five steps, and one before them


def loop(grid, checkpoints, n=N):
    """Return f(strength, state, xs) -> last state, u v after each step, of a nonlinear system."""

    def run(strength, state, xs):
        def step(state, x):
            u = halo_exchange(state["u"], grid, boundary="edge")
            u = u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]) + 0.1 * jnp.sin(strength * u[1:-1])
            v = state["v"] + x * u**2
            return {"u": u, "v": v}, u * v

        return scan(step, state, n, xs, checkpoints=checkpoints)

    return run


def operands(grid, n=N):
    generator = np.random.default_rng(3)
    u, v, xs = generator.normal(size=grid.shape), generator.normal(size=grid.shape), None
    xs = generator.normal(size=n)
    state = {"u": jnp.asarray(u[grid.slices]), "v": jnp.asarray(v[grid.slices])}
    return jnp.full(grid.local_shape, 1.5), state, jnp.asarray(xs)


def gradients(grid, checkpoints):
    """Return the value and all gradients of a function that depends on all operands."""

    def share(strength, state, xs):
        state, seen = loop(grid, checkpoints)(strength, state, xs)
        return jnp.sum(state["u"] ** 2) + jnp.sum(seen**3)

    both = mpigrad.value_and_grad(share, argnums=(0, 1, 2), replicated=2, comm=grid.comm)
    return mpigrad.jit(both)(*operands(grid))


@pytest.fixture
def scratch(comm, tmp_path_factory):
    directory = comm.mpi.bcast(str(tmp_path_factory.mktemp("scratch")))
    yield directory
    comm.mpi.Barrier()
    assert os.listdir(directory) == []  # files have no name


def files(directory):
    """Return paths through /proc to the open files of states in a directory."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    names = {path: os.readlink(path) for path in paths if os.path.islink(path)}
    return [path for path, name in names.items() if name.startswith(f"{directory}/mpigrad-state")]


@pytest.mark.ranks(1, 2, 3, 4)
def test_gradients_do_not_depend_on_checkpoints(comm, scratch):
    grid = Grid((13,), (1.0,), comm)
    expected = gradients(grid, None)
    mixed = Files(scratch, 3) if comm.rank == comm.size - 1 else BUDGET  # ranks may differ
    for checkpoints in (4, mixed):
        found = gradients(grid, checkpoints)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-14 * np.max(np.abs(b)))
    if comm.size > 1:
        alone = Grid((13,), (1.0,), Communicator(MPI.COMM_SELF))
        value, (strength, state, xs) = gradients(alone, None)
        np.testing.assert_allclose(found[0], value, rtol=1e-12)
        np.testing.assert_allclose(found[1][0], strength[grid.slices], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found[1][1]["u"], state["u"][grid.slices], rtol=1e-11)
        np.testing.assert_allclose(found[1][2], xs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["budget", "files"])
def test_forward_and_reverse_mode(comm, kind, scratch):
    grid = Grid((13,), (1.0,), comm)
    checkpoints = BUDGET if kind == "budget" else Files(scratch, 3)
    mpigrad.dot_test(loop(grid, checkpoints), *operands(grid))


def test_second_derivatives_and_batches(comm, scratch):
    grid = Grid((7,), (1.0,), comm)
    strength, state, xs = operands(grid, 4)

    def share(strength, checkpoints):
        state_, seen = loop(grid, checkpoints, 4)(strength, state, xs)
        return jnp.sum(state_["u"] ** 2) + jnp.sum(seen)

    def twice(strength, checkpoints):
        """Return Hessian-vector products along two directions."""
        slope = mpigrad.grad(functools.partial(share, checkpoints=checkpoints))
        along = jnp.stack([jnp.ones_like(strength), strength])
        return mpigrad.vmap(lambda v: mpigrad.jvp(slope, (strength,), (v,))[1])(along)

    choice = Files(scratch, 2)
    found, expected = (mpigrad.jit(lambda s, c=c: twice(s, c))(strength) for c in (choice, None))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_history_has_all_states(comm):
    grid = Grid((13,), (1.0,), comm)
    _, state, _ = operands(grid)

    def step(state, x):
        u = halo_exchange(state["u"], grid, boundary=0.0)
        return {"u": (u[2:] + u[:-2]) / 2, "v": state["v"] + x}, None

    @mpigrad.jit
    def states(state):
        return history(step, state, 5, jnp.arange(5.0), checkpoints=2)

    found = states(state)
    assert found["u"].shape == (6, *grid.local_shape)
    assert np.array_equal(found["u"][0], state["u"])
    np.testing.assert_allclose(found["v"][5] - found["v"][0], 10)
    for before, after in zip(found["u"], found["u"][1:], strict=False):
        np.testing.assert_array_equal(after, step({"u": before, "v": 0}, 0)[0]["u"])


@pytest.mark.ranks(1)
def test_checkpoints_reduce_memory(comm, scratch):
    grid = Grid((1000,), (1.0,), comm)

    def temporary(checkpoints, n):
        """Return the megabytes of temporary memory of the compiled gradient."""

        def share(strength, state, xs):
            return jnp.sum(loop(grid, checkpoints, n)(strength, state, xs)[0]["v"])

        program = jax.jit(mpigrad.grad(share)).lower(*operands(grid, n)).compile()
        return program.memory_analysis().temp_size_in_bytes / 1e6

    state = 2 * 1000 * 8 / 1e6
    everything = temporary(None, 400)
    assert everything > 400 * state
    assert temporary(20, 400) < everything / 5
    small = temporary(Budget(40), 400)  # two levels
    assert small < (40 + 15) * state
    smaller = temporary(Budget(24), 400)  # three
    assert smaller < (24 + 15) * state
    assert temporary(Budget(24), 800) < smaller + 5 * state
    assert temporary(Files(scratch, 10, None), 400) < temporary(None, 10) + 2 * state


@pytest.mark.ranks(1, 2)
def test_states_in_files(comm, scratch):
    """They are written for gradients only, read in any order, checked, and replaced."""
    grid = Grid((13,), (1.0,), comm)
    strength, state, xs = operands(grid)
    run = loop(grid, Files(scratch, 1))
    mpigrad.jit(lambda s: run(s, state, xs)[0])(strength)
    assert files(scratch) == []

    total = lambda s: mpigrad.allreduce(jnp.sum(run(s, state, xs)[0]["v"]), comm=comm)
    slope = mpigrad.jit(mpigrad.grad(total, comm=comm))
    expected = slope(strength)
    (path,) = files(scratch)
    size = os.path.getsize(path)
    np.testing.assert_array_equal(slope(strength), expected)
    assert os.path.getsize(path) == size
    pull_backs = [mpigrad.vjp(total, scale * strength)[1] for scale in (1, 0.5)]
    for pull_back in pull_backs:  # the first states are read after the second ones were written
        found = pull_back(jnp.float64(1))[0]
    np.testing.assert_allclose(found, slope(0.5 * strength), rtol=1e-12)


@pytest.mark.ranks(1)
def test_states_in_files_of_batched_choices_and_inner_gradients(comm, scratch):
    def results(checkpoints):
        def last(u):
            return scan(lambda u, _: (1.3 * jnp.sin(u), None), u, 8, checkpoints=checkpoints)[0]

        choice = lambda u: jax.lax.cond(u > 0, last, lambda u: 2 * u, u)
        after = lambda u: last(u - 0.1 * jax.grad(last)(u - 0.1 * jax.grad(last)(u)))
        batch = jax.vmap(jax.grad(choice))(jnp.array([-1.0, 0.3, 0.5]))
        return *batch, jax.jit(jax.grad(after))(0.7)

    np.testing.assert_allclose(results(Files(scratch, 2)), results(None), rtol=1e-12)


@pytest.mark.ranks(1)
def test_damaged_states(comm, scratch):
    step = lambda u, _: (jnp.sin(u), None)
    last = lambda u: scan(step, u, 20, checkpoints=Files(scratch, 1))[0]
    _, pull_back = mpigrad.vjp(last, jnp.ones(512))
    (path,) = files(scratch)
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(b"damage")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"loops.scan, .*test_loops.py:.*damaged"):
        pull_back(jnp.ones(512))


@pytest.mark.ranks(1)
def test_no_space_for_states(comm, scratch):
    last = lambda u: scan(lambda u, _: (u * u, None), u, 90, checkpoints=Files(scratch, 9))[0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))  # ten states take more
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"needs 41 kB .*for its file, and"):
            mpigrad.grad(last)(1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert mpigrad.grad(last)(1.0) == 2.0**90


@pytest.mark.ranks(1, 2, 4)
def test_rejects_invalid_arguments_on_every_rank(comm):
    grid = Grid((13,), (1.0,), comm)
    state = operands(grid)[1]

    def step(state, x):
        return {"u": halo_exchange(state["u"], grid)[1:-1], "v": state["v"]}, None

    def refused(error, message, step=step, n=4, xs=None, **options):
        with pytest.raises(error, match=message):
            scan(step, state, n, xs, **options)

    refused(ValueError, "n must not be negative, got -1", n=-1)
    refused(TypeError, "n must be an integer", n=1.5)
    refused(TypeError, "checkpoints an integer", checkpoints="all")
    refused(ValueError, "checkpoints must be at least 1, got 0", checkpoints=0)
    refused(ValueError, "Give at least 4 states", checkpoints=Budget(3))
    refused(ValueError, r"xs has shape \(3,\), expected \(4, ...\)", xs=jnp.ones(3))
    refused(TypeError, r"must return \(next state, y\)", lambda s, x: s)
    refused(TypeError, "must keep shapes and dtypes", lambda s, x: ({**s, "v": s["v"][1:]}, x))
    refused(TypeError, "returned a state of structure", lambda s, x: (s["u"], x))
    if comm.size > 1:
        n = 5 if comm.rank == 1 else 4
        refused(
            jax.errors.JaxRuntimeError,
            r"number of steps is not the same .* 1 of .* first of them is rank 1 \(by 1\)",
            n=n,
            comm=comm,
        )
    after, seen = scan(step, state, 0, checkpoints=3, comm=comm)
    assert np.array_equal(after["u"], state["u"])
    assert seen is None


# ---- blocks of points ----


def layers(w, x, y):
    return {"sum": jnp.sin(w @ jnp.stack([x, y[:, 0]])).sum(0), "y": y * w[0, 0] + x[:, None]}


@pytest.mark.ranks(1)
@pytest.mark.cases("1", "8", "9", reason="less than a block, whole blocks, and a rest")
@pytest.mark.parametrize("n", [1, 7, 8, 9, 23])
def test_blocks_do_not_change_values_and_gradients(n):
    generator = np.random.default_rng(n)
    w, x, y = (jnp.asarray(generator.normal(size=s)) for s in ((5, 2), (n,), (n, 3)))

    def blocked(w, x, y):
        return map_blocks(functools.partial(layers, w), x, y, size=4)

    def loss(f):
        return lambda *args: sum(jnp.sum(v**3) for v in jax.tree.leaves(f(*args)))

    for found, expected in zip(
        jax.tree.leaves(jax.jit(blocked)(w, x, y)), jax.tree.leaves(layers(w, x, y)), strict=True
    ):
        assert np.allclose(found, expected, rtol=1e-14, atol=1e-14)
    found = jax.jit(jax.grad(loss(blocked), argnums=(0, 1, 2)))(w, x, y)
    for a, b in zip(found, jax.grad(loss(layers), argnums=(0, 1, 2))(w, x, y), strict=True):
        assert np.allclose(a, b, rtol=1e-12, atol=1e-13)
    tangents = (w, x + 1, y)
    assert np.allclose(
        jax.jvp(loss(blocked), (w, x, y), tangents)[1],
        jax.jvp(loss(layers), (w, x, y), tangents)[1],
        rtol=1e-12,
    )


@pytest.mark.ranks(2)
def test_blocks_refuse_messages_and_uneven_arrays(comm):
    with pytest.raises(ValueError, match=r"map_blocks: the function sends messages"):
        map_blocks(lambda x: mpigrad.allreduce(x, comm=comm), jnp.ones(4), size=2)
    with pytest.raises(ValueError, match=r"map_blocks: the function sends messages"):
        map_blocks(lambda x: mpigrad.allreduce(x, comm=comm), jnp.ones(4), size=9)  # one block
    for points, size in (((jnp.ones(4), jnp.ones(3)), 2), ((jnp.ones(4),), 0), ((), 2)):
        with pytest.raises(ValueError, match=r"map_blocks: expected arrays"):
            map_blocks(lambda *x: x, *points, size=size)
