"""Jacobians of the one function on the product space of the ranks' arrays."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.autodiff.transforms import vjp, vmap
from mpigrad.communicator import Communicator, resolve
from mpigrad.operations.carrier import CARRIER, forbid_messages, with_carrier
from mpigrad.operations.checks import assert_replicated
from mpigrad.operations.collectives import bcast, gather
from mpigrad.operations.local_programs import as_array, jit_local

__all__ = ["jacobian"]

_ZERO = np.float32(0)
Mode = Literal["forward", "reverse"]
_LOCAL = (
    "jacobian: with local=True the function must not send messages, got one. For the Jacobian over "
    "all ranks leave `local` out."
)


def jacobian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    mode: Mode = "forward",
    *,
    local: bool = False,
    comm: Communicator | None = None,
) -> Callable[..., Any]:
    """Make a function that returns the Jacobian of `f` over all ranks.

    Parameters
    ----------
    f
        Function of arrays or pytrees of real floats that returns arrays or pytrees of real floats.
        Every rank calls it, with arguments and results of the same shapes.
    argnums
        The numbers of the arguments with respect to which `f` is differentiated.
    mode
        "forward" computes all columns at once. It is cheaper if the arguments of all ranks have
        fewer entries than the results. "reverse" computes all rows. The result is the same.
    local
        True if `f` does not send messages and its arguments are the same on all ranks (which
        MPIGRAD_GUARD=1 checks). Then each rank computes a part of the columns or rows, and the
        parts are gathered: the Jacobian of a serial function is computed in parallel.
    comm
        The communicator of the ranks whose arguments and results count. Default: the communicator
        of the enclosing `with`, or all ranks.

    Returns
    -------
    A function like `f`. On rank s it returns, for each result y and each argument x (a pytree as
    for `jax.jacobian`), an array of shape (number of ranks, *y.shape, *x.shape). Its entry [r] is
    the derivative of rank s's result with respect to rank r's argument. With `local` it returns the
    result of `jax.jacobian`, of shape (*y.shape, *x.shape), on every rank.

    Raises
    ------
    TypeError
        If arguments or results are not real floats.
    jax.errors.JaxRuntimeError
        On every rank, if shapes differ between ranks.

    Notes
    -----
    `jax.jacfwd` and `jax.jacrev` seed the same entry on every rank at the same time. For a function
    with messages they return sums over ranks: Σ_r ∂y_s/∂x_r (jacfwd) and Σ_s ∂y_s/∂x_r (jacrev).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.jacobian(lambda x: mg.allreduce(x**2))(jnp.arange(2.0))
    Array([[[0., 0.],
            [0., 2.]]], dtype=float32)
    """
    if mode not in ("forward", "reverse"):
        raise ValueError(
            f'jacobian: mode must be "forward" or "reverse", got {mode!r}. Choose one of the two.'
        )
    over = _divided if local else _over_ranks
    is_sequence = isinstance(argnums, Sequence)
    numbers = argnums if is_sequence else (argnums,)

    @functools.wraps(f)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        group = resolve(comm)
        try:
            by = tuple(args[n] for n in numbers)
        except IndexError:
            raise ValueError(
                "jacobian: argnums must name positional arguments, got "
                f"argnums={argnums}, but there are {len(args)} positional arguments. Correct "
                "argnums."
            ) from None
        leaves, arguments = jax.tree.flatten(by if is_sequence else by[0])
        leaves = [_real("argument", as_array(leaf)) for leaf in leaves]
        results: Any = None

        def flat(*values: Any) -> list[Any]:
            nonlocal results
            value = jax.tree.unflatten(arguments, values)
            every = list(args)
            for n, part in zip(numbers, value if is_sequence else (value,), strict=True):
                every[n] = part
            out, results = jax.tree.flatten(f(*every, **kwargs))
            return [_real("result", as_array(y)) for y in out]

        if local and os.environ.get("MPIGRAD_GUARD") == "1":
            assert_replicated((args, kwargs), group, what="jacobian: an argument, with local=True,")
        with forbid_messages(_LOCAL) if local else contextlib.nullcontext():
            outs = jax.eval_shape(flat, *leaves)
        shapes = [(x.shape, str(x.dtype)) for x in (*leaves, *outs)]
        assert_replicated(
            np.int32(zlib.crc32(repr(shapes).encode()) >> 1),
            group,
            what="jacobian: the shape or dtype of an argument or result",
            remedy="Pad shorter arrays. Entries that are not used have a derivative of zero.",
        )
        table = over(flat, leaves, outs, mode, group)
        rows = [jax.tree.unflatten(arguments, row) for row in table]
        return jax.tree.unflatten(results, rows)

    return transformed


def _real(what: str, x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"jacobian: arguments and results must be real floats, got {what} of dtype {x.dtype}. "
            "Convert it, or use mpigrad.jvp or vjp, which take integers and complex numbers."
        )
    return x


def _count(arrays: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) for x in arrays)


def _seeds(like: Sequence[Any], first: int, count: int) -> list[Any]:
    """Return rows first, ..., first + count - 1 of the identity, or zeros beyond it, by leaf."""
    avals = tuple((x.shape, np.dtype(x.dtype)) for x in like)
    return _identity_rows(first, avals=avals, count=count)


@jit_local(static_argnames=("avals", "count"))
def _identity_rows(first: Any, avals: Any, count: int) -> list[Any]:
    offset, seeds = 0, []
    chosen = first + jnp.arange(count)[:, None]
    for shape, dtype in avals:
        columns = jnp.arange(offset, offset + math.prod(shape))[None]
        seeds.append((chosen == columns).astype(dtype).reshape(count, *shape))
        offset += columns.size
    return seeds


def _shapes(arrays: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.shape) for x in arrays)


@jit_local(static_argnames=("xs", "ys", "lead", "forward"))
def _blocks(parts: list[Any], xs: Any, ys: Any, lead: tuple[int, ...], forward: bool) -> Any:
    """Return the table of blocks (*lead, *y.shape, *x.shape) from derivatives for all seeds.

    A part has one axis for the seeds after the leading ones. Forward it belongs to a result, and
    its seeds are those of all arguments. Otherwise it belongs to an argument.
    """
    axis, cuts = len(lead), _ends(xs if forward else ys)
    cut = [jnp.split(part, cuts, axis) for part in parts]
    if forward:
        moved = [[jnp.moveaxis(d, axis, -1) for d in row] for row in cut]
    else:
        moved = [list(row) for row in zip(*cut, strict=True)]
    return [
        [d.reshape(*lead, *y, *x) for d, x in zip(row, xs, strict=True)]
        for row, y in zip(moved, ys, strict=True)
    ]


def _ends(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the ends of flattened and concatenated arrays, without the last."""
    return [int(end) for end in np.cumsum(list(map(math.prod, shapes)))[:-1]]


def _columns(flat: Callable[..., Any], leaves: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    """Return derivatives of each result along a batch of seeds: shape (batch, *y.shape)."""

    def push(a_dot: Any, *tangents: Any) -> Any:
        return jax.jvp(with_carrier(flat), (_ZERO, *leaves), (a_dot, *tangents))[1]

    # The tangents are batched on every rank, the carrier's too. The function itself is not.
    return jax.vmap(push)(np.zeros(len(seeds[0]), CARRIER.dtype), *seeds)


def _rows(flat: Callable[..., Any], leaves: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    """Return cotangents of each argument for a batch of seeds: shape (batch, *x.shape)."""
    return vmap(lambda *cts: vjp(flat, *leaves)[1](list(cts)))(*seeds)


def _over_ranks(
    flat: Callable[..., Any], xs: Sequence[Any], ys: Sequence[Any], mode: Mode, comm: Communicator
) -> list[list[Any]]:
    """Return the table of blocks (ranks, *y.shape, *x.shape), by results and arguments."""
    seeded = xs if mode == "forward" else ys
    n, ranks = _count(seeded), comm.size
    if not (n and _count(xs) and _count(ys)):
        return [[jnp.zeros((ranks, *y.shape, *x.shape), y.dtype) for x in xs] for y in ys]
    # Seed number (r, i) is entry i on rank r, and zero on the other ranks.
    seeds = _seeds(seeded, -comm.rank * n, ranks * n)
    if mode == "forward":
        derivatives = _by_rank(_columns(flat, xs, seeds), ranks=ranks)
        return _blocks(derivatives, _shapes(xs), _shapes(ys), (ranks,), forward=True)
    # This rank has columns. The rows of each rank are gathered on that rank.
    rows = _rows_of_ranks(_rows(flat, xs, seeds), ranks=ranks)
    gathered = [gather(some, rank, comm) for rank, some in enumerate(rows)]
    return _blocks(gathered[comm.rank], _shapes(xs), _shapes(ys), (ranks,), forward=False)


@jit_local(static_argnames=("ranks",))
def _by_rank(derivatives: Sequence[Any], ranks: int) -> list[Any]:
    """Return derivatives with the axis of all seeds divided into ranks and seeds of a rank."""
    return [d.reshape(ranks, len(d) // ranks, *d.shape[1:]) for d in derivatives]


@jit_local(static_argnames=("ranks",))
def _rows_of_ranks(rows: Sequence[Any], ranks: int) -> list[list[Any]]:
    n = len(rows[0]) // ranks  # by name, because a part may have no entries
    return [[d.reshape(ranks, n, *d.shape[1:])[rank] for d in rows] for rank in range(ranks)]


def _divided(
    flat: Callable[..., Any], xs: Sequence[Any], ys: Sequence[Any], mode: Mode, comm: Communicator
) -> list[list[Any]]:
    """Return the table of (*y.shape, *x.shape); each rank computes a part of columns or rows."""
    seeded = xs if mode == "forward" else ys
    n = _count(seeded)
    if not (n and _count(xs) and _count(ys)):
        return [[jnp.zeros((*y.shape, *x.shape), y.dtype) for x in xs] for y in ys]
    share = -(-n // comm.size)
    seeds = _seeds(seeded, comm.rank * share, share)
    with forbid_messages(_LOCAL):
        part = (_columns if mode == "forward" else _rows)(flat, xs, seeds)
    every = bcast(gather(list(part), 0, comm), 0, comm)
    every = _first(every, n=n)
    return _blocks(every, _shapes(xs), _shapes(ys), (), forward=mode == "forward")


@jit_local(static_argnames=("n",))
def _first(shares: Sequence[Any], n: int) -> list[Any]:
    """Return the first n seeds of those of all ranks."""
    return [d.reshape(d.shape[0] * d.shape[1], *d.shape[2:])[:n] for d in shares]
