"""Operations that are written with mpi4py, and the example of one."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator
from proof import TRANSFORMS, operand, prove, prove_second_order

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def forward(x: np.ndarray, comm: Any) -> np.ndarray:
    """Row 0 of the left neighbour under this rank's rows: (n, 2) -> (n + 1, 2)."""
    row, right, left = np.empty_like(x[0]), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = comm.Irecv(row, left)
    comm.Send(x[0].copy(), right) if comm.size > 1 else comm.Isend(x[0].copy(), right).Wait()
    request.Wait()
    x *= 2  # its own copy
    return np.concatenate([x, row[None]])


def transpose(ct: np.ndarray, comm: Any) -> np.ndarray:
    row, right, left = (
        np.empty_like(ct[0]),
        (comm.rank + 1) % comm.size,
        (comm.rank - 1) % comm.size,
    )
    comm.Sendrecv(ct[-1].copy(), left, recvbuf=row, source=right)
    ct = 2 * ct[:-1]
    ct[0] += row
    return ct


def longer(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), x.dtype)


under = mg.custom_operation(forward, transpose, longer)


def simulated(X: Any) -> Any:
    return jnp.concatenate([2 * X, jnp.roll(X[:, :1], 1, axis=0)], axis=1)


@pytest.mark.thin(2)
@pytest.mark.parametrize("how", TRANSFORMS)
def test_value_gradient_and_dot_product(how: str, comm: Communicator) -> None:
    prove(lambda x: under(x, comm), simulated, comm, how)


def test_second_order_and_twice(comm: Communicator) -> None:
    prove_second_order(lambda x: under(x, comm), simulated, comm)
    twice = lambda x: under(under(x, comm), comm)
    prove(twice, lambda X: simulated(simulated(X)), comm, "jit")


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_dtypes(dtype: str, comm: Communicator) -> None:
    x, X = (v.astype(dtype) for v in operand(comm))
    close(under(x), simulated(X)[comm.rank], rtol=1e-6)
    if dtype == "complex64":
        mg.dot_test(under, x * (1 + 2j))


def test_on_the_ranks_of_a_split(comm: Communicator) -> None:
    x, X = operand(comm)
    group = comm.split(comm.rank // 2)
    first = comm.rank - comm.rank % 2
    close(under(x, group), simulated(X[first : first + 2])[comm.rank % 2])


def test_errors_have_the_rank_the_line_and_the_text(comm: Communicator) -> None:
    def fails(x: np.ndarray, mpi: Any) -> np.ndarray:
        raise RuntimeError(f"rank {mpi.rank} has no flour")

    operation = mg.custom_operation(fails, fails)
    for f in (operation, mg.jit(operation)):
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            f(jnp.ones(3))
        text = str(error.value)
        assert f"rank {comm.rank} of {comm.size}: custom_operation at " in text
        assert f"RuntimeError: rank {comm.rank} has no flour" in text
        assert text.count("test_custom.py:") == 2  # the call, and the line that raised
    short = mg.custom_operation(lambda x, mpi: x[:1], transpose)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"returned float64\[1\] where float64\[3"):
        short(jnp.ones(3))
    to_integer = mg.custom_operation(
        forward, transpose, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32)
    )
    with pytest.raises(TypeError, match="one has a derivative"):
        to_integer(jnp.ones(3))


def test_halo_by_hand() -> None:
    runpy.run_path(str(EXAMPLES / "halo_by_hand.py"))
