"""Matrix-free solves compared with dense ones of the whole grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import SHAPE, Field, dense, flux, pad_whole

import mpigrad as mg
from helpers import close
from mpigrad.sparse import GMRES, PCG, BiCGStab, Jacobi, Operator, solve

SOLVERS = {
    "PCG": (PCG(rtol=1e-12, preconditioner=None), 0.0),
    "GMRES": (GMRES(rtol=1e-12, preconditioner=None), 0.6),
    "BiCGStab": (BiCGStab(rtol=1e-12, preconditioner=None), 0.6),
}
_random = np.random.default_rng(4)
KAPPA, B, WEIGHTS = (_random.uniform(0.5, 2, SHAPE) for _ in range(3))


def operator(field, kappa, wind):
    """kappa's message stands inside, too."""
    return lambda v: flux(field.pad(kappa), field.pad(v), wind)


@functools.cache
def inverse_matrix(wind, varied=True):
    """Return the inverse of the operator on the whole grid, for KAPPA or for 1 in all cells."""
    kappa = KAPPA if varied else np.ones(SHAPE)
    matrix = jax.jit(lambda: dense(lambda v: flux(pad_whole(kappa), pad_whole(v), wind)))
    return np.linalg.inv(matrix())


@pytest.mark.long("loops in the derivative of a gradient; the gradients below are shorter")
def test_value_gradient_and_hessian_vector_product(comm):
    compare(comm, *SOLVERS["GMRES"])


@pytest.mark.cases("PCG", reason="BiCGStab has a dot test below, and the adjoint of GMRES")
@pytest.mark.parametrize("name", ["PCG", "BiCGStab"])
def test_gradient_of_other_methods(comm, name):
    compare(comm, *SOLVERS[name], second=False)


@pytest.mark.full("second derivatives do not depend on the method, and GMRES has them above")
@pytest.mark.parametrize("name", ["PCG", "BiCGStab"])
def test_hessian_vector_product_of_other_methods(comm, name):
    compare(comm, *SOLVERS[name])


def compare(comm, solver, wind, second=True):
    field = Field(comm)
    weights = field.tile(WEIGHTS)

    def f(kappa, b):
        x = solve(operator(field, kappa, wind), b, solver).value
        return jnp.sum(weights * x**3), x

    gradient = mg.grad(f, argnums=(0, 1), has_aux=True)

    @mg.jit
    def run(primals, tangents):
        if not second:
            return *gradient(*primals), None
        (g, x), (product, _) = mg.jvp(gradient, primals, tangents)
        return g, x, product

    # Two steps with the inverse matrix have the first and second derivatives of a solve.
    inverse = inverse_matrix(wind)
    solution = (inverse @ B.ravel()).reshape(SHAPE)

    def F(kappa, b):
        x = solution
        for _ in range(2):
            defect = flux(pad_whole(kappa), pad_whole(x), wind) - b
            x = x - (inverse @ defect.ravel()).reshape(SHAPE)
        return jnp.sum(WEIGHTS * x**3)

    primals, tangents = (KAPPA, B), (WEIGHTS, KAPPA)
    first = jax.grad(F, (0, 1))
    wanted = jax.jit(lambda p, t: jax.jvp(first, p, t) if second else (first(*p),))(
        primals, tangents
    )
    tiles = [tuple(field.tile(whole) for whole in pair) for pair in (primals, tangents)]
    g, x, product = run(*tiles)
    close(x, solution[field.mine], 1e-9)
    close(g, tuple(whole[field.mine] for whole in wanted[0]), 1e-8)
    if second:
        close(product, tuple(whole[field.mine] for whole in wanted[1]), 1e-7)


def chain(comm, theta):
    """v + theta (what the rank before has sent): the receiver's template is a constant."""

    def f(v):
        if comm.rank + 1 < comm.size:
            mg.send(v, comm.rank + 1, tag=3, comm=comm)
        before = mg.recv(np.zeros(3), comm.rank - 1, tag=3, comm=comm) if comm.rank else 0 * v
        return 2 * v + theta * before

    return f


def test_ranks_that_differ(comm):
    """One-way messages, and a parameter of the last rank alone: loss, gradient, dot test."""
    mine = comm.rank == comm.size - 1
    solver = GMRES(rtol=1e-13, preconditioner=None)
    b = 1.0 + comm.rank + jnp.arange(3.0)

    def f(theta):
        A = chain(comm, theta if mine else 0.5)
        return jnp.sum(solve(A, b, solver).value ** 2)

    value, gradient = mg.jit(mg.value_and_grad(f))(0.5)

    def whole(theta):
        total, before = 0.0, jnp.zeros(3)
        for rank in range(comm.size):
            factor = theta if rank == comm.size - 1 else 0.5
            before = (1.0 + rank + jnp.arange(3.0) - factor * before) / 2
            total += jnp.sum(before**2)
        return total

    expected = jax.value_and_grad(whole)(0.5)
    close(value, expected[0])
    close(gradient, expected[1] if mine else 0.0, 1e-10)


def coupled(field, kappa, x):
    """Solve for two coupled fields as a pytree."""

    def A(v):
        coupling = 0.3 * field.pad(v["b"])[1:-1, 1:-1]
        return {"a": flux(field.pad(kappa), field.pad(v["a"]), 0.5) + coupling,
                "b": 2 * v["b"] - 0.2 * v["a"]}  # fmt: skip

    return solve(A, x, BiCGStab(rtol=1e-13, preconditioner=None)).value


@pytest.mark.long("the dot test compiles two solves; test_ranks_that_differ compiles one")
def test_dot_of_pytrees(comm):
    field = Field(comm)
    tiles = [field.tile(whole) for whole in (KAPPA, B, WEIGHTS)]
    f = lambda kappa, a, b: coupled(field, kappa, {"a": a, "b": b})
    assert mg.dot_test(f, *tiles).error < 1e-10


@pytest.mark.full("test_guesses.py has gradients of functions' solves in a loop")
def test_dot_of_pytrees_in_a_loop(comm):
    """Two steps in a scan, batched: one dot test."""
    field = Field(comm)

    def run(kappa, x):
        factors = jnp.array([1.0, 2.0])
        x, _ = jax.lax.scan(lambda x, s: (coupled(field, s * kappa, x), None), x, factors)
        return x

    def batched(kappa, a, b):
        return mg.vmap(lambda s: run(s * kappa, {"a": a, "b": b}))(jnp.array([0.5, 2.0]))

    tiles = [field.tile(whole) for whole in (KAPPA, B, WEIGHTS)]
    assert mg.dot_test(batched, *tiles).error < 1e-10


def test_a_given_inverse(comm):
    """Badly scaled rows: an inverse of the diagonal makes up for it, in the adjoint, too."""
    field = Field(comm)
    scale = 10.0 ** field.tile(3 * KAPPA)

    def run(b, inverse):
        A = Operator(lambda v: flux(1 + 0 * field.pad(b), field.pad(v), 0.5) * scale, inverse)
        found = solve(A, b, GMRES(rtol=1e-11, preconditioner=None), throw=False)
        return jnp.sum(found.value), found.stats["num_steps"]

    def divided(r):  # linear, but 0 / 0 at zero
        size = jnp.max(jnp.abs(r))
        return size * (r / size / scale)

    @mg.jit
    def both(b):
        adjoint, helped = mg.grad(lambda b: run(b, divided), has_aux=True)(b)
        return adjoint, helped, run(b, None)[1]

    adjoint, helped, plain = both(field.tile(B * 10.0 ** (3 * KAPPA)))
    # b / scale is what the unscaled system has on its right. Compare relative to each entry: they
    # differ by many orders of magnitude.
    wanted = inverse_matrix(0.5, varied=False).sum(0).reshape(SHAPE)
    close(adjoint * scale, wanted[field.mine], 1e-6)
    assert helped < plain


def test_an_inverse_with_a_part_on_the_root(comm):
    """Messages whose results one rank alone uses are sent in each step of the adjoint solve."""
    n = 4
    stiffness = jnp.arange(1.0, n + 1) + comm.rank

    def product(v):
        return stiffness * v + mg.allreduce(jnp.sum(v), comm=comm)

    def inverse(r):
        sums = mg.gather(jnp.sum(r), root=0, comm=comm)
        coarse = 0.05 * sums if comm.rank == 0 else jnp.zeros(comm.size)
        return r / stiffness - mg.scatter(coarse, root=0, comm=comm)

    def slope(A):
        solver = GMRES(rtol=1e-12, preconditioner=None)
        return mg.grad(lambda b: jnp.sum(solve(A, b, solver).value ** 2))(jnp.ones(n))

    close(slope(Operator(product, inverse, comm)), slope(Operator(product, comm=comm)), 1e-9)


def test_faults_are_errors_on_all_ranks(comm):
    last = comm.rank == comm.size - 1

    def call(solver):
        def run(scale, affine, square, kinked, skew):
            turned = lambda v: jnp.array([v[1], -v[0], 0])
            A = lambda v: (
                scale * v + affine + square * v**2 + kinked * jnp.abs(v) + skew * turned(v)
            )
            return solve(A, jnp.ones(3), solver)

        program = mg.jit(run)
        return lambda scale, **parts: program(
            scale if last else 2.0,
            *(
                jnp.asarray(parts.get(part, 0.0) if last else 0.0)
                for part in ("affine", "square", "kinked", "skew")
            ),
        )

    pcg, gmres = call(PCG(preconditioner=None)), call(GMRES(preconditioner=None))
    for parts, message in (
        (
            {"affine": 1.0},
            r"the operator is not linear.*Bring constant terms to the right-hand side",
        ),
        ({"square": 1.0}, "the operator is not linear"),
        ({"kinked": 1.0}, "the operator is not linear"),
        ({"skew": 1.0}, r"the operator is not symmetric, .*Solve with GMRES"),
        ({"affine": jnp.nan}, "the operator's result for a finite vector holds such"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            pcg(2.0, **parts)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is not positive definite"):
        pcg(-2.0)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"test_operator_solve.py:\d+.*GMRES did not converge"
    ):
        gmres(0.0)


def test_rejects_wrong_arguments(comm):
    b = jnp.ones(3)
    assert jnp.allclose(solve(lambda v: 2 * v, b, PCG()).value, b / 2)  # without a preconditioner
    with pytest.raises(TypeError, match=r"needs a matrix, got a function. Write PCG\(precond"):
        solve(lambda v: v, b, PCG(preconditioner=Jacobi()))
    with pytest.raises(ValueError, match=r"result of the operator must have .* got float64\[2\]"):
        solve(lambda v: v[:2], b)
    with pytest.raises(ValueError, match="x0 must have"):
        solve(lambda v: v, b, x0=jnp.ones(2))
    with pytest.raises(TypeError, match=r"b must be .* got int"):
        solve(lambda v: v, jnp.ones(3, int))


def test_single_precision_and_complex(comm):
    field = Field(comm)
    kappa, b = field.tile(KAPPA), field.tile(B)

    @mg.jit
    def run(kappa, b):
        low = [x.astype("float32") for x in (kappa, b)]
        A = operator(field, low[0], 0.5)
        G = GMRES(rtol=1e-5, preconditioner=None)
        turned = operator(field, kappa * (1 + 1j), 0.5)
        return solve(A, low[1], G).value, solve(turned, b * (1 - 1j), SOLVERS["GMRES"][0]).value

    single, turned = run(kappa, b)
    assert single.dtype == np.float32
    exact = (inverse_matrix(0.5) @ B.ravel()).reshape(SHAPE)
    close(single, exact[field.mine], 1e-4)
    residual = mg.jit(operator(field, kappa * (1 + 1j), 0.5))(turned) - b * (1 - 1j)
    assert np.abs(residual).max() < 1e-10
