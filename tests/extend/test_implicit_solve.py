"""Errors of `implicit_solve`. Its derivatives are proved in test_outside_package.py."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import mpigrad as mg
from mpigrad.extend import implicit_solve

pytestmark = pytest.mark.ranks(1)

D, B = jnp.array([2.0, 4.0]), jnp.ones(2)


def solved(d, b=B, **changed):
    functions = {"solve": lambda d, b: b / d, "product": lambda d, x: d * x, **changed}
    transposed = functions.pop("transposed", None)
    return implicit_solve(functions["solve"], functions["product"], d, b, transposed=transposed)


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
