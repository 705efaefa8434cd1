"""Which samples a rank sees, step by step: the same global batches on any number of ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batches"]


class Batches:
    """Index arrays of batches, shuffled anew in each epoch, of which each rank takes its part.

    A global batch is `size` rows of the data; the last one of an epoch may have fewer. It depends
    on seed, epoch and its number alone. A rank's part are neighbours in it: every row is seen once
    per epoch, nothing is padded or dropped, parts may differ by a row and may be empty.

    Parameters
    ----------
    rows
        Number of samples in the data set.
    size
        Samples in a global batch.
    seed
        0 <= seed < 2⁶⁴; the order in epoch e is that of NumPy's Philox generator with key
        (seed, e).
    epochs
        Passes over the data; None: without end.
    shuffle
        False: the data's own order, in every epoch.
    shard
        (index, count): take the index-th of count parts. If not given, those of the trainer that
        runs with them (`Trainer.shard`); iterated without it, all rows are taken.
    take
        indices -> batch: what iteration yields, `lambda i: (x[i], y[i])`, say; the array of
        indices, int64 of shape (n,), if not given.

    Raises
    ------
    ValueError
        Numbers that do not fit.

    Notes
    -----
    Iteration goes on where the last one stopped, and ends after the last epoch; the position is
    what `state` saves.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        shard: tuple[int, int] | None = None,
        take: Callable[[NDArray[np.int64]], Any] | None = None,
    ) -> None:
        self.rows, self.size = operator.index(rows), operator.index(size)
        self.seed, self.shuffle, self.take = operator.index(seed), bool(shuffle), take
        self.epochs = None if epochs is None else operator.index(epochs)
        for name in ("rows", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"Batches: {name}={getattr(self, name)} must be positive")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"Batches: seed={seed} must be in [0, 2**64)")
        if self.epochs is not None and self.epochs < 0:
            raise ValueError(f"Batches: epochs={epochs} must not be negative, or None")
        self.shard = shard
        self.of_trainer: tuple[int, int] | None = None  # taken where no shard was given
        self.epoch, self.batch = 0, 0  # of the batch that comes next
        self._order: tuple[int, NDArray[np.int64]] | None = None  # of an epoch

    @property
    def shard(self) -> tuple[int, int] | None:
        """(index, count); a count of 0 takes no batches at all."""
        return self._shard

    @shard.setter
    def shard(self, shard: tuple[int, int] | None) -> None:
        if shard is not None:
            index, count = shard
            if not (0 <= index < count or count == 0):
                raise ValueError(f"Batches: shard={shard} must be (index, count), index < count")
        self._shard = shard

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return -(-self.rows // self.size)

    @property
    def left(self) -> int | None:
        """Batches until the end; None: without end."""
        if self.epochs is None:
            return None
        return max(0, (self.epochs - self.epoch) * self.per_epoch - self.batch)

    def __iter__(self) -> Iterator[Any]:
        index, count = self.shard or self.of_trainer or (0, 1)
        while count and (self.epochs is None or self.epoch < self.epochs):
            whole = self._rows(self.epoch)[self.batch * self.size :][: self.size]
            part = whole[len(whole) * index // count : len(whole) * (index + 1) // count]
            self.batch += 1
            if self.batch == self.per_epoch:
                self.epoch, self.batch = self.epoch + 1, 0
            yield part if self.take is None else self.take(part)

    def _rows(self, epoch: int) -> NDArray[np.int64]:
        """All rows in the order of an epoch."""
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self.rows)
            if self.shuffle:
                key = np.array([self.seed, epoch], np.uint64)
                order = np.random.Generator(np.random.Philox(key=key)).permutation(self.rows)
            self._order = epoch, order
        return self._order[1]

    def state(self) -> dict[str, Any]:
        """The position, and of which batches; independent of the number of ranks."""
        return {**self.about(), "epoch": self.epoch, "batch": self.batch}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` has given.

        Raises
        ------
        ValueError
            It is a state of other batches.
        """
        for name, here in self.about().items():
            if state[name] != here:
                raise ValueError(
                    f"Batches: the saved state is of {name}={state[name]}, not of {name}={here}"
                )
        self.epoch, self.batch = state["epoch"], state["batch"]

    def about(self) -> dict[str, Any]:
        """What all ranks' must have in common."""
        return {name: getattr(self, name) for name in ("rows", "size", "seed", "shuffle")}
