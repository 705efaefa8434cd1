"""Your own optimizer, written for one process, for an objective spread over ranks.

The optimizer is a few lines of NumPy: steepest descent with the step lengths of Barzilai and
Borwein (IMA Journal of Numerical Analysis 8, 1988, 141-148). It runs on rank 0 and does not use
MPI. The other ranks compute their parts of the objective when rank 0 asks for them.

    mpigrad launch -n 2 examples/own_loop_on_the_root.py membrane.png
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad_apps import report

jax.config.update("jax_enable_x64", True)

# A membrane over the unit square is pressed down by its weight and held at height 0 on its edge.
# Each rank has a tile of its cells, and computes the heights there from 16 unknowns, the amplitudes
# of sines. The objective is the energy of the membrane.
n = 16
grid = mg.Grid((n, n), (1 / n, 1 / n))
x, y = (jnp.asarray(axis) for axis in grid.centers())
modes = jnp.stack(
    [jnp.sin(i * jnp.pi * x) * jnp.sin(j * jnp.pi * y) for i in range(1, 5) for j in range(1, 5)]
)


def energy(a):
    """Return the energy of this rank's tile. The halo is a message to the neighbours."""
    u = jnp.tensordot(a, modes, 1)
    p = mg.halo_exchange(u, grid, boundary=0.0)
    around = (p[:-2, 1:-1], p[2:, 1:-1], p[1:-1, :-2], p[1:-1, 2:])
    stretch = sum(jnp.sum((u - side) ** 2) for side in around) / 4  # each pair is counted twice
    return stretch + jnp.sum(u) / n**2


def descend(value_and_gradient, x, iterations, tolerance):
    value, g = value_and_gradient(x)
    step = 1e-3
    for k in range(iterations):
        x_new = x - step * g
        value, g_new = value_and_gradient(x_new)
        s, y = x_new - x, g_new - g
        step = (s @ s) / (s @ y)
        x, g = x_new, g_new
        if np.abs(g).max() < tolerance:
            return x, value, np.abs(g).max(), k + 1
    raise RuntimeError(f"descend: the gradient is above {tolerance} after {iterations} steps")


with mg.optimize.root_objective(energy, jnp.zeros(len(modes))) as objective:
    if objective:  # only on rank 0. The other ranks serve until rank 0 leaves the block
        objective.result = descend(objective.value_and_gradient, objective.x0, 200, 1e-8)

# The result is on every rank now.
a, value, gradient, iterations = objective.result
heights = grid.gather(jnp.tensordot(a, modes, 1))  # on rank 0
if heights is not None:
    print(f"energy {value:.5f} after {iterations} steps, largest derivative {gradient:.0e}")
    if sys.argv[-1].endswith(".png"):
        panel = report.Panel("height of the membrane", heights)
        pathlib.Path(sys.argv[-1]).write_bytes(report.maps("membrane", "", [panel]).png)
assert gradient < 1e-8
assert value < -0.01
