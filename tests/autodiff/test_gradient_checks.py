"""The dot test and the Taylor test catch wrong gradients, on every rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.operations.checks import _verdict


@jax.custom_vjp
def wrong_adjoint(x: Any) -> Any:
    return mg.allreduce(x)


# What one well-known library does: identity as the adjoint of allreduce.
wrong_adjoint.defvjp(lambda x: (mg.allreduce(x), None), lambda _, ct: (ct,))


def test_dot_test(comm: Communicator) -> None:
    x = jnp.arange(4.0) + comm.rank
    result = mg.dot_test(lambda x: jnp.sin(mg.allreduce(x)), x)
    assert result.error < 1e-13
    assert abs(result.forward - result.reverse) < 1e-11
    pair = {"a": x, "n": jnp.arange(3)}  # integers take no part
    mg.dot_test(lambda p, y: (mg.bcast(p["a"] * y), p["n"]), pair, x)
    mg.dot_test(lambda x: 1.0 * x, x if comm.rank == 0 else jnp.arange(4))
    with pytest.raises(
        ValueError, match=r"expected a float argument, got int64.*jnp.arange\(3.0\)"
    ):
        mg.dot_test(lambda n: 1.0 * mg.bcast(n), jnp.arange(3))
    with pytest.raises(ValueError, match="expected a float result, got int64"):
        mg.dot_test(lambda x: jnp.floor(x).astype(int), x)


def test_taylor_test(comm: Communicator) -> None:
    x = jnp.arange(4.0) + comm.rank
    shares = mg.taylor_test(lambda x: jnp.sum(jnp.sin(mg.allreduce(x))), x)
    assert abs(shares.rates_with[-1] - 2) < 0.1
    assert abs(shares.rates_without[-1] - 1) < 0.1
    once = mg.taylor_test(lambda x: mg.allreduce(jnp.sum(jnp.cos(x))), x, loss="replicated")
    assert abs(once.rates_with[-1] - 2) < 0.1
    theta = {"w": jnp.ones(3)}
    mg.taylor_test(lambda t: jnp.sum(jnp.exp(t["w"]) * (comm.rank + 1)), theta, replicated=True)
    mg.taylor_test(lambda x: jnp.sum(mg.allreduce(x)), x)  # linear: only rounding remains


@pytest.mark.ranks(2, 3, 4)
def test_wrong_gradients_are_caught_on_every_rank(comm: Communicator) -> None:
    x = jnp.arange(4.0) + comm.rank
    with pytest.raises(AssertionError, match="taylor_test: expected the rates"):
        mg.taylor_test(lambda x: jnp.sum(jnp.sin(wrong_adjoint(x))), x)
    # A gradient that only one rank gets wrong.
    stop = jax.lax.stop_gradient if comm.rank == comm.size - 1 else (lambda x: x)
    with pytest.raises(AssertionError, match="taylor_test: expected the rates"):
        mg.taylor_test(lambda x: jnp.sum(jnp.sin(x) * stop(x)), x)


@pytest.mark.ranks(1, 2)
def test_dot_test_fails_where_jvp_and_vjp_differ() -> None:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return 2 * x

    # Its tangent map is not linear, so that no adjoint can agree with it.
    f.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0] + 0 * primals[0]))
    found = mg.dot_test(f, jnp.ones(3))
    assert isinstance(found.forward, float) and isinstance(found.reverse, float)
    with pytest.raises(AssertionError, match=r"dot_test: .* must be equal"):
        mg.dot_test(f, jnp.ones(3), rtol=-1.0)


@pytest.mark.ranks(2, 3, 4)
def test_assert_replicated(comm: Communicator) -> None:
    mg.assert_replicated({"a": jnp.ones(3), "n": jnp.int32(2), "nan": jnp.nan})
    x = jnp.ones(3).at[1].add(0.5 * (comm.rank == 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"1 of \d ranks differ.*rank 1 \(by 0.5"):
        mg.assert_replicated(x)
    rounding = jnp.ones(3) * (1 + 1e-15 * comm.rank)
    mg.assert_replicated(rounding)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the mesh is not the same"):
        mg.assert_replicated(jnp.int32(comm.rank), what="the mesh")
    for dtype in ("bfloat16", "float16"):
        mg.assert_replicated(jnp.asarray([1, jnp.nan, jnp.inf], dtype))
        mg.assert_replicated(jnp.asarray(1 + 0.01 * comm.rank, dtype))  # a rounding of bfloat16
        with pytest.raises(jax.errors.JaxRuntimeError, match="is not the same on all ranks"):
            mg.assert_replicated(jnp.asarray(1 + 0.5 * comm.rank, dtype))


@pytest.mark.ranks(1)
def test_values_of_other_shapes_are_not_replicated() -> None:
    """Without the guard, where MPI takes them for each other."""
    flags = jnp.array([[0, 0, 7, 8], [0, 0, 7, 8], [0, 0, 7, 9], [1, 0.5, 7, 8]])
    assert [float(x) for x in _verdict(flags)] == [0, 2, 2, jnp.inf]
    assert [float(x) for x in _verdict(flags[jnp.array([0, 1, 3])])] == [0, 1, 2, 0.5]
    assert bool(_verdict(flags[:2])[0])


def test_dot_test_of_maps_between_real_and_complex_arrays():
    mg.dot_test(lambda x: mg.allreduce(x * (1 + 2j)), jnp.arange(3.0))
    mg.dot_test(lambda z: mg.allreduce(z.imag) + jnp.conj(z), jnp.arange(3.0) + 1j)
    with pytest.raises(AssertionError, match="must be equal"):
        mg.dot_test(wrongly_transposed, jnp.arange(3.0) + 1j)


def wrongly_transposed(z: Any) -> Any:
    times, divide = (lambda _, v: 1j * v), (lambda _, v: -1j * v)
    return jax.custom_derivatives.linear_call(times, divide, (), z)
