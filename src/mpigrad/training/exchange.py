"""The sum of flat arrays over ranks, in buckets, beside other work.

Each rank owns a part of every bucket: it gets the other ranks' numbers of its part, adds them in
the order of the ranks, and sends the sum to all. So every rank has the same bits. Messages are
persistent point-to-point requests: ranks may begin buckets in different orders, and nothing is
copied but by the messages themselves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.communicator import Communicator, waiting
from mpigrad.training.flat import Flat
from mpigrad.training.summation import combine, nonfinite

__all__ = ["Exchange", "Span"]

_MIB = 1 << 20
_SHOWN = 5  # parameters that an error names


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end` (seconds of time.perf_counter), for a timeline."""

    name: str
    start: float
    end: float


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
    """

    def __init__(
        self,
        flat: Flat,
        comm: Communicator,
        bucket: float,
        first_bucket: float,
        compression: str | None = None,
    ) -> None:
        self.flat, self.comm = flat, comm
        self.spans: list[Span] = []
        self.seconds = 0.0  # in this object, since `begin`
        self.square = 0.0  # this rank's part of the squared two-norm of the result
        self._buckets: list[_Bucket] = []
        for section, numbers in enumerate(flat.sections):
            start = 0
            while start < numbers.size:
                size = bucket if self._buckets else first_bucket
                travelling = numbers.dtype
                if compression and comm.size > 1 and travelling.itemsize > 2:
                    travelling = jnp.dtype(compression)
                stop = min(numbers.size, start + max(1, int(size * _MIB) // travelling.itemsize))
                place = section, start, stop
                self._buckets.append(
                    _Bucket(len(self._buckets), place, numbers[start:stop], travelling, comm)
                )
                start = stop
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
        self._mine, self._all = np.zeros(2), np.zeros((comm.size, 2))
        self._told = MPI.REQUEST_NULL
        self._scale: float | None = None

    def close(self) -> None:
        """Give the requests back."""
        for bucket in self._buckets:
            bucket.close()

    # ---- one sum ----

    def begin(self, weight: float, ended: bool = False) -> None:
        """Begin a sum in which this rank's numbers have this weight (collective).

        `ended` says that this rank has nothing to add, now or later.
        """
        self.spans, self.seconds, self.square = [], 0.0, 0.0
        self._missing = list(self._parameters)
        self._going, self._scale = [], None
        self._mine[:] = weight, ended
        start = time.perf_counter()
        self._told = self.comm.mpi.Iallgather(self._mine, self._all)
        self.seconds += time.perf_counter() - start

    def weights(self) -> NDArray[np.float64]:
        """(weight, whether it has ended) of every rank, shape (ranks, 2); waits for them."""
        if self._scale is None:
            if not self._told.Test():
                with waiting("trainer.step"):
                    self._told.Wait()
            total = math.fsum(self._all[:, 0])
            self._scale = 1 / total if total > 0 else 0.0
        return self._all

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
        """Send what has not been sent, and wait for the whole sum."""
        start = time.perf_counter()
        self.weights()
        for bucket in self._buckets:
            if self._missing[bucket.number] > 0:
                self._missing[bucket.number] = 0
                self._start(bucket)
                self._advance()
        if self._going:
            with waiting("trainer.step"):
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
                self.square += bucket.add(self._scale)
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
            parameters and the ranks that these numbers come from.
        """
        if np.isfinite(squares).all():
            return math.sqrt(math.fsum(squares))
        spoiled: dict[str, set[int]] = {}
        for found in self.comm.mpi.allgather(self._spoiled()):
            for name, ranks in found.items():
                spoiled.setdefault(name, set()).update(ranks)
        if not spoiled:  # squares overflow in the dtype of the numbers
            return math.sqrt(math.fsum(self.comm.mpi.allgather(self._exact_square())))
        said = [
            f"{name} (from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))})"
            for name, ranks in spoiled.items()
        ]
        more = [f"{len(said) - _SHOWN} more parameters"] if len(said) > _SHOWN else []
        raise FloatingPointError(f"{what} not finite: {', '.join(said[:_SHOWN] + more)}")

    def _spoiled(self) -> dict[str, set[int]]:
        """Parameters with numbers in this rank's parts that are not finite, and whose they are."""
        found: dict[str, set[int]] = {}
        for bucket in self._buckets:
            index, ranks = bucket.spoiled()
            if index is not None:
                section, start, _ = bucket.place
                name = self.flat.parameter_at(section, start + index).name
                found.setdefault(name, set()).update(ranks)
        return found

    def _exact_square(self) -> float:
        return math.fsum(
            float(np.sum(np.square(part, dtype=np.float64)))
            for part in (b.numbers[b.parts[self.comm.rank]] for b in self._buckets)
        )


class _Bucket:
    """A range of one section, its parts and its messages."""

    def __init__(
        self,
        number: int,
        place: tuple[int, int, int],
        numbers: NDArray[Any],
        dtype: np.dtype[Any],
        comm: Communicator,
    ) -> None:
        self.number, self.place, self.numbers = number, place, numbers
        self.compressed = dtype != numbers.dtype
        self.sent = np.empty(numbers.size, dtype) if self.compressed else numbers
        self._rank, size, mpi = comm.rank, comm.size, comm.mpi
        ends = [numbers.size * r // size for r in range(size + 1)]
        self.parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        mine = self.parts[self._rank]
        others = [r for r in range(size) if r != self._rank]
        self._pieces = {r: np.empty(mine.stop - mine.start, dtype) for r in others}
        self.begun = 0.0
        self.collecting = False
        tag = 2 * number

        def raw(array: NDArray[Any]) -> list[Any]:
            return [array.view(np.uint8), MPI.BYTE]

        self._collect = [mpi.Recv_init(raw(self._pieces[r]), r, tag) for r in others]
        self._collect += [mpi.Send_init(raw(self.sent[self.parts[r]]), r, tag) for r in others]
        self._spread = [mpi.Recv_init(raw(self.sent[self.parts[r]]), r, tag + 1) for r in others]
        self._spread += [mpi.Send_init(raw(self.sent[mine]), r, tag + 1) for r in others]

    def close(self) -> None:
        for request in (*self._collect, *self._spread):
            request.Free()

    def start(self, scale: float) -> None:
        self.begun, self.collecting = time.perf_counter(), True
        if self.compressed:  # as means: sums of many samples' numbers are too big for 16 bits
            with np.errstate(over="ignore"):
                np.multiply(self.numbers, self.numbers.dtype.type(scale), out=self.numbers)
                self.sent[:] = self.numbers
        MPI.Prequest.Startall(self._collect)

    @property
    def requests(self) -> list[Any]:
        return self._collect if self.collecting else self._spread

    def test(self) -> bool:
        return MPI.Request.Testall(self.requests)

    def add(self, scale: float) -> float:
        """Make this rank's part of the sum, and send it; its squared two-norm."""
        mine = self.sent[self.parts[self._rank]]
        pieces = [self._pieces.get(r, mine) for r in range(len(self.parts))]
        with np.errstate(over="ignore", invalid="ignore"):
            square = combine(pieces, 1.0 if self.compressed else scale, mine)
        self.collecting = False
        MPI.Prequest.Startall(self._spread)
        return square

    def finish(self) -> None:
        if self.compressed:
            self.numbers[:] = self.sent

    def spoiled(self) -> tuple[int | None, list[int]]:
        """The first number of the own part that is not finite, and the ranks that made it so."""
        mine = self.parts[self._rank]
        bad = np.flatnonzero(nonfinite(self.sent[mine]))
        if not bad.size:
            return None, []
        index = int(bad[0])
        ranks = [r for r, piece in self._pieces.items() if nonfinite(piece[index : index + 1])[0]]
        return mine.start + index, ranks or [self._rank]
