"""A stencil of your own: two chemicals that form patterns, and the sensitivity to their feed rate.

In the reaction of Gray and Scott, u feeds v, v decays, and both diffuse. You only write `step`.
`mg.Grid` divides the cells among the ranks. `mg.halo_exchange` fetches the neighbours' cells, with
both chemicals in one message. `mg.loops.scan` makes the steps and stores as many states for the
gradient as its budget allows.

    mpigrad launch -n 4 examples/reaction_diffusion.py pattern.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg

jax.config.update("jax_enable_x64", True)

grid = mg.Grid((48, 48), (1.0, 1.0))
diffusion, kill = np.array([0.16, 0.08]), 0.062


def step(state, feed):
    """Advance the (lx, ly, 2) concentrations by one step. Nothing flows through the edge."""
    p = mg.halo_exchange(state, grid, boundary="edge")
    spread = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * state
    u, v = state[..., 0], state[..., 1]
    eaten = u * v**2
    growth = jnp.stack([feed * (1 - u) - eaten, eaten - (feed + kill) * v], axis=-1)
    return state + diffusion * spread + growth


# The start is a drop of v in a sea of u. Its edge becomes a front that uses up u.
x, y = grid.centers()
drop = (np.abs(x - 22) < 5) & (np.abs(y - 25) < 4)
first = jnp.stack([1 - 0.5 * drop, 0.25 * drop], axis=-1)
steps = 1000


def pattern(state, feed, checkpoints=None):
    """Return the concentrations after all steps. `feed` has one value for each cell of the tile."""
    after, _ = mg.loops.scan(
        lambda state, _: (step(state, feed), None), state, steps, checkpoints=checkpoints
    )
    return after


def yield_of(feed):
    """Return this rank's share of the final amount of v."""
    return jnp.sum(pattern(first, feed, mg.loops.Budget(states=65))[..., 1])


# The sensitivity of the final v to the feed rate: one gradient that stores 65 of the 1000 states.
feed = jnp.full(grid.local_shape, 0.037)
total, sensitivity = mg.jit(mg.value_and_grad(yield_of))(feed)

# The gradient agrees with a central difference along one change of the feed rate.
run = mg.jit(pattern)
end, change = run(first, feed), 1e-6 * jnp.cos(x / 9) * feed
more, less = (float(jnp.sum(run(first, feed + f)[..., 1])) for f in (change, -change))
slope = grid.comm.mpi.allreduce(float(jnp.vdot(sensitivity, change)))
difference = grid.comm.mpi.allreduce(more - less) / 2
assert abs(difference - slope) < 1e-4 * abs(slope), (difference, slope)

whole, map_of = grid.gather(end[..., 1]), grid.gather(sensitivity)
if whole is not None and map_of is not None:
    print(f"v after {steps} steps: {total:.3f}; along the change of the feed rate: {slope:+.3e}")
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
        right.set_title("gradient of the total v with respect to the feed rate")
        figure.savefig(sys.argv[-1], dpi=110)
