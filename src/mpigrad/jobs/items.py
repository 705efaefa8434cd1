"""The records of jobs, in buckets of one shape and blocks of fixed size, kept on the ranks."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.jobs.schedules import Dynamic, Schedule

__all__ = ["Bucket", "Data", "Store"]

_LARGEST_BLOCK = 64
_BLOCKS = 16


@dataclass(frozen=True, eq=False)
class Bucket:
    """Jobs whose records have one structure, one set of shapes and dtypes.

    Attributes
    ----------
    skeleton
        A record with the numbers of its leaves in their places.
    leaves
        Shape and dtype of each leaf.
    jobs
        The numbers of the jobs, ascending.
    block
        Jobs in a block. The last block is filled up with the last job again.
    first
        The number of the bucket's first block among all blocks.
    """

    skeleton: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]
    jobs: np.ndarray
    block: int
    first: int

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-len(self.jobs) // self.block)

    @cached_property
    def places(self) -> np.ndarray:
        """Places in `jobs`, shape (blocks, block)."""
        places = np.arange(self.blocks * self.block).reshape(-1, self.block)
        return np.minimum(places, len(self.jobs) - 1)

    @cached_property
    def counts(self) -> np.ndarray:
        """Whether a place holds a job for the first time, shape (blocks, block)."""
        return (np.arange(self.blocks * self.block) < len(self.jobs)).reshape(-1, self.block)

    def record(self, leaves: Sequence[Any]) -> Any:
        """A record, or a stack of records, of these leaves."""
        return jax.tree.unflatten(jax.tree.structure(self.skeleton), leaves)


class _Block:
    """The leaves of a block's records, each of shape (block, *shape)."""

    def __init__(self, leaves: Sequence[np.ndarray]) -> None:
        self.leaves = list(leaves)


@dataclass(frozen=True, eq=False)
class Data:
    """Records that are kept on the ranks, as `Pool.put` returns them.

    Attributes
    ----------
    comm
        The ranks of the pool.
    jobs
        How many records there are.
    buckets
        The buckets; jobs of one bucket are computed together by `vmap`, block by block.
    owners
        The rank of each block.
    everywhere, dynamic
        Whether every rank keeps all records, and whether a queue decides who computes a block.
    received
        Bytes of records that this rank has been sent for this `put`: none where they were here.
    """

    comm: Communicator
    jobs: int
    buckets: tuple[Bucket, ...]
    owners: np.ndarray
    everywhere: bool
    dynamic: bool
    received: int
    stacks: tuple[tuple[np.ndarray, list[Any]], ...]
    kept: tuple[_Block, ...]

    @property
    def blocks(self) -> int:
        """How many blocks there are in all buckets."""
        return len(self.owners)

    def owned(self, bucket: Bucket, rank: int) -> np.ndarray:
        """The blocks of the bucket, counted from 0 in it, that a rank owns."""
        owners = self.owners[bucket.first : bucket.first + bucket.blocks]
        return np.flatnonzero(owners == rank)

    def stacked(self, bucket: int, blocks: np.ndarray) -> list[Any]:
        """The leaves of kept blocks of a bucket, each of shape (blocks, block, *shape)."""
        kept, leaves = self.stacks[bucket]
        if np.array_equal(kept, blocks):
            return leaves
        places = np.searchsorted(kept, blocks)
        return [leaf[places] for leaf in leaves]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(b.jobs)} in {b.blocks} blocks" for b in self.buckets)
        return f"Data({self.jobs} jobs; {len(self.buckets)} buckets: {sizes})"


@dataclass(frozen=True, eq=False)
class _Plan:
    """What all ranks know of records: their buckets, and each block's digest and owner."""

    buckets: tuple[Bucket, ...]
    digests: tuple[bytes, ...]
    owners: np.ndarray
    everywhere: bool
    dynamic: bool


class Store:
    """The blocks that this rank keeps, by the digests of their contents."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._blocks: weakref.WeakValueDictionary[bytes, _Block] = weakref.WeakValueDictionary()

    def put(self, records: Any, schedule: Schedule, block: int | None, everywhere: bool) -> Data:
        """Share rank 0's records out (collective); only what a rank does not have is sent."""
        comm = self.comm
        error: Exception | None = None
        plan: _Plan | None = None
        contents: list[list[np.ndarray]] = []
        try:
            # Other ranks may give the same records, which are compared with rank 0's, or None.
            if comm.rank == 0 or records is not None:
                buckets, contents = _cut(records, block)
                digests = tuple(_digest(leaves) for leaves in contents)
                numbers = [_jobs(b, i) for b in buckets for i in range(b.blocks)]
                owners = schedule.owners(numbers, comm.size)
                dynamic = isinstance(schedule, Dynamic)
                plan = _Plan(buckets, digests, owners, everywhere or dynamic, dynamic)
        except Exception as raised:  # whatever it is, all ranks have to know
            error = raised
        said = comm.mpi.allgather(
            (plan and _digest_of_plan(plan), error and (_plain(type(error)), str(error)))
        )
        for rank, (digest, fault) in enumerate(said):
            if fault is not None:
                if error is not None:
                    raise error
                raise fault[0](f"{fault[1]} (found on rank {rank})")
            if digest not in (None, said[0][0]):
                raise ValueError(
                    f"put: the records, the block size, the schedule or `everywhere` of rank "
                    f"{rank} are not those of rank 0: give the same on all ranks, or None in place "
                    "of the records"
                )
        if any(digest is None for digest, _ in said):
            plan = _of_root(plan, comm)
        assert plan is not None
        buckets, digests, owners = plan.buckets, plan.digests, plan.owners
        mine = [i for i, owner in enumerate(owners) if plan.everywhere or owner == comm.rank]
        have = dict(self._blocks)  # kept while they are looked for
        wanted = {digests[i] for i in mine} - have.keys()
        parcel = self._fetch(wanted, digests, contents)
        blocks = [have.get(digests[i]) or _Block(parcel[digests[i]]) for i in mine]
        stacks = []
        for bucket in buckets:
            here = [
                n for n, i in enumerate(mine) if bucket.first <= i < bucket.first + bucket.blocks
            ]
            columns = zip(*(blocks[n].leaves for n in here), strict=True)
            with jax.ensure_compile_time_eval():  # arrays, also where a program is traced
                leaves = [jnp.asarray(np.stack(parts)) for parts in columns]
            stacks.append((np.array([mine[n] - bucket.first for n in here], int), leaves))
            views = [np.asarray(leaf) for leaf in leaves]  # on a CPU the same memory
            for place, n in enumerate(here):
                if digests[mine[n]] in parcel:
                    blocks[n] = _Block([v[place] for v in views])
                    self._blocks[digests[mine[n]]] = blocks[n]
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
        """The blocks that this rank lacks, from rank 0 (collective)."""
        asked = self.comm.mpi.gather(wanted, root=0)
        parcels = None
        if asked is not None:
            at = {digest: i for i, digest in enumerate(digests)}
            parcels = [{d: contents[at[d]] for d in lacking} for lacking in asked]
        return self.comm.mpi.scatter(parcels, root=0)


def _of_root(plan: _Plan | None, comm: Communicator) -> _Plan:
    """Rank 0's plan (collective); a structure that cannot be sent is an error on every rank."""
    said = (
        "put: other ranks cannot be told the type of the records: {}. Take a type of a module, or "
        "give the records on all ranks"
    )
    parcel = b""
    with raise_on_all_ranks(comm):
        try:
            parcel = pickle.dumps(plan) if comm.rank == 0 else b""
        except Exception as error:
            raise TypeError(said.format(error)) from error
    parcel = comm.mpi.bcast(parcel, root=0)
    with raise_on_all_ranks(comm):
        try:
            plan = plan or pickle.loads(parcel)
        except Exception as error:
            raise TypeError(said.format(error)) from error
    assert plan is not None
    return plan


def _jobs(bucket: Bucket, block: int) -> np.ndarray:
    return bucket.jobs[bucket.places[block][bucket.counts[block]]]


def _plain(kind: type) -> type[Exception]:
    return kind if kind in (TypeError, ValueError) else RuntimeError


def _cut(records: Any, block: int | None) -> tuple[tuple[Bucket, ...], list[list[np.ndarray]]]:
    """The buckets, and of each block the leaves."""
    if not isinstance(records, (list, tuple)):
        raise TypeError(
            "put takes a list of records, one pytree for each job, "
            f"not {type(records).__name__}; a stack of them: [x[i] for i in range(len(x))]"
        )
    members: dict[Any, list[int]] = {}
    flat = []
    for number, record in enumerate(records):
        leaves, structure = jax.tree.flatten(record)
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
    # In the types that the program computes with.
    x = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if x.dtype != object else x.dtype
    if dtype.kind not in "biufcV" or dtype.names is not None:
        raise TypeError(
            f"put: record {number} has a leaf of type {type(leaf).__name__} ({x.dtype}); the "
            "leaves of a record are numbers and arrays of numbers"
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
