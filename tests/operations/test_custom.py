"""Operations that are written with mpi4py: what the cases of helpers.py leave out."""

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
from message_cases import turned, under, under_simulated
from mpigrad.communicator import Communicator
from product_space import operand, prove

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_twice(comm: Communicator) -> None:
    twice = lambda x: under(under(x, comm), comm)
    prove(twice, lambda X: under_simulated(under_simulated(X)), comm, "jit")


def test_arrays_without_elements(comm: Communicator) -> None:
    same = mg.custom_operation(lambda x, mpi: x, lambda ct, mpi: ct)
    tree = {"a": jnp.ones(2), "empty": jnp.ones((0, 3)), "none": None}
    close(same(tree), tree)
    close(mg.grad(lambda x: jnp.sum(same(x)))(jnp.ones((0, 3))), jnp.ones((0, 3)))
    mg.dot_test(lambda x: same({"a": x, "rows": x[:0]}), jnp.ones(2))


def test_a_constant_leaf_under_transformations_of_jax(comm: Communicator) -> None:
    three = mg.custom_operation(
        lambda x, mpi: jax.tree.map(lambda leaf: 3 * leaf, x),
        lambda ct, mpi: jax.tree.map(lambda leaf: 3 * leaf, ct),
    )
    f = lambda a: three({"a": a, "b": jnp.ones(2), "n": jnp.arange(2)})
    close(jax.grad(lambda a: jnp.sum(f(a)["a"] * f(a)["b"]))(jnp.ones(2)), 9 * jnp.ones(2))
    close(jax.jvp(lambda a: f(a)["b"], (jnp.ones(2),), (jnp.ones(2),))[1], jnp.zeros(2))
    close(jax.linearize(lambda a: f(a)["a"], jnp.ones(2))[1](jnp.ones(2)), 3 * jnp.ones(2))


@pytest.mark.cases("scan", reason="test_operations has the other transformations")
@pytest.mark.parametrize("how", ["eager", "vmap", "scan"])
def test_leaves_that_are_constant_on_some_ranks(how: str, comm: Communicator) -> None:
    """Leaf b is active on odd ranks, a on even ones; their results are on their neighbours."""
    _, X = operand(comm)
    parity = jnp.arange(comm.size)[:, None] % 2

    def f(x: Any) -> Any:
        a, b = (x, X[comm.rank, :, 1]) if comm.rank % 2 == 0 else (X[comm.rank], x[:, 1])
        b, rest = turned({"a": a, "b": b, "n": jnp.zeros(1, jnp.int32)}, comm)
        return rest["a"] * b[:, None]

    def F(x: Any) -> Any:
        a = jnp.where(parity[..., None] == 0, x, X)
        b = jnp.where(parity == 1, x[:, :, 1], X[:, :, 1])
        return a[:, ::-1] * jnp.roll(b, 1, axis=0)[..., None]

    prove(f, F, comm, how)


def test_on_the_ranks_of_a_split(comm: Communicator) -> None:
    x, X = operand(comm)
    group = comm.split(comm.rank // 2)
    first = comm.rank - comm.rank % 2
    close(under(x, group), under_simulated(X[first : first + 2])[comm.rank % 2])


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
    short = mg.custom_operation(lambda x, mpi: x[:1], fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"expected float64\[3.*got float64\[1\]"):
        short(jnp.ones(3))
    other = mg.custom_operation(lambda x, mpi: {"b": x}, fails, lambda x: {"a": x, "c": [x]})
    for f in (other, mg.jit(other)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="type that `shape` returned") as error:
            f(jnp.ones(3))
        assert "{'a': float64[3], 'c': [float64[3]]}" in str(error.value)
    with pytest.raises(TypeError, match=r"`shape` must return .* got \(3,\) on rank"):
        mg.custom_operation(fails, fails, lambda x: (3,))(jnp.ones(3))
    with pytest.raises(TypeError, match="forward and transpose must be functions"):
        mg.custom_operation(fails, None)  # type: ignore[arg-type]
    back = mg.custom_operation(lambda x, mpi: x, lambda ct, mpi: ct[:1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="the type of x, which a cotangent"):
        mg.grad(lambda x: jnp.sum(back(x)))(jnp.ones(3))
    to_integer = mg.custom_operation(
        fails, fails, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32)
    )
    with pytest.raises(TypeError, match="must both have floating-point arrays"):
        to_integer(jnp.ones(3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_buffers_of_dtypes_without_an_mpi_datatype(dtype: str, comm: Communicator) -> None:
    def forward(x: np.ndarray, mpi: Any) -> np.ndarray:
        mpi.Bcast(x)
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"astype\('float32'\)") as error:
        mg.custom_operation(forward, forward)(jnp.ones(3, dtype))
    assert f"({dtype}: MPI has no such datatype. Convert it first" in str(error.value)
    assert "in forward: mpi.Bcast(x)" in str(error.value)


@pytest.mark.full("test_examples runs it on 2 ranks")
def test_halo_by_hand() -> None:
    runpy.run_path(str(EXAMPLES / "halo_by_hand.py"))
