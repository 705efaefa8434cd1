"""Evaluation of blocks of jobs by their owners, with the results on every rank."""

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

from mpigrad.autodiff import custom_jvp
from mpigrad.communicator import Communicator
from mpigrad.extend import (
    NO_REDUCTION,
    Primitive,
    alltoall_p,
    call_site,
    carrier,
    linear_map,
    tie_in,
)
from mpigrad.jobs.failures import FailureLog, end_with
from mpigrad.jobs.items import Bucket, Data, JobFunction, apart, result_types

__all__ = [
    "BlockAssignment",
    "assembled",
    "collect_rows",
    "evaluate",
    "rows",
    "sealed",
    "take_row",
]

# ---- Exchange between replicated arrays and arrays that differ between ranks ----
#
# `collect_rows` gathers one row from each rank, so that all ranks have all rows. Its transpose
# `take_row` gives each rank its row of a replicated array. The two are transposes of each other
# if a replicated array counts as *one* array: its cotangent is replicated, too, and counts once.
# If the cotangent differs between ranks (a loss that is seeded on rank 0 only), `take_row` takes
# the mean over ranks, so that the sum of the gradients over ranks is still right. The mean of
# equal numbers is that number, bit for bit.


def _mean_of_own(x: Any, a: Any, **where: int) -> list[Any]:
    versions = alltoall_p.bind(x, a, **where)[0]
    first = versions[0]
    others = jnp.where(versions == first, 0, versions - first)
    return [first + jnp.sum(others, 0) / len(versions)]


collect_p: Primitive = linear_map(
    "jobs_collect",
    target="mpigrad_allgather",
    result=lambda x, *, size, **_: jax.ShapeDtypeStruct((size, *x.shape), x.dtype),
    attributes=lambda avals, p: {"comm": p["comm"], "site": p["site"], "op": NO_REDUCTION},
    batch_axes=(0, 1),
    transpose=lambda ct, x, a, *, size, **where: take_p.bind(ct, a, **where)[0],
)
take_p: Primitive = linear_map(
    "jobs_take",
    run=_mean_of_own,
    result=lambda x, **_: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
    batch_axes=(1, 0),
    transpose=lambda ct, x, a, **where: collect_p.bind(ct, a, size=x.shape[0], **where)[0],
)


def collect_rows(x: Any, comm: Communicator) -> Any:
    """Gather the rows `x` of all ranks on every rank, as an array of shape (ranks, *x.shape)."""
    return collect_p.bind(x, carrier(), comm=comm.slot, site=call_site(), size=comm.size)[0]


def take_row(x: Any, comm: Communicator) -> Any:
    """Return this rank's row of `x`, shape (ranks, ...), averaged over the ranks' versions."""
    return take_p.bind(x, carrier(), comm=comm.slot, site=call_site())[0]


# ---- Evaluation of blocks of jobs by their owners, with the results on every rank ----
#
# Everything here is ordinary JAX, or a message that is a linear map, so that derivatives of any
# order follow. Each block has its own copy of `params`. The cotangents of the copies are gathered
# and summed in the order of blocks, so that no bit depends on the count of ranks.


@dataclass(frozen=True, eq=False)
class BlockAssignment:
    """The assignment of blocks to the ranks of `comm`, or to this rank alone (None)."""

    data: Data
    comm: Communicator | None

    @property
    def size(self) -> int:
        """The count of ranks."""
        return 1 if self.comm is None else self.comm.size

    @property
    def rank(self) -> int:
        """The index of this rank."""
        return 0 if self.comm is None else self.comm.rank

    @cached_property
    def blocks(self) -> list[list[np.ndarray]]:
        """The blocks of each rank and bucket, as indices into the bucket's blocks."""
        if self.size == 1:
            return [[np.arange(bucket.blocks) for bucket in self.data.buckets]]
        return [[self.data.owned(b, rank) for b in self.data.buckets] for rank in range(self.size)]


# (bucket, array): the leading axis of the array runs over the blocks of the bucket, or over all
# blocks if the bucket is None.
Leaf = tuple[int | None, Any]


class _Rows:
    """The layout of messages: one row for each rank, with the entries of the rank's blocks."""

    def __init__(
        self, assignment: BlockAssignment, kinds: Sequence[tuple[int | None, tuple[int, ...]]]
    ) -> None:
        self.assignment, self.kinds = assignment, kinds
        self.widths = [
            [len(self.chosen(bucket, rank)) * math.prod(shape) for bucket, shape in kinds]
            for rank in range(assignment.size)
        ]
        self.length = max(sum(widths) for widths in self.widths)

    def chosen(self, bucket: int | None, rank: int) -> np.ndarray:
        """Return the blocks of a rank, as indices into the leading axis."""
        of_rank = self.assignment.blocks[rank]
        if bucket is not None:
            return of_rank[bucket]
        buckets = self.assignment.data.buckets
        return np.concatenate([b.first + i for b, i in zip(buckets, of_rank, strict=True)])

    def of(self, parts: Sequence[Any]) -> Any:
        """Concatenate parts to a row, padded with zeros."""
        row = jnp.concatenate([part.ravel() for part in parts])
        return jnp.pad(row, (0, self.length - len(row)))

    def parts(self, row: Any, rank: int) -> list[Any]:
        """Split a rank's row into its parts."""
        ends = np.cumsum([0, *self.widths[rank]])
        return [
            row[int(i) : int(j)].reshape(len(self.chosen(bucket, rank)), *shape)
            for (bucket, shape), (i, j) in zip(self.kinds, itertools.pairwise(ends), strict=True)
        ]

    def joined(self, rows: Any) -> list[Any]:
        """Return the arrays over all blocks, in their order, from the rows of all ranks."""
        by_rank = [self.parts(row, rank) for rank, row in enumerate(rows)]
        arrays = []
        for n, (bucket, _) in enumerate(self.kinds):
            order = np.concatenate(
                [self.chosen(bucket, rank) for rank in range(self.assignment.size)]
            )
            stacked = jnp.concatenate([parts[n] for parts in by_rank])
            arrays.append(_picked(stacked, np.argsort(order)))
        return arrays


def _picked(x: Any, places: np.ndarray) -> Any:
    """Return x[places], as a slice if the indices are contiguous."""
    if not len(places):
        # JAX would replace x[[]] by zeros. A rank without blocks must be batched as the others are.
        return jax.lax.slice_in_dim(x, 0, 0)
    if (np.diff(places) == 1).all():
        return x[int(places[0]) : int(places[-1]) + 1]
    return x[places]


def _by_dtype(leaves: Sequence[Any]) -> list[list[int]]:
    """Return the indices of the leaves of each dtype."""
    dtypes = dict.fromkeys(leaf.dtype for leaf in leaves)
    return [[i for i, leaf in enumerate(leaves) if leaf.dtype == d] for d in dtypes]


def _own(assignment: BlockAssignment, leaves: Sequence[Leaf]) -> list[Any]:
    """Return this rank's blocks of replicated arrays, and send only tangents and cotangents."""
    chosen = _Rows(assignment, [])

    def pick(*xs: Any) -> list[Any]:
        pairs = zip(buckets, xs, strict=True)
        return [_picked(x, chosen.chosen(bucket, assignment.rank)) for bucket, x in pairs]

    buckets = [bucket for bucket, _ in leaves]
    values = [x for _, x in leaves]
    comm = assignment.comm
    if assignment.size == 1 or comm is None:
        return pick(*values)
    active = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]
    picked = pick(*values)
    if not active:
        return picked
    active_buckets = [buckets[i] for i in active]

    @custom_jvp
    def own(*xs: Any) -> tuple[Any, ...]:
        pairs = zip(active_buckets, xs, strict=True)
        return tuple(_picked(x, chosen.chosen(bucket, assignment.rank)) for bucket, x in pairs)

    def rule(primals: Any, tangents: Any) -> Any:
        results: list[Any] = [None] * len(tangents)
        for members in _by_dtype(tangents):
            rows = _Rows(assignment, [(active_buckets[i], tangents[i].shape[1:]) for i in members])
            every = jnp.stack([
                rows.of([
                    _picked(tangents[i], rows.chosen(active_buckets[i], rank)) for i in members
                ])
                for rank in range(assignment.size)
            ])  # fmt: skip
            row = take_row(every, comm) if rows.length else every[0]
            for i, part in zip(members, rows.parts(row, assignment.rank), strict=True):
                results[i] = part
        return own(*primals), tuple(results)

    own.defjvp(rule)
    for i, x in zip(active, own(*(values[i] for i in active)), strict=True):
        picked[i] = x
    return picked


def _everywhere(
    assignment: BlockAssignment, leaves: Sequence[Leaf], depends_on: Sequence[Any]
) -> list[Any]:
    """Gather arrays over the ranks' own blocks to arrays over all blocks, on every rank."""
    comm = assignment.comm
    if assignment.size == 1 or comm is None:
        return [x for _, x in leaves]
    values = [x for _, x in leaves]
    results: list[Any] = [None] * len(values)
    for members in _by_dtype(values):
        rows = _Rows(assignment, [(leaves[i][0], values[i].shape[1:]) for i in members])
        row = rows.of([values[i] for i in members])
        # For JAX every rank's row depends on all arguments, so that a rank without blocks takes
        # part in the messages of derivatives.
        for x in depends_on:
            row = tie_in(row, x)
        every = (
            collect_rows(row, comm) if rows.length else jnp.zeros((assignment.size, 0), row.dtype)
        )
        for i, x in zip(members, rows.joined(every), strict=True):
            results[i] = x
    return results


def evaluate(
    job: JobFunction,
    params: Any,
    by_bucket: Sequence[Any],
    assignment: BlockAssignment,
    log: FailureLog | None = None,
) -> tuple[Any, list[Any]]:
    """Compute `job` for all items, with the results on every rank.

    Parameters
    ----------
    params
        Pytree, the same for all jobs.
    by_bucket
        For each bucket a pytree with a leading axis over the bucket's jobs.
    log
        If given, a job with a NaN ends the program with an error, and its failure is stored here.

    Returns
    -------
    (sum over jobs, for each bucket the results of its jobs with a leading axis over them).
    """
    data, buckets = assignment.data, assignment.data.buckets
    params_leaves, params_structure = jax.tree.flatten(params)
    copies: list[Leaf] = [
        (None, sealed(_copied(jnp.asarray(x), data.blocks))) for x in params_leaves
    ]
    flat = [jax.tree.flatten(tree) for tree in by_bucket]
    spread: list[Leaf] = [
        (b, rows(x, buckets[b].places)) for b, (leaves, _) in enumerate(flat) for x in leaves
    ]
    own_copies, own_jobs = sealed((_own(assignment, copies), _own(assignment, spread)))
    own_spread = iter(own_jobs)
    block_leaves: list[Leaf] = []
    structures, finite, inputs = [], [], []
    first = 0
    for b, (bucket, (leaves, structure)) in enumerate(zip(buckets, flat, strict=True)):
        blocks = assignment.blocks[assignment.rank][b]
        item_params = [next(own_spread) for _ in leaves]
        inputs.append(jax.tree.unflatten(structure, item_params))
        if not len(blocks):
            types = added, kept = result_types(job, bucket, params, by_bucket[b])
            structures.append(jax.tree.structure(types))
            empty = [(0, *x.shape) for x in jax.tree.leaves(added)]
            empty += [(0, bucket.block, *x.shape) for x in jax.tree.leaves(kept)]
            dtypes = [x.dtype for x in jax.tree.leaves(types)]
            block_leaves += [(b, jnp.zeros(s, d)) for s, d in zip(empty, dtypes, strict=True)]
            finite.append(jnp.ones((0, bucket.block), bool))
            continue

        found_structure: list[Any] = []

        def one(
            operand: Any,
            bucket: Bucket = bucket,
            structure: Any = structure,
            found_structure: list[Any] = found_structure,
        ) -> Any:
            x, y, item, counts, ids = operand
            x, y = jax.tree.unflatten(params_structure, x), jax.tree.unflatten(structure, y)
            item = bucket.item(item)
            *results, ok = apart(job, x, y, item, counts, ids)
            leaves, structure = jax.tree.flatten(tuple(results))
            found_structure.append(structure)
            return leaves, ok

        results, ok = jax.lax.map(
            one,
            (
                [x[first : first + len(blocks)] for x in own_copies],
                item_params,
                data.stacked(b, blocks),
                jnp.asarray(bucket.counts[blocks]),
                jnp.asarray(bucket.jobs[bucket.places[blocks]].astype("int32")),
            ),
        )
        first += len(blocks)
        structures.append(found_structure[0])
        block_leaves += [(b, x) for x in results]
        finite.append(ok)
    everything = sealed(_everywhere(assignment, block_leaves, [*own_copies, *own_jobs]))
    results = assembled(buckets, structures, everything)
    if log is not None and assignment.comm is not None:
        leaves, local_blocks = jax.tree.leaves(results), assignment.blocks[assignment.rank]
        end_with(log, data, assignment.comm, local_blocks, leaves, finite, params, inputs)
    return results


def assembled(
    buckets: Sequence[Bucket], structures: Sequence[Any], leaves: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Return (the sum over jobs, the results of each bucket's jobs) from results by blocks."""
    rest = iter(leaves)
    sums, kept = [], []
    for bucket, structure in zip(buckets, structures, strict=True):
        bucket_leaves = [next(rest) for _ in range(structure.num_leaves)]
        of_blocks, of_jobs = jax.tree.unflatten(structure, bucket_leaves)
        sums.append(of_blocks)
        n = len(bucket.jobs)
        kept.append(jax.tree.map(lambda x, n=n: jax.lax.collapse(x, 0, 2)[:n], of_jobs))
    # Over the blocks of all buckets, in their order.
    total = jax.tree.map(lambda *ys: _added(jnp.concatenate(ys)), *sums)
    return total, kept


def _copied(x: Any, n: int) -> Any:
    """Return `n` copies of x along a new leading axis.

    The copies are made by doubling, so that cotangents are added elementwise, one half to the
    other. The compiler keeps this order, even if it fuses the additions with other operations.
    """
    copies = x[None]
    while len(copies) < n:
        copies = jnp.concatenate([copies, copies])
    return copies[:n]


def _added(x: Any) -> Any:
    """Sum over the leading axis, one half added to the other, in an order the compiler keeps."""
    if len(x) == 0:
        return jnp.zeros(x.shape[1:], x.dtype)
    while len(x) > 1:
        half = (len(x) + 1) // 2
        pairs = len(x) - half
        x = jnp.concatenate([x[:pairs] + x[half:], x[pairs:half]])
    return x[0]


def sealed(tree: Any) -> Any:
    """Return `tree` behind a barrier, across which the compiler does not optimise.

    Without it, the compiler would split sums by the origin of their parts, and rounding would
    depend on the count of ranks.
    """
    return jax.lax.optimization_barrier(tree)


def rows(x: Any, places: np.ndarray) -> Any:
    """Return x[places], as a reshape if no row is repeated."""
    return x.reshape(*places.shape, *x.shape[1:]) if places.size == len(x) else x[places]
