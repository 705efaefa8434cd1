"""Integrands of users: laws with kinks, variables from outside, and values outside of a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad import fem
from mpigrad.fem.tracing import is_affine


def total(comm, x):
    return float(comm.mpi.allreduce(float(x)))


@pytest.fixture
def space(comm):
    return fem.Space(fem.box((6, 4), (1.0, 1.0), comm=comm))


def largest_residual(equation, u, fixed, comm):
    free = jnp.where(fixed, 0, equation.residual(u))
    return comm.mpi.allreduce(float(jnp.max(jnp.abs(free)))) / comm.size


def test_laws_with_kinks_are_not_linear(space, comm):
    fixed = space.fixed("xmin")
    obstacle = fem.Energy(
        space, lambda p: 0.5 * p.grad @ p.grad - 3 * p.u + 2 * jnp.maximum(p.u - 0.3, 0)
    )
    assert not obstacle().is_linear
    stopped = fem.WeakForm(space, lambda p: (-jax.lax.stop_gradient(1 + p.u**2), p.grad))
    assert not stopped().is_linear
    u = fem.solve(obstacle(), fixed).value
    assert largest_residual(obstacle(), u, fixed, comm) < 1e-7


@pytest.mark.ranks(1)
def test_affine_functions_are_seen():
    x, k = jnp.arange(3.0), jnp.ones((3, 3))
    affine = [
        lambda x, k: k @ x + 1,
        lambda x, k: jnp.where(k[0, 0] > 0, x, 2 * x) / k[0, 0],
        lambda x, k: jax.grad(lambda y: 0.5 * y @ k @ y + jnp.sum(y**2))(x),
        lambda x, k: jax.jit(lambda y: y[1] * jnp.exp(k))(x),
        lambda x, k: jnp.trace(jnp.outer(x, k[0])) - x[0],
        lambda x, k: x.astype(jnp.float32) + k[0],
    ]
    others = [
        lambda x, k: x * x,
        lambda x, k: jnp.sin(x),
        lambda x, k: jnp.where(x > 0, 1.0, 2.0),
        lambda x, k: k / x,
        lambda x, k: jnp.maximum(x, 0),
        lambda x, k: jax.lax.stop_gradient(x**2),
        lambda x, k: k[jnp.int32(x[0])],
        lambda x, k: x.astype(int) * 1.0,
        lambda x, k: jnp.where(x.astype(bool), k[0], 0.0),
    ]
    for expected, functions in ((True, affine), (False, others)):
        for f in functions:
            assert is_affine(jax.make_jaxpr(f)(x, k), {0}) is expected


def test_variables_of_an_integrand_may_change(space, comm):
    k = 1.0
    form = fem.Energy(space, lambda p: 0.5 * k * p.grad @ p.grad - p.u)
    fixed = space.fixed("xmin")
    first = fem.solve(form(), fixed).value
    k = 2.0
    second = fem.solve(form(), fixed).value
    np.testing.assert_allclose(second, first / 2, atol=1e-8)


@pytest.mark.cases("1", reason="other tests have ranks without cells of an integral")
@pytest.mark.parametrize("axis", [0, 1])
def test_integrands_are_not_evaluated_outside_of_a_mask(axis, space, comm):
    """On 2 ranks one rank has the half along x, and each rank a part of the half along y."""
    mesh = space.mesh
    middle = mesh.points[mesh.cells].mean(axis=1)
    right = middle[:, axis] > 0.5
    root = fem.Energy(space, lambda p: jnp.sqrt(p.x[axis] - 0.5), on=right, degree=8)
    np.testing.assert_allclose(total(comm, root().integral()), 2 / 3 * 0.5**1.5, rtol=1e-2)
    law = fem.Energy(space, lambda p, k: 0.5 * jnp.log(k) * p.u**2, on=right)
    k = jnp.where(right, 2.0, 0.0)
    u = jnp.ones(space.shape)
    slope = mg.grad(lambda k: law(fem.PerCell(k)).integral(u))(k)
    np.testing.assert_allclose(slope, np.where(right, 0.25 / 24, 0), rtol=1e-12)
    residual = law(fem.PerCell(k)).residual(u)
    assert bool(jnp.all(jnp.isfinite(residual)))
    np.testing.assert_allclose(mg.grad(law(fem.PerCell(k)).integral)(u), residual, atol=1e-14)
    mg.dot_test(lambda k, u: law(fem.PerCell(k)).residual(u), k, u, comm=comm)
    with pytest.raises(TypeError, match="the factor must be a number"):
        law(fem.PerCell(k)) * u
    parts = sum([law(fem.PerCell(k)), law(fem.PerCell(k)) / 2])
    value = law(fem.PerCell(k)).integral(u)
    np.testing.assert_allclose(parts.integral(u), 1.5 * value)  # type: ignore[union-attr]


def test_fields_in_float32_have_a_tolerance_of_their_own(space, comm):
    fixed = space.fixed("xmin")
    form = fem.Energy(space, lambda p: 0.5 * p.grad @ p.grad - p.u + 0.1 * p.u**4)
    u = fem.solve(form(), fixed, jnp.float32(0), jnp.zeros(space.shape, jnp.float32)).value
    assert u.dtype == np.float32
    with pytest.raises(ValueError, match="values must be a field of shape"):
        fem.solve(form(), fixed, jnp.zeros(3))
    with pytest.raises(ValueError, match=r"values must be a field of shape .* got a function"):
        fem.solve(form(), fixed, lambda x: x[:, 0])
