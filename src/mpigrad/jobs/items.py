"""The items of a pool, in buckets of one shape and blocks of fixed size, kept on the ranks."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.jobs.schedules import Dynamic, Schedule
from mpigrad.operations.local_programs import as_array

__all__ = ["BlockStore", "Bucket", "Data"]

_LARGEST_BLOCK = 64
_BLOCKS = 16


@dataclass(frozen=True, eq=False)
class Bucket:
    """Jobs whose items have the same structure, shapes and dtypes.

    Attributes
    ----------
    skeleton
        An item in which each leaf is replaced by its index.
    leaves
        Shape and dtype of each leaf.
    jobs
        The ids of the jobs, ascending.
    block
        Count of jobs in a block. The last block is padded with copies of the last job.
    first
        The index of the bucket's first block among all blocks.
    """

    skeleton: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]
    jobs: np.ndarray
    block: int
    first: int

    @property
    def blocks(self) -> int:
        """The count of blocks of the bucket."""
        return -(-len(self.jobs) // self.block)

    @cached_property
    def places(self) -> np.ndarray:
        """Indices into `jobs`, shape (blocks, block)."""
        places = np.arange(self.blocks * self.block).reshape(-1, self.block)
        return np.minimum(places, len(self.jobs) - 1)

    @cached_property
    def counts(self) -> np.ndarray:
        """A mask that is False for padding, shape (blocks, block)."""
        return (np.arange(self.blocks * self.block) < len(self.jobs)).reshape(-1, self.block)

    def item(self, leaves: Sequence[Any]) -> Any:
        """Build an item, or a stack of items, from its leaves."""
        return jax.tree.unflatten(jax.tree.structure(self.skeleton), leaves)


class _Block:
    """The leaves of a block's items, each of shape (block, *shape)."""

    def __init__(self, leaves: Sequence[np.ndarray]) -> None:
        self.leaves = list(leaves)


@dataclass(frozen=True, eq=False)
class Data:
    """Items that are kept on the ranks, as `Pool.put` returns them.

    Attributes
    ----------
    comm
        The communicator of the pool.
    jobs
        The count of items, with one job for each.
    buckets
        The buckets. Jobs of one bucket are computed together by `vmap`, block by block.
    owners
        The rank of each block.
    everywhere
        True if every rank keeps all items.
    dynamic
        True if a queue on rank 0 decides at run time which rank computes a block.
    received
        Bytes that this rank received in this `put`, or 0 if it kept all its blocks already.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad import jobs
    >>> data = jobs.pool().put([np.zeros(2), np.zeros(3), np.zeros(2)])
    >>> data
    Data(3 jobs, 2 buckets: 2 in 2 blocks, 1 in 1 blocks)
    >>> [bucket.jobs.tolist() for bucket in data.buckets]
    [[0, 2], [1]]
    """

    comm: Communicator
    jobs: int
    buckets: tuple[Bucket, ...]
    owners: np.ndarray
    everywhere: bool
    dynamic: bool
    received: int
    stacks: tuple[tuple[np.ndarray, list[Any]], ...]
    local_blocks: tuple[_Block, ...]

    @property
    def blocks(self) -> int:
        """The count of blocks in all buckets."""
        return len(self.owners)

    def owned(self, bucket: Bucket, rank: int) -> np.ndarray:
        """Return the blocks that a rank owns, as indices into the bucket's blocks."""
        owners = self.owners[bucket.first : bucket.first + bucket.blocks]
        return np.flatnonzero(owners == rank)

    def stacked(self, bucket: int, blocks: np.ndarray) -> list[Any]:
        """Return the leaves of a bucket's local blocks, each of shape (blocks, block, *shape)."""
        kept, leaves = self.stacks[bucket]
        if np.array_equal(kept, blocks):
            return leaves
        places = np.searchsorted(kept, blocks)
        return [leaf[places] for leaf in leaves]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(b.jobs)} in {b.blocks} blocks" for b in self.buckets)
        return f"Data({self.jobs} jobs, {len(self.buckets)} buckets: {sizes})"


@dataclass(frozen=True, eq=False)
class _Plan:
    """The distribution of items, the same on all ranks: buckets, digests and owners of blocks."""

    buckets: tuple[Bucket, ...]
    digests: tuple[bytes, ...]
    owners: np.ndarray
    everywhere: bool
    dynamic: bool


class BlockStore:
    """The blocks of this rank, by the digests of their contents."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._blocks: weakref.WeakValueDictionary[bytes, _Block] = weakref.WeakValueDictionary()

    def put(self, items: Any, schedule: Schedule, block: int | None, everywhere: bool) -> Data:
        """Distribute rank 0's items (collective), sending only blocks that a rank lacks."""
        comm = self.comm
        error: Exception | None = None
        plan: _Plan | None = None
        contents: list[list[np.ndarray]] = []
        try:
            # Other ranks give None or the same items, which are compared with rank 0's.
            if comm.rank == 0 or items is not None:
                buckets, contents = _cut(items, block)
                digests = tuple(_digest(leaves) for leaves in contents)
                numbers = [_jobs(b, i) for b in buckets for i in range(b.blocks)]
                owners = schedule.owners(numbers, comm.size)
                dynamic = isinstance(schedule, Dynamic)
                plan = _Plan(buckets, digests, owners, everywhere or dynamic, dynamic)
        except Exception as raised:  # whatever it is, all ranks have to know
            error = raised
        reports = comm.mpi.allgather(
            (plan and _digest_of_plan(plan), error and (_plain(type(error)), str(error)))
        )
        for rank, (digest, fault) in enumerate(reports):
            if fault is not None:
                if error is not None:
                    raise error
                raise fault[0](f"{fault[1]} (found on rank {rank})")
            if digest not in (None, reports[0][0]):
                raise ValueError(
                    f"put: items, block, schedule and everywhere must be the same on all ranks, "
                    f"but rank {rank} differs from rank 0. Pass the same arguments on all ranks, "
                    "or items=None on all ranks but rank 0."
                )
        if any(digest is None for digest, _ in reports):
            plan = _of_root(plan, comm)
        assert plan is not None
        buckets, digests, owners = plan.buckets, plan.digests, plan.owners
        kept = [i for i, owner in enumerate(owners) if plan.everywhere or owner == comm.rank]
        have = dict(self._blocks)  # kept while they are looked for
        wanted = {digests[i] for i in kept} - have.keys()
        parcel = self._fetch(wanted, digests, contents)
        blocks = [have.get(digests[i]) or _Block(parcel[digests[i]]) for i in kept]
        stacks = []
        for bucket in buckets:
            here = [
                n for n, i in enumerate(kept) if bucket.first <= i < bucket.first + bucket.blocks
            ]
            columns = zip(*(blocks[n].leaves for n in here), strict=True)
            with jax.ensure_compile_time_eval():  # arrays, even while a program is traced
                leaves = [as_array(np.stack(parts)) for parts in columns]
            stacks.append((np.array([kept[n] - bucket.first for n in here], int), leaves))
            views = [np.asarray(leaf) for leaf in leaves]  # on a CPU the same memory
            for place, n in enumerate(here):
                if digests[kept[n]] in parcel:
                    blocks[n] = _Block([v[place] for v in views])
                    self._blocks[digests[kept[n]]] = blocks[n]
        received = 0 if comm.rank == 0 else sum(x.nbytes for v in parcel.values() for x in v)
        return Data(
            comm,
            sum(len(b.jobs) for b in buckets),
            buckets,
            owners,
            plan.everywhere,
            plan.dynamic,
            received,
            tuple(stacks),
            tuple(blocks),
        )

    def _fetch(
        self, wanted: set[bytes], digests: Sequence[bytes], contents: Sequence[Any]
    ) -> dict[bytes, list[np.ndarray]]:
        """Fetch from rank 0 the blocks that this rank lacks (collective)."""
        asked = self.comm.mpi.gather(wanted, root=0)
        parcels = None
        if asked is not None:
            at = {digest: i for i, digest in enumerate(digests)}
            parcels = [{d: contents[at[d]] for d in lacking} for lacking in asked]
        return self.comm.mpi.scatter(parcels, root=0)


def _of_root(plan: _Plan | None, comm: Communicator) -> _Plan:
    """Broadcast rank 0's plan (collective); raise on every rank if it cannot be pickled."""
    message = (
        "put: the type of the items cannot be sent to other ranks: {}. Use a type that is defined "
        "at the top level of a module, or pass the items on all ranks."
    )
    parcel = b""
    with raise_on_all_ranks(comm):
        try:
            parcel = pickle.dumps(plan) if comm.rank == 0 else b""
        except Exception as error:
            raise TypeError(message.format(error)) from error
    parcel = comm.mpi.bcast(parcel, root=0)
    with raise_on_all_ranks(comm):
        try:
            plan = plan or pickle.loads(parcel)
        except Exception as error:
            raise TypeError(message.format(error)) from error
    assert plan is not None
    return plan


def _jobs(bucket: Bucket, block: int) -> np.ndarray:
    return bucket.jobs[bucket.places[block][bucket.counts[block]]]


def _plain(kind: type) -> type[Exception]:
    return kind if kind in (TypeError, ValueError) else RuntimeError


def _cut(items: Any, block: int | None) -> tuple[tuple[Bucket, ...], list[list[np.ndarray]]]:
    """Return the buckets of the items and the leaves of each block."""
    if not isinstance(items, (list, tuple)):
        raise TypeError(
            f"put: expected a list of items, one pytree for each job, got {type(items).__name__}. "
            "Split a stacked array x by [x[i] for i in range(len(x))]."
        )
    members: dict[Any, list[int]] = {}
    flat = []
    for number, item in enumerate(items):
        leaves, structure = jax.tree.flatten(item)
        leaves = [_leaf(leaf, number) for leaf in leaves]
        flat.append(leaves)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        members.setdefault(key, []).append(number)
    buckets: list[Bucket] = []
    contents: list[list[np.ndarray]] = []
    for (structure, leaves), jobs in members.items():
        size = min(block or _LARGEST_BLOCK, len(jobs) if block else -(-len(jobs) // _BLOCKS))
        skeleton = jax.tree.unflatten(structure, range(len(leaves)))
        bucket = Bucket(skeleton, leaves, np.asarray(jobs), size, len(contents))
        buckets.append(bucket)
        for places in bucket.places:
            chosen = [flat[jobs[place]] for place in places]
            contents.append([np.stack(parts) for parts in zip(*chosen, strict=True)])
    return tuple(buckets), contents


def _leaf(leaf: Any, number: int) -> np.ndarray:
    # The dtype that JAX computes with.
    x = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if x.dtype != object else x.dtype
    if dtype.kind not in "biufcV" or dtype.names is not None:
        raise TypeError(
            f"put: expected items with leaves that are numbers or numeric arrays, got a leaf of "
            f"type {type(leaf).__name__} ({x.dtype}) in item {number}. Convert the leaf or leave "
            "it out."
        )
    return x.astype(dtype)


def _digest(leaves: Sequence[np.ndarray]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        found.update(f"{leaf.shape} {leaf.dtype};".encode())
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.digest()


def _digest_of_plan(plan: _Plan) -> bytes:
    found = hashlib.blake2b(b"".join(plan.digests) + plan.owners.tobytes(), digest_size=16)
    found.update(bytes([plan.everywhere, plan.dynamic]))
    for bucket in plan.buckets:
        found.update(repr((jax.tree.structure(bucket.skeleton), bucket.leaves)).encode())
        found.update(bucket.jobs.tobytes())
    return found.digest()
