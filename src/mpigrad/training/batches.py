"""Batches of sample indices, the same global batches on any number of ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batches"]


class Batches:
    """An iterable of batches, shuffled in each epoch. Each rank takes its part of them.

    A global batch has `size` rows of the data, but the last one of an epoch may have fewer. It
    depends only on the seed, the epoch and its index. The part of a rank is contiguous in the
    global batch. Every row is seen once per epoch, without padding or dropping. The parts of two
    ranks may differ by one row, and a part may be empty.

    Parameters
    ----------
    rows
        Count of samples in the data set.
    size
        Count of samples in a global batch.
    seed
        0 <= seed < 2⁶⁴. The order in epoch e is that of NumPy's Philox generator with key
        (seed, e).
    epochs
        Count of passes over the data, or None for endless batches.
    shuffle
        False for the order of the data in every epoch.
    shard
        (index, count) to take part `index` of `count` parts. Default: the shard of the trainer
        that runs with these batches (`Trainer.shard`), or all rows without a trainer.
    take
        A function from the array of indices, int64 of shape (n,), to the batch, for instance
        `lambda i: (x[i], y[i])`. Default: iteration gives the indices.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Notes
    -----
    Each iteration continues at the position at which the last one stopped, and ends after the last
    epoch. `state` saves the position.

    Examples
    --------
    >>> from mpigrad import training
    >>> [i.tolist() for i in training.Batches(5, 2, epochs=1, shuffle=False)]
    [[0, 1], [2, 3], [4]]
    >>> [i.tolist() for i in training.Batches(5, 2, epochs=1, shuffle=False, shard=(1, 2))]
    [[1], [3], [4]]
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
                raise ValueError(
                    f"Batches: {name} must be positive, got {getattr(self, name)}. Pass a positive "
                    "count."
                )
        if not 0 <= self.seed < 2**64:
            raise ValueError(
                f"Batches: seed must be in [0, 2**64), got {seed}. Pass a seed in this range."
            )
        if self.epochs is not None and self.epochs < 0:
            raise ValueError(
                f"Batches: epochs must not be negative, got {epochs}. Pass a count, or None for "
                "endless batches."
            )
        self.shard = shard
        self.default_shard: tuple[int, int] | None = None  # the trainer's, if no shard was given
        self.epoch, self.batch = 0, 0  # indices of the next batch
        self._order: tuple[int, NDArray[np.int64]] | None = None  # of an epoch

    @property
    def shard(self) -> tuple[int, int] | None:
        """The pair (index, count), with a count of 0 on a rank that takes no batches."""
        return self._shard

    @shard.setter
    def shard(self, shard: tuple[int, int] | None) -> None:
        if shard is not None:
            index, count = shard
            if not (0 <= index < count or count == 0):
                raise ValueError(
                    f"Batches: shard must be (index, count) with 0 <= index < count, got {shard}. "
                    "Pass Trainer.shard, or (rank, size)."
                )
        self._shard = shard

    @property
    def per_epoch(self) -> int:
        """The count of batches in an epoch."""
        return -(-self.rows // self.size)

    @property
    def left(self) -> int | None:
        """The count of batches until the end, or None for endless batches."""
        if self.epochs is None:
            return None
        return max(0, (self.epochs - self.epoch) * self.per_epoch - self.batch)

    def __iter__(self) -> Iterator[Any]:
        index, count = self.shard or self.default_shard or (0, 1)
        while count and (self.epochs is None or self.epoch < self.epochs):
            whole = self._rows(self.epoch)[self.batch * self.size :][: self.size]
            part = whole[len(whole) * index // count : len(whole) * (index + 1) // count]
            self.batch += 1
            if self.batch == self.per_epoch:
                self.epoch, self.batch = self.epoch + 1, 0
            yield part if self.take is None else self.take(part)

    def _rows(self, epoch: int) -> NDArray[np.int64]:
        """Return all rows in the order of an epoch."""
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self.rows)
            if self.shuffle:
                key = np.array([self.seed, epoch], np.uint64)
                order = np.random.Generator(np.random.Philox(key=key)).permutation(self.rows)
            self._order = epoch, order
        return self._order[1]

    def state(self) -> dict[str, Any]:
        """Return the settings and the position, which do not depend on the count of ranks."""
        return {**self.settings(), "epoch": self.epoch, "batch": self.batch}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at the position that `state` returned.

        Raises
        ------
        ValueError
            If the state belongs to batches with other settings.
        """
        for name, here in self.settings().items():
            if state[name] != here:
                raise ValueError(
                    f"Batches: the saved state has {name}={state[name]}, but these batches have "
                    f"{name}={here}. Make the batches with the saved settings."
                )
        self.epoch, self.batch = state["epoch"], state["batch"]

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks."""
        return {name: getattr(self, name) for name in ("rows", "size", "seed", "shuffle")}
