"""Measure the memory of a wave gradient, with all steps stored and within a budget."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Storage, acoustic, elastic

STEPS, BUDGET = 3000, int(sys.argv[1])
grid = Grid((60, 60), (10.0, 10.0))
survey = acoustic.Survey(np.array([[[300.0, 300.0]]]), np.array([[[100.0, 200.0]]]))


def pressure(c, wavelets, **settings):
    model = acoustic.Acoustic(grid, 1e-3, wavelets.size, pml=8, max_velocity=2e3, **settings)
    return model.propagate(2e3 * c, wavelets, survey).gathers


def velocities(c, wavelets, **settings):
    model = elastic.Elastic(grid, 1e-3, wavelets.size, 15.0, pml=8, max_velocity=2e3, **settings)
    return model.propagate(
        elastic.ElasticMedium(4e9 * c, 2e9 * c, 2e3 * c), wavelets, survey
    ).gathers


def gradient(waves, steps=STEPS, **settings):
    """Return a gradient, and the bytes by which its computation raised the peak of memory."""
    wavelets = jnp.sin(jnp.arange(steps, dtype="float32"))[None, None]
    loss = lambda c: jnp.sum(waves(c, wavelets, **settings) ** 2)
    c = jnp.ones(grid.shape, "float32")
    compiled = jax.jit(mpigrad.grad(loss)).lower(c).compile()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is what is there now
    before = peak()
    return np.asarray(compiled(c)), peak() - before


def peak():
    # Not getrusage's: that of a process which was started by a larger one begins with the latter's.
    with open("/proc/self/status") as lines:
        (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return 1024 * int(kilobytes)


def main():
    found = {}
    kinds = (pressure, velocities)
    for waves in kinds:
        gradient(waves, steps=20)  # the fields of a step stay
        found[waves] = gradient(waves, storage=Storage(memory=BUDGET))
    for waves in kinds:
        g, within = found[waves]
        every, stored = gradient(waves, storage=Storage("all"))
        print(json.dumps((waves.__name__, within, stored, np.array_equal(g, every))))


main()
