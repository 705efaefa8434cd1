"""Errors of a parameter server: `trained.py CASE`."""

import itertools
import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

from mpigrad.training import Parameter, ParameterServer, Replica, trainer

rank = MPI.COMM_WORLD.rank
case = sys.argv[1]
LAYERS, NUMBERS, ROUNDS = 5, 20_000, 40  # 160 kB a layer: too much to be sent eagerly


class Patterns(Replica):
    """A model whose gradients identify their source: 10⁴ · worker + 10 · round + layer."""

    def __init__(self) -> None:
        super().__init__([Parameter(f"layer{i}", (NUMBERS,), "float64") for i in range(LAYERS)])
        self.round = 0

    model = None

    def gradient(self, batch, weight, ready=None, *, add=False):
        self.round += 1
        for layer, place in enumerate(self.gradients.arrays):
            place[:] = weight * (10_000 * rank + 10 * self.round + layer)
        return 0.0

    def update(self, skip=frozenset()):
        """Of one gradient, or of the mean of several: layers differ by their numbers alone."""
        first = self.gradients.arrays[0]
        for layer, place in enumerate(self.gradients.arrays):
            assert np.all(abs(place - first[0] - layer) < 1e-6), f"layer {layer} is mixed"

    def read(self):
        for place in self.values.arrays:
            place[:] += 1

    def write(self):
        numbers = [np.unique(place) for place in self.values.arrays]
        assert len(np.unique(numbers)) == 1, "parameters of several versions"

    def state(self):
        return b""

    def load(self, state):
        pass


def batches():
    for number in itertools.count(1):
        if case == "raises" and rank == 2 and number == 20:
            raise LookupError("no file of that name")
        if case == "leaves" and rank == 2 and number == 20:
            sys.exit()
        if case == "dies" and rank == 2 and number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "raises" and rank == 1:
            time.sleep(0.01)
        if case == "patterns" and number > ROUNDS:
            return
        yield (np.ones(1),)


coach = trainer(Patterns(), strategy=ParameterServer(staleness=7))
history = coach.run(batches())
if rank == 0:
    workers = MPI.COMM_WORLD.size - 1
    assert sum(history.staleness.values()) == workers * ROUNDS, history.staleness
    print(f"{len(history.records)} updates in {history.records[-1].seconds:.1f} s")
