"""Element matrices from any rank, compared with one pair of indices for each contribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import stripes

import mpigrad as mg
from helpers import close
from mpigrad.sparse import Matrix, Pattern


def elements(kind, size):
    """(rows of each rank, unknowns (n, k) of all elements, the rank that has each element)."""
    generator = np.random.default_rng(len(kind))
    sizes = stripes(23, size, empty=size - 1 if kind == "empty stripe" and size > 1 else None)
    n, k = 40, 4
    unknowns = np.stack([generator.choice(23, k, replace=kind == "twice") for _ in range(n)])
    unknowns[:23, 0] = np.arange(23)
    owner = generator.integers(0, size, n)
    if kind == "one has all":
        owner[:] = size - 1
    elif kind == "own":
        sizes = [23] + [0] * (size - 1)
        owner[:] = 0
    return sizes, unknowns, owner


KINDS = ("any rank", "empty stripe", "one has all", "twice", "own")


@pytest.mark.cases("any rank", "twice", "own", reason="with and without messages and duplicates")
@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_pattern_from_pairs(comm, kind):
    sizes, unknowns, owner = elements(kind, comm.size)
    mine = unknowns[owner == comm.rank]
    n_local = sizes[comm.rank]
    k = mine.shape[1]
    pattern = Pattern.from_elements(mine, n_local, comm)
    rows, columns = np.repeat(mine, k, axis=1), np.tile(mine, (1, k))
    pairs = Pattern.from_coo(rows.ravel(), columns.ravel(), n_local, comm)
    np.testing.assert_array_equal(pattern.rows, pairs.rows)
    np.testing.assert_array_equal(pattern.columns, pairs.columns)
    values = np.random.default_rng(comm.rank).standard_normal((len(mine), k, k))
    assembled = pattern.assemble(jnp.asarray(values))
    close(assembled, pairs.assemble(jnp.asarray(values.ravel())), 1e-13)
    close(pattern.assemble(values.ravel()), assembled, 0)
    assert pattern.n_given == values.size


@pytest.mark.cases("any rank", reason="a rank without elements differs in sizes only")
@pytest.mark.parametrize("kind", ("any rank", "one has all"))
def test_assembly_is_differentiable(comm, kind):
    sizes, unknowns, owner = elements(kind, comm.size)
    mine = unknowns[owner == comm.rank]
    pattern = Pattern.from_elements(mine, sizes[comm.rank], comm)
    shape = (*mine.shape, mine.shape[1])
    values = jnp.asarray(np.random.default_rng(comm.rank).standard_normal(shape))
    mg.dot_test(pattern.assemble, values, comm=comm)

    def share(values):
        A = Matrix.assemble(pattern, values**2)
        return jnp.sum(jnp.sin(A @ jnp.ones(sizes[comm.rank])))

    mg.taylor_test(jax.jit(share), values, comm=comm)
    batch = jnp.stack([values, 2 * values])
    both = mg.vmap(pattern.assemble)(batch)
    close(both[1], 2 * both[0], 1e-14)


@pytest.mark.ranks(1, 2)
def test_rejects_invalid_elements(comm):
    odd = np.zeros((2, 3)) if comm.rank == comm.size - 1 else np.zeros((2, 3), int)
    with pytest.raises(ValueError, match=r"from_elements: expected integers of shape .* float64"):
        Pattern.from_elements(odd, 3, comm)
    with pytest.raises(ValueError, match="outside the matrix of"):
        Pattern.from_elements([[0, 3 * comm.size]], 3, comm)
    pattern = Pattern.from_elements([[0, 1]], 2, comm)
    with pytest.raises(ValueError, match=r"1 elements of 2 unknowns. Give shape \(1, 2, 2\)"):
        pattern.assemble(jnp.ones((1, 3, 3)))
