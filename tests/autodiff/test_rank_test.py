"""Values and gradients on several numbers of ranks, in one job and by `mpigrad check`."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import pytest

import mpigrad as mg
from launching import mpigrad

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "rank_check"


def own_part(x):
    """This rank's entries of an array that all ranks have."""
    comm = mg.default_communicator()
    return x[comm.rank :: comm.size]


def energy(x, p):
    return mg.allreduce(jnp.sum(p["a"] * own_part(x) ** 2) + jnp.sum(own_part(p["b"])))


@pytest.mark.ranks(2, 3)
def test_an_objective_that_does_not_depend_on_the_ranks(comm):
    x, p = jnp.arange(7.0), {"a": jnp.asarray(2.0), "b": jnp.ones(5)}
    result = mg.rank_test(energy, x, p, loss="replicated", comm=comm)
    assert result.ranks == (1, 2)
    assert result.values == pytest.approx((187.0, 187.0))
    assert result.errors[0] == 0 and result.errors[1] < 1e-5
    shares = mg.rank_test(
        lambda x, p: jnp.sum(p["a"] * own_part(x) ** 2), x, p, ranks=range(1, 9), comm=comm
    )
    assert shares.ranks == tuple(range(1, comm.size + 1))


@pytest.mark.ranks(3)
def test_the_entry_and_the_rank_of_a_difference_are_named(comm):
    with pytest.raises(ValueError, match=r"expected two of the numbers of ranks \(1, 8\) to be at"):
        mg.rank_test(jnp.sum, jnp.ones(3), ranks=(1, 8), comm=comm)

    def constant_on_one_rank(x):
        local = own_part(x)
        if mg.default_communicator().rank == 1:
            local = jax.lax.stop_gradient(local)
        return jnp.sum(local**2)

    expected = (
        r"rank_test: on 2 ranks, rank 0, the gradient\[0\]\[5\] is 0, but 10 on 1: a difference of "
        r"0.83 of the largest entry"
    )
    with pytest.raises(AssertionError, match=expected):
        mg.rank_test(constant_on_one_rank, jnp.arange(7.0), comm=comm)


@pytest.mark.ranks(2)
def test_an_error_on_some_ranks_is_raised_on_all(comm):
    def fails(x):
        if mg.default_communicator().size == 2:
            raise ValueError("on two ranks")
        return jnp.sum(x)

    with pytest.raises(ValueError, match="on two ranks"):
        mg.rank_test(fails, jnp.ones(3), loss="replicated", comm=comm)


@pytest.mark.launcher
@pytest.mark.long("it starts four jobs")
@pytest.mark.parametrize(
    ("program", "same", "different"),
    [
        ("gradient_of_a_monitor.py", "objective", "gradient"),
        pytest.param(
            *("halo_of_an_array.py", "reverse", "forward"),
            marks=pytest.mark.full("the other program takes the same path"),
        ),
    ],
)
def test_programs_with_public_faults(program, same, different):
    assert len((EXAMPLES / program).read_text().splitlines()) <= 30
    done = mpigrad("check", "-n", "1", "2", EXAMPLES / program)
    assert done.returncode == 1, done.stderr
    assert f"depend on the number of ranks: {different} on 2 ranks." in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines[:4]] == [*lines[0][:1], lines[1][0]] * 2
    (row,) = [line for line in lines if line[:2] == [same, "2"]]
    assert "within" in row


@pytest.mark.launcher
def test_bad_programs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("x = 1\n")
    done = mpigrad("check", "-n", "1", "1", program)
    assert done.returncode == 1 and "expected a function outputs()" in done.stderr
    done = mpigrad("check", "-n", "1", program)
    assert done.returncode == 2 and "expected at least two numbers of ranks" in done.stderr
    done = mpigrad("check", tmp_path / "missing.py")
    assert done.returncode == 2 and "check: expected a program" in done.stderr
    program.write_text(
        "import numpy as np\nfrom mpi4py import MPI\n"
        "def outputs(): return {'x': np.full(2, MPI.COMM_WORLD.rank), 'y': ('rows', [1.0])}\n"
    )
    done = mpigrad("check", "-n", "1", "2", program)
    assert "x    2 ranks  rank 1 differs from rank 0 by 1" in done.stdout, done.stderr
    assert "y    2 ranks  shape (2,), expected (1,)" in done.stdout
