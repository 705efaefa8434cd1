"""Epochs of one-sided operations: what the cases of helpers.py leave out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad.communicator import Communicator


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
    with pytest.raises(TypeError, match="Convert one of them"):
        mg.one_sided(x, accumulate=[(jnp.ones((1, 3), jnp.int32), 0, 0)])
    with pytest.raises(TypeError, match="got bool, which MPI cannot add"):
        mg.one_sided(x > 0, accumulate=[(x[:1] > 0, 0, 0)])
    with pytest.raises(TypeError, match=r"of put must .*'a'.* got PyTreeDef\(\*\)"):
        mg.one_sided({"a": x}, put=[(x, 0, 0)])
    with pytest.raises(ValueError, match=r"same number of rows, got \[1, 2\] on rank"):
        mg.one_sided({"a": x, "b": x[:1]})
    with pytest.raises(TypeError, match="got bool, which MPI cannot add"):
        mg.one_sided([x, x > 0], accumulate=[([x, x > 0], 0, 0)])
    with pytest.raises(ValueError, match="must have rows"):
        mg.one_sided(1.0)
    for wrong in ({"get": [(0, 1)]}, {"put": (x, 0, 0)}, {"accumulate": [x]}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a list of triples"):
            mg.one_sided(x, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not negative"):
        mg.one_sided(x, get=[(0, -1, 1)])
    own = mg.one_sided
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"names rows 1 to 2 .* has 2 rows"):
        own(x, get=[(comm.rank, 1, 2)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="Put these rows in another epoch"):
        own(x, put=[(x, comm.rank, 0), (x[:1], comm.rank, 1)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rows 92233720368\d* to .* has 2"):
        own(x, get=[(comm.rank, 2**63 - 1, 2)])
    # The last rank alone is wrong, about rank 0's window: all ranks say so.
    last = comm.rank == comm.size - 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"names rows 1 to 2 of .* of rank 0"):
        own(x, get=[(0, 1, 2)] if last else [])
