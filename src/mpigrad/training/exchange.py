"""Sums of flat buffers over ranks, in buckets, overlapped with computation.

Each rank owns a part of every bucket. It receives the other ranks' numbers of its part, adds them
in the order of ranks, and sends the sum to all ranks. So every rank has the same bits. Messages are
persistent point-to-point requests, because ranks may begin buckets in different orders. Between
ranks of one host the messages are empty: the owner reads the other ranks' memory, and writes the
sum into it.
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
from mpigrad.training.flat_buffer import FlatBuffer, Memory, combine, scale
from mpigrad.training.history import Span

__all__ = ["Exchange"]

_MIB = 1 << 20
_SHOWN = 5  # parameters that an error names


class Exchange:
    """Weighted means of flat buffers over the ranks of a communicator.

    Parameters
    ----------
    flat
        On entry each rank's numbers, multiplied by its weight. On return their sum divided by the
        sum of weights.
    comm
        A communicator without other messages during a sum.
    bucket, first_bucket
        Sizes of buckets in MiB of numbers as they are sent.
    compression
        The dtype in which numbers are sent, or None for their own.
    weigh
        True if the numbers are not yet multiplied by their rank's weight.
    """

    def __init__(
        self,
        flat: FlatBuffer,
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
        self._nonfinite: list[tuple[_Bucket, list[tuple[int, list[int]]]]] = []
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
        # MPI does not free persistent requests when their Python objects are deleted.
        requests = [request for b in self._buckets for request in b.all_requests]
        self._gathering: list[MPI.Request] = []
        self._free = weakref.finalize(self, _free, requests, self._gathering)
        self._free.atexit = False
        # For each parameter the buckets that hold it.
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
        self._header, self._all = np.zeros(3), np.zeros((comm.size, 3))
        self._request = MPI.REQUEST_NULL
        self._scale: float | None = None

    def _travelling(self, compression: str | None) -> list[list[NDArray[Any] | None]]:
        """Return each section as every rank sends it, or None for ranks on another host."""
        flat = self.flat
        if compression is None:
            memories = flat.memory.map_all(self.comm)
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
        memories = self._packed.map_all(self.comm)
        return [
            [
                None if m is None else m[start:][: section.size * kind.itemsize].view(kind)
                for m in memories
            ]
            for start, section, kind in zip(ends[:-1], flat.sections, kinds, strict=True)
        ]

    def close(self) -> None:
        """Free the requests."""
        self._free()

    # ---- one sum ----

    def begin(self, weight: float, ended: bool = False, mark: float = 0.0) -> None:
        """Begin a sum in which this rank's numbers have this weight (collective).

        Parameters
        ----------
        ended
            True if this rank has nothing to add, now or later.
        mark
            A number that all ranks receive from `weights`.
        """
        self.spans, self.seconds, self.square = [], 0.0, 0.0
        self._nonfinite = []
        self._missing = list(self._parameters)
        self._going, self._scale = [], None
        self._header[:] = weight, ended, mark
        start = time.perf_counter()
        self._request = self.comm.mpi.Iallgather(self._header, self._all)
        self._gathering[:] = [self._request]
        self.seconds += time.perf_counter() - start

    def weights(self) -> NDArray[np.float64]:
        """Wait for (weight, ended, mark) of every rank, shape (ranks, 3)."""
        if self._scale is None:
            if not self._request.Test():
                with BlockingCall("trainer.step"):
                    self._request.Wait()
            self._sum_weights()
        return self._all

    def _sum_weights(self) -> None:
        total = math.fsum(self._all[:, 0])
        self._scale = 1 / total if total > 0 else 0.0

    def ready(self, index: int) -> None:
        """Mark a parameter's numbers as complete, and send the buckets that are complete."""
        start = time.perf_counter()
        for bucket in self._of[index]:
            self._missing[bucket.number] -= 1
            if self._missing[bucket.number] == 0:
                self._start(bucket)
        self._advance()
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Send the remaining buckets and wait for the whole sum (collective)."""
        start = time.perf_counter()
        # Declared as a collective, so that the watchdog sees at once a rank that has ended.
        with BlockingCall("trainer.step", self.comm.slot):
            if self._scale is None:
                self._request.Wait()
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
                nonfinite: list[tuple[int, list[int]]] = []
                factors = self._all[:, 0].tolist() if self._weigh else None
                self.square += bucket.add(self._scale, nonfinite, factors)
                if nonfinite:
                    self._nonfinite.append((bucket, nonfinite))
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
        """Return the two-norm of the result from every rank's `square` (collective).

        Parameters
        ----------
        squares
            `square` of every rank.
        what
            The beginning of the error, for instance "trainer: the parameters are".

        Raises
        ------
        FloatingPointError
            On every rank, if a number is not finite or the square of the norm overflows float64.
            The error names the parameters, and the ranks from which these numbers come.
        """
        if np.isfinite(squares).all():
            return math.sqrt(math.fsum(squares))
        nonfinite: dict[str, set[int]] = {}
        for by_name in self.comm.mpi.allgather(self._named()):
            for name, ranks in by_name.items():
                nonfinite.setdefault(name, set()).update(ranks)
        if not nonfinite:  # squares overflow in the dtype of the numbers
            square = math.fsum(self.comm.mpi.allgather(self._exact_square()))
            if math.isinf(square):
                raise FloatingPointError(
                    f"{what} too large: the sum of squares overflows float64. Use a smaller "
                    "learning rate, or scale the loss."
                )
            return math.sqrt(square)
        names = [
            f"{name} (from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))})"
            for name, ranks in nonfinite.items()
        ]
        more = [f"{len(names) - _SHOWN} more parameters"] if len(names) > _SHOWN else []
        how = f" (sent as {self._compression})" if self._compression else ""
        raise FloatingPointError(
            f"{what} not finite{how}: {', '.join(names[:_SHOWN] + more)}. Check the batch and the "
            "loss, or use a smaller learning rate."
        )

    def _named(self) -> dict[str, list[int]]:
        """Return the parameters with non-finite numbers in this rank's parts, with their ranks."""
        by_name: dict[str, set[int]] = {}
        for bucket, places in self._nonfinite:
            section, start, _ = bucket.place
            for index, ranks in places:
                at = start + bucket.parts[self.comm.rank].start + index
                name = self.flat.parameter_at(section, at).name
                by_name.setdefault(name, set()).update(ranks)
        return {name: sorted(ranks) for name, ranks in by_name.items()}

    def _exact_square(self) -> float:
        with np.errstate(over="ignore"):
            return math.fsum(
                float(np.sum(np.square(part, dtype=np.float64)))
                for part in (b.numbers[b.parts[self.comm.rank]] for b in self._buckets)
            )


class _Bucket:
    """A range of one section, with its parts and its messages.

    Parameters
    ----------
    memories
        For each rank these numbers in its memory as it sends them, or None if this rank cannot map
        that memory. Messages to and from a mapped rank are empty: they tell that the numbers can be
        read, or that the sum has been written into the memory.
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
        share = self.parts[self._rank]
        others = [r for r in range(size) if r != self._rank]
        self._pieces: list[NDArray[Any]] = []
        self._copies: list[NDArray[Any]] = []
        for rank, memory in enumerate(memories):
            if memory is None:
                self._pieces.append(np.empty(share.stop - share.start, sent.dtype))
            else:
                self._pieces.append(memory[share])
                if rank != self._rank:
                    self._copies.append(memory[share])
        self.begun = 0.0
        self.collecting = False

        def raw(array: NDArray[Any], rank: int) -> list[Any]:
            reached = memories[rank] is not None
            return [array[: 0 if reached else None].view(np.uint8), MPI.BYTE]

        def requests(
            incoming: list[NDArray[Any]], outgoing: list[NDArray[Any]], tag: int
        ) -> list[Any]:
            made = [mpi.Recv_init(raw(incoming[r], r), r, tag) for r in others]
            return made + [mpi.Send_init(raw(outgoing[r], r), r, tag) for r in others]

        parts = [sent[part] for part in self.parts]
        self._collect = requests(self._pieces, parts, 2 * number)
        self._spread = requests(parts, [sent[share]] * size, 2 * number + 1)
        self.all_requests = [*self._collect, *self._spread]

    def start(self, factor: float) -> None:
        self.begun, self.collecting = time.perf_counter(), True
        if self.compressed:  # send means, because sums over many samples overflow 16 bits
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
        nonfinite: list[tuple[int, list[int]]],
        factors: list[float] | None,
    ) -> float:
        """Compute and send this rank's part of the sum, and return its squared two-norm."""
        factor = 1.0 if self.compressed else factor
        share = self.sent[self.parts[self._rank]]
        square = combine(self._pieces, factor, share, self._copies, nonfinite, factors)
        self.collecting = False
        MPI.Prequest.Startall(self._spread)
        return square

    def finish(self) -> None:
        if self.compressed:
            self.numbers[:] = self.sent


# Requests of an interrupted step, by Ctrl-C for example. They hold the memory that MPI uses.
_abandoned: list[MPI.Request] = []


def _free(requests: Sequence[MPI.Prequest], gathering: Sequence[MPI.Request]) -> None:
    _abandoned.extend(request for request in gathering if not request.Test())
    for request in requests:
        if request.Test():
            request.Free()
        else:
            _abandoned.append(request)
