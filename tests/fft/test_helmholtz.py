"""Solves by transforms as strategies of `sparse.solve`, against matrices and one rank."""

import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad import fft, sparse
from mpigrad.grid import Grid, halo_exchange

COMM = mg.default_communicator()
LENGTHS = (2 * np.pi, 4 * np.pi)
KRYLOV = [
    sparse.PCG,
    pytest.param(sparse.GMRES, marks=pytest.mark.full("PCG takes the same path")),
    pytest.param(sparse.BiCGStab, marks=pytest.mark.full("PCG takes the same path")),
]


def periodic_grid(nx=15, ny=17, comm=None):
    return Grid((nx, ny), (LENGTHS[0] / nx, LENGTHS[1] / ny), comm, periodic=True)


def field_on(grid, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=grid.shape)[grid.slices])


def stencil_matrix(grid, kappa, shift):
    """Return the matrix of shift u - div(kappa grad u) by differences across the cells' faces."""
    rows = grid.rows(*np.indices(grid.shape)).astype(int)
    own = rows[grid.slices].ravel()
    around = halo_exchange(kappa, grid)
    diagonal, i, j, values = shift, [own], [own], []
    for axis, h in enumerate(grid.spacing):
        for step in (-1, 1):
            shifted = tuple(
                slice(1 + step * (a == axis), 1 + step * (a == axis) + n)
                for a, n in enumerate(grid.local_shape)
            )
            face = (kappa + around[shifted]) / 2 / h**2
            i.append(own)
            j.append(np.roll(rows, -step, axis)[grid.slices].ravel())
            values.append(-face.ravel())
            diagonal = diagonal + face
    pattern = sparse.Pattern.from_coo(np.concatenate(i), np.concatenate(j), grid.n_local, grid.comm)
    return sparse.Matrix(pattern, jnp.concatenate([jnp.ravel(diagonal), *values]))


def variable(grid, amplitude):
    x, y = grid.centers()
    return 1 + amplitude * jnp.sin(x) * jnp.cos(y / 2)


@pytest.mark.parametrize("method", KRYLOV)
def test_it_preconditions_a_matrix(method):
    grid = periodic_grid()
    layout = fft.Layout(grid, real=True)
    f = field_on(grid)
    helmholtz = fft.Helmholtz(layout, shift=0.5, stencil=True)
    solver = method(rtol=1e-11, preconditioner=helmholtz)
    exact = sparse.solve(stencil_matrix(grid, variable(grid, 0.0), 0.5), f.ravel(), solver)
    assert exact.stats["num_steps"] <= 2  # constant coefficients
    direct = fft.Direct(helmholtz, rtol=1e-10)
    alike = sparse.solve(stencil_matrix(grid, variable(grid, 0.0), 0.5), f.ravel(), direct)
    np.testing.assert_allclose(alike.value, exact.value, atol=1e-10)
    A = stencil_matrix(grid, variable(grid, 0.4), 0.5)
    found = sparse.solve(A, f.ravel(), solver)
    assert found.stats["num_steps"] < 25
    np.testing.assert_allclose(A @ found.value, f.ravel(), atol=1e-8)


@pytest.mark.long("two programs with adjoint solves; another test has those of direct solves")
def test_the_gradient_of_a_preconditioned_solve_is_that_of_one_rank(alone):
    def gradient(grid):
        layout = fft.Layout(grid, real=True)
        solver = sparse.PCG(rtol=1e-12, preconditioner=fft.Helmholtz(layout, 0.5, stencil=True))
        f = field_on(grid)

        def loss(kappa, f):
            A = stencil_matrix(grid, kappa, 0.5)
            return jnp.sum(sparse.solve(A, f.ravel(), solver).value ** 3)

        program = mg.jit(mg.value_and_grad(loss, (0, 1), comm=grid.comm))
        return grid, program, variable(grid, 0.4), f

    grid, program, kappa, f = gradient(periodic_grid())
    value, found = program(kappa, f)
    _, alone_program, *whole = gradient(periodic_grid(comm=alone))
    for mine, every in zip(found, alone_program(*whole)[1], strict=True):
        np.testing.assert_allclose(mine, every[grid.slices], rtol=1e-8, atol=1e-9)
    # Taylor's remainders, by the same program.
    direction = jnp.asarray(np.random.default_rng(COMM.rank).normal(size=grid.local_shape))
    slope = COMM.mpi.allreduce(float(jnp.vdot(found[0], direction)))
    steps = np.array([2e-3, 1e-3])
    changes = np.array([float(program(kappa + h * direction, f)[0] - value) for h in steps])
    for remainders, order in ((changes, 1), (changes - steps * slope, 2)):
        assert abs(np.log2(abs(remainders[0] / remainders[1])) - order) < 0.2, remainders


@pytest.mark.long("derivatives of two orders; test_fourier has transforms with one")
def test_a_direct_solve_is_exact_with_exact_derivatives():
    grid = periodic_grid()
    layout = fft.Layout(grid, real=True)
    solver = fft.Direct(fft.Helmholtz(layout, shift=0.7, diffusivity=1.5), rtol=1e-11)
    f = field_on(grid)

    def solution(f, shift):
        operator = lambda u: shift * u - 1.5 * fft.laplacian(u, layout)
        return sparse.solve(operator, f, solver)

    found = solution(f, 0.7)
    assert found.stats["num_steps"] == 1
    expected = fft.solve_helmholtz(f / 1.5, layout, 0.7 / 1.5)
    np.testing.assert_allclose(found.value, expected, atol=1e-12)
    mg.dot_test(mg.jit(lambda f: solution(f, 0.7).value), f)
    derivative = mg.jit(mg.grad(lambda s: jnp.sum(solution(f, s).value ** 3), replicated=0))
    direct = lambda s: jnp.sum(fft.solve_helmholtz(f / 1.5, layout, s / 1.5) ** 3)
    direct = mg.jit(mg.grad(direct, replicated=0))
    s = jnp.asarray(0.7)
    np.testing.assert_allclose(derivative(s), direct(s), rtol=1e-9)
    two = jnp.stack([f, 2 * f], axis=-1)  # fields have trailing axes
    found = mg.jit(lambda f: solution(f, 0.7).value)(two)
    np.testing.assert_allclose(found[..., 1], 2 * expected, atol=1e-12)


@pytest.mark.full("periodic axes take the same path")
@pytest.mark.parametrize("kinds", ["dct", "dst", ("dst", "dct")])
def test_a_direct_solve_between_walls(kinds):
    grid = Grid((12, 10), (1 / 12, 1 / 10))
    layout = fft.Layout(grid, kinds=kinds)
    f = field_on(grid)
    solver = fft.Direct(fft.Helmholtz(layout, shift=0.3))
    operator = lambda u: 0.3 * u - fft.laplacian(u, layout)
    u = mg.jit(lambda f: sparse.solve(operator, f, solver).value)(f)
    np.testing.assert_allclose(u, fft.solve_helmholtz(f, layout, 0.3), atol=1e-12)


def test_without_shift_it_is_definite():
    """Poisson's matrix is singular. Its solution with mean zero is found from its first guess."""
    grid = periodic_grid()
    layout = fft.Layout(grid, real=True)
    helmholtz = fft.Helmholtz(layout, stencil=True)
    assert helmholtz.is_singular
    np.testing.assert_allclose(helmholtz(jnp.ones(grid.local_shape)), 4.0, rtol=0.02)
    f = field_on(grid)
    f = f - mg.allreduce(jnp.sum(f)) / grid.size
    A = stencil_matrix(grid, jnp.ones(grid.local_shape), 0.0)
    solver = sparse.PCG(preconditioner=helmholtz)
    u = sparse.solve(A, f.ravel(), solver).value.reshape(grid.local_shape)
    expected = fft.solve_helmholtz(f, layout, stencil=True)
    np.testing.assert_allclose(u, expected, atol=1e-7)
    with pytest.raises(Exception, match=r"PCG did not converge.*singular"):
        sparse.solve(A, f.ravel() + 1, solver)


@pytest.mark.ranks(1, 2)
def test_wrong_use_is_refused_on_all_ranks():
    grid = periodic_grid()
    layout = fft.Layout(grid, real=True)
    f = field_on(grid)
    with pytest.raises(TypeError, match=r"layout must be a fft\.Layout, got Grid"):
        fft.Helmholtz(grid)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shift must be not negative and finite, got shift=-1"):
        fft.Helmholtz(layout, shift=-1.0)
    with pytest.raises(TypeError, match="diffusivity must be a Python number"):
        fft.Helmholtz(layout, diffusivity=jnp.ones(()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be singular, got shift=0"):
        fft.Direct(fft.Helmholtz(layout))
    with pytest.raises(TypeError, match=r"operator must be a fft\.Helmholtz, got Layout"):
        fft.Direct(layout)  # type: ignore[arg-type]
    helmholtz = fft.Helmholtz(layout, shift=0.5)
    other = periodic_grid(12, 12)
    with pytest.raises(ValueError, match="one row for each cell of the layout's grid"):
        A = stencil_matrix(other, variable(other, 0.0), 0.5)
        sparse.solve(A, field_on(other).ravel(), sparse.PCG(preconditioner=helmholtz))
    with pytest.raises(ValueError, match="must be on the tile of shape"):
        sparse.solve(lambda u: u, jnp.ones(7), fft.Direct(helmholtz))
    with pytest.raises(Exception, match=r"Direct did not converge: the residual of the vector"):
        sparse.solve(lambda u: 3.0 * u, f, fft.Direct(helmholtz))  # another operator


@pytest.mark.ranks(2)
def test_settings_must_be_the_same_on_all_ranks():
    layout = fft.Layout(periodic_grid(), real=True)
    with pytest.raises(ValueError, match="shift, diffusivity and stencil must be the same"):
        fft.Helmholtz(layout, shift=1.0 + COMM.rank)


@pytest.mark.ranks(1)
def test_layouts_of_equal_arguments_are_equal():
    grid = periodic_grid()
    first, second = fft.Layout(grid, real=True), fft.Layout(grid, real=True)
    assert first == second and first.plan is second.plan
    assert hash(fft.Layout(grid, real=True)) == hash(fft.Layout(grid, real=True))
    assert fft.Layout(grid) != fft.Layout(grid, real=True)
