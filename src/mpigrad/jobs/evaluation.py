"""Blocks of jobs computed by their owners, and the results on every rank.

Everything here is ordinary JAX and messages that are linear maps, so that derivatives of any order
follow. Block b has its own copy of the shared arguments: cotangents of the copies are gathered and
added up in the order of blocks, whoever computed them, so that no bit depends on the number of
ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.custom_rules import custom_jvp
from mpigrad.jobs.context import in_job
from mpigrad.jobs.records import Bucket, Data
from mpigrad.jobs.replication import collect, take
from mpigrad.operations.activity import nought

__all__ = ["BlockFunction", "Team", "evaluate", "result_types"]

# (shared, arguments of each job, records, which jobs count, numbers of the jobs), the last four
# with a leading axis of the block's length -> (results of the block, results of each job).
BlockFunction = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]


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
    if len(places) and (np.diff(places) == 1).all():
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
            for i, part in zip(members, rows.parts(take(every, comm), team.rank), strict=True):
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
            if jnp.issubdtype(row.dtype, jnp.inexact) and isinstance(x.dtype, np.dtype):
                row = row + nought(x, jax.typeof(row))
        for i, x in zip(members, rows.joined(collect(row, comm)), strict=True):
            results[i] = x
    return results


def result_types(
    function: BlockFunction, bucket: Bucket, shared: Any, per_job: Any
) -> tuple[Any, Any]:
    """Shapes and dtypes of what a block of the bucket gives."""
    k = bucket.block

    def over_jobs(x: Any) -> Any:
        return jax.ShapeDtypeStruct((k, *x.shape[1:]), x.dtype)

    records = bucket.record([jax.ShapeDtypeStruct((k, *s), d) for s, d in bucket.leaves])
    counts = jax.ShapeDtypeStruct((k,), bool)
    numbers = jax.ShapeDtypeStruct((k,), "int32")
    with in_job():
        return jax.eval_shape(
            function, shared, jax.tree.map(over_jobs, per_job), records, counts, numbers
        )


def evaluate(
    function: BlockFunction,
    shared: Any,
    per_job: Sequence[Any],
    team: Team,
) -> list[tuple[Any, Any]]:
    """What `function` gives for every block of every bucket, on every rank.

    Parameters
    ----------
    function
        What is done for a block of jobs.
    shared
        Pytree that all jobs have.
    per_job
        For each bucket a pytree with a leading axis over the bucket's jobs.
    team
        Who computes which blocks.

    Returns
    -------
    For each bucket (results of the blocks, with a leading axis over the blocks; results of the
    jobs, with a leading axis over the bucket's jobs).
    """
    data = team.data
    buckets = data.buckets
    shared_leaves, shared_structure = jax.tree.flatten(shared)
    copies: list[Leaf] = [
        (None, jnp.broadcast_to(x, (data.blocks, *jnp.shape(x)))) for x in shared_leaves
    ]
    own_copies = _own(team, copies)
    job_leaves, job_structures = zip(*(jax.tree.flatten(tree) for tree in per_job), strict=True)
    spread: list[Leaf] = [
        (b, x[bucket.places])
        for b, (bucket, leaves) in enumerate(zip(buckets, job_leaves, strict=True))
        for x in leaves
    ]
    own_jobs = iter(_own(team, spread))
    found: list[Leaf] = []
    structures = []
    first = 0
    for b, bucket in enumerate(buckets):
        mine = team.blocks[team.rank][b]
        arguments = [next(own_jobs) for _ in job_leaves[b]]
        types = result_types(function, bucket, shared, per_job[b])
        leaves, structure = jax.tree.flatten(types)
        structures.append(structure)
        if len(mine):
            operands = (
                [x[first : first + len(mine)] for x in own_copies],
                arguments,
                data.stacked(b, mine),
                jnp.asarray(bucket.counts[mine]),
                jnp.asarray(bucket.jobs[bucket.places[mine]].astype("int32")),
            )
            first += len(mine)

            def one(operand: Any, b: int = b, bucket: Bucket = bucket) -> list[Any]:
                x, y, record, counts, numbers = operand
                with in_job():
                    result = function(
                        jax.tree.unflatten(shared_structure, x),
                        jax.tree.unflatten(job_structures[b], y),
                        bucket.record(record),
                        counts,
                        numbers,
                    )
                return jax.tree.leaves(result)

            results = jax.lax.map(one, operands)
        else:
            results = [jnp.zeros((0, *x.shape), x.dtype) for x in leaves]
        found += [(b, x) for x in results]
    everything = iter(_everywhere(team, found, [x for _, x in (*copies, *spread)]))
    gathered = []
    for bucket, structure in zip(buckets, structures, strict=True):
        leaves = [next(everything) for _ in range(structure.num_leaves)]
        of_blocks, of_jobs = jax.tree.unflatten(structure, leaves)
        of_jobs = jax.tree.map(
            lambda x, bucket=bucket: x.reshape(-1, *x.shape[2:])[: len(bucket.jobs)], of_jobs
        )
        gathered.append((of_blocks, of_jobs))
    return gathered
