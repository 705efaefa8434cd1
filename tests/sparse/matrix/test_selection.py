"""`Selection` and `NullSpace.remove_from`: their derivatives over all ranks, and their errors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad.sparse import GhostExchange, NullSpace, Selection
from product_space import operand, prove

N = 3  # entries of each rank


def segments(comm):
    """Each entry and the one behind it, which the next rank may own (on a ring)."""
    first = comm.rank * N + np.arange(N)
    needed = np.stack([first, (first + 1) % (N * comm.size)], 1).ravel()
    ghosts = GhostExchange(N, needed, comm)
    return Selection(ghosts, np.asarray(ghosts.position))


def selected(X):
    """The same on the stack of all ranks."""
    x = X.ravel()
    return jnp.stack([x, jnp.roll(x, -1)], 1).reshape(len(X), 2 * N)


def added(Y):
    """The transpose of `selected`."""
    y = Y.reshape(-1, 2)
    return (y[:, 0] + jnp.roll(y[:, 1], 1)).reshape(len(Y), N)


@pytest.mark.thin(2, 3, reason="a rank has two neighbours")
def test_a_selection_and_its_sums_are_transposes(comm):
    selection = segments(comm)
    prove(selection, selected, comm, "jit", shape=(N,))
    prove(selection.add_up, added, comm, "jit", shape=(2 * N,))


def test_vectors_are_removed_over_all_ranks(comm):
    x, X = operand(comm, (N,))
    vectors = np.random.default_rng(2).standard_normal((2, comm.size, N))
    own = list(jnp.asarray(vectors[:, comm.rank]))
    q = np.linalg.qr(vectors.reshape(2, -1).T)[0]

    def without(X):
        return (X.ravel() - q @ (q.T @ X.ravel())).reshape(X.shape)

    close(NullSpace(own).remove_from(x, comm), without(X)[comm.rank])
    prove(lambda x: NullSpace(own).remove_from(x, comm), without, comm, "jit", shape=(N,))
    for constants in ("constants", jnp.ones(N), [jnp.ones(N)]):
        close(NullSpace(constants).remove_from(x, comm), x - jnp.mean(X))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda g: Selection(g, [0, 9]), ValueError, "positions must lie in 0 to 2, .* got 0 to 9"),
        (lambda g: Selection(g, [-1, 0]), ValueError, "positions must lie in"),
        (lambda g: Selection(g, [0.5]), TypeError, "expected positions as an array of integers"),
        (lambda g: Selection(g, [[0]]), TypeError, r"with one axis, got int64\[1, 1\]"),
        (lambda g: Selection(g, [0, 1]).add_up(jnp.ones(5)), ValueError, "expected 2 values of"),
        (lambda g: NullSpace(jnp.ones(2)).remove_from(jnp.ones(3)), ValueError, r"shape \(2,\)"),
        (lambda g: NullSpace("constants").remove_from(jnp.ones(3, int)), TypeError, "floating"),
    ],
)
def test_what_does_not_fit_is_an_error(make, error, message):
    with pytest.raises(error, match=message):
        make(GhostExchange(3, [0, 1], mg.default_communicator()))
