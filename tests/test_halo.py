"""Halo exchange against padding the whole field, and its adjoint over all ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad.grid import Grid
from mpigrad.halo import halo_exchange

COMM = mpigrad.communicator.default()


def whole_field(grid, fields=()):
    return np.random.default_rng(3).normal(size=(*grid.shape, *fields))


def expected(whole, grid, width, boundary):
    rest = [(0, 0)] * (whole.ndim - grid.ndim)
    how = {"mode": "edge"} if boundary == "edge" else {"constant_values": boundary}
    padded = np.pad(whole, [(width, width)] * grid.ndim + rest, **how)
    return padded[tuple(slice(part.start, part.stop + 2 * width) for part in grid.slices)]


@pytest.mark.parametrize(
    ("shape", "width", "boundary", "fields"),
    [
        ((9, 8), 1, "edge", ()),
        ((9, 8), 2, "edge", (3,)),
        ((4, 13), 1, 2.5, (2, 2)),
        ((4, 13), 2, "edge", ()),
        ((10, 5), 2, 0.0, ()),
        ((10, 5), 1, "edge", ()),
        ((11,), 2, "edge", ()),
        ((11,), 1, 1.5, (2,)),
        ((6, 5, 7), 1, "edge", ()),
        ((6, 5, 7), 2, -1.0, (2,)),
    ],
    ids=str,
)
def test_layers_are_those_of_the_whole_field(shape, width, boundary, fields):
    grid = Grid(shape, (1.0,) * len(shape))
    if width > min(grid.smallest_tile):
        pytest.skip("the layers reach past a neighbouring tile")
    whole = whole_field(grid, fields)
    padded = mpigrad.jit(lambda u: halo_exchange(u, grid, width, boundary))(
        jnp.asarray(whole[grid.slices])
    )
    assert np.array_equal(padded, expected(whole, grid, width, boundary))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("shape", "boundary"),
    [((9, 8), "edge"), ((9, 8), 0.0), ((9,), "edge"), ((6, 5, 4), "edge"), ((6, 5, 4), 0.0)],
)
def test_adjoint(shape, boundary):
    grid = Grid(shape, (1.0,) * len(shape))
    u = jnp.asarray(whole_field(grid)[grid.slices])
    mpigrad.dot_test(lambda u: halo_exchange(u, grid, 1, boundary), u)


@pytest.mark.parametrize("boundary", ["edge", 2.0])
def test_gradient_equals_that_of_the_one_rank_program(boundary):
    grid = Grid((9, 8), (1.0, 1.0))
    whole = whole_field(grid)

    def energy(padded):  # non-linear, and corners count
        middle = padded[1:-1, 1:-1]
        return jnp.sum(jnp.sin(middle * padded[2:, 2:]) + padded[:-2, 2:] ** 2 * middle)

    def alone(u):
        how = {"mode": "edge"} if boundary == "edge" else {"constant_values": boundary}
        return energy(jnp.pad(u, 1, **how))

    value, gradient = mpigrad.value_and_grad(lambda u: energy(halo_exchange(u, grid, 1, boundary)))(
        jnp.asarray(whole[grid.slices])
    )
    reference, slope = jax.value_and_grad(alone)(jnp.asarray(whole))
    assert np.isclose(value, reference, rtol=1e-13)
    assert np.allclose(gradient, slope[grid.slices], rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
def test_corners_in_three_dimensions_come_from_the_tile_that_owns_them():
    dims = {1: (1, 1, 1), 2: (1, 2, 1), 3: (1, 1, 3), 4: (2, 1, 2)}[COMM.size]
    grid = Grid((5, 4, 6), (1.0, 1.0, 1.0), dims=dims)
    whole = whole_field(grid)
    padded = mpigrad.jit(lambda u: halo_exchange(u, grid))(jnp.asarray(whole[grid.slices]))
    assert np.array_equal(padded, expected(whole, grid, 1, "edge"))


def test_vmap_is_the_exchange_of_each():
    grid = Grid((9, 8), (1.0, 1.0))
    whole = whole_field(grid, (3,))
    batch = jnp.moveaxis(jnp.asarray(whole[grid.slices]), -1, 0)
    padded = mpigrad.vmap(lambda u: halo_exchange(u, grid))(batch)
    assert np.array_equal(np.moveaxis(padded, 0, -1), expected(whole, grid, 1, "edge"))


def test_forward_mode():
    grid = Grid((9, 8), (1.0, 1.0))
    whole = whole_field(grid)
    u = jnp.asarray(whole[grid.slices])
    _, tangent = mpigrad.jvp(lambda u: halo_exchange(u, grid, 1, 7.0), (u,), (u,))
    assert np.array_equal(tangent, expected(whole, grid, 1, 0.0))


def test_bad_arguments_are_refused():
    grid = Grid((9, 8), (1.0, 1.0))
    u = jnp.zeros(grid.local_shape)
    with pytest.raises(ValueError, match="on a tile of"):
        halo_exchange(jnp.zeros((2, 1)), grid)
    with pytest.raises(ValueError, match="width 0"):
        halo_exchange(u, grid, 0)
    with pytest.raises(ValueError, match="boundary must be"):
        halo_exchange(u, grid, 1, "open")  # type: ignore[arg-type]
    if COMM.size > 1:
        with pytest.raises(ValueError, match="not past the neighbouring tile"):
            halo_exchange(u, grid, 9)
