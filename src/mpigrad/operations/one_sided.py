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
from mpigrad.operations.pytree_packing import array, packed
from mpigrad.runtime.native import ARITHMETIC_DTYPES, words_per_element

__all__ = ["one_sided"]

Triples = tuple[tuple[int, int, int], ...]  # (rank, offset, count)


def _rows(triples: Triples) -> int:
    return sum(count for _, _, count in triples)


# The primitive maps rows to rows: x has the window, the values to put, the values to accumulate; y
# has the new window and the rows that were got. With `clear` (rows that become zero) such maps are
# closed under transposition: what was put was cleared before, and is got back.


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
    """The entries of a list of triples."""
    listed = list(entries)
    for entry in listed:
        if not isinstance(entry, (tuple, list)) or len(entry) != 3:
            raise ValueError(
                f"one_sided: {name} is a list of triples ({fields}); one of its entries on rank "
                f"{comm.rank} is {type(entry).__name__}, or has another length"
            )
    return listed


def _triple(rank: Any, offset: Any, count: Any, name: str, comm: Communicator) -> Any:
    target = check_rank(rank, comm, f"one_sided: {name}: rank")
    for value in (offset, count):
        if not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(
                f"one_sided: {name}: offset and count must be integers, not negative, known "
                f"before the program runs; got {value!r} on rank {comm.rank}"
            )
    return target, int(offset), int(count)


def _rows_of(name: str, tree: Any, comm: Communicator) -> int:
    """The number of rows that all arrays of `tree` have."""
    leaves = jax.tree.leaves(tree)
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(
            f"one_sided: {name} has no rows on rank {comm.rank}; give it a leading axis"
        )
    rows = {leaf.shape[0] for leaf in leaves}
    if len(rows) > 1:
        raise ValueError(
            f"one_sided: {name}: the arrays of a pytree have the same number of rows; got "
            f"{sorted(rows)} on rank {comm.rank}"
        )
    return rows.pop() if rows else 0


def _check_values(name: str, tree: Any, window: Any, comm: Communicator) -> None:
    if jax.tree.structure(tree) != jax.tree.structure(window):
        raise TypeError(
            f"one_sided: {name}: values are {jax.tree.structure(tree)} on rank {comm.rank}, but "
            f"the window is {jax.tree.structure(window)}; give values of the window's structure"
        )
    for values, content in zip(jax.tree.leaves(tree), jax.tree.leaves(window), strict=True):
        if values.ndim != content.ndim or values.shape[1:] != content.shape[1:]:
            raise ValueError(
                f"one_sided: {name}: values have shape {values.shape} on rank {comm.rank}, but "
                f"the window has shape {content.shape}; only the number of rows may differ"
            )
        if values.dtype != content.dtype:
            raise TypeError(
                f"one_sided: {name}: values are {values.dtype} on rank {comm.rank}, but the "
                f"window is {content.dtype}; convert one of them"
            )
        if name == "accumulate" and content.dtype.name not in ARITHMETIC_DTYPES - {"bool"}:
            raise TypeError(
                f"one_sided: accumulate: MPI cannot add {content.dtype.name}; convert it first, "
                "for instance x.astype('float32')"
            )


def one_sided(
    content: Any,
    *,
    put: Iterable[tuple[Any, int, int]] = (),
    get: Iterable[tuple[int, int, int]] = (),
    accumulate: Iterable[tuple[Any, int, int]] = (),
    comm: Communicator | None = None,
) -> tuple[Any, list[Any]]:
    """One epoch of one-sided operations: this rank alone says what is read and written where.

    What MPI does between two fences, as a function: windows go in, and come out changed. All
    ranks of the communicator call it, each with lists of its own, which may be empty.

    Parameters
    ----------
    content
        This rank's window: an array of shape (rows, ...), whose number of rows may differ from
        rank to rank; the rest of the shape and the dtype are the same everywhere. Or a pytree of
        such arrays, with the same number of rows: values and what is got are then pytrees, too.
    put
        (values, rank, offset): the rows of `values` replace those of the rank's window from
        `offset` on. No row may be put twice in an epoch.
    get
        (rank, offset, count): rows of the rank's window as it was before the epoch.
    accumulate
        (values, rank, offset): the rows of `values` are added there, after all puts, in the order
        of ranks. Integers, float32/64, complex64/128.

    Returns
    -------
    content
        This rank's window after the epoch.
    gotten
        For each of `get` an array, or pytree of arrays, of shape (count, ...).

    Notes
    -----
    The adjoint is an epoch, too: gets become accumulations, accumulations become gets, and puts
    become gets of rows that are then cleared. Offsets past the end of a window and rows that are
    put twice are errors on all ranks when the program runs.
    """
    comm = resolve(comm)
    content = jax.tree.map(array, content)
    rows = _rows_of("content", content, comm)
    lists: dict[str, list[tuple[int, int, int]]] = {"put": [], "accumulate": []}
    parts = [content]
    for name, entries in (("put", put), ("accumulate", accumulate)):
        for given, rank, offset in _entries(name, entries, "values, rank, offset", comm):
            values = jax.tree.map(array, given)
            _check_values(name, values, content, comm)
            lists[name].append(_triple(rank, offset, _rows_of(name, values, comm), name, comm))
            parts.append(values)
    wanted = _entries("get", get, "rank, offset, count", comm)
    gets = tuple(_triple(rank, offset, count, "get", comm) for rank, offset, count in wanted)
    y = packed(
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
