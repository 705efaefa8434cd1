"""An equation of your own in three dimensions: Born modelling, and the image that is its adjoint.

A wave u in a smooth medium and the wave v that a small change m of the velocity scatters, to first
order in m:

    u_tt = c² Δu + s,    v_tt = c² Δv + 2 m c² Δu

You only write the Laplacian and `step`. `mg.apply_stencil` applies the Laplacian to both waves with
one message for each neighbour, and computes the interior while it travels. `mg.loops.scan` makes
the steps and bounds the memory of the adjoint.

    mpigrad launch -n 4 examples/born.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg

jax.config.update("jax_enable_x64", True)

grid = mg.Grid((24, 20, 18), (10.0, 10.0, 10.0))  # divided among the ranks along all axes
dt, steps = 2e-3, 90
x, y, z = grid.centers()
speed = jnp.asarray(2000.0 + 2.0 * z)
blob = jnp.asarray(np.exp(-((x - 70) ** 2 + (y - 100) ** 2 + (z - 60) ** 2) / (2 * 15.0**2)))
t = np.arange(steps) * dt - 0.04
wavelet = jnp.asarray((1 - 2 * (np.pi * 20 * t) ** 2) * np.exp(-((np.pi * 20 * t) ** 2)))
weights = (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12)  # of the second derivative, fourth order


def laplacian(p):
    """Return the Laplacian of a tile with two layers of cells on all sides."""
    inner = slice(2, -2)
    total = 0.0
    for axis, h in enumerate(grid.spacing):
        for k, w in enumerate(weights):
            shift = slice(k, p.shape[axis] - 4 + k)
            total += w / h**2 * p[*(shift if a == axis else inner for a in range(3))]
    return total


def spread(u):
    """Return the Laplacian of a field (lx, ly, lz, ...) that is zero outside the box."""
    return mg.apply_stencil(laplacian, u, grid, width=2, boundary=0.0)


def model(c):
    """Return the wave of all steps in this rank's cells, shape (steps, lx, ly, lz)."""

    def step(state, s):
        before, u = state
        after = 2 * u - before + dt**2 * (c**2 * spread(u) + s * blob)
        return (u, after), after

    return mg.loops.scan(step, (0 * blob, 0 * blob), steps, wavelet)[1]


def born(m):
    """Return the scattered wave of all steps. The waves u and v travel together."""

    def step(state, s):
        before, now = state
        curvature = speed[..., None] ** 2 * spread(now)
        first, scattered = curvature[..., 0] + s * blob, curvature[..., 1]
        force = jnp.stack([first, scattered + 2 * m * curvature[..., 0]], axis=-1)
        after = 2 * now - before + dt**2 * force
        return (now, after), after[..., 1]

    rest = jnp.zeros((*grid.local_shape, 2))
    budget = mg.loops.Budget(states=20)
    return mg.loops.scan(step, (rest, rest), steps, wavelet, checkpoints=budget)[1]


# A layer at a depth of 120 m scatters. What comes back is the tangent of the whole model.
change = jnp.asarray(0.01 * np.exp(-(((z - 120) / 10) ** 2)))
scattered, image_of = mg.vjp(born, change)
_, tangent = mg.jvp(model, (speed,), (speed * change,))
wrong, whole = (float(mg.allreduce(jnp.sum(a**2))) for a in (scattered - tangent, tangent))
error = (wrong / whole) ** 0.5
assert error < 1e-11, error

# The image of the scattered wave is the adjoint: <B m, B m> = <m, B' B m>, over all ranks.
(image,) = image_of(scattered)
energy, product = (
    float(mg.allreduce(jnp.vdot(a, b))) for a, b in ((scattered, scattered), (change, image))
)
assert abs(energy - product) < 1e-11 * energy, (energy, product)

if grid.comm.rank == 0:
    print(f"Born modelling and the tangent differ by {error:.1e}")
    print(f"the adjoint test: {energy:.12e} = {product:.12e}")
