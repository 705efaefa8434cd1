"""One-sided operations: an epoch of puts, gets and accumulations between two fences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.primitive import check_arithmetic, linear_map
from mpigrad.operations.pytree_packing import arrays, bind_packed
from mpigrad.runtime.native import ARITHMETIC_DTYPES, words_per_element

__all__ = ["one_sided"]

Triples = tuple[tuple[int, int, int], ...]  # (rank, offset, count)


def _rows(triples: Triples) -> int:
    return sum(count for _, _, count in triples)


# The primitive maps rows to rows. x has the window, the values to put and the values to accumulate.
# y has the new window and the rows of `get`. With `clear` (rows that become zero) such maps are
# closed under transposition: the transpose of a put gets the rows, then clears them.


def _result(
    x: Any, *, rows: int, get: Triples, accumulate: Triples, site: int, **_: Any
) -> ShapedArray:
    if accumulate:
        check_arithmetic("one_sided", x, site)
    return ShapedArray((rows + _rows(get), *x.shape[1:]), x.dtype)


def _transpose(
    ct: Any, x: Any, a: Any, *, get: Any, put: Any, clear: Any, accumulate: Any, **p: Any
) -> Any:
    p.update(get=put + accumulate, put=(), clear=clear + put, accumulate=get)
    return one_sided_p.bind(ct, a, **p)[0]


def _attributes(avals: Any, p: dict[str, Any]) -> dict[str, Any]:
    x = avals[0]
    row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    flat = {
        name: tuple(n for triple in p[name] for n in triple)
        for name in ("get", "put", "clear", "accumulate")
    }
    word_bytes = x.dtype.itemsize // words_per_element(x.dtype)
    return {**p, **flat, "row_bytes": row_bytes, "word_bytes": word_bytes}


one_sided_p: Primitive = linear_map(
    "one_sided",
    result=_result,
    attributes=_attributes,
    batch_axes=(1, 1),
    transpose=_transpose,
)


def _entries(name: str, entries: Iterable[Any], fields: str, comm: Communicator) -> list[Any]:
    """Return a list of triples, or raise an error."""
    listed = list(entries)
    for entry in listed:
        if not isinstance(entry, (tuple, list)) or len(entry) != 3:
            raise ValueError(
                f"one_sided: {name} must be a list of triples ({fields}), got an entry of type "
                f"{type(entry).__name__}"
                f"{f' and length {len(entry)}' if isinstance(entry, (tuple, list)) else ''} on "
                f"rank {comm.rank}. Give three values for each entry."
            )
    return listed


def _triple(rank: Any, offset: Any, count: Any, name: str, comm: Communicator) -> Any:
    target = check_rank(rank, comm, f"one_sided: {name}: rank")
    for value in (offset, count):
        if not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(
                f"one_sided: offset and count in {name} must be integers that are not negative, "
                f"got {value!r} on rank {comm.rank}. Compute them before the program runs."
            )
    return target, int(offset), int(count)


def _rows_of(name: str, tree: Any, comm: Communicator) -> int:
    """Return the number of rows, which all arrays of `tree` share."""
    leaves = jax.tree.leaves(tree)
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(
            f"one_sided: {name} must have rows on a leading axis, got a scalar on rank "
            f"{comm.rank}. Give it the shape (rows, ...)."
        )
    rows = {leaf.shape[0] for leaf in leaves}
    if len(rows) > 1:
        raise ValueError(
            f"one_sided: all arrays of {name} must have the same number of rows, got "
            f"{sorted(rows)} on rank {comm.rank}. Make the leading axes equal."
        )
    return rows.pop() if rows else 0


def _check_values(name: str, tree: Any, window: Any, comm: Communicator) -> None:
    if jax.tree.structure(tree) != jax.tree.structure(window):
        raise TypeError(
            f"one_sided: the values of {name} must have the structure of the window, "
            f"{jax.tree.structure(window)}, got {jax.tree.structure(tree)} on rank {comm.rank}. "
            "Give one array for each array of the window."
        )
    for values, content in zip(jax.tree.leaves(tree), jax.tree.leaves(window), strict=True):
        if values.ndim != content.ndim or values.shape[1:] != content.shape[1:]:
            raise ValueError(
                f"one_sided: the values of {name} must have the shape (rows, "
                f"*{content.shape[1:]}), got {values.shape} for a window of shape {content.shape} "
                f"on rank {comm.rank}. Change the shape: only the number of rows may differ."
            )
        if values.dtype != content.dtype:
            raise TypeError(
                f"one_sided: the values of {name} must have the dtype of the window, "
                f"{content.dtype}, got {values.dtype} on rank {comm.rank}. Convert one of them."
            )
        if name == "accumulate" and content.dtype.name not in ARITHMETIC_DTYPES - {"bool"}:
            raise TypeError(
                f"one_sided: accumulate takes integers, float32/64 and complex64/128, got "
                f"{content.dtype.name}, which MPI cannot add. Convert it first, for example "
                "x.astype('float32')."
            )


def one_sided(
    content: Any,
    *,
    put: Iterable[tuple[Any, int, int]] = (),
    get: Iterable[tuple[int, int, int]] = (),
    accumulate: Iterable[tuple[Any, int, int]] = (),
    comm: Communicator | None = None,
) -> tuple[Any, list[Any]]:
    """Perform an epoch of one-sided operations: puts, gets and accumulations between two fences.

    Each rank alone decides which rows of which window it reads and writes. The function takes the
    windows and returns their new content. All ranks of the communicator call it, each with its own
    lists, which may be empty.

    Parameters
    ----------
    content
        The window of this rank: an array of shape (rows, ...). The number of rows may differ
        between ranks. The rest of the shape and the dtype are the same on all ranks. It may be a
        pytree of such arrays with the same number of rows. Then values and results are pytrees,
        too.
    put
        (values, rank, offset): the rows of `values` replace the rows of that rank's window from
        `offset` on. No row may be put twice in an epoch.
    get
        (rank, offset, count): rows of that rank's window as it was before the epoch.
    accumulate
        (values, rank, offset): the rows of `values` are added to the rows of that rank's window,
        after all puts, in the order of ranks. Integers, float32/64, complex64/128.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    content
        The window of this rank after the epoch.
    gotten
        An array, or pytree of arrays, of shape (count, ...) for each entry of `get`.

    Notes
    -----
    The adjoint is an epoch, too: gets become accumulations, accumulations become gets, and puts
    become gets of rows that are then cleared. Offsets past the end of a window and rows that are
    put twice are errors on all ranks when the program runs.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> window, (row,) = mg.one_sided(
    ...     jnp.zeros((2, 3)), accumulate=[(jnp.ones((1, 3)), 0, 1)], get=[(0, 1, 1)]
    ... )
    >>> window
    Array([[0., 0., 0.],
           [1., 1., 1.]], dtype=float32)
    >>> row
    Array([[0., 0., 0.]], dtype=float32)
    """
    comm = resolve(comm)
    content = arrays("one_sided", content, "content")
    rows = _rows_of("content", content, comm)
    lists: dict[str, list[tuple[int, int, int]]] = {"put": [], "accumulate": []}
    parts = [content]
    for name, entries in (("put", put), ("accumulate", accumulate)):
        for entry, rank, offset in _entries(name, entries, "values, rank, offset", comm):
            values = arrays("one_sided", entry, name)
            _check_values(name, values, content, comm)
            lists[name].append(_triple(rank, offset, _rows_of(name, values, comm), name, comm))
            parts.append(values)
    triples = _entries("get", get, "rank, offset, count", comm)
    gets = tuple(_triple(rank, offset, count, "get", comm) for rank, offset, count in triples)
    y = bind_packed(
        one_sided_p,
        jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts) if parts[1:] else content,
        comm,
        leading=(1, 1),
        rows=rows,
        get=gets,
        put=tuple(lists["put"]),
        clear=(),
        accumulate=tuple(lists["accumulate"]),
    )
    ends = list(itertools.accumulate((count for _, _, count in gets), initial=rows))

    def between(start: int, stop: int) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, start, stop), y)

    return between(0, rows), [between(*bounds) for bounds in itertools.pairwise(ends)]
