"""Nonlinear diffusion on a grid, compared with dense Newton steps on the whole grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import SHAPE, Field, flux, pad_whole

import mpigrad as mg
from helpers import close
from mpigrad.sparse import (
    GMRES,
    BiCGStab,
    Jacobi,
    Matrix,
    Pattern,
    Result,
    hypre_available,
    newton,
    sparse_jacobian,
)

_random = np.random.default_rng(6)
B, WEIGHTS = (_random.uniform(0.5, 2, SHAPE) for _ in range(2))
THETA = np.array([0.8, 0.6, 0.3])
DIRECTION = np.ones(3), WEIGHTS
# A solve by hypre compiles several times faster than the loops of the matrix-free solves.
LINEAR = GMRES(rtol=1e-12) if hypre_available() else GMRES(rtol=1e-12, preconditioner=Jacobi())
FREE = BiCGStab(rtol=1e-12, preconditioner=None)


def residual(u, theta, b, pad):
    u = pad(u)
    return flux(theta[0] + theta[1] * u**2, u, theta[2]) - b


def dense_solution(theta, b):
    """Newton's method. The last steps are differentiated, which makes derivatives exact."""

    def step(u):
        F = lambda u: residual(u.reshape(SHAPE), theta, b, pad_whole).ravel()
        return u - jnp.linalg.solve(jax.jacobian(F)(u), F(u))

    u = jnp.zeros(b.size)
    for _ in range(8):
        u = jax.lax.stop_gradient(step(u))
    return step(step(u)).reshape(SHAPE)


@functools.cache
def exact():
    """Return the solution, the gradient of `objective`, and its derivative along `DIRECTION`.

    Two steps with the Jacobian matrix at the solution have its first and second derivatives.
    """
    F = lambda u, theta, b: residual(u.reshape(SHAPE), theta, b, pad_whole).ravel()
    both = jax.jit(lambda u: (F(u, THETA, B), jax.jacobian(F)(u, THETA, B)))
    u = np.zeros(B.size)
    for _ in range(10):
        value, matrix = both(u)
        inverse = np.linalg.inv(matrix)
        u = u - inverse @ value

    def loss(theta, b):
        v = u
        for _ in range(2):
            v = v - inverse @ F(v, theta, b)
        return jnp.sum(WEIGHTS.ravel() * v**3)

    gradient = jax.grad(loss, (0, 1))
    found = jax.jit(lambda p, t: jax.jvp(gradient, p, t))((THETA, B), DIRECTION)
    return u.reshape(SHAPE), *found


def ways(field):
    """How the Jacobian comes: coloured, given, not at all."""
    F = lambda u, theta, b: residual(u, theta, b, field.pad)
    pattern = field.pattern()
    exact = sparse_jacobian(F, pattern)
    return F, {
        "pattern": {"pattern": pattern, "solver": LINEAR},
        "jacobian": {"jacobian": lambda *xs: Matrix(pattern, exact(*xs).values), "solver": LINEAR},
        "matrix-free": {"solver": FREE},
    }


def objective(field, F, options):
    weights = field.tile(WEIGHTS)

    def f(theta, b):
        found = newton(F, jnp.zeros_like(b), args=(theta, b), rtol=1e-12, **options)
        return jnp.sum(weights * found.value**3), found

    return mg.grad(f, argnums=(0, 1), has_aux=True, replicated=0)


def tiles(field, pair):
    return jnp.asarray(pair[0]), field.tile(pair[1])


@pytest.mark.long("a gradient of nested loops is differentiated; test_gradient is shorter")
def test_value_gradient_and_hessian_vector_product(comm):
    field = Field(comm)
    F, options = ways(field)
    gradient = objective(field, F, options["pattern"])

    @mg.jit
    def run(primals, tangents):
        (g, found), (product, _) = mg.jvp(gradient, primals, tangents)
        return found, g, product

    solution, *wanted = exact()
    found, g, product = run(*(tiles(field, pair) for pair in ((THETA, B), DIRECTION)))
    close(found.value, solution[field.mine], 1e-9)
    assert found.result == Result.SUCCESSFUL
    assert found.stats["relative_residual"] <= 1e-12
    assert 3 < found.stats["num_steps"] < 10
    assert found.stats["num_steps"] < found.stats["num_linear_steps"]
    close(g, tiles(field, wanted[0]), 1e-8)
    close(product, tiles(field, wanted[1]), 1e-7)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            "jacobian", marks=pytest.mark.full("the pattern gives the same kind of Jacobian")
        ),
        "matrix-free",
    ],
)
def test_gradient(comm, way):
    field = Field(comm)
    F, options = ways(field)
    got, _ = mg.jit(objective(field, F, options[way]))(*tiles(field, (THETA, B)))
    close(got, tiles(field, exact()[1]), 1e-8)


@pytest.mark.full("second derivatives are tested with a pattern, too")
def test_matrix_free_hessian_vector_product(comm):
    field = Field(comm)
    F, options = ways(field)
    gradient = objective(field, F, options["matrix-free"])
    operands = [tiles(field, pair) for pair in ((THETA, B), DIRECTION)]
    product = mg.jit(lambda p, t: mg.jvp(gradient, p, t)[1][0])(*operands)
    close(product, tiles(field, exact()[2]), 1e-7)


@pytest.mark.full("matrix-free solves are tested with ranks that differ, too")
@pytest.mark.ranks(2)
def test_ranks_that_differ(comm):
    """Only the last rank differentiates its source: a Taylor test."""
    field = Field(comm)
    F, _ = ways(field)
    weights, b = field.tile(WEIGHTS), field.tile(B)
    mine = comm.rank == comm.size - 1

    @mg.jit
    def f(source):
        source = source if mine else b
        found = newton(F, b, FREE, [jnp.asarray(THETA), source], rtol=1e-13)
        return jnp.sum(weights * jnp.sin(found.value))

    mg.taylor_test(f, b, step=0.05, halvings=3)
    gradient = mg.jit(mg.grad(f))(b)
    assert np.any(gradient != 0) == mine


@pytest.mark.full("it compiles four programs")
def test_closures_batches_and_single_precision(comm):
    """Derivatives in values that F closes over, vmap, and the accuracy of float32."""
    field = Field(comm)
    b = field.tile(B)

    def root(theta, b, rtol=1e-12):
        F = lambda u: residual(u, theta, b, field.pad)
        solver = GMRES(rtol=rtol, preconditioner=None)
        return newton(F, jnp.zeros_like(b), solver, rtol=rtol).value

    @mg.jit
    def run(b):
        slopes = lambda s: mg.grad(lambda s: jnp.sum(root(s * jnp.asarray(THETA), b) ** 2))(s)
        single = root(jnp.asarray(THETA, "float32"), b.astype("float32"), 1e-4)
        return mg.vmap(slopes)(jnp.array([1.0, 1.5])), single

    slopes, single = run(b)
    F = lambda s: jnp.sum(dense_solution(s * THETA, B) ** 2)
    close(comm.mpi.allreduce(np.asarray(slopes)), jax.vmap(jax.grad(F))(jnp.array([1, 1.5])), 1e-8)
    assert single.dtype == np.float32
    close(single, dense_solution(THETA, B)[field.mine], 1e-3)


@pytest.mark.long("three programs of nested loops; test_short_steps compiles one")
def test_failures_are_errors_on_all_ranks(comm):
    """x² + p = 0 on each rank, with special values on the last one."""
    last = comm.rank == comm.size - 1

    @mg.jit
    def call(x0, p):
        return newton(lambda x, p: x**2 + p, x0, args=(p,))

    def both(x0, p):
        return call(jnp.full(2, x0 if last else 3.0), jnp.full(2, p if last else -4.0))

    good = both(3.0, -9.0)
    close(good.value, jnp.full(2, 3.0 if last else 2.0), 1e-7)
    for x0, p, message in (
        (
            3.0,
            1.0,
            r"no step, however short, makes the residual smaller: \|F\(x\)\| is|in step \d+, at",
        ),
        (np.nan, -4.0, r"NaN or infinity appeared: F\(x0\)"),
        (0.0, -4.0, r"linear solve of a Newton step failed: in step 1, .*GMRES.*may be singular"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"test_newton.py:\d+.*({message})"):
            both(x0, p)
    assert both(3.0, -9.0).result == Result.SUCCESSFUL  # all ranks go on together

    few = lambda throw: newton(lambda x: x**2 - 4, jnp.full(2, 50.0), max_steps=2, throw=throw)
    quiet = few(False)
    assert (quiet.result, quiet.stats["num_steps"]) == (Result.MAX_STEPS_REACHED, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"after 2 steps, .*Raise max_steps=2"):
        few(True)


def test_short_steps(comm):
    """Full steps for arctan x = 0 run away from x0 = 5 on one rank: all shorten them."""
    x0 = jnp.full(1, 5.0 if comm.rank == comm.size - 1 else 0.1)
    found = newton(jnp.arctan, x0, rtol=1e-12)
    close(found.value, jnp.zeros(1), 1e-8)


def test_a_wrong_jacobian_is_found(comm):
    field = Field(comm)
    F = lambda u: residual(u, jnp.asarray(THETA), field.tile(B), field.pad)
    own = np.arange(field.grid.n_local) + field.grid.row_offsets[comm.rank]
    bare = Pattern.from_coo(own, own, len(own), comm)
    with pytest.raises(jax.errors.JaxRuntimeError, match="The pattern lacks entries"):
        newton(F, field.tile(B), LINEAR, pattern=bare)


def test_rejects_wrong_arguments(comm):
    x = jnp.ones(2)
    pattern = Pattern.from_coo(*[2 * comm.rank + np.arange(2)] * 2, 2, comm)
    with pytest.raises(ValueError, match="a pattern or a jacobian, got both"):
        newton(jnp.sin, x, pattern=pattern, jacobian=lambda x: Matrix(pattern, x))
    with pytest.raises(TypeError, match=r"solver must be a LinearSolver, got .*as args=\(\.\.\.\)"):
        newton(lambda x, p: x - p, x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="solver must be a LinearSolver, got the class GMRES"):
        newton(jnp.sin, x, GMRES)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"args must be a tuple or a list, got .*=\(parameter,\)"):
        newton(lambda x, p: x - p, x, args=x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got dtype int"):
        newton(jnp.sin, jnp.arange(2))
    with pytest.raises(ValueError, match="comm is not the communicator of the Jacobian"):
        newton(jnp.sin, x, pattern=pattern, comm=comm.dup())
    with pytest.raises(ValueError, match=r"like x, float64\[2\], got float64\[1\]"):
        newton(lambda x: x[:1], x)
    with pytest.raises(ValueError, match="x0 has 3 entries on rank"):
        newton(jnp.sin, jnp.ones(3), pattern=pattern)
    with pytest.raises(TypeError, match="jacobian must return a Matrix"):
        newton(jnp.sin, x, jacobian=jnp.cos)
    with pytest.raises(ValueError, match=r"rtol must lie .* got rtol=2"):
        newton(jnp.sin, x, rtol=2)
    with pytest.raises(ValueError, match=r"max_steps must be .* got max_steps=0"):
        newton(jnp.sin, x, max_steps=0)
