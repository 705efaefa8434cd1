"""Eigenpairs compared with dense ones, and their derivatives with those of dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from systems import grid_system
from whole import prove, rows_of

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import BoxMG, Jacobi, Matrix, Pattern, Result, eigh, local_range

FIVE_POINTS = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def scaled(A, d):
    return A.scale_rows(d).scale_columns(d)


def dense_pairs(a, b):
    """The pairs of a generalized problem, differentiable by JAX."""
    lower = jnp.linalg.cholesky(b)
    half = jax.scipy.linalg.solve_triangular(lower, a, lower=True)
    values, vectors = jnp.linalg.eigh(jax.scipy.linalg.solve_triangular(lower, half.T, lower=True))
    return values, jax.scipy.linalg.solve_triangular(lower.T, vectors)


def squares(comm, n=6, spacing=1.0):
    """The five-point Laplacian of a square of cells: most eigenvalues are double."""
    grid = Grid((n, n), (spacing, spacing), comm=comm)
    pattern = Pattern.from_stencil(grid, FIVE_POINTS)
    entries = [jnp.full(grid.local_shape, v) for v in (4.0, -1.0, -1.0, -1.0, -1.0)]
    return grid, Matrix.assemble(pattern, entries)


def test_values_vectors_and_derivatives(comm):
    """A generalized problem: jvp, gradient and Hessian with respect to both matrices."""
    system = grid_system(comm)
    S = system.matrix
    M = S + 3 * S  # another pattern object
    whole, k = system.dense(system.all_values), 3
    weights = jnp.array([1.0, -2.0, 0.7])

    def f(p, q):
        A, B = scaled(S, 2 + jnp.sin(p)), scaled(M, 3 + jnp.cos(q))
        values, vectors = eigh(A, B, k, preconditioner=Jacobi(), rtol=1e-12).value
        return vectors**2 @ (weights * values)

    def F(p, q):
        d, e = 2 + jnp.sin(p), 3 + jnp.cos(q)
        values, vectors = dense_pairs(d[:, None] * whole * d, 4 * e[:, None] * whole * e)
        return vectors[:, :k] ** 2 @ (weights * values[:k])

    operands = [rows_of(S.pattern, seed=i) for i in (1, 2)]
    prove(f, F, operands, operands[0].mine, rtol=1e-7)


def test_equal_values(comm):
    """The trace and the projector of a double value: the gradient, and a second derivative."""
    grid, A = squares(comm)
    n, k = A.shape[0], 3
    mine = slice(A.pattern.offset, A.pattern.offset + A.pattern.n_local)
    order = Matrix.assemble  # noqa: F841
    whole = np.concatenate(comm.mpi.allgather(A.local_scipy().toarray()))
    generator = np.random.default_rng(5)
    point, along, u, w = generator.standard_normal((4, n))
    point = 0 * point

    def loss(p):
        values, vectors = eigh(scaled(A, jnp.exp(p)), k=k, preconditioner=Jacobi(), rtol=1e-12).value
        uw = mg.allreduce(jnp.stack([jnp.asarray(v[mine]) for v in (u, w)]) @ vectors, comm=comm)
        return jnp.sum(values**2) + jnp.sum(uw[0, 1:] * uw[1, 1:])

    def dense(p):
        d = np.exp(p)
        values, vectors = scipy.linalg.eigh(d[:, None] * whole * d)
        parts = np.stack([u, w]) @ vectors[:, 1:k]
        return np.sum(values[:k] ** 2) + np.sum(parts[0] * parts[1])

    def slopes(p, t):
        gradient = mg.grad(loss, loss="replicated", comm=comm)
        return *mg.jvp(loss, (p,), (t,)), *mg.jvp(gradient, (p,), (t,))

    value, slope, gradient, hessian = mg.jit(slopes)(
        jnp.asarray(point[mine]), jnp.asarray(along[mine])
    )
    step = 2e-3
    f = [dense(point + i * step * along) for i in (-2, -1, 0, 1, 2)]
    first = (f[0] - 8 * f[1] + 8 * f[3] - f[4]) / (12 * step)
    second = (-f[0] + 16 * f[1] - 30 * f[2] + 16 * f[3] - f[4]) / (12 * step**2)
    dot = lambda x: comm.mpi.allreduce(float(np.dot(x, along[mine])))
    close(value, f[2], 1e-11)
    close((float(slope), dot(gradient)), (first, first), 1e-6)
    close(dot(hessian), second, 1e-4)
