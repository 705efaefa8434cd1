"""The rule of the parameter server: staleness within the bound, and no worker starves."""

from __future__ import annotations

import collections
import heapq

import numpy as np
import pytest

from mpigrad.training.server import Versions

UPDATES = 10_000


@pytest.mark.ranks(1)
@pytest.mark.parametrize("bound", [0, 1, 3, 7])
@pytest.mark.parametrize("workers", [2, 5])
def test_ten_thousand_updates_with_random_delays(bound: int, workers: int) -> None:
    """Delays of very different length: bursts, a worker that is ten times slower, pauses."""
    dice = np.random.default_rng([bound, workers])
    slowness = dict(enumerate(dice.permutation(np.geomspace(1, 10, workers)), start=1))
    versions = Versions(bound, 0, dict.fromkeys(slowness, 0))
    time, arrivals = 0.0, [(0.0, worker) for worker in slowness]
    seen: collections.Counter[int] = collections.Counter()
    taken: collections.Counter[int] = collections.Counter()
    while versions.version < UPDATES:
        assert arrivals, "everybody waits for the server, and it for nobody"
        time, worker = heapq.heappop(arrivals)
        versions.arrive(worker, versions.outstanding[worker])
        while arrivals and dice.random() < 0.3:  # others have come as well
            time, worker = heapq.heappop(arrivals)
            versions.arrive(worker, versions.outstanding[worker])
        if not versions.ready:
            continue
        staleness = versions.staleness()
        assert list(staleness) == sorted(staleness)
        assert bound > 0 or len(staleness) == workers
        seen.update(staleness.values())
        taken.update(list(staleness))
        versions.use()
        versions.give(staleness)
        for worker in staleness:
            pause = 50.0 * (dice.random() < 0.01)
            delay = slowness[worker] * dice.exponential() + pause
            heapq.heappush(arrivals, (time + delay, worker))
    assert max(seen) == bound  # it is reached as well
    assert len(taken) == workers and min(taken.values()) >= UPDATES // (bound + 1)


@pytest.mark.ranks(1)
def test_the_server_does_not_wait_for_workers_that_left() -> None:
    versions = Versions(0, 0, {1: 0, 2: 0, 3: 0})
    versions.arrive(3, 0)
    versions.arrive(1, 0)
    assert not versions.ready and versions.workers == [1, 2, 3]
    versions.leave(2)
    assert versions.ready and versions.staleness() == {1: 0, 3: 0}
    versions.use()
    versions.give([1, 3])
    assert versions.version == 1 and versions.outstanding == {1: 1, 3: 1}
    versions.arrive(1, 1)
    versions.leave(3)
    assert versions.ready and versions.staleness() == {1: 0}
    versions.use(changed=False)
    assert versions.version == 1 and versions.workers == [] and not versions.ready
