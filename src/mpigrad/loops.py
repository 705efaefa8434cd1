"""Loops whose gradients fit into memory: time loops, and loops over blocks of points.

The gradient of a time loop of n steps goes through the steps backwards and needs the state before
each step. Either all states are stored, or only some of them, the *checkpoints*, from which the
other states are computed again. Checkpoints change the memory and the time of a gradient, but not
its value, because the same states are computed again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.communicator import Communicator
from mpigrad.extend import StateFolder, call_site, describe, has_messages
from mpigrad.operations import assert_replicated

__all__ = ["Budget", "Checkpoints", "Files", "history", "map_blocks", "scan"]


@dataclasses.dataclass(frozen=True)
class Budget:
    """Checkpoints within a memory budget: the largest count of stored states.

    The loop is divided into chunks, the chunks into smaller chunks, and so on, with the fewest
    levels that the budget allows. A level stores the states before its chunks only while the
    gradient is in it. With d levels of f chunks each, f^d steps need d f states, and each step is
    computed d + 1 times instead of once. The binomial schedules of Griewank and Walther
    ("Algorithm 799: Revolve", ACM TOMS 26, 2000) need fewer states, because later chunks reuse
    freed states. But they need a schedule outside of the program, which then has neither forward
    mode nor second derivatives.

    Attributes
    ----------
    states
        Largest count of states stored at a time, in addition to the first state, the current one
        and the values that the derivative of one step needs. Two levels need a few more than
        2 sqrt(n) states. At least about 2 log2(n) are needed.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad import loops
    >>> def last(rate):
    ...     def step(x, _):
    ...         return x - rate * x, None
    ...     return loops.scan(step, jnp.ones(()), 100, checkpoints=loops.Budget(states=22))[0]
    >>> round(float(mg.grad(last)(0.01)), 2)
    -36.97
    """

    states: int


@dataclasses.dataclass(frozen=True)
class Files:
    """Checkpoints in files on a disk, for loops whose states do not fit into memory.

    A thread of its own writes the state before every k-th step, and reads it again before the
    gradient needs it. Each state has a checksum. Files have no name, so nothing is left however
    the program ends, and their space is reserved before the first step. They are closed with the
    compiled program.

    Attributes
    ----------
    directory
        An existing directory on a fast disk of the rank's host.
    every
        k, the number of steps from one stored state to the next. Default: the square root of the
        number of steps.
    inside
        The checkpoints of the k steps between two states, which are in memory: None, an integer or
        a `Budget`, as for a loop of k steps. Default: 1, so a step is computed three times.

    Notes
    -----
    A program that is not differentiated writes nothing. Three states of each loop are buffered in
    memory. Derivatives of any order are right; tangents are not stored in files. Received arrays
    stay in memory (docs/loops.md).

    Examples
    --------
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad import loops
    >>> scratch = loops.Files(tempfile.gettempdir(), every=10)
    >>> def last(rate):
    ...     def step(x, _):
    ...         return x - rate * x, None
    ...     return loops.scan(step, jnp.ones(()), 100, checkpoints=scratch)[0]
    >>> round(float(mg.grad(last)(0.01)), 2)
    -36.97
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    inside: int | Budget | None = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", os.path.abspath(self.directory))
        if self.every is not None and not (_is_integer(self.every) and self.every > 0):
            raise ValueError(
                f"loops.Files: every must be a positive integer or None, got {self.every!r}."
            )
        if not (self.inside is None or _is_integer(self.inside) or isinstance(self.inside, Budget)):
            raise TypeError(
                "loops.Files: inside must be None, an integer or a Budget, got "
                f"{self.inside!r}. It is for the steps between two stored states."
            )

    def folder(self, count: int, name: str, *, agrees: bool = False) -> StateFolder:
        """Return the open files of a loop that stores so many states."""
        if not (os.path.isdir(self.directory) and os.access(self.directory, os.W_OK)):
            raise ValueError(
                f"{name}: the directory of checkpoints, {str(self.directory)!r}, does not exist or "
                "cannot be written. Give an existing directory on a disk of this host."
            )
        head = f"{name}, {describe(call_site())}: "
        return StateFolder.at(str(self.directory), count, head, agrees)


def _is_integer(x: Any) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool)


Checkpoints = int | Budget | Files | None
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

    Each message in a step (halo exchange, reduction) is sent once in the step and once in its
    adjoint, whatever the checkpoints are: received arrays are stored, so they are not sent again
    if the step is computed again. Use it with `mpigrad.grad`, `jvp`, `vmap` and `jit`.

    Parameters
    ----------
    step
        step(state, x) -> (next state, y). It may close over arrays that are differentiated.
    state
        The first state, an array or a pytree of arrays. A step must keep shapes and dtypes.
    n
        Count of steps, a Python integer. It must be the same on all ranks that exchange messages
        in the step.
    xs
        The x of each step: an array or a pytree of arrays of shapes (n, ...). Without it x is
        None.
    checkpoints
        The values that the gradient stores of the forward loop. None: all values that the
        derivatives need. Each step is computed once. An integer k: the state before every k-th
        step, and all values of k steps at a time. Each step is computed twice. `Budget(states)`: at
        most so many states, and all values of one step. Each step is computed once more than there
        are levels. `Files(directory)`: states in files. It may differ between ranks.
    comm
        The ranks that make these steps together. They compare n before the first step, in one
        small message. Without it n is not compared.

    Returns
    -------
    state, ys
        The last state, and the stacked y of all steps, with shapes (n, ...).

    Raises
    ------
    ValueError, TypeError
        When the program is traced: if n is negative, xs do not have n rows, checkpoints are invalid
        or too few, or the step changes the structure, shapes or dtypes of the state.
    jax.errors.JaxRuntimeError
        On all ranks of `comm`, before the first step, if n differs between ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import loops
    >>> def step(total, x):
    ...     total = total + x
    ...     return total, total**2
    >>> total, squares = loops.scan(step, jnp.zeros(()), 3, jnp.arange(1.0, 4.0), checkpoints=2)
    >>> print(total, squares)
    6.0 [ 1.  9. 36.]
    """
    state = jax.tree.map(jnp.asarray, state)
    n, files, lengths = _checked(n, xs, checkpoints)
    if n > 0:
        _compare(state, jax.eval_shape(step, state, jax.tree.map(lambda a: a[0], xs)))
    if comm is not None:
        remedy = "Let all ranks make as many steps: decide it on one rank, or by an allreduce."
        assert_replicated(n, comm, what="the number of steps", remedy=remedy)
    folder = None if files is None else files.folder(-(-n // lengths[0]), "loops.scan")
    return _run(step, state, xs, n, lengths, folder)


def history(
    step: Step,
    state: Any,
    n: int,
    xs: Any = None,
    *,
    checkpoints: Checkpoints = None,
    comm: Communicator | None = None,
) -> Any:
    """Make n steps as `scan` does, and return all n + 1 states.

    The y of the steps is not returned. The result has n + 1 states whatever the checkpoints are.
    Checkpoints still reduce the memory for the derivatives of the steps.

    Parameters
    ----------
    step, state, n, xs, checkpoints, comm
        As in `scan`.

    Returns
    -------
    A tree of the structure of `state`, with shapes (n + 1, ...). The first state comes first.

    Raises
    ------
    ValueError, TypeError, jax.errors.JaxRuntimeError
        As in `scan`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import loops
    >>> print(loops.history(lambda x, _: (2 * x, None), jnp.ones(()), 4))
    [ 1.  2.  4.  8. 16.]
    """

    def recording(state: Any, x: Any) -> tuple[Any, Any]:
        after = step(state, x)[0]
        return after, after

    state = jax.tree.map(jnp.asarray, state)
    _, states = scan(recording, state, n, xs, checkpoints=checkpoints, comm=comm)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), state, states)


def map_blocks(f: Callable[..., Any], *points: Any, size: int) -> Any:
    """Apply a function of points to many points, in blocks that fit into the processor's cache.

    Use it for a neural network inside a PDE. Its hidden layers have many values at each point. For
    all points at once they are written to the main memory and read again, and the gradient stores
    all of them. In blocks they stay in the cache. The gradient stores the points only, and computes
    f of each block again. Value and gradient are those of f of all points, up to rounding.

    Parameters
    ----------
    f
        Function of arrays of shapes (m, ...) that returns an array or a pytree of arrays of shapes
        (m, ...) for any m. Row i of the results must depend on row i of the arguments only. f may
        close over arrays that are differentiated. It must not send messages, because ranks may have
        different numbers of blocks.
    points
        One or more arrays of shapes (n, ...).
    size
        The largest count of points in a block. The values that f computes for a block should take
        about half of the second-level cache of a core: 256 KiB fit into all usual processors. If n
        is not a multiple of the number of blocks, the last point is repeated, and the results of
        the copies are dropped.

    Returns
    -------
    The results of f, with shapes (n, ...).

    Raises
    ------
    ValueError
        If size is less than 1, the arrays do not have the same n, or f sends messages.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import loops
    >>> x, w = jnp.linspace(0.0, 1.0, 5), jnp.ones((8, 1))
    >>> y = loops.map_blocks(lambda x: jnp.tanh(w * x).sum(0), x, size=2)
    >>> y.shape
    (5,)
    """
    shapes = [jnp.shape(p) for p in points]
    n = shapes[0][0] if shapes and shapes[0] else 0
    if size < 1 or not shapes or any(shape[:1] != (n,) for shape in shapes):
        raise ValueError(
            "map_blocks: expected arrays of shapes (n, ...) and size of at least 1, got the shapes "
            f"{', '.join(map(str, shapes)) or 'of no array'} and size={size}."
        )

    def block(*row: Any) -> Any:  # f may be a method of unhashable arrays
        return f(*row)

    if has_messages(jax.make_jaxpr(block)(*points).effects):
        raise ValueError(
            "map_blocks: the function sends messages. Ranks may have different numbers of blocks, "
            "so send the messages before or after map_blocks."
        )
    blocks = -(-n // size)
    if blocks < 2:
        return f(*points)
    length = -(-n // blocks)
    padding = blocks * length - n

    def split(p: Any) -> Any:
        p = jnp.concatenate([p, jnp.repeat(p[-1:], padding, axis=0)]) if padding else p
        return jnp.reshape(p, (blocks, length, *p.shape[1:]))

    rows = [split(jnp.asarray(p)) for p in points]

    # In a loop XLA cannot merge the repeated computation with the first one.
    results = jax.lax.map(lambda row: jax.checkpoint(block, prevent_cse=False)(*row), rows)
    return jax.tree.map(lambda a: a.reshape(blocks * length, *a.shape[2:])[:n], results)


def _run(
    step: Step,
    state: Any,
    xs: Any,
    n: int,
    lengths: tuple[int, ...],
    folder: Any = None,
) -> tuple[Any, Any]:
    """Run the loop. `lengths` are the lengths of chunks at each level, 1 for single steps.

    The states before chunks of the first level are stored in `folder`.
    """
    if not lengths or n == 0:
        return jax.lax.scan(step, state, xs, length=n)
    length, *inner = lengths
    chunks, rest = divmod(n, length)

    def checkpoint(f: Step) -> Step:
        # In a loop of more than one turn XLA cannot merge the repeated computation with the first.
        repeated = functools.partial(jax.checkpoint, prevent_cse=chunks == 1)
        if folder is None:
            return repeated(f)

        @repeated
        def read(ticket: Any, state: Any, xs: Any) -> tuple[Any, Any]:
            leaves, structure = jax.tree.flatten(state)
            return f(jax.tree.unflatten(structure, folder.recall(ticket, leaves)), xs)

        def stored(state: Any, xs: Any) -> tuple[Any, Any]:
            return read(folder.withhold(jax.tree.leaves(state)), state, xs)

        return stored

    if length == 1:
        return jax.lax.scan(checkpoint(step), state, xs, length=n)

    def chunk(state: Any, xs: Any) -> tuple[Any, Any]:
        return _run(step, state, xs, length, tuple(inner))

    # The remaining steps come first, each with its own checkpoint.
    head = jax.tree.map(lambda a: a[:rest], xs)
    body = jax.tree.map(lambda a: a[rest:].reshape(chunks, length, *a.shape[1:]), xs)
    parts = []
    if rest:
        state, ys = _run(step, state, head, rest, (1,))
        parts.append(ys)
    state, ys = jax.lax.scan(checkpoint(chunk), state, body, length=chunks)
    parts.append(jax.tree.map(lambda a: a.reshape(chunks * length, *a.shape[2:]), ys))
    return state, jax.tree.map(lambda *a: jnp.concatenate(a), *parts) if rest else parts[0]


# ---- the stored states ----


def _lengths(n: int, checkpoints: int | Budget | None) -> tuple[int, ...]:
    """Return the lengths of the chunks at each level."""
    if checkpoints is None:
        return ()
    if not isinstance(checkpoints, Budget):
        every = operator.index(checkpoints)
        if every < 1:
            raise ValueError(
                f"loops: checkpoints must be at least 1, got {every}, as the state before every "
                "k-th step is stored"
            )
        return (min(every, max(n, 1)),)
    budget = operator.index(checkpoints.states)
    choices = [_fewest_states(n, levels) for levels in range(1, max(n, 1).bit_length() + 1)]
    for states, lengths in choices:
        if states <= budget:
            return lengths
    raise ValueError(
        f"loops: {n} steps need more states than checkpoints=Budget(states={budget}). "
        f"Give at least {min(choices)[0]} states."
    )


@functools.cache
def _fewest_states(n: int, levels: int) -> tuple[int, tuple[int, ...]]:
    """Return the fewest states that so many levels store, and the lengths of their chunks."""
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


# ---- errors ----


def _checked(n: Any, xs: Any, checkpoints: Any) -> tuple[int, Files | None, tuple[int, ...]]:
    files = None
    try:
        n = operator.index(n)
        if not isinstance(checkpoints, Files):
            lengths = _lengths(max(n, 0), checkpoints)
        else:
            files = checkpoints
            every = min(files.every or math.isqrt(max(n, 1)), max(n, 1))
            lengths = (every, *(_lengths(every, files.inside) if every > 1 else ()))
    except TypeError:
        raise TypeError(
            "loops: n must be an integer, and checkpoints an integer, a Budget, Files or None, got "
            f"n={n!r}, checkpoints={checkpoints!r}"
        ) from None
    if n < 0:
        raise ValueError(f"loops: n must not be negative, got {n}")
    for x in jax.tree.leaves(xs):
        if jnp.shape(x)[:1] != (n,):
            raise ValueError(
                f"loops: xs has shape {jnp.shape(x)}, expected ({n}, ...) for {n} steps"
            )
    return n, files, lengths


def _compare(before: Any, returned: Any) -> None:
    """Raise an error unless a step returned (next state, y) with a state like the one before."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"loops: step must return (next state, y), got {jax.tree.structure(returned)}"
        )
    after = returned[0]
    if jax.tree.structure(after) != jax.tree.structure(before):
        raise TypeError(
            f"loops: step returned a state of structure {jax.tree.structure(after)}, expected "
            f"the structure of its argument, {jax.tree.structure(before)}"
        )
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TypeError(
                f"loops: step returned {new.dtype} {new.shape} for the state's {old.dtype} "
                f"{old.shape}. A step must keep shapes and dtypes."
            )
