"""Echoes: find the places in the ground that reflected the waves of a shot.

A shot goes off at the surface, and receivers next to it record the waves. Our model of the ground
has one velocity. The true ground also contains a lens and a layer that we do not know. The misfit
compares the recordings with those of the model. Its gradient with respect to the velocity of every
cell is a picture of the lens and the layer. Seismologists call this migration. It takes one forward
run and one backward run of each shot, on tiles of the ground.

    mpigrad launch -n 2 examples/echoes.py echoes.png
"""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad_apps import report

# The ground: 96 x 56 cells of 10 m, x to the right and y downwards. Waves leave it through
# absorbing layers on all four sides.
grid = mg.Grid((96, 56), (10.0, 10.0))
x, y = grid.centers()
steps, dt = 420, 2e-3
model = mg.waves.Acoustic(grid, dt=dt, steps=steps)

known = jnp.full(grid.local_shape, 2000.0, jnp.float32)
slow_lens = ((x - 320) / 90) ** 2 + ((y - 260) / 35) ** 2 < 1
bed = y > 400 + 0.08 * x
true = known - 250.0 * jnp.asarray(slow_lens, jnp.float32) + 300.0 * jnp.asarray(bed, jnp.float32)

# Eight shots, 47 receivers, and a wavelet of 12 Hz for all.
survey = mg.waves.Survey(
    sources=np.array([[[60.0 + 120 * k, 25.0]] for k in range(8)]),
    receivers=np.array([[[20.0 + 20 * k, 25.0] for k in range(47)]]),
)
phase = (np.pi * 12 * (np.arange(steps) * dt - 0.1)) ** 2
wavelet = jnp.asarray((1 - 2 * phase) * np.exp(-phase), jnp.float32)[None, None]

heard = model.propagate(true, wavelet, survey).gathers  # (shots, receivers, steps), on every rank


@mg.jit
def migrate(velocity):
    """Return the misfit and its derivative with respect to this rank's cells."""

    def misfit(velocity):
        difference = model.propagate(velocity, wavelet, survey).gathers - heard
        return 0.5 * jnp.sum(difference**2)

    return mg.value_and_grad(misfit, loss="replicated")(velocity)


misfit, gradient = migrate(known)

# A small step against the gradient decreases the misfit by the amount that the gradient predicts.
slope = grid.comm.mpi.allreduce(float(jnp.vdot(gradient, gradient)))
step = 1e-3 * misfit / slope
less, _ = migrate(known - step * gradient)
assert abs((misfit - less) / (step * slope) - 1) < 0.05

image = grid.gather(-gradient)
ground = grid.gather(true)
if image is not None and ground is not None:
    print(f"misfit {float(misfit):.3e}; {image.size} derivatives by one backward run of each shot")
    if sys.argv[-1].endswith(".png"):
        image[:, :8] = 0  # directly below the shots the waves of all receivers meet
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
