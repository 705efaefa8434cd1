"""Sparse Jacobians: several columns by one derivative, if no row has entries in two of them.

Such columns get one colour (Curtis, Powell & Reid, J. Inst. Math. Appl. 13, 1974): the derivative
along the sum of their unit vectors holds the entries of all of them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from mpigrad.extend import CARRIER, as_array, take, with_carrier
from mpigrad.sparse.matrix.ghost_exchange import (
    GhostExchange,
    exchange_with_neighbors,
    index_array,
    split_by_counts,
)
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.products import pool_positions

__all__ = ["Colouring", "colouring", "sparse_jacobian"]

_TASK = "the colouring of a pattern"
_ZERO = np.float32(0)


def sparse_jacobian(F: Callable[..., Any], pattern: Pattern) -> Callable[..., Matrix]:
    """Make the Jacobian of a function over all ranks, as a sparse matrix.

    Parameters
    ----------
    F
        The function F(x, *args) of this rank's part of x, with this rank's part of the result:
        arrays of any shapes, with pattern.n_local_columns and pattern.n_local entries. It may
        exchange messages.
    pattern
        The entries of dF/dx that may differ from zero. Other entries would be added to wrong
        places: `newton` checks for them.

    Returns
    -------
    A function (x, *args) -> Matrix, collective and differentiable. It takes as many derivatives of
    F as the pattern has colours, batched: at least the number of entries of the longest row.
    Colouring is collective, too, and done once for each pattern.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import Pattern, sparse_jacobian
    >>> diagonal = Pattern.from_coo([0, 1, 2], [0, 1, 2], n_local=3)
    >>> jacobian = sparse_jacobian(lambda x: x**2, diagonal)
    >>> jacobian(jnp.array([1.0, 2.0, 3.0])).values
    Array([2., 4., 6.], dtype=float32)
    """

    def jacobian(x: Any, *args: Any) -> Matrix:
        x, colours = as_array(x), colouring(pattern)
        if x.size != pattern.n_local_columns:
            raise ValueError(
                f"sparse_jacobian: x has {x.size} entries on rank {pattern.comm.rank}, but the "
                f"pattern has {pattern.n_local_columns} columns there. Give this rank's part of x."
            )

        def push(a_dot: Any, seed: Any) -> jax.Array:
            f = with_carrier(lambda x: F(x, *args))
            y = jax.jvp(f, (_ZERO, x), (a_dot, seed))[1]
            if y.size != pattern.n_local:
                raise ValueError(
                    f"sparse_jacobian: F returns {y.size} entries on rank {pattern.comm.rank}, "
                    f"but the pattern has {pattern.n_local} rows there. Return this rank's part."
                )
            return y.reshape(-1)

        chosen = jnp.arange(colours.count)[:, None] == index_array(colours.columns)
        seeds = chosen.astype(x.dtype).reshape(colours.count, *x.shape)
        # The tangents are batched on every rank, the carrier's too, but not the function itself.
        columns = jax.vmap(push)(jnp.zeros(colours.count, CARRIER.dtype), seeds)
        place = index_array(colours.entries * pattern.n_local + colours.rows)
        return Matrix(pattern, take(columns.reshape(-1), place))

    return jacobian


@dataclass(frozen=True)
class Colouring:
    """The colours of a pattern's columns: no row has two entries of one colour.

    Attributes
    ----------
    count
        The number of colours on all ranks.
    columns
        The colour of each of this rank's columns, shape (n_local_columns,).
    rows, entries
        The local row of each stored entry and the colour of its column, shape (nnz,).
    """

    count: int
    columns: np.ndarray
    rows: np.ndarray
    entries: np.ndarray


_cache: weakref.WeakKeyDictionary[Pattern, Colouring] = weakref.WeakKeyDictionary()


def colouring(pattern: Pattern) -> Colouring:
    """Return the colouring of a pattern (collective at the first call).

    A pattern of a grid is coloured by a linear function of the coordinates, with few colours. The
    columns of any other pattern are coloured by the rounds of Jones & Plassmann (SIAM J. Sci.
    Comput. 14, 1993) and then once more, colour by colour, which saves some (Culberson 1992). Both
    give the same colours on any number of ranks.
    """
    if pattern not in _cache:
        colours = _of_stencil(pattern) if pattern.colours is None else pattern.colours
        result = None if colours is None else _checked(pattern, colours)
        if result is None:
            result = _checked(pattern, _of_graph(pattern))
            assert result is not None
        _cache[pattern] = result
    return _cache[pattern]


def _checked(pattern: Pattern, colours: np.ndarray) -> Colouring | None:
    """Return the colouring, or None if a row on any rank has two entries of one colour."""
    comm, ghosts = pattern.comm, pattern.ghosts
    all_colours = np.concatenate([colours, _exchange(ghosts, colours)])
    count = max(comm.mpi.allgather(int(colours.max(initial=-1)))) + 1
    by_row = all_colours[pool_positions(pattern)]
    once = np.zeros(pattern.n_local * count, bool)
    once[pattern.rows * count + by_row] = True
    wrong = np.count_nonzero(once) < pattern.nnz
    if comm.mpi.allreduce(int(wrong)):
        return None
    rows, entries = np.empty(pattern.nnz, np.int64), np.empty(pattern.nnz, np.int64)
    rows[pattern.order], entries[pattern.order] = pattern.rows, by_row
    return Colouring(count, colours, rows, entries)


def _exchange(ghosts: GhostExchange, values: np.ndarray) -> np.ndarray:
    """Return the ghosts' integers, on the host."""
    packed = values[np.asarray(ghosts.send_index)]
    received = exchange_with_neighbors(
        ghosts.comm,
        ghosts.neighbors,
        split_by_counts(packed, ghosts.sendcounts),
        ghosts.recvcounts,
        _TASK,
    )
    return np.concatenate([*received, np.zeros(0, np.int64)])


# ---- stencils ----


def _of_stencil(pattern: Pattern) -> np.ndarray | None:
    """Return (w . coordinates) mod m for the smallest m that separates all cells of a stencil."""
    stencil = getattr(pattern, "stencil", None)
    if stencil is None:
        return None
    offsets = np.unique(np.asarray(stencil.offsets), axis=0)
    dimensions = offsets.shape[1]
    differences = (offsets[:, None] - offsets[None]).reshape(-1, dimensions)
    differences = np.unique(differences[np.any(differences != 0, axis=1)], axis=0)
    cells = np.meshgrid(
        *(np.arange(part.start, part.stop) for part in stencil.grid.slices), indexing="ij"
    )
    for m in itertools.count(len(offsets)):
        for weights in itertools.product(range(m), repeat=dimensions):
            if np.all(differences @ np.array(weights) % m != 0):
                colours = sum(w * cell for w, cell in zip(weights, cells, strict=True)) % m
                return np.asarray(colours, np.int64).ravel()
    raise AssertionError("itertools.count does not end")


# ---- any graph ----


def _of_graph(pattern: Pattern) -> np.ndarray:
    """Colour the columns in rounds between neighbours."""
    graph = _Graph(pattern)
    colours = np.full(graph.n, -1, np.int64)
    edges, waiting = graph.edges, graph.comm.mpi.allreduce(graph.n)
    while waiting:
        others = graph.of_others(colours)
        i, j = edges
        # A column chooses if its priority is the highest among its uncoloured neighbours.
        blocked = np.zeros(graph.n, bool)
        blocked[i[(others[j] < 0) & (graph.priority_of(j) > graph.priority[i])]] = True
        now = (colours < 0) & ~blocked
        colours = np.where(now, graph.smallest_free(edges, others, now), colours)
        keep = colours[i] < 0
        edges = i[keep], j[keep]
        waiting = graph.comm.mpi.allreduce(int(np.sum(colours < 0)))
    return _again(graph, colours)


def _again(graph: _Graph, old: np.ndarray) -> np.ndarray:
    """Give each column the smallest free colour, the last colours first: never more colours."""
    count = max(graph.comm.mpi.allgather(int(old.max(initial=-1)))) + 1
    colours = np.full(graph.n, -1, np.int64)
    for colour in reversed(range(count)):
        others = graph.of_others(colours)
        now = old == colour
        colours = np.where(now, graph.smallest_free(graph.edges, others, now), colours)
    return colours


class _Graph:
    """The graph of own columns and of the columns that share a row with them on any rank.

    `edges` are (own column, position of the other column among own and other ranks' columns).
    """

    def __init__(self, pattern: Pattern) -> None:
        self.comm, self.n = pattern.comm, pattern.n_local_columns
        ghosts, first = pattern.ghosts, pattern.column_offset
        width = self.n + len(ghosts.ghosts)
        rows = scipy.sparse.csr_array(
            (np.ones(pattern.nnz, np.int8), pool_positions(pattern), pattern.row_starts),
            shape=(pattern.n_local, width),
        ).astype(bool)
        pairs = (rows.T @ rows).tocoo()
        number = np.concatenate([first + np.arange(self.n), ghosts.ghosts])
        i, j = number[pairs.row], number[pairs.col]
        different = i != j
        i, j = i[different], j[different]

        # The owner of another rank's column needs the pair.
        is_local = (i >= first) & (i < first + self.n)
        ends = np.cumsum([0, *ghosts.recvcounts])
        bounds = [ghosts.ghosts[a:b] for a, b in itertools.pairwise(ends)]
        out = []
        for block in bounds:
            mask = ~is_local & np.isin(i, block)
            out.append(np.concatenate([i[mask], j[mask]]))
        sizes = [np.array([len(message)]) for message in out]
        counts = exchange_with_neighbors(
            self.comm, ghosts.neighbors, sizes, [1] * len(sizes), _TASK
        )
        got = exchange_with_neighbors(
            self.comm, ghosts.neighbors, out, [int(c[0]) for c in counts], _TASK
        )
        halves = [np.split(message, 2) for message in got]
        i = np.concatenate([i[is_local], *(half[0] for half in halves)])
        j = np.concatenate([j[is_local], *(half[1] for half in halves)])
        i, j = _distinct(i, j)

        self.exchange = GhostExchange(self.n, j, self.comm)
        self.edges = i - first, np.asarray(self.exchange.position).astype(np.int64)
        self.priority = _hash(first + np.arange(self.n))
        self._priorities = np.concatenate([self.priority, _hash(self.exchange.ghosts)])

    def priority_of(self, position: np.ndarray) -> np.ndarray:
        return self._priorities[position]

    def of_others(self, colours: np.ndarray) -> np.ndarray:
        return np.concatenate([colours, _exchange(self.exchange, colours)])

    def smallest_free(
        self, edges: tuple[np.ndarray, np.ndarray], others: np.ndarray, now: np.ndarray
    ) -> np.ndarray:
        """Return the smallest colour that no neighbour has, for the columns `now`."""
        i, j = edges
        taken = others[j]
        relevant = now[i] & (taken >= 0)
        i, taken = _distinct(i[relevant], taken[relevant])
        starts = np.searchsorted(i, np.arange(self.n))
        # Sorted and without repetition: colours 0, 1, ... are at their own places up to a gap.
        in_place = taken == np.arange(len(i)) - starts[i]
        return np.bincount(i[in_place], minlength=self.n)


def _distinct(i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct pairs, sorted."""
    order = np.lexsort((j, i))
    i, j = i[order], j[order]
    new = np.ones(len(i), bool)
    new[1:] = (i[1:] != i[:-1]) | (j[1:] != j[:-1])
    return i[new], j[new]


def _hash(number: np.ndarray) -> np.ndarray:
    """Return random-looking integers, different for each column (splitmix64, a bijection)."""
    x = number.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
