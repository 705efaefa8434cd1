"""Activity and errors of `implicit_solve`. test_outside_package.py proves its derivatives."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import mpigrad as mg
from mpigrad.extend import implicit_solve

D, B = jnp.array([2.0, 4.0]), jnp.ones(2)


def solved(d, b=B, **changed):
    functions = {"solve": lambda d, b: b / d, "product": lambda d, x: d * x, **changed}
    transposed = functions.pop("transposed", None)
    return implicit_solve(functions["solve"], functions["product"], d, b, transposed=transposed)


def test_a_method_with_messages_and_a_product_without(comm):
    """Only rank 0 depends on t, and all ranks take part in the adjoint solve."""

    def solve(d, b):
        return b / d + 0 * mg.allreduce(b, comm=comm)

    def loss(t):
        d = t * D if comm.rank == 0 else D
        return jnp.sum(implicit_solve(solve, lambda d, x: d * x, d, B) ** 2)

    expected = -2 * float(jnp.sum(1 / D**2)) if comm.rank == 0 else 0.0
    assert float(mg.grad(loss)(1.0)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"b": jnp.ones(2, int)}, TypeError, "b must be floating-point or complex, got int"),
        ({"transposed": True}, TypeError, "expected transposed to be a function"),
        (
            {"solve": lambda d, b: b[:1]},
            ValueError,
            r"solve must return a tree like b, float64\[2\]",
        ),
        ({"solve": lambda d, b: (b, b)}, ValueError, "solve must return a tree like b"),
        ({"transposed": lambda d: d[0]}, ValueError, "transposed must return a tree like the oper"),
        ({"transposed": lambda d: {"d": d}}, ValueError, "transposed must return a tree like the"),
        ({"product": lambda d, x: x[0]}, ValueError, "product must return a tree like b"),
    ],
)
def test_what_does_not_fit_is_an_error(changed, error, message):
    with pytest.raises(error, match=rf"implicit_solve, .*{message}"):
        mg.grad(lambda d: jnp.sum(solved(d, **changed)))(D)
