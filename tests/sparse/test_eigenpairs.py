"""Eigenpairs compared with dense ones, and their derivatives with those of dense ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from systems import grid_system
from whole import rows_of

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import (
    BoxMG,
    Jacobi,
    Matrix,
    Pattern,
    Preconditioner,
    Result,
    eigh,
    local_range,
)

FIVE_POINTS = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def scaled(A, d):
    return A.scale_rows(d).scale_columns(d) if isinstance(A, Matrix) else d[:, None] * A * d


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


@pytest.mark.long("second derivatives; test_derivatives_that_do_not_exist has first ones")
def test_values_vectors_and_derivatives(comm):
    """A generalized problem: value, jvp, gradient and Hessian with respect to both matrices."""
    system = grid_system(comm)
    S = system.matrix
    M = S + 3 * S  # the pattern is another object
    whole, k = system.dense(system.all_values), 3
    operands = [rows_of(S.pattern, seed=i) for i in range(4)]
    weights = [1.0, -2.0, 0.7]

    def loss(p, q, w, pairs, A, B):
        values, vectors = pairs(scaled(A, 2 + jnp.sin(p)), scaled(B, 3 + jnp.cos(q)))
        return jnp.sum(w * jnp.sin(10 * vectors[:, :k] ** 2 @ (jnp.array(weights) * values[:k])))

    def pairs(A, B):
        return eigh(A, B, k, preconditioner=Jacobi(), rtol=1e-12).value

    def derivatives(kit, *arguments):
        def program(p, q, tp, tq, w):
            f = lambda p, q: loss(p, q, w, *arguments)
            return kit.jvp(kit.value_and_grad(f, (0, 1)), (p, q), (tp, tq))

        return program

    parts, wholes = [x.part for x in operands], [jnp.asarray(x.whole) for x in operands]
    (value, gradient), (slope, hessian) = mg.jit(derivatives(mg, pairs, S, M))(
        *parts, operands[0].part
    )
    (Value, Gradient), (Slope, Hessian) = jax.jit(derivatives(jax, dense_pairs, whole, 4 * whole))(
        *wholes, wholes[0]
    )
    close((value, slope), (Value, Slope), 1e-8)
    mine = operands[0].mine
    close((gradient, hessian), jax.tree.map(lambda x: x[mine], (Gradient, Hessian)), 1e-7)


@pytest.mark.long("second derivatives; test_derivatives_that_do_not_exist has first ones")
def test_equal_values(comm):
    """The trace and the projector of a double value: the gradient, and a second derivative."""
    _, A = squares(comm)
    n, k = A.shape[0], 3
    mine = slice(A.pattern.offset, A.pattern.offset + A.pattern.n_local)
    whole = np.concatenate(comm.mpi.allgather(A.local_scipy().toarray()))
    generator = np.random.default_rng(5)
    point, along, u, w = generator.standard_normal((4, n))
    point = 0 * point

    def loss(p):
        values, vectors = eigh(
            scaled(A, jnp.exp(p)), k=k, preconditioner=Jacobi(), rtol=1e-12
        ).value
        uw = mg.allreduce(jnp.stack([jnp.asarray(v[mine]) for v in (u, w)]) @ vectors, comm=comm)
        return values[0] + jnp.sum(values[1:]) ** 2 + jnp.sum(uw[0, 1:] * uw[1, 1:])

    def dense(p):
        values, vectors = scipy.linalg.eigh(scaled(whole, np.exp(p)))
        parts = np.stack([u, w]) @ vectors[:, 1:k]
        return values[0] + np.sum(values[1:k]) ** 2 + np.sum(parts[0] * parts[1])

    def slopes(p, t):
        return mg.jvp(mg.value_and_grad(loss, loss="replicated", comm=comm), (p,), (t,))

    (value, gradient), (slope, hessian) = mg.jit(slopes)(
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


def test_derivatives_that_do_not_exist(comm):
    """Functions that depend on the basis of a group, or on a group that k cuts in two."""
    _, A = squares(comm, 4)

    wave = jnp.sin(A.pattern.offset + jnp.arange(A.pattern.n_local) ** 2)
    tangent = jnp.sin(A.values)

    def pairs(values, k):
        return eigh(Matrix(A.pattern, values), k=k, preconditioner=None, rtol=1e-10).value

    def pulled(k):
        def program(v, *weights):
            def loss(v):
                pair = pairs(v, k)
                return pair.values @ weights[0] + jnp.sum(pair.vectors * weights[1])

            return mg.grad(loss)(v)

        return mg.jit(program)

    zero = jnp.zeros((A.pattern.n_local, 3))
    waves = zero.at[:, 1].set(wave)
    cut = "Take k larger or smaller"
    three, two = pulled(3), pulled(2)
    for match, program, *weights in (
        ("eigenvalues 1 and 2 .* treats their values differently.*the sum of their values", three,
         jnp.array([1.0, 1.0, 0.0]), zero),
        ("treats their vectors differently", three, jnp.zeros(3), waves),
        (cut, two, jnp.array([0.0, 1.0]), zero[:, :2]),
        (cut, two, jnp.zeros(2), waves[:, :2]),
    ):  # fmt: skip
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            program(A.values, *weights)
    with pytest.raises(jax.errors.JaxRuntimeError, match=cut):
        mg.jvp(lambda v: pairs(v, 2), (A.values,), (tangent,))
    # The first value is not in the group that is cut. It is linear in A.
    lowest = two(A.values, jnp.array([1.0, 0.0]), zero[:, :2]) / comm.size
    total = mg.allreduce(jnp.sum(lowest * A.values), comm=comm)
    expected = 4 - 4 * np.cos(np.pi / 5)
    close(total, expected, 1e-8)
    group = three(A.values, jnp.array([0.0, 1.0, 1.0]), zero) / comm.size
    total = mg.allreduce(jnp.sum(group * A.values), comm=comm)
    close(total, 2 * (4 - 2 * np.cos(np.pi / 5) - 2 * np.cos(2 * np.pi / 5)), 1e-8)


def line(comm, n=24, ends=2.0, dtype=float):
    """The second difference on n points of a line. ends=1: without flux at both ends."""
    row = np.array(local_range(n, comm))
    left, right = row[row > 0], row[row < n - 1]
    rows, columns = np.concatenate([row, left, right]), np.concatenate([row, left - 1, right + 1])
    pattern = Pattern.from_coo(rows, columns, len(row), comm)
    edge = (rows == columns) & ((rows == 0) | (rows == n - 1))
    values = np.where(rows == columns, np.where(edge, ends, 2.0), -1.0)
    return Matrix(pattern, jnp.asarray(values, dtype))


def test_ends_of_the_spectrum(comm):
    """The largest values, all values of a small matrix in float32, and a singular matrix."""
    n, steps = 24, np.arange(1, 25)
    expected = 2 - 2 * np.cos(steps * np.pi / (n + 1))
    A = line(comm)
    solution = eigh(A, k=3, which="largest")
    close(solution.value.values, expected[-3:], 1e-12)
    close(solution.stats["next_value"], expected[-4], 1e-6)
    small = eigh(line(comm, 5, dtype="float32"), k=5, rtol=1e-4)
    assert small.value.vectors.dtype == "float32" and np.isinf(small.stats["next_value"])
    close(small.value.values, 2 - 2 * np.cos(np.arange(1, 6) * np.pi / 6), 1e-5)
    # Constants are in the null space.
    free = eigh(line(comm, ends=1.0), k=3, shift=0.01)
    close(free.value.values, 2 - 2 * np.cos(np.arange(3) * np.pi / n), 1e-12)
    gram = mg.allreduce(free.value.vectors.T @ free.value.vectors, comm=comm)
    close(gram, np.eye(3), 1e-12)


def test_multigrid_and_ranks(comm):
    """BoxMG needs few steps, and vectors do not depend on the number of ranks."""
    grid, A = squares(comm, 20)
    solution = eigh(A, k=4, preconditioner=BoxMG())
    lowest = 2 - 2 * np.cos(np.arange(1, 5) * np.pi / 21)
    close(solution.value.values, np.sort(np.add.outer(lowest, lowest).ravel())[:4], 1e-12)
    assert solution.stats["num_steps"] < 25
    x = grid.gather(solution.value.vectors[:, 0].reshape(grid.local_shape))
    if comm.rank == 0:
        shape = np.sin(np.arange(1, 21) * np.pi / 21)
        exact = np.outer(shape, shape)
        close(np.abs(x), exact / np.linalg.norm(exact), 1e-7)
    # Neumann conditions, with multigrid for the shifted matrix.
    free = eigh(A - Matrix(A.pattern, _boundary(grid, A)), k=4, preconditioner=BoxMG(), shift=0.01)
    close(free.value.values[0], 0, 1e-12)


@dataclasses.dataclass(frozen=True)
class Spread(Preconditioner):
    """Positive definite, and leads from each row to its neighbours."""

    def inverse(self, A):
        links = Matrix(A.pattern, jnp.where(A.values > 0, 1.0, 0.2))
        return lambda r: links @ r


def test_fixed_rows(comm):
    """A line in two pieces: no pair of a fixed row, and derivatives of the free ones."""
    A, n = line(comm, 12), 12
    M = Matrix(A.pattern, jnp.where(A.values > 0, 0.5, 0.0))
    fixed = np.isin(local_range(n, comm), [0, 5, 11])
    pieces = [2 - 2 * np.cos(np.arange(1, m) * np.pi / m) for m in (5, 6)]
    expected = 2 * np.sort(np.concatenate(pieces))
    whole = eigh(A, M, k=9, fixed=fixed).value
    close(whole.values, expected, 1e-12)
    assert not whole.vectors[fixed].any()
    close(eigh(A, M, k=2, which="largest", fixed=fixed).value.values, expected[-2:], 1e-12)
    # The preconditioner's matrix has ones in fixed rows, whatever the shift and the scale.
    _, S = squares(comm, 6)
    corner = np.asarray(jnp.arange(S.pattern.n_local) + S.pattern.offset == 0)
    small = eigh(0.01 * S, k=2, which="largest", shift=0.1, fixed=corner, preconditioner=BoxMG())
    plain = eigh(0.01 * S, k=2, which="largest", fixed=corner, preconditioner=None)
    close(small.value.values, plain.value.values, 1e-10)

    def lowest(a):  # large, so that the pairs of fixed rows would be the lowest ones
        high = Matrix(A.pattern, 100 * a)
        pairs = eigh(high, M, k=2, fixed=fixed, preconditioner=Spread()).value
        return jnp.sum(pairs.values) / comm.size

    slope = mg.grad(lowest)(A.values)
    total = mg.allreduce(jnp.sum(slope * A.values), comm=comm)
    close(total, 100 * expected[:2].sum(), 1e-8)
    with pytest.raises(ValueError, match="rows that are not fixed, 9, got k=10"):
        eigh(A, k=10, fixed=fixed)
    with pytest.raises(TypeError, match="eigh: fixed must be booleans for the"):
        eigh(A, fixed=np.arange(3))


def _boundary(grid, A):
    """The links that lead out of the square, on the diagonal."""
    ones = jnp.ones(A.pattern.n_local)
    return jnp.zeros_like(A.values).at[A.pattern.diagonal_index].set(A @ ones)


def test_errors(comm):
    A = line(comm, 12)
    n = A.pattern.n_local
    for error, match, arguments, options in (
        (ValueError, "at most the number of rows, 12, got k=13. Ask for fewer", (A, None, 13), {}),
        (ValueError, "k must be at least 1", (A, None, 0), {}),
        (TypeError, r"k must be an integer, got 2\.5", (A, None, 2.5), {}),
        (TypeError, "A must be a mpigrad.sparse.Matrix, got int. Make", (3,), {}),
        (TypeError, "B must be a mpigrad.sparse.Matrix, got int", (A, 3), {}),
        (TypeError, "A must be real", (Matrix(A.pattern, A.values + 0j),), {}),
        (ValueError, "which must be 'smallest' or 'largest', got 'LM'", (A,), {"which": "LM"}),
        (ValueError, "rtol must lie between 0 and 1", (A,), {"rtol": 0}),
        (ValueError, "shift must be finite", (A,), {"shift": np.nan}),
        (TypeError, "the preconditioner must be BoomerAMG", (A,), {"preconditioner": "ilu"}),
        (ValueError, "^eigh: BoxMG cannot take this", (A,), {"preconditioner": BoxMG()}),
    ):
        with pytest.raises(error, match=match):
            eigh(*arguments, **options)
    if comm.size > 1:
        shifted = Pattern.from_coo([], [], n + (comm.rank == 0) - (comm.rank == 1), comm)
        with pytest.raises(ValueError, match="the same stripes of rows, got"):
            eigh(A, Matrix(shifted, jnp.zeros(0)))


def test_failures_at_run_time(comm):
    """One program with other values: each failure is an error on all ranks, or a result."""
    A = line(comm, 12)
    M = Matrix(A.pattern, jnp.where(A.values > 0, 4.0, 1.0))
    skew = A.scale_rows(jnp.arange(1.0, A.pattern.n_local + 1) + comm.rank)

    @jax.jit
    def solution(a, b):
        pair = Matrix(A.pattern, a), Matrix(A.pattern, b)
        return eigh(*pair, k=2, preconditioner=None, max_steps=1, throw=False)

    def failing(matrix, mass):
        return eigh(matrix, mass, k=2, preconditioner=None, max_steps=1)

    for match, result, matrix, mass in (
        ("A must be symmetric", Result.NOT_SYMMETRIC, skew, M),
        ("A holds NaN", Result.NOT_FINITE, A * np.nan, M),
        ("B must be symmetric", Result.NOT_SYMMETRIC, A, skew),
        ("B must be positive definite, got a diagonal", Result.NOT_POSITIVE_DEFINITE, A, -M),
        ("expected 2 eigenpairs, got 0 after 1 steps", Result.MAX_STEPS_REACHED, A, M),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            failing(matrix, mass)
        got = solution(matrix.values, mass.values)
        assert got.result == result
        assert bool(jnp.isfinite(got.value.vectors).all()) == (result == Result.MAX_STEPS_REACHED)


@pytest.mark.full("test_values_vectors_and_derivatives compares with dense derivatives")
def test_dot_and_taylor(comm):
    A = line(comm, 16)
    pairs = lambda v: eigh(Matrix(A.pattern, v), k=3, preconditioner=Jacobi(), rtol=1e-11).value
    mg.dot_test(pairs, A.values, comm=comm, rtol=1e-8)

    def loss(p):
        values, vectors = eigh(
            scaled(A, jnp.exp(p)), k=3, preconditioner=Jacobi(), rtol=1e-12
        ).value
        return jnp.sum(values) / comm.size + jnp.sum(vectors[:, 1] ** 4)

    mg.taylor_test(loss, jnp.sin(jnp.arange(A.pattern.n_local)), comm=comm)

    # With fixed rows, and a preconditioner that leads into them.
    fixed = np.isin(local_range(16, comm), [0, 6])
    settings = {"k": 3, "fixed": fixed, "preconditioner": Spread()}
    inner = lambda v: eigh(Matrix(A.pattern, v), rtol=1e-11, **settings).value
    mg.dot_test(inner, A.values, comm=comm, rtol=1e-8)

    def inner_loss(p):
        values, vectors = eigh(scaled(A, jnp.exp(p)), rtol=1e-12, **settings).value
        return jnp.sum(values) / comm.size + jnp.sum(vectors[:, 1] ** 4)

    mg.taylor_test(inner_loss, jnp.sin(jnp.arange(A.pattern.n_local)), comm=comm)
