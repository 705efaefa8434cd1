"""Patterns of functions on grids: all entries, no others, and few colours."""

import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad import sparse
from mpigrad.grid import Grid, halo_exchange
from mpigrad.sparse.nonlinear.sparse_jacobian import colouring


def gray_scott(w, grid):
    p = halo_exchange(w, grid)
    lap = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * w
    u, v = w[..., 0], w[..., 1]
    return lap + jnp.stack([-u * v, u * v], axis=-1)


@pytest.mark.thin(3, reason="tiles of different sizes, and a neighbour on both sides")
@pytest.mark.parametrize("periodic", [True, False])
def test_pattern_of_two_components(comm, periodic):
    grid = Grid((7, 8), (1.0, 1.0), comm=comm, periodic=(periodic, periodic))
    x = jnp.zeros((*grid.local_shape, 2))  # where the reaction's derivative is zero
    pattern = sparse.find_pattern(lambda w: gray_scott(w, grid), x, grid)
    cells = 7 * 8
    edges = 0 if periodic else 2 * (7 + 8)  # neighbours outside the grid
    assert mg.allreduce(pattern.nnz, comm=comm) == 2 * (6 * cells - edges)
    w = jnp.asarray(np.random.default_rng(comm.rank).uniform(size=x.shape))
    J = sparse.sparse_jacobian(lambda w: gray_scott(w, grid), pattern)(w)
    direction = jnp.asarray(np.random.default_rng(9 + comm.rank).uniform(size=x.shape))
    expected = mg.jvp(lambda w: gray_scott(w, grid), (w,), (direction,))[1]
    np.testing.assert_allclose(J @ direction.ravel(), expected.ravel(), atol=1e-12)
    # A row has six entries. Rings of seven and eight cells need more colours.
    assert 6 <= colouring(pattern).count <= (16 if periodic else 8)


@pytest.mark.thin(2)
def test_one_component_has_the_pattern_of_a_stencil(comm):
    grid = Grid((9,), (1.0,), comm=comm)

    def f(u):
        p = halo_exchange(u, grid, 2)
        return p[4:] * u

    pattern = sparse.find_pattern(f, jnp.ones(grid.local_shape), grid, reach=2)
    assert pattern.stencil is not None
    assert pattern.stencil.offsets == ((0,), (1,), (2,))  # the last halo cells copy the edge


@pytest.mark.thin(2)
def test_function_that_looks_too_far_is_refused_on_all_ranks(comm):
    grid = Grid((8, 3), (1.0, 1.0), comm=comm)
    x = jnp.ones(grid.local_shape)

    def wide(u):
        return halo_exchange(u, grid, 2)[4:, 2:-2]

    with pytest.raises(ValueError, match="looks farther than reach=1"):
        sparse.find_pattern(wide, x, grid)
    with pytest.raises(ValueError, match="looks farther than reach=1"):
        sparse.find_pattern(lambda u: u * mg.allreduce(jnp.sum(u), comm=comm), x, grid)
    ring = Grid((9,), (1.0,), comm=comm, periodic=(True,))  # a cell and its third have one colour
    u = jnp.ones(ring.local_shape)
    for far in (lambda u: halo_exchange(u, ring, 2)[4:], lambda u: mg.allreduce(u.sum()) + 0 * u):
        with pytest.raises(ValueError, match="looks farther than reach=1"):
            sparse.find_pattern(far, u, ring)
    with pytest.raises(ValueError, match="derivative of F at x is not finite"):
        sparse.find_pattern(lambda u: jnp.sqrt(u - 1), u, ring)
    with pytest.raises(ValueError, match="field of floating-point numbers"):
        sparse.find_pattern(wide, x[..., :1] if comm.rank == 0 else x, grid)
    with pytest.raises(ValueError, match="reach must be a count"):
        sparse.find_pattern(wide, x, grid, reach=-1)
    with pytest.raises(TypeError, match=r"must be a mpigrad\.Grid"):
        sparse.find_pattern(wide, x, grid.shape)  # type: ignore[arg-type]


@pytest.mark.ranks(1)
def test_narrow_periodic_axis():
    grid = Grid((2, 5), (1.0, 1.0), periodic=(True, False))

    def f(u):
        p = halo_exchange(u, grid)
        return p[2:, 1:-1] + p[1:-1, 2:]

    pattern = sparse.find_pattern(f, jnp.ones(grid.local_shape), grid)
    assert pattern.nnz == 3 * 10 - 2
