"""Turbulence by Fourier transforms: the Taylor–Green vortex, and its sensitivity to its start.

The Navier–Stokes equations of an incompressible fluid in a periodic box, on 24³ cells. The three
components of the velocity travel together in each transform. `layout.wavenumbers()` are those of
this rank, so `step` is written as on one process.

    mpigrad launch -n 2 examples/taylor_green.py vortex.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fft

jax.config.update("jax_enable_x64", True)

n, reynolds, dt, steps = 24, 100.0, 0.02, 25
grid = mg.Grid((n, n, n), (2 * np.pi / n,) * 3, periodic=True)
layout = fft.Layout.of(grid, real=True)
k = layout.wavenumbers()
k2 = sum(component**2 for component in k)
decay = jnp.exp(-k2 * dt / reynolds)[..., None]  # viscosity, exactly


def curl(u):
    """Return i k × u of a spectrum (mx, my, mz, 3)."""
    x, y, z = (1j * component for component in k)
    a, b, c = u[..., 0], u[..., 1], u[..., 2]
    return jnp.stack([y * c - z * b, z * a - x * c, x * b - y * a], axis=-1)


def force(u):
    """Return the part of u × ω without divergence: the pressure takes the other part."""
    velocity, vorticity = fft.inverse((u, curl(u)), layout)
    f = fft.dealias(fft.forward(jnp.cross(velocity, vorticity), layout), layout)
    along = sum(component * f[..., i] for i, component in enumerate(k)) / jnp.maximum(k2, 1)
    return f - jnp.stack([component * along for component in k], axis=-1)


def step(u, _):
    """Advance the spectrum of the velocity by one step of Heun's method."""
    first = force(u)
    guess = decay * (u + dt * first)
    return decay * (u + dt / 2 * first) + dt / 2 * force(guess), enstrophy(u)


def enstrophy(u):
    """Return the mean of |ω|² / 2 over this rank's share of the box."""
    vorticity = fft.inverse(curl(u), layout)
    return jnp.sum(vorticity**2) / 2 / grid.size


x, y, z = grid.centers()
start = jnp.stack(
    [np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z), 0 * x], -1
)


def final(velocity):
    """Return this rank's share of the final enstrophy, and of that before each step."""
    last, before = mg.loops.scan(
        step, fft.forward(velocity, layout), steps, checkpoints=mg.loops.Budget(states=11)
    )
    return enstrophy(last), before


(_, history), gradient = mg.jit(mg.value_and_grad(final, has_aux=True))(start)
history = np.asarray(mg.allreduce(history))

# Taylor and Green (1937) expand the enstrophy over its start in powers of the time.
t = dt * np.arange(steps)
series = 1 - 6 * t / reynolds + (5 / 48 + 18 / reynolds**2) * t**2
series -= (5 / 3 + 36 / reynolds**2) * t**3 / reynolds
early = t <= 0.2
assert abs(history[0] - 3 / 8) < 1e-12
assert np.allclose(history[early] / history[0], series[early], rtol=0, atol=2e-4)

mg.taylor_test(lambda u: final(u)[0], start, step=1e-3, halvings=2)

slices = [grid.gather(field[..., 0]) for field in (start, gradient)]
if grid.comm.rank == 0:
    print(f"enstrophy {history[0]:.4f} at first, {history[-1]:.4f} at t = {t[-1]:.2f}")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.5, 3.4), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        left.plot(t, history / history[0], label=f"Re = {reynolds:.0f}")
        left.plot(t, series, ":", label="Taylor and Green (1937)")
        left.set(xlabel="time", ylabel="enstrophy / enstrophy at first")
        left.legend(frameon=False)
        for axes, field, title in (
            (middle, slices[0], "velocity along x at first, z = 0"),
            (right, slices[1], "gradient of the final enstrophy"),
        ):
            image = axes.imshow(field[:, :, 0].T, origin="lower", cmap="RdBu_r")
            figure.colorbar(image, ax=axes)
            axes.set_title(title)
        figure.savefig(sys.argv[-1], dpi=110)
