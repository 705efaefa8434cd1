"""The proof of an operation: beside the same map on the stack of all ranks' arrays.

What a program with messages gives, its jvp and its vjp are compared with those of the program that
simulates it on the product space, and the dot test is taken over all ranks. Compiling is what tests
cost here, so each side is one compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator

Map = Callable[[Any], Any]


def same(f: Map) -> Map:
    return f


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


def batched(F: Map) -> Map:
    return batch(F, jax.vmap)


def branch(f: Map) -> Map:
    return lambda x: jax.lax.cond(jnp.sum(jnp.abs(x)) > -1, f, f, x)


# name -> (transformation of the program with messages, of the one without)
TRANSFORMED: dict[str, tuple[Callable[[Map], Map], Callable[[Map], Map]]] = {
    "eager": (same, same),
    "jit": (mg.jit, same),
    "jax.jit": (jax.jit, same),
    "scan": (scan, scan),
    "vmap": (lambda f: batch(f, mg.vmap), batched),
    "vmap over the last axis": (
        lambda f: lambda x: mg.vmap(f, -1, -1)(jnp.stack([x, 2 * x], -1)).sum(-1),
        batched,
    ),
    "checkpoint": (jax.checkpoint, same),
    "cond": (branch, same),
    "checkpoint(scan)": (lambda f: jax.checkpoint(scan(f)), scan),
    "scan(checkpoint)": (lambda f: scan(jax.checkpoint(f)), scan),
    "jit(vmap)": (lambda f: mg.jit(batch(f, mg.vmap)), batched),
}
TRANSFORMS = (
    *("eager", "jit", "scan", "vmap", "checkpoint", "cond"),
    *("checkpoint(scan)", "scan(checkpoint)"),
)


def operand(comm: Communicator, shape: tuple[int, ...] = (3, 2)) -> tuple[Any, Any]:
    """(this rank's operand, the stack of all ranks' operands)."""
    stack = jax.device_put(np.random.default_rng(5).standard_normal((comm.size, *shape)))
    return _row(comm, stack), stack


def _row(comm: Communicator, tree: Any) -> Any:
    """This rank's rows of stacks. JAX would compile a slice for each shape."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(np.asarray(leaf)[comm.rank])), tree)


def _directions(like: Any, seed: int) -> Any:
    """Standard normal numbers in the shapes of a stack: row r is rank r's."""
    generator = np.random.default_rng(seed)
    numbers = lambda x: np.asarray(generator.standard_normal(x.shape), x.dtype)
    return jax.tree.map(lambda x: jax.device_put(numbers(x)), like)


def _derivatives(f: Map, kit: Any) -> Callable[..., Any]:
    """(x, direction, weights) -> (f(x), jvp, vjp) with the transformations of `kit`."""

    def derivatives(x: Any, direction: Any, weights: Any) -> Any:
        value, tangent = kit.jvp(f, (x,), (direction,))
        return value, tangent, kit.vjp(f, x)[1](weights)[0]

    return derivatives


def _dot(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    # Of complex numbers jax's pairing is the sum of products, without conjugates.
    total = sum(np.sum(np.asarray(x) * np.asarray(y)) for x, y in pairs)
    return complex(total) if np.iscomplexobj(total) else float(total)


class Stack:
    """A stack of all ranks' operands, hashable."""

    def __init__(self, stack: Any) -> None:
        self._stack = stack
        self._key = (stack.shape, str(stack.dtype), np.asarray(stack).tobytes())

    def __call__(self) -> Any:
        return self._stack

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stack) and self._key == other._key


@functools.lru_cache(maxsize=8)
def _expected(
    F: Map, X: Stack, reference: Callable[[Map], Map], compute: bool
) -> tuple[Any, Any, Any]:
    """(direction, weights, (value, jvp, vjp) of the program on the stack, if wanted)."""
    stack = X()
    G = reference(lambda X: jax.tree.map(jnp.cos, F(jnp.sin(X))))
    direction, weights = _directions(stack, 3), _directions(jax.eval_shape(G, stack), 4)
    if not compute:
        return direction, weights, None
    results = jax.jit(_derivatives(G, jax))(stack, direction, weights)
    return direction, weights, jax.device_get(results)


def prove(
    f: Map,
    F: Map,
    comm: Communicator,
    how: str,
    shape: tuple[int, ...] = (3, 2),
    X: Any = None,
    rtol: float = 1e-11,
) -> None:
    """cos(f(sin x)) on each rank is cos(F(sin X)) on the stack: values, jvp, vjp, dot product.

    `X` is the stack of operands; random ones of `shape` on each rank without it.
    """
    stack = operand(comm, shape)[1] if X is None else X
    transform, reference = TRANSFORMED[how]
    # One rank compiles the simulation while the others compile the program.
    direction, weights, expected = _expected(F, Stack(stack), reference, comm.rank == 0)
    mine = functools.partial(_row, comm)
    g = _derivatives(transform(lambda x: jax.tree.map(jnp.cos, f(jnp.sin(x)))), mg)
    if how != "eager":
        g = mg.jit(g)
    value, tangent, cotangent = g(mine(stack), mine(direction), mine(weights))
    for got, joint in zip((value, tangent, cotangent), comm.mpi.bcast(expected), strict=True):
        close(got, mine(joint), rtol)
    forward = comm.mpi.allreduce(_dot(mine(weights), tangent))
    backward = comm.mpi.allreduce(_dot(cotangent, mine(direction)))
    np.testing.assert_allclose(forward, backward, rtol=100 * rtol, atol=100 * rtol)


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
