"""One-sided operations: an epoch of puts, gets and accumulations between two fences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.native import ARITHMETIC_DTYPES, words_per_element
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.activity import carrier
from mpigrad.operations.factory import check_arithmetic, linear_map
from mpigrad.operations.packing import array
from mpigrad.operations.sites import call_site

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


def _triple(rank: Any, offset: Any, count: Any, name: str, comm: Communicator) -> Any:
    target = check_rank(rank, comm, f"one_sided: {name}: rank")
    for value in (offset, count):
        if not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(
                f"one_sided: {name}: offset and count must be integers, not negative, known "
                f"before the program runs; got {value!r} on rank {comm.rank}"
            )
    return target, int(offset), int(count)


def _one_array(x: Any, what: str) -> None:
    if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(x) if leaf is not x):
        raise TypeError(
            f"one_sided: {what} is one array, not {jax.tree.structure(x)}; give each array of a "
            "pytree an epoch of its own"
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
        rank to rank; the rest of the shape and the dtype are the same everywhere.
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
        For each of `get` an array of shape (count, ...).

    Notes
    -----
    The adjoint is an epoch, too: gets become accumulations, accumulations become gets, and puts
    become gets of rows that are then cleared. Offsets past the end of a window and rows that are
    put twice are errors on all ranks when the program runs.
    """
    comm = resolve(comm)
    _one_array(content, "content")
    content = array(content)
    if content.ndim == 0:
        raise ValueError("one_sided: content has no rows; give it a leading axis")
    lists: dict[str, list[tuple[int, int, int]]] = {"put": [], "accumulate": []}
    parts = [content]
    for name, entries in (("put", put), ("accumulate", accumulate)):
        for given, rank, offset in entries:
            _one_array(given, name)
            values = array(given)
            if values.shape[1:] != content.shape[1:] or values.ndim != content.ndim:
                raise ValueError(
                    f"one_sided: {name}: values have shape {values.shape} on rank {comm.rank}, but "
                    f"the window has shape {content.shape}; only the number of rows may differ"
                )
            if values.dtype != content.dtype:
                raise TypeError(
                    f"one_sided: {name}: values are {values.dtype} on rank {comm.rank}, but the "
                    f"window is {content.dtype}; convert one of them"
                )
            lists[name].append(_triple(rank, offset, values.shape[0], name, comm))
            parts.append(values)
    if lists["accumulate"] and content.dtype.name not in ARITHMETIC_DTYPES - {"bool"}:
        raise TypeError(
            f"one_sided: accumulate: MPI cannot add {content.dtype.name}; convert it first, for "
            "instance x.astype('float32')"
        )
    gets = tuple(_triple(*entry, "get", comm) for entry in get)
    (y,) = one_sided_p.bind(
        jnp.concatenate(parts) if len(parts) > 1 else content,
        carrier(),
        comm=comm.slot,
        site=call_site(),
        rows=content.shape[0],
        get=gets,
        put=tuple(lists["put"]),
        clear=(),
        accumulate=tuple(lists["accumulate"]),
    )
    gotten, start = [], content.shape[0]
    for _, _, count in gets:
        gotten.append(jax.lax.slice_in_dim(y, start, start + count))
        start += count
    return jax.lax.slice_in_dim(y, 0, content.shape[0]), gotten
