"""The sum of flat arrays over ranks, in buckets, beside other work.

Each rank owns a part of every bucket: it gets the other ranks' numbers of its part, adds them in
the order of the ranks, and gives the sum to all. So every rank has the same bits. Messages are
persistent point-to-point requests: ranks may begin buckets in different orders. Between ranks of
one host they carry no numbers: the owner reads the others' where they lie, and writes the sum
there.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.communicator import BlockingCall, Communicator
from mpigrad.training.flat_buffer import Flat
from mpigrad.training.history import Span
from mpigrad.training.memory import Memory
from mpigrad.training.summation import combine, scale

__all__ = ["Exchange"]

_MIB = 1 << 20
_SHOWN = 5  # parameters that an error names


class Exchange:
    """Sums of all numbers in a flat array, weighted, over the ranks of a communicator.

    Parameters
    ----------
    flat
        Each rank's numbers, already multiplied by its weight; then their sum divided by the sum of
        weights.
    comm
        A communicator on which nobody else sends meanwhile.
    bucket, first_bucket
        Sizes of buckets, MiB of numbers as they travel.
    compression
        The dtype in which numbers travel; their own if None.
    weigh
        Whether the numbers are yet to be multiplied by their rank's weight.
    """

    def __init__(
        self,
        flat: Flat,
        comm: Communicator,
        bucket: float,
        first_bucket: float,
        compression: str | None = None,
        *,
        weigh: bool = False,
    ) -> None:
        self.flat, self.comm, self._weigh = flat, comm, weigh
        self._compression = compression if comm.size > 1 else None
        self.spans: list[Span] = []
        self.seconds = 0.0  # in this object, since `begin`
        self.square = 0.0  # this rank's part of the squared two-norm of the result
        self._spoiled: list[tuple[_Bucket, list[tuple[int, list[int]]]]] = []
        self._buckets: list[_Bucket] = []
        travelling = self._travelling(self._compression)
        for section, numbers in enumerate(flat.sections):
            memories = travelling[section]
            itemsize = next(m.dtype.itemsize for m in memories if m is not None)
            start = 0
            while start < numbers.size:
                size = bucket if self._buckets else first_bucket
                stop = min(numbers.size, start + max(1, int(size * _MIB) // itemsize))
                parts = [None if m is None else m[start:stop] for m in memories]
                self._buckets.append(
                    _Bucket(
                        len(self._buckets),
                        (section, start, stop),
                        numbers[start:stop],
                        parts,
                        comm,
                    )
                )
                start = stop
        # They are MPI's: nobody else gives them back when this object is forgotten.
        requests = [request for b in self._buckets for request in b.all_requests]
        self._free = weakref.finalize(self, _free, requests)
        self._free.atexit = False
        # Which buckets a parameter lies in.
        self._of: list[list[_Bucket]] = []
        for section, start, stop in flat.places:
            self._of.append(
                [
                    bucket
                    for bucket in self._buckets
                    if bucket.place[0] == section
                    and bucket.place[1] < stop
                    and start < bucket.place[2]
                ]
            )
        self._parameters = [0] * len(self._buckets)
        for buckets in self._of:
            for b in buckets:
                self._parameters[b.number] += 1
        self._missing: list[int] = []
        self._going: list[_Bucket] = []
        self._mine, self._all = np.zeros(3), np.zeros((comm.size, 3))
        self._told = MPI.REQUEST_NULL
        self._scale: float | None = None

    def _travelling(self, compression: str | None) -> list[list[NDArray[Any] | None]]:
        """For each section every rank's numbers as they travel; None on another host."""
        flat = self.flat
        if compression is None:
            memories = flat.memory.of_all(self.comm)
            return [
                [None if m is None else flat.section_of(m, section) for m in memories]
                for section in range(len(flat.sections))
            ]
        dtype = jnp.dtype(compression)
        kinds = [dtype if s.dtype.itemsize > dtype.itemsize else s.dtype for s in flat.sections]
        ends = [0]
        for section, kind in zip(flat.sections, kinds, strict=True):
            ends.append(ends[-1] + -(-section.size * kind.itemsize // 64) * 64)
        self._packed = Memory(ends[-1])
        memories = self._packed.of_all(self.comm)
        return [
            [
                None if m is None else m[start:][: section.size * kind.itemsize].view(kind)
                for m in memories
            ]
            for start, section, kind in zip(ends[:-1], flat.sections, kinds, strict=True)
        ]

    def close(self) -> None:
        """Give the requests back."""
        self._free()

    # ---- one sum ----

    def begin(self, weight: float, ended: bool = False, mark: float = 0.0) -> None:
        """Begin a sum in which this rank's numbers have this weight (collective).

        `ended` says that this rank has nothing to add, now or later; `mark` is a number that ranks
        show each other.
        """
        self.spans, self.seconds, self.square = [], 0.0, 0.0
        self._spoiled = []
        self._missing = list(self._parameters)
        self._going, self._scale = [], None
        self._mine[:] = weight, ended, mark
        start = time.perf_counter()
        self._told = self.comm.mpi.Iallgather(self._mine, self._all)
        self.seconds += time.perf_counter() - start

    def weights(self) -> NDArray[np.float64]:
        """(weight, whether it has ended, mark) of every rank, shape (ranks, 3); waits for them."""
        if self._scale is None:
            if not self._told.Test():
                with BlockingCall("trainer.step"):
                    self._told.Wait()
            self._sum_weights()
        return self._all

    def _sum_weights(self) -> None:
        total = math.fsum(self._all[:, 0])
        self._scale = 1 / total if total > 0 else 0.0

    def ready(self, index: int) -> None:
        """A parameter's numbers are in place; a bucket that they complete is sent."""
        start = time.perf_counter()
        for bucket in self._of[index]:
            self._missing[bucket.number] -= 1
            if self._missing[bucket.number] == 0:
                self._start(bucket)
        self._advance()
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Send what has not been sent, and wait for the whole sum (collective)."""
        start = time.perf_counter()
        # As a collective: a rank that has left the program is found missing at once.
        with BlockingCall("trainer.step", self.comm.slot):
            if self._scale is None:
                self._told.Wait()
                self._sum_weights()
            for bucket in self._buckets:
                if self._missing[bucket.number] > 0:
                    self._missing[bucket.number] = 0
                    self._start(bucket)
                    self._advance()
            while self._going:
                MPI.Request.Waitany([r for bucket in self._going for r in bucket.requests])
                self._advance()
        self.seconds += time.perf_counter() - start

    def _start(self, bucket: _Bucket) -> None:
        if bucket.compressed:
            self.weights()
        bucket.start(self._scale or 0.0)
        self._going.append(bucket)

    def _advance(self) -> None:
        going = []
        for bucket in self._going:
            if bucket.collecting and bucket.test():
                self.weights()
                assert self._scale is not None
                spoiled: list[tuple[int, list[int]]] = []
                factors = self._all[:, 0].tolist() if self._weigh else None
                self.square += bucket.add(self._scale, spoiled, factors)
                if spoiled:
                    self._spoiled.append((bucket, spoiled))
            if not bucket.collecting and bucket.test():
                bucket.finish()
                self.spans.append(
                    Span(f"bucket {bucket.number}", bucket.begun, time.perf_counter())
                )
            else:
                going.append(bucket)
        self._going = going

    # ---- its size ----

    def norm(self, squares: NDArray[np.float64], what: str) -> float:
        """The two-norm of the result, from every rank's `square` (collective).

        Raises
        ------
        FloatingPointError
            On every rank: a number is not finite. The error begins with `what`, and names
            parameters and the ranks that these numbers come from. Or the norm's square is beyond
            float64.
        """
        if np.isfinite(squares).all():
            return math.sqrt(math.fsum(squares))
        spoiled: dict[str, set[int]] = {}
        for found in self.comm.mpi.allgather(self._named()):
            for name, ranks in found.items():
                spoiled.setdefault(name, set()).update(ranks)
        if not spoiled:  # squares overflow in the dtype of the numbers
            square = math.fsum(self.comm.mpi.allgather(self._exact_square()))
            if math.isinf(square):
                raise FloatingPointError(f"{what} too large: the sum of squares is beyond float64")
            return math.sqrt(square)
        said = [
            f"{name} (from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))})"
            for name, ranks in spoiled.items()
        ]
        more = [f"{len(said) - _SHOWN} more parameters"] if len(said) > _SHOWN else []
        how = f", as numbers of {self._compression}," if self._compression else ""
        raise FloatingPointError(f"{what}{how} not finite: {', '.join(said[:_SHOWN] + more)}")

    def _named(self) -> dict[str, list[int]]:
        """Parameters with numbers in this rank's parts that are not finite, and whose they are."""
        found: dict[str, set[int]] = {}
        for bucket, places in self._spoiled:
            section, start, _ = bucket.place
            for index, ranks in places:
                at = start + bucket.parts[self.comm.rank].start + index
                name = self.flat.parameter_at(section, at).name
                found.setdefault(name, set()).update(ranks)
        return {name: sorted(ranks) for name, ranks in found.items()}

    def _exact_square(self) -> float:
        with np.errstate(over="ignore"):
            return math.fsum(
                float(np.sum(np.square(part, dtype=np.float64)))
                for part in (b.numbers[b.parts[self.comm.rank]] for b in self._buckets)
            )


class _Bucket:
    """A range of one section, its parts and its messages.

    Parameters
    ----------
    memories
        For each rank these numbers as they travel, where this rank can reach them; else None. A
        message to or from such a rank has no bytes: it says that numbers can be read, or that the
        sum has been written to where they were.
    """

    def __init__(
        self,
        number: int,
        place: tuple[int, int, int],
        numbers: NDArray[Any],
        memories: list[NDArray[Any] | None],
        comm: Communicator,
    ) -> None:
        self.number, self.place, self.numbers = number, place, numbers
        sent = memories[comm.rank]
        assert sent is not None
        self.sent, self.compressed = sent, not np.may_share_memory(sent, numbers)
        self._rank, size, mpi = comm.rank, comm.size, comm.mpi
        ends = [numbers.size * r // size for r in range(size + 1)]
        self.parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        mine = self.parts[self._rank]
        others = [r for r in range(size) if r != self._rank]
        self._pieces: list[NDArray[Any]] = []
        self._copies: list[NDArray[Any]] = []
        for rank, memory in enumerate(memories):
            if memory is None:
                self._pieces.append(np.empty(mine.stop - mine.start, sent.dtype))
            else:
                self._pieces.append(memory[mine])
                if rank != self._rank:
                    self._copies.append(memory[mine])
        self.begun = 0.0
        self.collecting = False

        def raw(array: NDArray[Any], rank: int) -> list[Any]:
            reached = memories[rank] is not None
            return [array[: 0 if reached else None].view(np.uint8), MPI.BYTE]

        def requests(got: list[NDArray[Any]], given: list[NDArray[Any]], tag: int) -> list[Any]:
            made = [mpi.Recv_init(raw(got[r], r), r, tag) for r in others]
            return made + [mpi.Send_init(raw(given[r], r), r, tag) for r in others]

        parts = [sent[part] for part in self.parts]
        self._collect = requests(self._pieces, parts, 2 * number)
        self._spread = requests(parts, [sent[mine]] * size, 2 * number + 1)
        self.all_requests = [*self._collect, *self._spread]

    def start(self, factor: float) -> None:
        self.begun, self.collecting = time.perf_counter(), True
        if self.compressed:  # as means: sums of many samples' numbers are too big for 16 bits
            with np.errstate(over="ignore"):
                scale(self.numbers, factor)
                self.sent[:] = self.numbers
        MPI.Prequest.Startall(self._collect)

    @property
    def requests(self) -> list[Any]:
        return self._collect if self.collecting else self._spread

    def test(self) -> bool:
        return MPI.Request.Testall(self.requests)

    def add(
        self,
        factor: float,
        spoiled: list[tuple[int, list[int]]],
        factors: list[float] | None,
    ) -> float:
        """Make this rank's part of the sum, and send it; its squared two-norm."""
        factor = 1.0 if self.compressed else factor
        mine = self.sent[self.parts[self._rank]]
        square = combine(self._pieces, factor, mine, self._copies, spoiled, factors)
        self.collecting = False
        MPI.Prequest.Startall(self._spread)
        return square

    def finish(self) -> None:
        if self.compressed:
            self.numbers[:] = self.sent


def _free(requests: Sequence[MPI.Prequest]) -> None:
    for request in requests:
        request.Free()
