"""Stencils with overlap against the same stencils on exchanged tiles, and their adjoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad.grid import Grid, apply_stencil, halo_exchange
from mpigrad.runtime.native import TAG_LIMIT, library

COMM = mpigrad.default_communicator()
WIDTHS = ((2, 1), (1, 0))


def flows(fields, kappa):
    """Of two fields padded by WIDTHS: one non-linear result on the cells, one of shape (.., 2)."""
    u, v = fields
    cut = lambda x, i, j: x[2 + i : x.shape[0] - 1 + i, 1 + j : x.shape[1] + j]
    first = kappa * cut(u, -2, -1) * cut(v[..., 0], 0, 0) + jnp.sin(cut(u, 1, -1))
    return first, cut(v, 0, -1) * cut(u, -1, 0)[..., None]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("interior", [True, False], ids=["an interior", "no interior"])
def test_the_same_as_on_exchanged_tiles(interior):
    # Tiles of three cells are too small for an interior.
    shape, dims = ((13, 9), None) if interior else ((3 * COMM.size, 4), (COMM.size, 1))
    grid = Grid(shape, (1.0, 1.0), dims=dims, periodic=(False, COMM.size % 2 == 1))
    boundary = (("reflect", 2.0), "symmetric")
    generator = np.random.default_rng(COMM.rank)
    n = grid.local_shape
    u, v, kappa = (jnp.asarray(generator.normal(size=s)) for s in (n, (*n, 2), n))

    def overlapped(u, v, kappa):
        return apply_stencil(flows, (u, v), grid, WIDTHS, boundary, coefficients=(kappa,))

    def after(u, v, kappa):
        return flows(halo_exchange((u, v), grid, WIDTHS, boundary), kappa)

    def loss(f):
        return lambda *x: sum(jnp.sum(jnp.cos(y)) for y in f(*x))

    def results(f, *x):
        return f(*x), mpigrad.grad(loss(f), argnums=(0, 1, 2))(*x)

    both = mpigrad.jit(lambda *x: (results(overlapped, *x), results(after, *x)))
    got, reference = both(u, v, kappa)
    for a, b in zip(*map(jax.tree.leaves, (got, reference)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
    mpigrad.dot_test(overlapped, u, v, kappa)


@pytest.mark.thin(4)
def test_float32_in_three_dimensions_and_in_one():
    for shape in ((6, 5, 7), (23,)):
        grid = Grid(shape, (1.0,) * len(shape))
        whole = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        inner = (slice(1, -1),) * len(shape)

        def corner_differences(p, inner=inner):
            beside = tuple(slice(2, None) for _ in inner)
            return p[inner] - p[beside]

        result = mpigrad.jit(lambda u, g=grid, f=corner_differences: apply_stencil(f, u, g))(
            jnp.asarray(whole[grid.slices])
        )
        assert result.dtype == jnp.float32
        assert np.array_equal(result, corner_differences(np.pad(whole, 1, "edge"))[grid.slices])


def ends(fields, widths):
    """Of the first and the last cell around each, in a float32 and a float64 field."""
    axes = range(len(widths))
    first, last = (
        [x[tuple(slice(k, x.shape[i] - sum(widths[i]) + k) for i, k in enumerate(begin))]
         for x in fields]
        for begin in ([0 for _ in axes], [sum(widths[i]) for i in axes])
    )  # fmt: skip
    product = first[0] * last[1][..., 1]
    return product, first[1] - 2 * last[1], jnp.sin(last[0])


@pytest.mark.full("the other tests run two axes and one precision of the same code")
def test_adjoints_of_two_precisions_in_three_dimensions_and_in_one():
    cases, tiles = [], []
    for shape, widths in (((23,), ((2, 1),)), ((5, 4, 14), ((0, 1), (2, 0), (1, 2)))):
        grid = Grid(shape, (1.0,) * len(shape))
        draw = np.random.default_rng([len(shape), COMM.rank]).normal
        single = jnp.asarray(draw(size=grid.local_shape), jnp.float32)
        tiles.append((single, jnp.asarray(draw(size=(*grid.local_shape, 2)))))
        cases.append((functools.partial(ends, widths=widths), grid, widths, "symmetric"))

    def overlapped(tiles):
        return [apply_stencil(f, u, *where) for u, (f, *where) in zip(tiles, cases, strict=True)]

    mpigrad.dot_test(overlapped, tiles, rtol=1e-6)


def test_messages_are_posted_before_the_interior_is_computed():
    grid = Grid((12,), (1.0,))
    laplacian = lambda p: p[2:] + p[:-2] - 2 * p[1:-1]

    def names(f):
        jaxpr = jax.make_jaxpr(f)(jnp.ones(grid.local_shape))
        found = [str(e.primitive).removeprefix("mpigrad_") for e in jaxpr.eqns]
        return [n for n in found if n in ("irecv", "isend", "in_order", "arrive", "sent")]

    neighbors = (grid.comm.rank > 0) + (grid.comm.rank < grid.comm.size - 1)
    _, back = mpigrad.vjp(lambda u: apply_stencil(laplacian, u, grid), jnp.ones(grid.local_shape))
    for way in (lambda u: apply_stencil(laplacian, u, grid), back):
        found = names(way)
        first = found.index("in_order") if neighbors else 0
        assert found[:first] == ["irecv"] * neighbors + ["isend"] * neighbors
        rest = found[first:]
        assert rest.count("arrive") == rest.count("sent") == neighbors
        assert not {"irecv", "isend"} & set(rest)
        assert not neighbors or rest[:2] == ["in_order", "in_order"]


def test_a_stencil_that_loses_cells_is_refused():
    grid = Grid((9, 8), (1.0, 1.0))
    with pytest.raises(ValueError, match="must be those of the tile"):
        apply_stencil(lambda p: p, jnp.zeros(grid.local_shape), grid)
    with pytest.raises(ValueError, match="apply_stencil: the first axes of a field"):
        apply_stencil(
            lambda p, c: p, jnp.zeros(grid.local_shape), grid, coefficients=(jnp.zeros(3),)
        )
    # The messages that it has posted are waited for.
    assert b"test_apply_stencil.py" not in library().mpigrad_pending_requests()


@pytest.mark.ranks(2)
def test_layers_are_not_taken_for_messages_of_the_program(comm):
    """Of its largest tag, in derivatives; and tags that mpigrad itself takes are refused."""
    grid = Grid((8,), (1.0,), comm)

    def f(x):
        if comm.rank == 0:
            mpigrad.send(100 * x[:1], 1, TAG_LIMIT)
        y = apply_stencil(lambda u: u[2:] + u[:-2], x, grid)
        return y + mpigrad.recv(x[:1], 0, TAG_LIMIT) if comm.rank == 1 else y

    x = jnp.arange(4.0) + 4 * comm.rank
    value, tangent = mpigrad.jvp(f, (x,), (x,))  # f is linear
    np.testing.assert_array_equal(value, tangent)
    mpigrad.dot_test(f, x)
    with pytest.raises(ValueError, match="integer from 0 to"):
        mpigrad.send(x, 0, TAG_LIMIT + 1)
