"""Blocks of jobs computed by their owners, and the results on every rank.

Everything here is ordinary JAX and messages that are linear maps, so that derivatives of any order
follow. Block b has its own copy of the shared arguments: cotangents of the copies are gathered and
added up in the order of blocks, whoever computed them, so that no bit depends on the number of
ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.autodiff.custom_rules import custom_jvp
from mpigrad.communicator import Communicator
from mpigrad.jobs.blocks import apart, result_types
from mpigrad.jobs.context import Job
from mpigrad.jobs.failures import Watch, end_with
from mpigrad.jobs.items import Bucket, Data
from mpigrad.jobs.replication import collect, take
from mpigrad.operations.carrier import tie_in

__all__ = ["Team", "assembled", "evaluate", "rows", "sealed"]


@dataclass(frozen=True, eq=False)
class Team:
    """Who computes which blocks: the ranks of `comm`, or this rank alone (None)."""

    data: Data
    comm: Communicator | None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self.comm is None else self.comm.size

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.comm is None else self.comm.rank

    @cached_property
    def blocks(self) -> list[list[np.ndarray]]:
        """For each rank and each bucket the blocks, counted from 0 in the bucket."""
        if self.size == 1:
            return [[np.arange(bucket.blocks) for bucket in self.data.buckets]]
        return [[self.data.owned(b, rank) for b in self.data.buckets] for rank in range(self.size)]


# What is laid side by side: an array with a leading axis over the blocks of a bucket, or over all
# blocks (bucket None).
Leaf = tuple[int | None, Any]


class _Rows:
    """One row for each rank of numbers of one dtype: what belongs to the rank's blocks."""

    def __init__(self, team: Team, kinds: Sequence[tuple[int | None, tuple[int, ...]]]) -> None:
        self.team, self.kinds = team, kinds
        self.widths = [
            [len(self.chosen(bucket, rank)) * math.prod(shape) for bucket, shape in kinds]
            for rank in range(team.size)
        ]
        self.length = max(sum(widths) for widths in self.widths)

    def chosen(self, bucket: int | None, rank: int) -> np.ndarray:
        """The blocks of a rank, as places on the leading axis."""
        of_rank = self.team.blocks[rank]
        if bucket is not None:
            return of_rank[bucket]
        buckets = self.team.data.buckets
        return np.concatenate([b.first + i for b, i in zip(buckets, of_rank, strict=True)])

    def of(self, parts: Sequence[Any]) -> Any:
        """A row of these parts, filled up with zeros."""
        row = jnp.concatenate([part.ravel() for part in parts])
        return jnp.pad(row, (0, self.length - len(row)))

    def parts(self, row: Any, rank: int) -> list[Any]:
        """The parts of a rank's row."""
        ends = np.cumsum([0, *self.widths[rank]])
        return [
            row[int(i) : int(j)].reshape(len(self.chosen(bucket, rank)), *shape)
            for (bucket, shape), (i, j) in zip(self.kinds, itertools.pairwise(ends), strict=True)
        ]

    def joined(self, rows: Any) -> list[Any]:
        """Of the rows of all ranks, the arrays over all blocks, in their order."""
        by_rank = [self.parts(row, rank) for rank, row in enumerate(rows)]
        arrays = []
        for n, (bucket, _) in enumerate(self.kinds):
            order = np.concatenate([self.chosen(bucket, rank) for rank in range(self.team.size)])
            stacked = jnp.concatenate([parts[n] for parts in by_rank])
            arrays.append(_picked(stacked, np.argsort(order)))
        return arrays


def _picked(x: Any, places: np.ndarray) -> Any:
    """x[places]; a slice where it is one."""
    if not len(places):
        # Not x[[]], which JAX makes zeros of: a rank without blocks is batched as the others are.
        return jax.lax.slice_in_dim(x, 0, 0)
    if (np.diff(places) == 1).all():
        return x[int(places[0]) : int(places[-1]) + 1]
    return x[places]


def _by_dtype(leaves: Sequence[Any]) -> list[list[int]]:
    """The numbers of the leaves of each dtype."""
    dtypes = dict.fromkeys(leaf.dtype for leaf in leaves)
    return [[i for i, leaf in enumerate(leaves) if leaf.dtype == d] for d in dtypes]


def _own(team: Team, leaves: Sequence[Leaf]) -> list[Any]:
    """This rank's blocks of what all ranks have: no message, but for tangents and cotangents."""
    chosen = _Rows(team, [])

    def pick(*xs: Any) -> list[Any]:
        pairs = zip(buckets, xs, strict=True)
        return [_picked(x, chosen.chosen(bucket, team.rank)) for bucket, x in pairs]

    buckets = [bucket for bucket, _ in leaves]
    values = [x for _, x in leaves]
    comm = team.comm
    if team.size == 1 or comm is None:
        return pick(*values)
    active = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]
    picked = pick(*values)
    if not active:
        return picked
    active_buckets = [buckets[i] for i in active]

    @custom_jvp
    def own(*xs: Any) -> tuple[Any, ...]:
        pairs = zip(active_buckets, xs, strict=True)
        return tuple(_picked(x, chosen.chosen(bucket, team.rank)) for bucket, x in pairs)

    def rule(primals: Any, tangents: Any) -> Any:
        results: list[Any] = [None] * len(tangents)
        for members in _by_dtype(tangents):
            rows = _Rows(team, [(active_buckets[i], tangents[i].shape[1:]) for i in members])
            every = jnp.stack([
                rows.of([
                    _picked(tangents[i], rows.chosen(active_buckets[i], rank)) for i in members
                ])
                for rank in range(team.size)
            ])  # fmt: skip
            row = take(every, comm) if rows.length else every[0]
            for i, part in zip(members, rows.parts(row, team.rank), strict=True):
                results[i] = part
        return own(*primals), tuple(results)

    own.defjvp(rule)
    for i, x in zip(active, own(*(values[i] for i in active)), strict=True):
        picked[i] = x
    return picked


def _everywhere(team: Team, leaves: Sequence[Leaf], depends_on: Sequence[Any]) -> list[Any]:
    """Over all blocks, on all ranks, what each rank has for its own blocks."""
    comm = team.comm
    if team.size == 1 or comm is None:
        return [x for _, x in leaves]
    values = [x for _, x in leaves]
    results: list[Any] = [None] * len(values)
    for members in _by_dtype(values):
        rows = _Rows(team, [(leaves[i][0], values[i].shape[1:]) for i in members])
        row = rows.of([values[i] for i in members])
        # Every rank's row depends on all arguments, in the eyes of JAX: a rank without blocks
        # takes part in the messages of derivatives, too.
        for x in depends_on:
            row = tie_in(row, x)
        every = collect(row, comm) if rows.length else jnp.zeros((team.size, 0), row.dtype)
        for i, x in zip(members, rows.joined(every), strict=True):
            results[i] = x
    return results


def evaluate(
    job: Job, shared: Any, per_job: Sequence[Any], team: Team, watch: Watch | None = None
) -> tuple[Any, list[Any]]:
    """What `job` gives for all records of the team, on every rank.

    Parameters
    ----------
    shared
        Pytree that all jobs have.
    per_job
        For each bucket a pytree with a leading axis over the bucket's jobs.
    watch
        Ends the program where a job gives a NaN.

    Returns
    -------
    (the sum of what is added, for each bucket what is kept with a leading axis over its jobs).
    """
    data, buckets = team.data, team.data.buckets
    shared_leaves, shared_structure = jax.tree.flatten(shared)
    copies: list[Leaf] = [
        (None, sealed(_copied(jnp.asarray(x), data.blocks))) for x in shared_leaves
    ]
    flat = [jax.tree.flatten(tree) for tree in per_job]
    spread: list[Leaf] = [
        (b, rows(x, buckets[b].places)) for b, (leaves, _) in enumerate(flat) for x in leaves
    ]
    own_copies, own_jobs = sealed((_own(team, copies), _own(team, spread)))
    own_spread = iter(own_jobs)
    found: list[Leaf] = []
    structures, whole, inputs = [], [], []
    first = 0
    for b, (bucket, (leaves, structure)) in enumerate(zip(buckets, flat, strict=True)):
        blocks = team.blocks[team.rank][b]
        mine = [next(own_spread) for _ in leaves]
        inputs.append(jax.tree.unflatten(structure, mine))
        if not len(blocks):
            types = added, kept = result_types(job, bucket, shared, per_job[b])
            structures.append(jax.tree.structure(types))
            empty = [(0, *x.shape) for x in jax.tree.leaves(added)]
            empty += [(0, bucket.block, *x.shape) for x in jax.tree.leaves(kept)]
            dtypes = [x.dtype for x in jax.tree.leaves(types)]
            found += [(b, jnp.zeros(s, d)) for s, d in zip(empty, dtypes, strict=True)]
            whole.append(jnp.ones((0, bucket.block), bool))
            continue

        found_structure: list[Any] = []

        def one(
            operand: Any,
            bucket: Bucket = bucket,
            structure: Any = structure,
            found_structure: list[Any] = found_structure,
        ) -> Any:
            x, y, record, counts, numbers = operand
            x, y = jax.tree.unflatten(shared_structure, x), jax.tree.unflatten(structure, y)
            record = bucket.record(record)
            *results, ok = apart(job, x, y, record, counts, numbers)
            leaves, structure = jax.tree.flatten(tuple(results))
            found_structure.append(structure)
            return leaves, ok

        results, ok = jax.lax.map(
            one,
            (
                [x[first : first + len(blocks)] for x in own_copies],
                mine,
                data.stacked(b, blocks),
                jnp.asarray(bucket.counts[blocks]),
                jnp.asarray(bucket.jobs[bucket.places[blocks]].astype("int32")),
            ),
        )
        first += len(blocks)
        structures.append(found_structure[0])
        found += [(b, x) for x in results]
        whole.append(ok)
    everything = sealed(_everywhere(team, found, [*own_copies, *own_jobs]))
    results = assembled(buckets, structures, everything)
    if watch is not None and team.comm is not None:
        leaves, own = jax.tree.leaves(results), team.blocks[team.rank]
        end_with(watch, data, team.comm, own, leaves, whole, shared, inputs)
    return results


def assembled(
    buckets: Sequence[Bucket], structures: Sequence[Any], leaves: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """(the sum of what is added, what is kept of each bucket's jobs), of results by blocks."""
    rest = iter(leaves)
    sums, kept = [], []
    for bucket, structure in zip(buckets, structures, strict=True):
        own = [next(rest) for _ in range(structure.num_leaves)]
        of_blocks, of_jobs = jax.tree.unflatten(structure, own)
        sums.append(of_blocks)
        n = len(bucket.jobs)
        kept.append(jax.tree.map(lambda x, n=n: jax.lax.collapse(x, 0, 2)[:n], of_jobs))
    # Over the blocks of all buckets, in their order.
    total = jax.tree.map(lambda *ys: _added(jnp.concatenate(ys)), *sums)
    return total, kept


def _copied(x: Any, n: int) -> Any:
    """`n` copies of x along a new leading axis.

    By doubling, so that cotangents are added elementwise, two halves at a time: an order that the
    compiler keeps, whatever it puts the additions together with.
    """
    copies = x[None]
    while len(copies) < n:
        copies = jnp.concatenate([copies, copies])
    return copies[:n]


def _added(x: Any) -> Any:
    """The sum over the leading axis, likewise in an order of its own."""
    if len(x) == 0:
        return jnp.zeros(x.shape[1:], x.dtype)
    while len(x) > 1:
        half = (len(x) + 1) // 2
        pairs = len(x) - half
        x = jnp.concatenate([x[:pairs] + x[half:], x[pairs:half]])
    return x[0]


def sealed(tree: Any) -> Any:
    """`tree`; the compiler does not compute across (it would split sums by where parts came from).

    So that what is compiled on both sides, and how it rounds, is the same on any number of ranks.
    """
    return jax.lax.optimization_barrier(tree)


def rows(x: Any, places: np.ndarray) -> Any:
    """x[places], where the last row may be repeated; a mere reshape where it is none."""
    return x.reshape(*places.shape, *x.shape[1:]) if places.size == len(x) else x[places]
