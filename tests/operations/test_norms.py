"""Norms over all ranks, at every scale of the dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.operations.norms import two_norms


def powers(dtype: str) -> list[int]:
    """Return exponents over the whole range of normal numbers, with some in every part of it."""
    most = int(jnp.finfo(dtype).maxexp)
    return [2 - most, -most // 2, *range(-3, 4), most // 3, most // 2, most - 3]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_norms_scale_with_their_vector(dtype: str, comm: Communicator) -> None:
    rng = np.random.default_rng(comm.rank)
    x = (1 + rng.random(5)).astype(dtype)

    @mg.jit
    def norms(x: jax.Array) -> list[jax.Array]:
        gradient = mg.grad(lambda x: mg.rms_norm(x) / comm.size)
        slope = gradient(x) if not np.iscomplexobj(x) else x
        return [mg.rms_norm(x), mg.max_norm(x), *two_norms(x, 2 * x, comm=comm), slope]

    one = [np.asarray(y) for y in norms(x)]
    everything = np.concatenate(comm.mpi.allgather(x))
    np.testing.assert_allclose(one[2], np.linalg.norm(everything), rtol=1e-5)
    np.testing.assert_allclose(one[0], one[2] / np.sqrt(everything.size), rtol=1e-5)
    for power in powers(dtype):
        *got, slope = (np.asarray(y) for y in norms(x * np.asarray(2.0**power, x.real.dtype)))
        for a, b in zip(got, one[:-1], strict=True):
            if np.frexp(b)[1] + power <= int(jnp.finfo(dtype).maxexp):
                np.testing.assert_allclose(a, np.ldexp(b, power), rtol=4 * jnp.finfo(dtype).eps)
            else:
                assert np.isinf(a)
        if not np.iscomplexobj(x):  # the gradient of a norm has no scale
            np.testing.assert_allclose(slope, one[-1], rtol=8 * jnp.finfo(dtype).eps)


@pytest.mark.ranks(2)
def test_norms_of_numbers_of_all_sizes(comm: Communicator) -> None:
    for numbers in ([1e-30, 1e-3], [1e-25, 1e-30], [1e30, 1.0], [0.0, 2e-38], [3e37, 1e-37]):
        x = np.asarray(numbers[comm.rank :: 2], np.float32)
        (norm,) = two_norms(jnp.asarray(x), comm=comm)
        np.testing.assert_allclose(norm, np.linalg.norm(np.asarray(numbers)), rtol=1e-6)
    for number in (np.inf, np.nan):
        x = np.asarray([1.0, number if comm.rank else 1.0])
        np.testing.assert_equal(np.asarray(mg.rms_norm(x)), number)
    assert float(mg.rms_norm(jnp.zeros(3))) == 0
    assert not np.any(mg.grad(lambda x: mg.rms_norm(x))(jnp.zeros(3)))
