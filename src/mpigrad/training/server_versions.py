"""The bound on the staleness of gradients: when a parameter server may update."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

__all__ = ["Versions"]


@dataclasses.dataclass
class Versions:
    """The version of the parameters at which each worker computes, and the arrived gradients.

    The version is the count of updates. The *staleness* of a gradient is the count of updates
    between the parameters at which it was computed and the parameters that it changes. A worker
    that has parameters and has not sent a gradient is *outstanding*. A gradient that no update has
    used yet is *pending*.

    No staleness exceeds `bound`, because the server makes no update that would let an outstanding
    worker's gradient exceed it. Let a worker compute at version v. An update at version V needs
    V - v < bound for all outstanding workers. With the bound 0 every update waits for all workers.

    Attributes
    ----------
    bound
        The largest staleness, 0 or more.
    version
        The version of the server's parameters.
    outstanding, pending
        For each worker the version at which its gradient is computed.
    """

    bound: int
    version: int
    outstanding: dict[int, int]
    pending: dict[int, int] = dataclasses.field(default_factory=dict)

    def arrive(self, worker: int, version: int) -> None:
        """Record that a worker's gradient has arrived, computed at that version."""
        del self.outstanding[worker]
        self.pending[worker] = version

    def leave(self, worker: int) -> None:
        """Record that a worker sends no more gradients."""
        del self.outstanding[worker]

    @property
    def workers(self) -> list[int]:
        """The workers that have not left."""
        return sorted(self.outstanding | self.pending)

    @property
    def ready(self) -> bool:
        """True if the pending gradients may be used now."""
        late = (self.version - v >= self.bound for v in self.outstanding.values())
        return bool(self.pending) and not any(late)

    def staleness(self) -> dict[int, int]:
        """Return the staleness of each pending gradient if it were used now, by worker."""
        return {worker: self.version - self.pending[worker] for worker in sorted(self.pending)}

    def use(self, *, changed: bool = True) -> None:
        """Record that the pending gradients were used, and whether they `changed` parameters."""
        self.version += changed
        self.pending.clear()

    def give(self, workers: Iterable[int]) -> None:
        """Record that workers receive the current parameters."""
        self.outstanding.update(dict.fromkeys(workers, self.version))
