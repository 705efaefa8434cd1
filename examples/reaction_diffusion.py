"""A stencil of one's own: two chemicals that make patterns, and what a drop does to them.

Gray and Scott's reaction: u feeds v, which decays; both diffuse. `step` is all that there is to
write. `Grid` divides the cells among the ranks, `halo_exchange` brings the neighbours' cells, both
chemicals in one message, and `loops.scan` makes the steps, and keeps of them what the gradient
may keep.

    mpigrad launch -n 4 examples/reaction_diffusion.py pattern.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad import loops
from mpigrad.grid import Grid, halo_exchange

jax.config.update("jax_enable_x64", True)

grid = Grid((48, 48), (1.0, 1.0))
diffusion, kill = np.array([0.16, 0.08]), 0.062


def step(state, feed):
    """One step of (lx, ly, 2) concentrations; nothing flows through the edge."""
    p = halo_exchange(state, grid, boundary="edge")
    spread = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * state
    u, v = state[..., 0], state[..., 1]
    eaten = u * v**2
    growth = jnp.stack([feed * (1 - u) - eaten, eaten - (feed + kill) * v], axis=-1)
    return state + diffusion * spread + growth


# A drop of v in a sea of u. Its edge becomes a front, which leaves hungry land behind.
x, y = grid.centers()
drop = (np.abs(x - 22) < 5) & (np.abs(y - 25) < 4)
first = jnp.stack([1 - 0.5 * drop, 0.25 * drop], axis=-1)
steps = 1000


def pattern(state, feed, checkpoints=None):
    """The concentrations after all steps; `feed` has a value for each of the tile's cells."""
    after, _ = loops.scan(
        lambda state, _: (step(state, feed), None), state, steps, checkpoints=checkpoints
    )
    return after


def yield_of(feed):
    """This rank's share of the v that is there in the end."""
    return jnp.sum(pattern(first, feed, loops.Budget(states=65))[..., 1])


# Where would more food have made more v? One gradient, that keeps 65 of the 1000 states.
feed = jnp.full(grid.local_shape, 0.037)
total, sensitivity = mpigrad.jit(mpigrad.value_and_grad(yield_of))(feed)

# The gradient is that of the program: the difference that a little more and a little less make.
run = mpigrad.jit(pattern)
end, change = run(first, feed), 1e-6 * jnp.cos(x / 9) * feed
more, less = (float(jnp.sum(run(first, feed + f)[..., 1])) for f in (change, -change))
slope = grid.comm.mpi.allreduce(float(jnp.vdot(sensitivity, change)))
difference = grid.comm.mpi.allreduce(more - less) / 2
assert abs(difference - slope) < 1e-4 * abs(slope), (difference, slope)

whole, map_of = grid.gather(end[..., 1]), grid.gather(sensitivity)
if whole is not None and map_of is not None:
    print(f"v after {steps} steps: {total:.3f}; along the change of food: {slope:+.3e}")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        image = left.imshow(whole.T, origin="lower", cmap="magma")
        figure.colorbar(image, ax=left)
        left.set_title(f"v after {steps} steps")
        largest = np.quantile(np.abs(map_of), 0.995)
        image = right.imshow(map_of.T, origin="lower", cmap="RdBu_r", vmin=-largest, vmax=largest)
        figure.colorbar(image, ax=right)
        right.set_title("gradient of the total v by the feed rate")
        figure.savefig(sys.argv[-1], dpi=110)
