"""The proof of an operation under the transformations, against the stacked arrays of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator

Map = Callable[[Any], Any]


def scan(f: Map) -> Map:
    """f(x) + f(2 x) by a scan; the messages stand inside the loop."""

    def g(x: Any) -> Any:
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, x))
        body = lambda total, s: (jax.tree.map(jnp.add, total, f(s * x)), None)
        return jax.lax.scan(body, zero, jnp.array([1, 2], x.dtype))[0]

    return g


def batch(f: Map, vmap: Callable[..., Any]) -> Map:
    """f(x) + f(2 x) by vmap."""
    return lambda x: jax.tree.map(lambda y: y.sum(0), vmap(f)(jnp.stack([x, 2 * x])))


# name -> (transformation of the program with messages, of the one without)
TRANSFORMS: dict[str, tuple[Callable[[Map], Map], Callable[[Map], Map]]] = {
    "eager": (lambda f: f, lambda F: F),
    "jit": (mg.jit, lambda F: F),
    "vmap": (lambda f: batch(f, mg.vmap), lambda F: batch(F, jax.vmap)),
    "checkpoint(scan)": (lambda f: jax.checkpoint(scan(f)), scan),
    "scan(checkpoint)": (lambda f: scan(jax.checkpoint(f)), scan),
}


def operand(comm: Communicator, shape: tuple[int, ...] = (3, 2)) -> tuple[Any, Any]:
    """(this rank's operand, the stack of all ranks' operands)."""
    stack = jnp.asarray(np.random.default_rng(5).standard_normal((comm.size, *shape)))
    return stack[comm.rank], stack


def prove(f: Map, F: Map, comm: Communicator, how: str, shape: tuple[int, ...] = (3, 2)) -> None:
    """Value, gradient and dot product of cos(f(sin(x))) are those of the joint function F."""
    x, X = operand(comm, shape)
    transform, reference = TRANSFORMS[how]
    g = transform(lambda x: jnp.cos(f(jnp.sin(x))))
    G = reference(lambda X: jnp.cos(F(jnp.sin(X))))
    W = jnp.asarray(np.random.default_rng(3).standard_normal(jax.eval_shape(G, X).shape))
    value, gradient = jax.jit(jax.value_and_grad(lambda X: jnp.vdot(G(X), W)))(X)
    differentiate = mg.value_and_grad(lambda x: jnp.vdot(g(x), W[comm.rank]))
    if how == "eager":
        close(differentiate(x), (value, gradient[comm.rank]))
        return  # the dot test is compiled anyway: "jit" has it
    close(mg.jit(differentiate)(x), (value, gradient[comm.rank]))
    mg.dot_test(g, x)


def prove_second_order(f: Map, F: Map, comm: Communicator, shape: tuple[int, ...] = (3, 2)) -> None:
    """Hessian-vector products, forward over reverse and reverse over reverse."""
    x, X = operand(comm, shape)
    loss = lambda x: jnp.sum(jnp.sin(f(x)) ** 3)
    Loss = lambda X: jnp.sum(jnp.sin(F(X)) ** 3)
    expected = jax.jit(lambda X: jax.jvp(jax.grad(Loss), (X,), (X,))[1])(X)[comm.rank]

    @mg.jit
    def products(x: Any) -> Any:
        reverse = mg.grad(lambda x: jnp.vdot(mg.grad(loss)(x), jax.lax.stop_gradient(x)))(x)
        return mg.jvp(mg.grad(loss), (x,), (x,))[1], reverse

    close(products(x), (expected, expected))
