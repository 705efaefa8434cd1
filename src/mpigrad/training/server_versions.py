"""When a parameter server may update: the bound on the staleness of gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

__all__ = ["Versions"]


@dataclasses.dataclass
class Versions:
    """Which version of the parameters each worker computes on, and whose gradient is there.

    The version is the number of updates. The *staleness* of a gradient is the number of updates
    between the parameters that it was computed at and those that it changes. A worker that has
    parameters and no gradient yet is *outstanding*; a gradient that no update has used yet is
    *pending*.

    No staleness exceeds `bound`, since no update is made that would let an outstanding worker's
    gradient become staler: with v the version that a worker computes on, an update at version V
    needs V - v < bound for all that are outstanding. With the bound 0 that leaves updates that
    wait for everybody.

    Attributes
    ----------
    bound
        The largest staleness, 0 or more.
    version
        Of the server's parameters.
    outstanding, pending
        For each worker the version that its gradient is computed at.
    """

    bound: int
    version: int
    outstanding: dict[int, int]
    pending: dict[int, int] = dataclasses.field(default_factory=dict)

    def arrive(self, worker: int, version: int) -> None:
        """The worker's gradient is there, computed at that version."""
        del self.outstanding[worker]
        self.pending[worker] = version

    def leave(self, worker: int) -> None:
        """The worker sends no gradient any more."""
        del self.outstanding[worker]

    @property
    def workers(self) -> list[int]:
        """Those that have not left."""
        return sorted(self.outstanding | self.pending)

    @property
    def ready(self) -> bool:
        """Whether the pending gradients may be used now."""
        late = (self.version - v >= self.bound for v in self.outstanding.values())
        return bool(self.pending) and not any(late)

    def staleness(self) -> dict[int, int]:
        """Of each pending gradient, were it used now; in the order of workers."""
        return {worker: self.version - self.pending[worker] for worker in sorted(self.pending)}

    def use(self, *, changed: bool = True) -> None:
        """The pending gradients have been used; where nothing has `changed`, to no effect."""
        self.version += changed
        self.pending.clear()

    def give(self, workers: Iterable[int]) -> None:
        """These workers get the parameters as they are now."""
        self.outstanding.update(dict.fromkeys(workers, self.version))
