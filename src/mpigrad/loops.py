"""Time loops whose gradients fit into memory.

The gradient of a loop of n steps goes through the steps backwards, and needs the state before each
of them: all of them kept, or some, the *checkpoints*, from which the others are computed again.
Checkpoints change the memory and the time of a gradient, and no value: what is computed again is
what was computed before.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.communicator import Communicator
from mpigrad.operations.checks import assert_replicated

__all__ = ["Budget", "Checkpoints", "history", "scan"]


@dataclasses.dataclass(frozen=True)
class Budget:
    """Checkpoints within a budget of memory: so many states at a time.

    The loop is divided into chunks, these into smaller chunks, and so on, with the fewest levels
    that the budget allows. A level keeps the states before its chunks, and only while it is worked
    on: with d levels of f chunks each, f^d steps need d f states, and each step is computed d + 1
    times where a gradient without checkpoints computes it once. (The binomial schedules of Griewank
    and Walther, "Algorithm 799: Revolve", ACM TOMS 26, 2000, give freed states to later chunks,
    and need fewer still; that takes a schedule outside of the program, which then has neither a
    forward mode nor second derivatives.)

    Attributes
    ----------
    states
        Number of states kept at a time, beside the first, the current one and what the derivative
        of one step needs. A few more than 2 sqrt(n) are enough for two levels; at least about
        2 log2(n) are needed.
    """

    states: int


Checkpoints = int | Budget | None
Step = Callable[[Any, Any], tuple[Any, Any]]


def scan(
    step: Step,
    state: Any,
    n: int,
    xs: Any = None,
    *,
    checkpoints: Checkpoints = None,
    comm: Communicator | None = None,
) -> tuple[Any, Any]:
    """Make n steps, as `jax.lax.scan` does, with checkpoints for the gradient.

    Messages in the step (halo exchanges, reductions) are sent once in a step and once in its
    adjoint, whatever the checkpoints: what a step has received is kept, and is not asked for again
    when the step is computed again. Use it with `mpigrad.grad`, `jvp`, `vmap`, `jit`.

    Parameters
    ----------
    step
        step(state, x) -> (next state, y). It may close over arrays that are differentiated.
    state
        The first state, an array or a pytree of them; a step keeps its shapes and dtypes.
    n
        Number of steps, a Python integer. The same on all ranks between which the step has
        messages.
    xs
        What the steps take in turn, an array or a pytree of them, of shapes (n, ...); without it
        x is None.
    checkpoints
        What the gradient keeps of the forward loop: None, everything that the derivatives of all
        steps need; an integer k, the state before every k-th step, and everything of k steps at a
        time; `Budget(states)`, no more than this number of states, and everything of one step. A
        step is computed once, twice, and once more than there are levels. Ranks may differ.
    comm
        The ranks that make these steps together: before the first step they compare n, in one
        small message. Without it n is not compared.

    Returns
    -------
    state, ys
        The last state, and what the steps returned beside it, with shapes (n, ...).

    Raises
    ------
    ValueError, TypeError
        Where the program is traced: if n is negative, xs are not n, checkpoints make no sense or
        are too few, or the step changes the state's structure, shapes or dtypes.
    jax.errors.JaxRuntimeError
        On all ranks of `comm`, before the first step: if they disagree about n.
    """
    state = jax.tree.map(jnp.asarray, state)
    n, lengths = _checked(n, xs, checkpoints)
    if n > 0:
        _compare(state, jax.eval_shape(step, state, jax.tree.map(lambda a: a[0], xs)))
    if comm is not None:
        remedy = "Let all ranks make as many steps: decide it on one rank, or by an allreduce."
        assert_replicated(n, comm, "the number of steps", remedy)
    return _run(step, state, xs, n, lengths)


def history(
    step: Step,
    state: Any,
    n: int,
    xs: Any = None,
    *,
    checkpoints: Checkpoints = None,
    comm: Communicator | None = None,
) -> Any:
    """The states before, between and after n steps: of shapes (n + 1, ...), the first one first.

    All of it as for `scan`; what steps return beside the state is dropped. The result holds n + 1
    states whatever the checkpoints, which still save what the derivatives of the steps need.
    """

    def recording(state: Any, x: Any) -> tuple[Any, Any]:
        after = step(state, x)[0]
        return after, after

    state = jax.tree.map(jnp.asarray, state)
    _, states = scan(recording, state, n, xs, checkpoints=checkpoints, comm=comm)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), state, states)


def _run(step: Step, state: Any, xs: Any, n: int, lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """The loop; `lengths` are those of the chunks at each level, 1 for single steps."""
    if not lengths or n == 0:
        return jax.lax.scan(step, state, xs, length=n)
    length, *inner = lengths
    chunks, rest = divmod(n, length)
    # In a loop of more than one turn XLA cannot merge what is computed again with what was before.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=chunks == 1)
    if length == 1:
        return jax.lax.scan(checkpoint(step), state, xs, length=n)

    def chunk(state: Any, xs: Any) -> tuple[Any, Any]:
        return _run(step, state, xs, length, tuple(inner))

    # The few steps that are left over come first, each with its own checkpoint.
    head = jax.tree.map(lambda a: a[:rest], xs)
    body = jax.tree.map(lambda a: a[rest:].reshape(chunks, length, *a.shape[1:]), xs)
    parts = []
    if rest:
        state, ys = _run(step, state, head, rest, (1,))
        parts.append(ys)
    state, ys = jax.lax.scan(checkpoint(chunk), state, body, length=chunks)
    parts.append(jax.tree.map(lambda a: a.reshape(chunks * length, *a.shape[2:]), ys))
    return state, jax.tree.map(lambda *a: jnp.concatenate(a), *parts) if rest else parts[0]


# ---- which states are kept ----


def _lengths(n: int, checkpoints: Checkpoints) -> tuple[int, ...]:
    """The lengths of the chunks at each level."""
    if checkpoints is None:
        return ()
    if not isinstance(checkpoints, Budget):
        every = operator.index(checkpoints)
        if every < 1:
            raise ValueError(
                f"stepping: checkpoints={every}: the state before every k-th step is kept, so k is "
                "at least 1"
            )
        return (min(every, max(n, 1)),)
    budget = operator.index(checkpoints.states)
    choices = [_fewest_states(n, levels) for levels in range(1, max(n, 1).bit_length() + 1)]
    for states, lengths in choices:
        if states <= budget:
            return lengths
    raise ValueError(
        f"stepping: {n} steps cannot be differentiated with checkpoints=Budget(states={budget}); "
        f"give at least {min(choices)[0]} states"
    )


@functools.cache
def _fewest_states(n: int, levels: int) -> tuple[int, tuple[int, ...]]:
    """The fewest states that so many levels keep at a time, and the lengths of their chunks."""
    best, lengths = n, (1,)
    if levels == 1:
        return best, lengths
    chunks = 2
    while chunks < best and chunks <= n // 2:
        length, rest = divmod(n, chunks)
        inside, inner = _fewest_states(length, levels - 1)
        if rest + chunks + inside < best:
            best, lengths = rest + chunks + inside, (length, *inner)
        chunks += 1
    return best, lengths


# ---- what is refused ----


def _checked(n: Any, xs: Any, checkpoints: Any) -> tuple[int, tuple[int, ...]]:
    try:
        n = operator.index(n)
        lengths = _lengths(max(n, 0), checkpoints)
    except TypeError:
        raise TypeError(
            "stepping: n must be an integer, and checkpoints an integer, a Budget or None, not "
            f"n={n!r}, checkpoints={checkpoints!r}"
        ) from None
    if n < 0:
        raise ValueError(f"stepping: n={n}: a number of steps is not negative")
    for x in jax.tree.leaves(xs):
        if jnp.shape(x)[:1] != (n,):
            raise ValueError(f"stepping: xs of shape {jnp.shape(x)} for {n} steps: give ({n}, ...)")
    return n, lengths


def _compare(before: Any, returned: Any) -> None:
    """Raise unless a step returned a pair whose first is like the state before it."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"stepping: step must return (next state, y), not {jax.tree.structure(returned)}"
        )
    after = returned[0]
    if jax.tree.structure(after) != jax.tree.structure(before):
        raise TypeError(
            f"stepping: the step makes a state of structure {jax.tree.structure(after)} out of one "
            f"of structure {jax.tree.structure(before)}"
        )
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TypeError(
                f"stepping: the step makes {new.dtype} {new.shape} out of the state's {old.dtype} "
                f"{old.shape}; a step keeps shapes and dtypes"
            )
