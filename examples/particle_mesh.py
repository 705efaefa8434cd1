"""Gravity on a mesh: particles that move between ranks, and the gradient in the density at first.

Each step spreads the particles' mass on the mesh (cloud in cell), solves for the potential by
Fourier transforms, interpolates the force at the particles, and moves them. A particle that leaves
its tile goes to the neighbouring rank. The same program runs on one rank alone, and has the same
gradient. The functions work on grids with two and three axes.

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

steps, dt = 6, 0.5
room = 40  # for particles that arrive, and the most that go to one rank in a step


def corners(x, grid):
    """Return the 4 or 8 cells of the padded tile around each position, and their weights."""
    first = np.array([part.start for part in grid.slices])
    low = jnp.floor(x - 0.5)
    part = x - 0.5 - low
    for step in itertools.product((0, 1), repeat=grid.ndim):
        at = tuple(((low - first + 1).astype(int) + np.array(step)).T)
        weight = jnp.prod(jnp.where(np.array(step), part, 1 - part), axis=1)
        yield at, weight


def spread(x, mass, grid):
    """Return the mass in each cell: the transpose of interpolation, and of the halo exchange."""
    padded = jnp.zeros(tuple(n + 2 for n in grid.local_shape))
    for at, weight in corners(x, grid):
        padded = padded.at[at].add(weight * mass, mode="drop")
    _, transpose = mg.vjp(lambda f: mg.halo_exchange(f, grid), jnp.zeros(grid.local_shape))
    return transpose(padded)[0]


def interpolate(field, x, grid):
    """Return the field, of shape (lx, ly, 2) or (lx, ly, lz, 3), at the positions."""
    padded = mg.halo_exchange(field, grid)
    return sum(weight[:, None] * padded[at] for at, weight in corners(x, grid))


def step(state, _, grid):
    """Kick and drift, and send particles to the ranks of their new cells."""
    x, v, mass, alive = state
    layout = fft.Layout(grid, real=True)
    density = spread(x, mass, grid)
    potential = -fft.solve_helmholtz(density, layout)
    force = -jnp.stack(fft.gradient(potential, layout), axis=-1)
    v = v + dt * interpolate(force, x, grid)
    x = (x + dt * v) % np.array(grid.shape)
    x = jnp.where(x < np.array(grid.shape), x, 0.0)  # -1e-17 % 8 is 8.0
    owner = rank_at_position(x, grid)
    leaving = jnp.sum(alive & (owner != grid.comm.rank))
    (x, v, mass), alive = exchange_particles((x, v, mass), owner, alive, room, comm=grid.comm)
    return (x, v, mass, alive), leaving


def final_density(contrast, grid):
    """Return the mass in each cell at the end, and how many particles have left this rank.

    At first there is a particle in each cell.
    """
    x = jnp.stack(grid.centers(), axis=-1).reshape(-1, grid.ndim)
    state = (x, jnp.zeros_like(x), 1 + contrast.reshape(-1), jnp.ones(len(x), bool))
    state = tuple(jnp.pad(a, ((0, room), *[(0, 0)] * (a.ndim - 1))) for a in state)
    (x, _, mass, _), left = jax.lax.scan(lambda s, i: step(s, i, grid), state, None, length=steps)
    return spread(x, mass, grid), jnp.sum(left)


def clumping(contrast, grid):
    """Return this rank's share of the sum of squares of the final density."""
    return jnp.sum(final_density(contrast, grid)[0] ** 2)


def initial_contrast(grid):
    """Return this rank's part of a random field."""
    whole = 0.3 * np.random.default_rng(0).normal(size=grid.shape)
    return jnp.asarray(whole[grid.slices])


def run(cells, comm):
    """Return the final density, the gradient of the clumping, and how many particles moved."""
    grid = mg.Grid(cells, (1.0,) * len(cells), comm, periodic=True)
    contrast = initial_contrast(grid)
    gradient = mg.jit(mg.grad(lambda c: clumping(c, grid)))(contrast)
    density, left = mg.jit(lambda c: final_density(c, grid))(contrast)
    return grid, density, gradient, mg.allreduce(left, comm=comm)


def main():
    """Compare with one rank, and draw."""
    world = mg.default_communicator()
    alone = world.split(world.rank)  # a communicator of this rank only
    grid, density, gradient, left = run((16, 16), world)
    _, whole_density, whole_gradient, _ = run((16, 16), alone)
    assert left > 0 or world.size == 1
    assert np.allclose(density, whole_density[grid.slices], rtol=1e-10)
    assert np.allclose(gradient, whole_gradient[grid.slices], rtol=1e-8, atol=1e-10)

    if world.rank == 0:
        print(f"largest density {whole_density.max():.3f} after {steps} steps")
        print(f"{left} times a particle moved to another rank")
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


if __name__ == "__main__":
    main()
