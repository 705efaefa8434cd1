"""Gravity on a mesh: particles that move between ranks, and the gradient in the density at first.

Each step spreads the particles' mass on the mesh (cloud in cell), solves for the potential by
Fourier transforms, interpolates the force at the particles, and moves them. A particle that leaves
its tile goes to the neighbouring rank. The same program runs on one rank alone, and has the same
gradient.

    mpigrad launch -n 2 examples/particle_mesh.py particles.png
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fft
from mpigrad.grid import exchange_particles, rank_at_position

jax.config.update("jax_enable_x64", True)

cells, steps, dt = (16, 16), 4, 0.25
world = mg.default_communicator()
alone = world.split(world.rank)  # a communicator of this rank only


def corners(x, grid):
    """Return the four cells of the padded tile around each position, and their weights."""
    first = np.array([part.start for part in grid.slices])
    low = jnp.floor(x - 0.5)
    part = x - 0.5 - low
    for step in itertools.product((0, 1), repeat=2):
        i, j = ((low - first + 1).astype(int) + np.array(step)).T
        weight = jnp.prod(jnp.where(np.array(step), part, 1 - part), axis=1)
        yield (i, j), weight


def spread(x, mass, grid):
    """Return the mass in each cell: the transpose of interpolation, and of the halo exchange."""
    padded = jnp.zeros(tuple(n + 2 for n in grid.local_shape))
    for at, weight in corners(x, grid):
        padded = padded.at[at].add(weight * mass, mode="drop")
    _, transpose = mg.vjp(lambda f: mg.halo_exchange(f, grid), jnp.zeros(grid.local_shape))
    return transpose(padded)[0]


def interpolate(field, x, grid):
    """Return the field (lx, ly, 2) at the positions."""
    padded = mg.halo_exchange(field, grid)
    return sum(weight[:, None] * padded[at] for at, weight in corners(x, grid))


def step(state, _, grid):
    """Kick and drift, and send particles to the ranks of their new cells."""
    x, v, mass, alive = state
    layout = fft.Layout.of(grid, real=True)
    density = spread(x, mass, grid)
    potential = -fft.solve_helmholtz(density, layout)
    force = -jnp.stack(fft.gradient(potential, layout), axis=-1)
    v = v + dt * interpolate(force, x, grid)
    x = (x + dt * v) % np.array(grid.shape)
    (x, v, mass), alive = exchange_particles(
        (x, v, mass), rank_at_position(x, grid), alive, most=40, comm=grid.comm
    )
    return (x, v, mass, alive), None


def final_density(contrast, grid):
    """Return the mass in each cell at the end. At first there is a particle in each cell."""
    x = jnp.stack(grid.centers(), axis=-1).reshape(-1, 2)
    state = (x, jnp.zeros_like(x), 1 + contrast.reshape(-1), jnp.ones(len(x), bool))
    room = 40  # for particles that arrive
    state = tuple(jnp.pad(a, ((0, room), *[(0, 0)] * (a.ndim - 1))) for a in state)
    (x, _, mass, _), _ = jax.lax.scan(lambda s, i: step(s, i, grid), state, None, length=steps)
    return spread(x, mass, grid)


def clumping(contrast, grid):
    """Return this rank's share of the sum of squares of the final density."""
    return jnp.sum(final_density(contrast, grid) ** 2)


def run(comm):
    """Return the final density and the gradient of the clumping on these ranks."""
    grid = mg.Grid(cells, (1.0, 1.0), comm, periodic=True)
    contrast = jnp.asarray(0.3 * np.random.default_rng(0).normal(size=cells)[grid.slices])
    gradient = mg.jit(mg.grad(lambda c: clumping(c, grid)))(contrast)
    density = mg.jit(lambda c: final_density(c, grid))(contrast)
    return grid, density, gradient


grid, density, gradient = run(world)
_, whole_density, whole_gradient = run(alone)
assert np.allclose(density, whole_density[grid.slices], rtol=1e-10)
assert np.allclose(gradient, whole_gradient[grid.slices], rtol=1e-8, atol=1e-10)

if world.rank == 0:
    print(f"largest density {whole_density.max():.3f} after {steps} steps")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        figure.colorbar(left.imshow(whole_density.T, origin="lower", cmap="magma"), ax=left)
        left.set_title("density at the end")
        largest = np.abs(whole_gradient).max()
        image = right.imshow(
            whole_gradient.T, origin="lower", cmap="RdBu_r", vmin=-largest, vmax=largest
        )
        figure.colorbar(image, ax=right)
        right.set_title("gradient of the clumping in the density at first")
        figure.savefig(sys.argv[-1], dpi=110)
