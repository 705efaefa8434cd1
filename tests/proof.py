"""The proof of an operation: beside the same map on the stack of all ranks' arrays.

What a program with messages gives, its jvp, its vjp and the gradient of a loss around it are
compared with those of the simulated program on the product space, and the dot test is taken over
all ranks. Compiling is what tests cost here, so each side is one compiled program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator


def _directions(like: Any, seed: int) -> Any:
    """Standard normal arrays in the shapes of a stack: row r is rank r's."""
    generator = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        values = generator.standard_normal(leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            values = values + 1j * generator.standard_normal(leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(draw, like)


def _derivatives(f: Callable[..., Any], kit: Any) -> Callable[..., Any]:
    """x, direction, weights -> (f(x), jvp, vjp of the weights), with `kit`'s transformations."""

    def all_of_it(x: Any, direction: Any, weights: Any) -> Any:
        value, tangent = kit.jvp(f, (x,), (direction,))
        (cotangent,) = kit.vjp(f, x)[1](weights)
        return value, tangent, cotangent

    return all_of_it


def _dot(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(sum(np.sum(np.real(np.asarray(x) * np.asarray(y))) for x, y in pairs))


def prove(
    f: Callable[[Any], Any],
    F: Callable[[Any], Any],
    X: Any,
    comm: Communicator,
    *,
    compiled: bool = True,
    rtol: float = 1e-11,
) -> None:
    """Compare `f` on this rank's row of the stack `X` with row `comm.rank` of `F(X)`."""
    mine = lambda tree: jax.tree.map(lambda leaf: leaf[comm.rank], tree)
    D, W = _directions(X, 3), _directions(jax.eval_shape(F, X), 4)
    both = _derivatives(f, mg)
    value, tangent, cotangent = (mg.jit(both) if compiled else both)(mine(X), mine(D), mine(W))
    expected = jax.jit(_derivatives(F, jax))(X, D, W)
    for got, stack in zip((value, tangent, cotangent), expected, strict=True):
        close(got, mine(stack), rtol)
    forward = comm.mpi.allreduce(_dot(mine(W), tangent))
    backward = comm.mpi.allreduce(_dot(cotangent, mine(D)))
    np.testing.assert_allclose(forward, backward, rtol=1e-9, atol=1e-9)
