"""L-BFGS on parameters that every rank holds; every step is rank 0's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import mpigrad
from mpigrad.communicator import Communicator

__all__ = ["LBFGS", "Iterate"]

Parameters = Any  # a pytree of arrays, equal on all ranks
Scalar = Any  # an array of shape (), or what stands for it while JAX traces a program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Iterate:
    """Where the optimizer is: parameters, their loss and gradient norm, and its memory."""

    parameters: Parameters
    loss: Scalar
    gradient_norm: Scalar
    evaluations: Scalar
    step: Scalar
    state: Any


class LBFGS:
    """optax's L-BFGS with its zoom line search (strong Wolfe conditions).

    One iteration is one compiled program: the messages and the solves are inside the line search's
    loop. Its decisions depend on the loss and the gradient alone, which
    `mpigrad.value_and_grad(..., replicated=0)` makes equal on all ranks bit for bit. Ranks whose
    tiles differ compile different programs, and round what they all compute differently: so each
    evaluation is at rank 0's parameters, and each step ends with rank 0's iterate on all ranks. A
    step on which the loss is not finite is shortened.

    Parameters
    ----------
    value_and_grad
        Function of the parameters that gives the global loss and its gradient, equal on all ranks.
        Parameters that are sharded over ranks would make optax's inner products local and wrong.
    memory
        Number of past steps that it remembers.
    line_search
        Largest number of evaluations in one line search.
    comm
        The communicator whose ranks all hold the parameters; by default all ranks.
    """

    def __init__(
        self,
        value_and_grad: Callable[[Parameters], tuple[jax.Array, Parameters]],
        memory: int = 50,
        line_search: int = 20,
        comm: Communicator | None = None,
    ) -> None:
        search = optax.scale_by_zoom_linesearch(line_search, initial_guess_strategy="one")
        self._optax = optax.lbfgs(memory_size=memory, linesearch=search)
        self._value_and_grad = value_and_grad
        self._comm = comm
        self.start = mpigrad.jit(self._start)
        self.step = mpigrad.jit(self._step)

    def _start(self, parameters: Parameters) -> Iterate:
        """The iterate of the first parameters: one evaluation."""
        parameters = mpigrad.bcast(parameters, comm=self._comm)
        loss, gradient = self._value_and_grad(parameters)
        flat, _ = ravel_pytree(parameters)
        slope, _ = ravel_pytree(gradient)
        return Iterate(
            parameters,
            loss,
            jnp.linalg.norm(slope),
            jnp.ones((), int),
            jnp.zeros_like(loss),
            self._without_memory(flat, loss, slope),
        )

    def _step(self, now: Iterate) -> Iterate:
        """The next iterate; `step` is 0 where the line search finds no smaller loss."""
        # One vector instead of many small arrays: a smaller program, compiled sooner.
        flat, unravel = ravel_pytree(now.parameters)

        def value_and_grad(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = mpigrad.bcast(x, comm=self._comm)
            value, gradient = self._value_and_grad(unravel(x))
            return value, ravel_pytree(gradient)[0]

        # The line search differentiates the loss with jax.value_and_grad, which gets the value
        # and the gradient that were computed together.
        @jax.custom_vjp
        def loss(x: jax.Array) -> jax.Array:
            return value_and_grad(x)[0]

        loss.defvjp(value_and_grad, lambda gradient, seed: (seed * gradient,))
        slope = optax.tree.get(now.state, "grad")
        updates, state = self._optax.update(
            slope, now.state, flat, value=now.loss, grad=slope, value_fn=loss
        )
        following = Iterate(
            unravel(flat + jnp.asarray(updates)),
            optax.tree.get(state, "value"),
            jnp.linalg.norm(optax.tree.get(state, "grad")),
            now.evaluations + optax.tree.get(state, "num_linesearch_steps"),
            optax.tree.get(state, "learning_rate"),
            state,
        )
        return mpigrad.bcast(following, comm=self._comm)

    def blank(self, parameters: Parameters) -> Iterate:
        """An iterate of these parameters' structure, not evaluated: what a file is read into."""
        zero = jnp.zeros(())
        flat, _ = ravel_pytree(parameters)
        state = self._without_memory(flat, zero, jnp.zeros_like(flat))
        return Iterate(parameters, zero, zero, jnp.ones((), int), zero, state)

    def forget(self, now: Iterate) -> Iterate:
        """The same iterate without memory: the next step is along the gradient."""
        flat, _ = ravel_pytree(now.parameters)
        state = self._without_memory(flat, now.loss, optax.tree.get(now.state, "grad"))
        return dataclasses.replace(now, state=state)

    def _without_memory(self, x: jax.Array, loss: jax.Array, gradient: jax.Array) -> Any:
        state = optax.tree.set(self._optax.init(x), value=loss, grad=gradient)
        # Types as a step leaves them, so that the first step is compiled for all the others.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
