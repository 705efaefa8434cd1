"""The discrete equation: its order, its matrix, and its derivatives."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import mpigrad
from mpigrad import sparse
from mpigrad_apps.poisson import poisson, unit_square
from mpigrad_apps.poisson.fields import (
    TRUTHS,
    manufactured_solution,
    manufactured_source,
    quadratic,
)


def largest(comm, values):
    return max(comm.mpi.allgather(float(np.max(np.abs(values)))))


def error(comm, cells, kappa=quadratic):
    grid = unit_square(cells, comm)
    x, y = (jnp.asarray(axis) for axis in grid.centers())
    model = poisson(grid, manufactured_source(kappa)(x, y))
    solver = sparse.default_solver(rtol=1e-12)
    u = mpigrad.jit(lambda k: model.solution(k, solver))(kappa(x, y))
    return largest(comm, u - manufactured_solution(x, y))


@pytest.mark.full("a test with different spacings finds the same order")
def test_second_order(comm):
    coarse, middle, fine = (error(comm, (n, n)) for n in (10, 20, 40))
    assert np.log2(coarse / middle) > 1.9
    assert np.log2(middle / fine) > 1.9
    assert fine < 1e-4


def test_second_order_with_different_spacings(comm):
    coarse, fine = error(comm, (12, 18)), error(comm, (24, 36))
    assert np.log2(coarse / fine) > 1.9


@pytest.mark.ranks(1)
def test_manufactured_source_is_that_of_the_papers_case():
    x, y = np.meshgrid(np.linspace(0.1, 0.9, 5), np.linspace(0.2, 0.7, 4), indexing="ij")
    kappa = 1 + x**2 + y**2
    by_hand = (
        2 * x * (1 - 2 * x) * y * (1 - y)
        + 2 * y * (1 - 2 * y) * x * (1 - x)
        - 2 * kappa * (y * (1 - y) + x * (1 - x))
    )
    assert np.allclose(manufactured_source(quadratic)(x, y), by_hand, rtol=1e-12)


@pytest.mark.ranks(1)
def test_true_fields_are_positive():
    x, y = jnp.meshgrid(jnp.linspace(0, 1, 50), jnp.linspace(0, 1, 50), indexing="ij")
    for truth in TRUTHS.values():
        assert np.min(truth(x, y)) > 0.3


def test_shapes_are_checked_as_annotated(comm):
    model = poisson(unit_square((8, 6), comm), np.ones(unit_square((8, 6), comm).local_shape))
    with pytest.raises(jaxtyping.TypeCheckError):
        model.roughness(jnp.ones(3))


def test_matrix_is_that_of_the_one_rank_program(comm, alone):
    kappa = np.random.default_rng(5).uniform(1, 3, size=(9, 7))
    v = np.random.default_rng(6).normal(size=(9, 7))
    products = []
    for ranks in (comm, alone):
        grid = unit_square((9, 7), ranks)
        model = poisson(grid, np.ones(grid.local_shape))
        matrix = model.matrix(jnp.asarray(kappa[grid.slices]))
        product = matrix @ jnp.asarray(v[grid.slices].ravel())
        products.append((grid, np.asarray(product).reshape(grid.local_shape)))
    (grid, mine), (_, whole) = products
    assert np.allclose(mine, whole[grid.slices], rtol=1e-13, atol=1e-13)
    dense = dense_matrix(kappa) @ v.ravel()
    assert np.allclose(whole.ravel(), dense, rtol=1e-13, atol=1e-13)


def dense_matrix(kappa):
    """The scheme written out cell by cell."""
    nx, ny = kappa.shape
    hx, hy = 1 / nx, 1 / ny
    matrix = np.zeros((nx * ny, nx * ny))
    for i in range(nx):
        for j in range(ny):
            row = i * ny + j
            for di, dj, weight in (
                (1, 0, hy / hx),
                (-1, 0, hy / hx),
                (0, 1, hx / hy),
                (0, -1, hx / hy),
            ):
                k, l = i + di, j + dj
                if 0 <= k < nx and 0 <= l < ny:
                    c = weight * (kappa[i, j] + kappa[k, l]) / 2
                    matrix[row, k * ny + l] -= c
                else:
                    c = 2 * weight * kappa[i, j]
                matrix[row, row] += c
    return matrix


def test_solution_is_differentiable_in_kappa(comm):
    grid = unit_square((8, 9), comm)
    model = poisson(grid, np.ones(grid.local_shape))
    solver = sparse.default_solver(rtol=1e-12)
    kappa = jnp.asarray(np.random.default_rng(comm.rank).uniform(1, 2, grid.local_shape))
    mpigrad.dot_test(lambda k: model.solution(k, solver), kappa, rtol=1e-8)


def test_roughness_counts_every_face_once(comm):
    grid = unit_square((8, 9), comm)
    model = poisson(grid, np.ones(grid.local_shape))
    field = np.random.default_rng(1).normal(size=grid.shape)
    share = mpigrad.jit(model.roughness)(jnp.asarray(field[grid.slices]))
    total = sum(comm.mpi.allgather(float(share)))
    expected = np.sum(np.diff(field, axis=0) ** 2) + np.sum(np.diff(field, axis=1) ** 2)
    assert np.isclose(total, expected / grid.size, rtol=1e-12)


def test_rejects_wrong_shapes(comm):
    grid = unit_square((8, 9), comm)
    with pytest.raises(ValueError, match="the source must have the shape"):
        poisson(grid, np.ones((3, 3)))
    model = poisson(grid, np.ones(grid.local_shape))
    with pytest.raises(ValueError, match="kappa must have the shape"):
        model.matrix(jnp.ones((3, 3)))


def test_rejects_more_ranks_than_cells(comm):
    if comm.size == 1:
        with pytest.raises(ValueError, match="0 x 5"):
            unit_square((0, 5), comm)
    else:
        with pytest.raises(ValueError, match="cannot share 1 x 1 cells"):
            unit_square((1, 1), comm)


assert jax.config.jax_enable_x64  # type: ignore[attr-defined]
