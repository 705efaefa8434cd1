"""Echoes: where in the ground a shot's waves were thrown back.

A shot goes off at the surface, and receivers beside it listen. The ground that we know has one
velocity; the true one has two things in it that we do not know. What we would have heard is
subtracted from what was heard, and the gradient of the misfit by the velocity of every cell is a
picture of what made the difference: migration, in the words of seismics. One forward run of each
shot and one backward run, on tiles of the ground.

    mpigrad launch -n 2 examples/echoes.py echoes.png
"""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves.acoustic import Acoustic, Survey
from mpigrad_apps import report

# The ground: 96 x 56 cells of 10 m, x to the right and y downwards. Waves leave it through
# absorbing layers on all four sides.
grid = Grid((96, 56), (10.0, 10.0))
x, y = grid.centers()
steps, dt = 420, 2e-3
model = Acoustic(grid, dt=dt, steps=steps)

known = jnp.full(grid.local_shape, 2000.0, jnp.float32)
slow_lens = ((x - 320) / 90) ** 2 + ((y - 260) / 35) ** 2 < 1
bed = y > 400 + 0.08 * x
true = known - 250.0 * jnp.asarray(slow_lens, jnp.float32) + 300.0 * jnp.asarray(bed, jnp.float32)

# Eight shots, 47 receivers, and a wavelet of 12 Hz for all.
survey = Survey(
    sources=np.array([[[60.0 + 120 * k, 25.0]] for k in range(8)]),
    receivers=np.array([[[20.0 + 20 * k, 25.0] for k in range(47)]]),
)
phase = (np.pi * 12 * (np.arange(steps) * dt - 0.1)) ** 2
wavelet = jnp.asarray((1 - 2 * phase) * np.exp(-phase), jnp.float32)[None, None]

heard = model.propagate(true, wavelet, survey).gathers  # (shots, receivers, steps), on every rank


@mpigrad.jit
def migrate(velocity):
    """The misfit, and its derivative by this rank's cells."""

    def misfit(velocity):
        difference = model.propagate(velocity, wavelet, survey).gathers - heard
        return 0.5 * jnp.sum(difference**2)

    return mpigrad.value_and_grad(misfit, loss="replicated")(velocity)


misfit, gradient = migrate(known)

# A small step against the gradient makes the misfit smaller by as much as the gradient says.
slope = grid.comm.mpi.allreduce(float(jnp.vdot(gradient, gradient)))
step = 1e-3 * misfit / slope
less, _ = migrate(known - step * gradient)
assert abs((misfit - less) / (step * slope) - 1) < 0.05

image = grid.gather(-gradient)
ground = grid.gather(true)
if image is not None and ground is not None:
    print(f"misfit {float(misfit):.3e}; {image.size} derivatives by one backward run of each shot")
    if sys.argv[-1].endswith(".png"):
        image[:, :8] = 0  # right below the shots all waves meet
        look = {"extent": (0.0, 960.0, 0.0, 560.0), "labels": ("x (m)", "depth (m)")}
        panels = [
            report.Panel("true velocity (m/s)", ground, downwards=True, **look),
            report.Panel(
                "minus the gradient of the misfit",
                np.clip(image, *np.quantile(image, [0.01, 0.99])),
                diverging=True,
                downwards=True,
                **look,
            ),
        ]
        pathlib.Path(sys.argv[-1]).write_bytes(report.maps("echoes", "", panels).png)
