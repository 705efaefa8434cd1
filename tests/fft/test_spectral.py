"""Derivatives and solves by transforms, against analytic fields and matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad import fft, sparse
from mpigrad.grid import Grid

LENGTHS = (2 * np.pi, 4 * np.pi)


def periodic_grid(nx=16, ny=18):
    return Grid((nx, ny), (LENGTHS[0] / nx, LENGTHS[1] / ny), periodic=True)


def test_derivatives_of_waves():
    grid = periodic_grid()
    x, y = grid.centers()
    layout = fft.Layout(grid, real=True)
    u = jnp.sin(2 * x) * jnp.cos(1.5 * y)
    du = fft.gradient(u, layout)
    np.testing.assert_allclose(du[0], 2 * np.cos(2 * x) * np.cos(1.5 * y), atol=1e-12)
    np.testing.assert_allclose(du[1], -1.5 * np.sin(2 * x) * np.sin(1.5 * y), atol=1e-12)
    np.testing.assert_allclose(fft.laplacian(u, layout), -(4 + 1.5**2) * u, atol=1e-11)
    # As many fields behind as cells along an axis, which must not be taken for the axis.
    several = u[..., None] * jnp.arange(1.0, 1 + len(y[0]))
    for one, many in zip(du, fft.gradient(several, layout), strict=True):
        np.testing.assert_allclose(many[..., 2], 3 * one, atol=1e-12)


def test_misuse_is_an_error(comm):
    grid = periodic_grid()
    layout, f = fft.Layout(grid, real=True), jnp.ones(grid.local_shape)
    for shift in (-1.0, np.nan):
        with pytest.raises(ValueError, match="shift must be finite and not negative"):
            fft.solve_helmholtz(f, layout, shift)
    with pytest.raises(ValueError, match="shift must be a number, got shape"):
        fft.solve_helmholtz(f, layout, f)
    if comm.size > 1:
        fft.Layout(grid, axes=(0, 1))  # the ranks have one of the two already
        with pytest.raises(ValueError, match="real, axes and kinds must be the same on all ranks"):
            fft.Layout(grid, axes=(0, 1) if comm.rank == 0 else (1, 0))


def test_the_highest_mode_has_no_derivative():
    grid = periodic_grid(4, 6)
    x, y = grid.centers()
    i = np.rint(x / grid.spacing[0] - 0.5)
    u = jnp.asarray((-1.0) ** i * np.cos(y / 2))
    du, _ = fft.gradient(u, fft.Layout(grid, real=True))
    np.testing.assert_allclose(du, 0, atol=1e-14)


@pytest.mark.cases("dct", "kinds2", reason="both kinds are in them")
@pytest.mark.parametrize("kinds", ["dct", "dst", ("dst", "dct")])
def test_solves_between_walls(kinds):
    grid = Grid((12, 10), (1 / 12, 1 / 10))
    layout = fft.Layout(grid, kinds=kinds)
    u = jnp.asarray(np.random.default_rng(1).normal(size=grid.shape)[grid.slices])
    shift = 0.7
    f = shift * u - fft.laplacian(u, layout)
    np.testing.assert_allclose(fft.solve_helmholtz(f, layout, shift), u, atol=1e-11)


def test_the_stencil_is_inverted():
    """The five-point matrix times the solution is the right-hand side."""
    grid = Grid((8, 6), (0.25, 0.5), periodic=(True, False))
    layout = fft.Layout(grid, real=True, kinds=("fft", "dst"))
    f = jnp.asarray(np.random.default_rng(1).normal(size=grid.shape)[grid.slices])
    u = fft.solve_helmholtz(f, layout, 0.3, stencil=True)
    padded = mg.grid.halo_exchange(u, grid)  # u is odd at the walls of y
    sides = (grid.slices[1].start == 0, grid.slices[1].stop == 6)
    padded = padded.at[:, 0].multiply(-1.0 if sides[0] else 1.0)
    padded = padded.at[:, -1].multiply(-1.0 if sides[1] else 1.0)
    middle = padded[1:-1, 1:-1]
    second = (padded[2:, 1:-1] + padded[:-2, 1:-1] - 2 * middle) / 0.25**2
    second = second + (padded[1:-1, 2:] + padded[1:-1, :-2] - 2 * middle) / 0.5**2
    np.testing.assert_allclose(0.3 * u - second, f, atol=1e-11)


def test_a_periodic_solve_has_mean_zero_and_a_gradient():
    grid = periodic_grid()
    layout = fft.Layout(grid, real=True)
    x, _ = grid.centers()
    u = fft.solve_helmholtz(1 + 4 * jnp.sin(2 * x), layout)
    np.testing.assert_allclose(u, np.sin(2 * x), atol=1e-13)
    f = jnp.asarray(np.random.default_rng(1).normal(size=grid.shape)[grid.slices])
    mg.dot_test(lambda f: fft.solve_helmholtz(f, layout), f)
    mg.taylor_test(lambda f: jnp.sum(fft.solve_helmholtz(f, layout) ** 3), f)
    loss = lambda s: jnp.sum(fft.solve_helmholtz(f, layout, s) ** 2)
    mg.taylor_test(loss, jnp.asarray(0.5), replicated=True)


@pytest.mark.full("it compiles many solves")
def test_it_preconditions_an_operator_with_variable_coefficients():
    grid = periodic_grid(15, 17)  # no highest mode, which has no gradient
    layout = fft.Layout(grid, real=True)
    x, y = grid.centers()
    f = jnp.asarray(np.random.default_rng(1).normal(size=grid.shape)[grid.slices])

    def solution(amplitude):
        kappa = 1 + amplitude * jnp.sin(x) * jnp.cos(y / 2)

        def operator(u):
            flux = [kappa * d for d in fft.gradient(u, layout)]
            return u - sum(fft.gradient(q, layout)[i] for i, q in enumerate(flux))

        inverse = lambda r: fft.solve_helmholtz(r, layout, 1.0)
        A = sparse.Operator(operator, inverse=inverse)
        found = sparse.solve(A, f, sparse.PCG(preconditioner=None, rtol=1e-12))
        return found.value, operator(found.value), found.stats["num_steps"]

    _, again, steps = solution(0.4)
    np.testing.assert_allclose(again, f, atol=1e-9)
    assert steps < 30
    mg.taylor_test(lambda a: jnp.sum(solution(a)[0] ** 2), jnp.asarray(0.4), replicated=True)


def test_dealiasing_keeps_the_lower_two_thirds():
    grid = periodic_grid(12, 9)
    layout = fft.Layout(grid, real=True)
    ones = fft.dealias(jnp.ones(layout.local_shape, complex), layout)
    mx, my = layout.modes()
    np.testing.assert_array_equal(ones.real, (np.abs(mx) < 4) & (my < 3))


def test_walls_have_no_plain_gradient():
    grid = Grid((8, 8), (1.0, 1.0))
    with pytest.raises(ValueError, match="expected periodic axes"):
        fft.gradient(jnp.ones(grid.local_shape), fft.Layout(grid, kinds="dct"))
