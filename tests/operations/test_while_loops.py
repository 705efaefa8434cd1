"""While loops with messages whose condition is local to a rank: a warning, or an error."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator

import diffrax
import jax
import jax.numpy as jnp
import lineax
import pytest
from jax.scipy.sparse import linalg

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid, halo_exchange
from mpigrad.guard.failure import current_board

WARNING = r"the condition of the while_loop at .*test_while_loops\.py:\d+ depends on received halos"
LINE = r"in the while_loop at tests/operations/test_while_loops\.py:\d+, whose condition reads"


@pytest.fixture
def comm(comm: Communicator) -> Iterator[Communicator]:
    """Return a new communicator, whose messages are counted, whatever other tests have done."""
    board = current_board()
    if comm.size == 1 or board is None:
        yield comm
        return
    mine = board.slots[board.own_index]
    comm.mpi.barrier()
    before, mine["counts_invalid"] = int(mine["counts_invalid"]), 0
    yield comm.dup()
    comm.mpi.barrier()
    mine["counts_invalid"] = max(before, int(mine["counts_invalid"]))


@contextlib.contextmanager
def warns(comm, expected: bool) -> Iterator[None]:
    """Check that rank 0 warns of a local condition, or that nobody does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [w for w in caught if re.search(WARNING, str(w.message))]
    assert bool(found) == (expected and comm.rank == 0), [str(w.message) for w in caught]


def refused(run) -> str:
    """Return the error of a loop, which the guard raises on every rank."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        run()
    return str(caught.value)


def field(comm):
    grid = Grid((4 * comm.size,), (1.0,), comm)
    (x,) = grid.centers()
    return grid, jnp.exp(-((x - 2) ** 2))


def march(grid, largest, dtype="float64"):
    """u -> the time after steps whose length is given by `largest`, the norm of a step."""

    def step(state):
        t, u = state
        p = halo_exchange(u, grid, 1, "edge")
        after = u + 0.2 * (p[2:] - 2 * u + p[:-2])
        return t + 0.1 / (1 + largest(after)).astype(dtype), after

    start = jnp.zeros((), dtype)
    return lambda u: jax.lax.while_loop(lambda state: state[0] < 0.5, step, (start, u))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("local", [False, True])
def test_conditions_are_followed_through_scans(comm, local):
    grid, u = field(comm)
    size = jnp.max if local else lambda u: mg.max_norm(u, comm=comm)

    def smooth(u, _):
        p = halo_exchange(u, grid, 1, "edge")
        return (p[2:] + p[:-2]) / 4, None

    def loop(u):
        step = lambda u: jax.lax.scan(smooth, u, length=2)[0]
        return jax.lax.while_loop(lambda u: size(u) > 1e6, step, u)

    with warns(comm, local):
        assert jnp.array_equal(mg.jit(loop)(u), u)


@pytest.mark.ranks(2, 3)
@pytest.mark.cases("float32", reason="test_transformed_loops_are_compared is in float64")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_steps_of_one_rank_are_refused(comm, dtype):
    grid, u = field(comm)
    with warns(comm, True):
        text = refused(lambda: mg.jit(march(grid, jnp.max, dtype))(u))
    assert "mpigrad: the ranks do not agree:" in text
    pattern = rf"rank \d.*(?:neighbor_alltoallv|halo_exchange).* {LINE} (\S+)$"
    lines = re.findall(pattern, text, re.MULTILINE)
    assert len(lines) == 2 and len(set(lines)) == 2
    assert "norm=mpigrad.rms_norm" in text
    # The session goes on.
    over_all = lambda u: mg.max_norm(u, comm)
    with warns(comm, False):
        t, _ = mg.jit(march(grid, over_all, dtype))(u)
    mg.assert_replicated(t, comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transformed", ["vmap", "jvp", "jit"])
def test_transformed_loops_are_compared(comm, transformed):
    grid, u = field(comm)
    loop = march(grid, jnp.max)
    run = {
        "vmap": lambda: mg.jit(mg.vmap(loop))(jnp.stack([u, 2 * u])),
        "jvp": lambda: mg.jit(lambda u: mg.jvp(loop, (u,), (u,)))(u),
        "jit": lambda: jax.jit(loop)(u),
    }
    text = refused(run[transformed])
    assert len(re.findall(LINE, text)) == 2
    # Outside of the loop, nothing is compared with it.
    total = jax.jit(lambda x: mg.allreduce(x, comm=comm))
    assert total(1.0) == comm.size


@pytest.mark.ranks(2, 3)
def test_collectives_in_steps_of_one_rank_are_refused(comm):
    def step(state):
        t, u, total = state
        return t + (1 + comm.rank), u, total + mg.allreduce(u, comm=comm)

    def total(u):
        start = (0.0, u, 0.0)
        return jax.lax.while_loop(lambda state: state[0] < 12, step, start)[2]

    text = refused(lambda: mg.jit(total)(1.0))
    assert len(re.findall(rf"rank \d: allreduce.* {LINE} \d\.0$", text, re.MULTILINE)) == comm.size
    assert mg.allreduce(1.0, comm=comm) == comm.size


@pytest.mark.ranks(2, 3)
def test_ranks_that_leave_a_loop_are_reported(comm):
    grid, u = field(comm)

    def early(u):  # the condition is local, but reads no number that the ranks can compare
        def step(state):
            _, u = state
            p = halo_exchange(u, grid, 1, "edge")
            return jnp.max(u) + jnp.max(p) > 10 * (comm.rank + 1), u * 0.5

        return jax.lax.while_loop(lambda state: state[0], step, (True, 100 * u + 100))[1]

    with warns(comm, True):
        text = refused(lambda: mg.allreduce(jnp.sum(mg.jit(early)(u)), comm=comm))
    assert "deadlock: ranks wait for each other" in text or "do not agree" in text


@pytest.mark.ranks(1, 2, 3)
def test_loops_that_ranks_take_together_are_right(comm):
    """Numbers that the condition does not read, rank-local counters, and NaN checks may differ."""
    grid, u = field(comm)

    def step(state):
        i, local, u = state
        p = halo_exchange(u, grid, 1, "edge")
        return i + 1, local + jnp.sum(p), u + mg.allreduce(local, comm=comm)

    def running(state):
        i, _, u = state
        return (i < 3 + comm.rank) & jnp.all(jnp.isfinite(u))

    def loop(u):  # the counters differ, and the numbers of steps do not
        return jax.lax.while_loop(running, step, (comm.rank, 1.0 * comm.rank, u))

    with warns(comm, False):
        i, _, _ = mg.jit(loop)(u)
    assert i == 3 + comm.rank


@pytest.mark.ranks(2, 3)
def test_loops_on_different_lines_are_not_compared(comm):
    """The root decides by a number, and the others follow what it sends."""

    def lead(x):
        def step(x):
            return mg.bcast(x / 2, 0, comm)

        return jax.lax.while_loop(lambda x: x > 1, step, x)

    def follow(x):
        def step(state):
            x, n = state
            return mg.bcast(x, 0, comm), n + 1

        return jax.lax.while_loop(lambda state: state[0] > 1, step, (2 * x, 0))[0]

    assert mg.jit(lead if comm.rank == 0 else follow)(8.0) == 1


@pytest.mark.ranks(2, 3)
def test_nested_loops_are_compared_with_what_the_outer_one_reads(comm):
    def inner(u, t):
        body = lambda s: (s[0] + 1.0, s[1] + mg.allreduce(t, comm=comm))
        return jax.lax.while_loop(lambda s: s[0] < 2, body, (0.0, u))[1]

    def outer(u):
        body = lambda s: (s[0] + 1.0 + comm.rank, inner(s[1], s[0]))
        return jax.lax.while_loop(lambda s: s[0] < 9, body, (0.0, u))[1]

    assert "the ranks do not agree" in refused(lambda: mg.jit(outer)(1.0))


@pytest.mark.ranks(2)
def test_the_norm_of_one_rank_in_diffrax_is_refused(comm):
    grid, u = field(comm)

    def rate(t, u, args):
        p = halo_exchange(u, grid, 1, "edge")
        return p[2:] - 2 * u + p[:-2] - 20 * u**3

    def solve(u):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(rate), diffrax.Heun(), 0.0, 1.0, 0.01, u,
            stepsize_controller=diffrax.PIDController(1e-3, 1e-5),
        ).ys  # fmt: skip

    with warns(comm, True):
        text = refused(lambda: mg.jit(solve)(u))
    assert len(re.findall(LINE, text)) == 2 and "norm=mpigrad.rms_norm" in text


OPERATOR = r"jax.scipy.sparse.linalg at tests/operations/test_while_loops.py:\d+: .* mpigrad.sparse"


@pytest.mark.ranks(1, 2)
@pytest.mark.cases("cg", "gmres", reason="bicgstab is refused as cg is")
@pytest.mark.parametrize("name", ["cg", "gmres", "bicgstab"])
def test_krylov_methods_of_jax_are_refused(comm, name):
    grid, b = field(comm)

    def system(u):
        p = halo_exchange(u, grid, 1, 0.0)
        return 3 * u - p[2:] - p[:-2]

    solve = mg.jit(lambda b: getattr(linalg, name)(system, b)[0])
    if comm.size > 1:
        with pytest.raises(ValueError, match=OPERATOR):
            solve(b)
    else:
        assert jnp.allclose(system(solve(b)), b, atol=1e-4)


def test_krylov_methods_of_jax_on_a_replicated_unknown_are_right(comm):
    """Each rank adds its part of the matrix: inner products are those of the whole vector."""
    part = lambda u: mg.allreduce(u * (comm.rank + 1.0), comm=comm)
    solve = mg.jit(lambda b: linalg.cg(part, b)[0])
    total = comm.size * (comm.size + 1) / 2
    with warns(comm, False):
        assert jnp.allclose(solve(jnp.ones(3)), 1 / total)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("operator", [lineax.FunctionLinearOperator, lineax.JacobianLinearOperator])
def test_matrices_of_lineax_are_refused(comm, operator):
    grid, b = field(comm)

    def system(u, *args):
        p = halo_exchange(u, grid, 1, 0.0)
        return 3 * u - p[2:] - p[:-2]

    def solve(b):
        linear = operator(system, b if operator is lineax.JacobianLinearOperator else jax.typeof(b))
        return lineax.linear_solve(linear, b, lineax.LU()).value

    if comm.size > 1:
        with pytest.raises(ValueError, match=r"halo exchange at .*mpigrad.sparse.newton"):
            mg.jit(solve)(b)
    else:
        assert jnp.allclose(system(mg.jit(solve)(b)), b)
