"""Epochs of one-sided operations, against the same map on the stack of all windows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator
from proof import TRANSFORMS, prove, prove_second_order

SHAPE = (4, 2)


def epoch(x: Any, c: Communicator) -> Any:
    """Puts and accumulations meet in row 0; rank 0 reads its left neighbour twice, others once."""
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    window, gotten = mg.one_sided(
        x,
        put=[(2 * x[1:2], right, 0)],
        get=[(left, 1, 2), (c.rank, 0, 1)] + [(left, 0, 4)] * (c.rank == 0),
        accumulate=[(jnp.sin(x[:2]), left, 2), (x[3:] ** 2, c.rank, 0)],
        comm=c,
    )
    ours = jnp.concatenate([window, *gotten[:2]])
    return ours + jnp.sum(gotten[2]) if c.rank == 0 else ours


def epoch_simulated(X: Any) -> Any:
    W = X.at[:, 0].set(jnp.roll(2 * X[:, 1], 1, axis=0))
    W = W.at[:, 2:].add(jnp.roll(jnp.sin(X[:, :2]), -1, axis=0)).at[:, 0].add(X[:, 3] ** 2)
    ours = jnp.concatenate([W, jnp.roll(X[:, 1:3], 1, axis=0), X[:, :1]], axis=1)
    return ours.at[0].add(jnp.sum(X[-1]))


@pytest.mark.thin(2)
@pytest.mark.parametrize("how", TRANSFORMS)
def test_value_gradient_and_dot_product(how: str, comm: Communicator) -> None:
    prove(lambda x: epoch(x, comm), epoch_simulated, comm, how, SHAPE)


def test_second_order(comm: Communicator) -> None:
    prove_second_order(lambda x: epoch(x, comm), epoch_simulated, comm, SHAPE)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int32", "uint8"])
def test_dtypes(dtype: str, comm: Communicator) -> None:
    x = jnp.arange(6).reshape(3, 2).astype(dtype) + jnp.array(comm.rank).astype(dtype)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    f = lambda x: mg.one_sided(
        x, put=[(x[:1], right, 1)], get=[(right, 0, 1)], accumulate=[(x[1:2], 0, 2)]
    )
    window, (row,) = f(x)
    assert window.dtype == row.dtype == dtype
    all_x = [np.arange(6).reshape(3, 2) + r for r in range(comm.size)]
    close(row, all_x[right][:1])
    close(window[:2], np.stack([x[0], all_x[left][0]]))
    close(window[2], x[2] + (sum(a[1] for a in all_x) if comm.rank == 0 else 0))
    if jnp.issubdtype(dtype, jnp.inexact):
        mg.dot_test(lambda x: f(x)[0], x)


def test_windows_of_different_lengths_and_data_that_only_moves(comm: Communicator) -> None:
    """Rank r has r + 1 rows; rank 0 fills the last row of each."""
    rows = jnp.zeros((comm.rank + 1, 3), bool)
    put = [(jnp.ones((1, 3), bool), r, r) for r in range(comm.size)] if comm.rank == 0 else []
    window, _ = mg.one_sided(rows, put=put)
    np.testing.assert_array_equal(window, rows.at[-1].set(True))
    window, (all_last,) = mg.one_sided(window, get=[(comm.size - 1, 0, comm.size)])
    np.testing.assert_array_equal(all_last.sum(axis=1), [0] * (comm.size - 1) + [3])
    empty, nothing = mg.one_sided(jnp.zeros((0, 2)))
    assert (empty.shape, nothing) == ((0, 2), [])


def test_wrong_use(comm: Communicator) -> None:
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="only the number of rows may differ"):
        mg.one_sided(x, put=[(jnp.ones((1, 2)), 0, 0)])
    with pytest.raises(TypeError, match="convert one of them"):
        mg.one_sided(x, accumulate=[(jnp.ones((1, 3), jnp.int32), 0, 0)])
    with pytest.raises(TypeError, match="cannot add bool"):
        mg.one_sided(x > 0, accumulate=[(x[:1] > 0, 0, 0)])
    with pytest.raises(TypeError, match="content is one array, not PyTreeDef"):
        mg.one_sided({"a": jnp.ones(2)}, comm=comm)
    with pytest.raises(ValueError, match="not negative"):
        mg.one_sided(x, get=[(0, -1, 1)])
    own = mg.one_sided
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"names rows 1 to 2 .* has 2 rows"):
        own(x, get=[(comm.rank, 1, 2)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="put there in another epoch"):
        own(x, put=[(x, comm.rank, 0), (x[:1], comm.rank, 1)])
    # The last rank alone is wrong, about rank 0's window: all ranks say so.
    last = comm.rank == comm.size - 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"names rows 1 to 2 of .* of rank 0"):
        own(x, get=[(0, 1, 2)] if last else [])
