"""The items of a pool, and the blocks of jobs that are computed together."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.extend import as_array, forbid_messages, without_carriers
from mpigrad.jobs.schedules import Dynamic, Schedule

__all__ = [
    "BlockStore",
    "Bucket",
    "Data",
    "JobFunction",
    "UserJob",
    "apart",
    "compute_block",
    "inside_job",
    "job_id",
    "result_types",
    "traced",
]

# ---- The context in which a job is traced ----


# (params, item_params, item) -> (results that are summed over jobs, results of each job).
JobFunction = Callable[[Any, Any, Any], tuple[Any, Any]]

_REASON = (
    "a job cannot communicate, because the other ranks are busy with other jobs. Communicate "
    "before or after the map"
)
# Part of JAX's cache keys, 0 outside a job. A function traced inside a job is not reused outside,
# and a function that holds the id of a job is not reused in a later trace.
_inside = jax.make_user_context(0)
_era = 1  # increases when the id of a job is read
_ids: list[Any] = []


def inside_job() -> bool:
    """Return True while a job is traced, when pools compute without messages."""
    return bool(_inside.value)


def job_id() -> Any:
    """Return the id of the outermost job that is traced now, or -1 outside a job."""
    global _era
    if not _ids:
        return -1
    _era += 1
    return _ids[0]


@contextlib.contextmanager
def _in_job(index: Any) -> Iterator[None]:
    _ids.append(index)
    try:
        with _inside(_era), forbid_messages(_REASON), without_carriers():
            yield
    finally:
        _ids.pop()


@dataclass(frozen=True)
class UserJob:
    """The user's function as a job, whose results are summed or returned one by one."""

    fn: Callable[..., Any]
    total: bool

    def __call__(self, params: Any, item_params: Any, item: Any) -> tuple[Any, Any]:
        result = jax.tree.map(jnp.asarray, self.fn(params, item_params, item))
        if not self.total:
            return (), result
        # Booleans are counted.
        return jax.tree.map(lambda y: y.astype(int) if y.dtype == bool else y, result), ()


def traced(
    job: JobFunction, params: Any, item_params: Any, item: Any, index: Any
) -> tuple[Any, Any]:
    """Trace `job` as the job of this id and return its results."""
    with _in_job(index):
        return job(params, item_params, item)


# ---- The items of a pool, in buckets of one shape and blocks of fixed size, kept on the ranks


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
    hasher = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        hasher.update(f"{leaf.shape} {leaf.dtype};".encode())
        hasher.update(np.ascontiguousarray(leaf).tobytes())
    return hasher.digest()


def _digest_of_plan(plan: _Plan) -> bytes:
    hasher = hashlib.blake2b(b"".join(plan.digests) + plan.owners.tobytes(), digest_size=16)
    hasher.update(bytes([plan.everywhere, plan.dynamic]))
    for bucket in plan.buckets:
        hasher.update(repr((jax.tree.structure(bucket.skeleton), bucket.leaves)).encode())
        hasher.update(bucket.jobs.tobytes())
    return hasher.digest()


# ---- Blocks of jobs: the unit of `vmap`, of schedules and of sums ----


def compute_block(
    job: JobFunction, params: Any, item_params: Any, item: Any, counts: Any, ids: Any
) -> tuple[Any, Any, Any]:
    """Compute all jobs of a block.

    All arguments but `params` have a leading axis over the jobs of the block.

    Returns
    -------
    The sum over the jobs that count, the result of each job, and a mask of the jobs without a NaN.
    """

    def one(item_params: Any, item: Any, index: Any) -> tuple[Any, Any]:
        return traced(job, params, item_params, item, index)

    added, kept = jax.vmap(one)(item_params, item, ids)
    finite = jnp.ones(counts.shape, bool)
    for leaf in jax.tree.leaves((added, kept)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            nan = jnp.isnan(jax.lax.stop_gradient(leaf))
            finite &= ~jnp.any(nan, tuple(range(1, nan.ndim)))

    def total(y: Any) -> Any:
        counted = counts.reshape(-1, *[1] * (y.ndim - 1))
        return jnp.sum(jnp.where(counted, y, jnp.zeros_like(y)), 0, dtype=y.dtype)

    return jax.tree.map(total, added), kept, finite


def apart(job: JobFunction, *operands: Any) -> tuple[Any, Any, Any]:
    """Run `compute_block` as a separately compiled region.

    Without it, XLA would inline a loop of one iteration, and the rounding of a block would depend
    on how many blocks a rank has.
    """
    block = jax.jit(functools.partial(compute_block, job))
    types = jax.eval_shape(block, *operands)
    # True at run time, which the compiler cannot see.
    always = jax.lax.optimization_barrier(jnp.asarray(True))
    return jax.lax.cond(
        always,
        lambda: block(*operands),
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types),
    )


def result_types(
    job: JobFunction, bucket: Bucket, params: Any, item_params: Any
) -> tuple[Any, Any]:
    """Return shapes and dtypes of one job's results: (the summed ones, the separate ones).

    `item_params` has a leading axis over jobs.
    """
    items = bucket.item([jax.ShapeDtypeStruct(s, d) for s, d in bucket.leaves])
    job_params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), item_params)
    index = jax.ShapeDtypeStruct((), "int32")
    program, types = jax.make_jaxpr(lambda *operands: traced(job, *operands), return_shape=True)(
        params, job_params, items, index
    )
    # The cotangents of other ranks' jobs would never arrive at a traced value from outside.
    if not inside_job() and any(isinstance(x, Tracer) for x in program.consts):
        kinds = ", ".join(str(jax.typeof(x)) for x in program.consts if isinstance(x, Tracer))
        raise TypeError(
            f"the job's function closes over traced values ({kinds}), whose derivatives would "
            "miss the jobs of other ranks. Pass every value that is differentiated or traced by "
            "jit in `params` or `item_params`."
        )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types)  # no weak types
