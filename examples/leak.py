"""A leak, found from measurements downstream.

The wind carries the substance away, it spreads, and a reaction that is faster than both uses it up
where there is much of it. Diffusion and reaction are implicit in time, the wind is explicit. The
unknown is the rate of the leak in each cell. Measured is the concentration at some cells and times.

    mpigrad launch -n 4 examples/leak.py leak.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import ode, optimize, sparse

jax.config.update("jax_enable_x64", True)

n = 32
grid = mg.Grid((n, n), (1 / n, 1 / n), periodic=(True, True))
x, y = grid.centers()
wind = 0.6 + 0.3 * jnp.sin(2 * jnp.pi * y)  # along x


def settle(t, c, leak):
    """Return the rate of change by diffusion, reaction and the leak."""
    p = mg.halo_exchange(c, grid)
    spread = (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * c) * n**2
    return 4e-3 * spread - 200 * c**3 + leak


def drift(t, c, leak):
    """Return the rate of change by the wind, from upwind differences."""
    return -wind * (c - mg.halo_exchange(c, grid)[:-2, 1:-1]) * n


def concentrations(leak):
    """Return c at three times after the leak begins."""
    times, clean = jnp.array([0.0, 0.2, 0.4, 0.6]), jnp.zeros(grid.local_shape)
    solution = ode.integrate(
        settle, clean, times, (leak,), ode.KenCarp3(), explicit=drift, rtol=1e-3, atol=1e-5,
        solver=sparse.PCG(rtol=1e-8), max_steps=64,
    )  # fmt: skip
    return solution.value[1:]


true = 3.0 * jnp.exp(-(((x - 0.3) / 0.06) ** 2) - ((y - 0.6) / 0.06) ** 2)
true = true + 2.0 * jnp.exp(-(((x - 0.5) / 0.05) ** 2) - ((y - 0.25) / 0.08) ** 2)
i, j = (jnp.round(v * n - 0.5).astype(int) for v in (x, y))
sensors = ((i % 2 == 0) & (j % 2 == 0)).astype(float)
noise = np.random.default_rng(1).normal(0, 1e-3, (3, n, n))[(slice(None), *grid.slices)]
measured = mg.jit(concentrations)(true) + noise


def misfit(root):
    """Return this rank's share. The square of the unknown is the leak, so it is not negative."""
    fit = jnp.sum(sensors * (concentrations(root**2) - measured) ** 2) / 1e-6
    p = mg.halo_exchange(root, grid)
    rough = jnp.sum((p[2:, 1:-1] - root) ** 2 + (p[1:-1, 2:] - root) ** 2)
    return 0.5 * fit + 10 * rough


first = 0.3 * jnp.ones(grid.local_shape)
found = optimize.minimize(misfit, first, sharded=grid, max_steps=60, rtol=1e-3)
leak = found.value**2
error = mg.rms_norm(leak - true) / mg.rms_norm(true)
assert error < 0.4, error

fields = [grid.gather(field) for field in (true, leak, measured[-1])]
if fields[0] is not None:
    print(f"{int(found.stats['num_steps'])} steps of L-BFGS; error of the leak {error:.2f}")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        titles = ("leak, true", "leak, found", "measured at t = 0.6")
        for axes, field, title in zip(figure.subplots(1, 3), fields, titles, strict=True):
            top = np.max(fields[2] if field is fields[2] else fields[0])
            image = axes.imshow(field.T, origin="lower", cmap="magma", vmin=0, vmax=top)
            axes.set_title(title)
            axes.set_xticks([])
            axes.set_yticks([])
            figure.colorbar(image, ax=axes, shrink=0.8)
        figure.savefig(sys.argv[-1], dpi=110)
