"""All verbs of matrices in one loop, in other dtypes than float64, compared with dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system
from whole import Entries

import mpigrad as mg
from helpers import close
from mpigrad.sparse import Matrix

FIXED = np.random.default_rng(8).random(30) < 0.3


def loop(step, x):
    return jax.lax.scan(lambda y, _: (step(y), None), x, None, length=2)[0]


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        pytest.param("float32", 1e-4, marks=pytest.mark.full("complex128 runs the same code")),
        ("complex128", 1e-11),
    ],
)
def test_in_a_loop(comm, dtype, rtol):
    """Value, tangent and adjoint of sums, products, transposes, scalings and Dirichlet rows."""
    system = grid_system(comm, empty=0 if comm.size > 2 else None)
    pattern, rows = system.pattern, system.mine
    entries = Entries.of(pattern)
    generator = np.random.default_rng(4)

    def random(*shape):
        x = generator.standard_normal(shape) + 1j * generator.standard_normal(shape)
        return jnp.asarray(x if np.issubdtype(dtype, np.complexfloating) else x.real, dtype)

    def f(v, x):
        A = Matrix(pattern, v)

        def step(y):
            both = A + 2 * A.T - A.at_boundary(FIXED[rows])
            return 0.1 * (both @ y + (A @ A.T) @ (A.scale_rows(y) @ y))

        return loop(step, x)

    def F(v, x):
        A = entries.dense(v)

        def step(y):
            both = A + 2 * A.T - jnp.where(FIXED[:, None], jnp.eye(30, dtype=dtype), A)
            return 0.1 * (both @ y + (A @ A.T) @ (y * (A @ y)))

        return loop(step, x)

    (V, Vt), (X, Xt, ct) = (random(2, len(entries.rows))), random(3, 30)
    v, vt, x, xt = V[entries.mine], Vt[entries.mine], X[rows], Xt[rows]
    got, (a, b) = mg.jit(lambda v, x: (mg.jvp(f, (v, x), (vt, xt)), mg.vjp(f, v, x)[1](ct[rows])))(
        v, x
    )
    expected, (A, B) = jax.jit(
        lambda V, X: (jax.jvp(F, (V, X), (Vt, Xt)), jax.vjp(F, V, X)[1](ct))
    )(V, X)
    assert got[0].dtype == dtype
    scale = float(jnp.max(jnp.abs(expected[1])))
    close([g / scale for g in got], [e[rows] / scale for e in expected], rtol)
    scale = float(jnp.max(jnp.abs(A)))
    close((a / scale, b / scale), (A[entries.mine] / scale, B[rows] / scale), rtol)


@pytest.mark.ranks(2, 3)
def test_rejects_values_of_another_pattern(comm):
    pattern = grid_system(comm).pattern
    other = grid_system(comm, (5, 5)).pattern
    with pytest.raises(ValueError, match="values"):
        Matrix(pattern, jnp.ones(other.nnz))
