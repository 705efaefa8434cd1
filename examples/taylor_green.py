"""Turbulence by Fourier transforms: the Taylor–Green vortex, and its sensitivity to its start.

The Navier–Stokes equations of an incompressible fluid in a periodic box, on 24³ cells. The three
components of the velocity travel together in each transform. `layout.wavenumbers()` are those of
this rank, so `step` is written as on one process. bench/vortex.py runs it at higher Reynolds
numbers.

    mpigrad launch -n 2 examples/taylor_green.py vortex.png
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fft

jax.config.update("jax_enable_x64", True)


class Flow:
    """The equations on n³ cells of a box with sides 2π, with time steps dt."""

    def __init__(self, n, reynolds, dt, comm=None):
        self.dt = dt
        self.grid = mg.Grid((n, n, n), (2 * np.pi / n,) * 3, comm, periodic=True)
        self.layout = fft.Layout(self.grid, real=True)
        self.k = self.layout.wavenumbers()
        self.k2 = sum(component**2 for component in self.k)
        self.decay = np.exp(-self.k2 * dt / reynolds)[..., None]  # viscosity, exactly

    def start(self):
        """Return this rank's tile of the velocity at first, of shape (lx, ly, lz, 3)."""
        x, y, z = self.grid.centers()
        u, v = np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z)
        return jnp.stack([u, v, 0 * u], -1)

    def curl(self, u):
        """Return i k × u of a spectrum (mx, my, mz, 3)."""
        x, y, z = (1j * component for component in self.k)
        a, b, c = u[..., 0], u[..., 1], u[..., 2]
        return jnp.stack([y * c - z * b, z * a - x * c, x * b - y * a], axis=-1)

    def force(self, u):
        """Return the part of u × ω without divergence: the pressure takes the other part."""
        velocity, vorticity = fft.inverse((u, self.curl(u)), self.layout)
        f = fft.forward(jnp.cross(velocity, vorticity), self.layout)
        f = fft.dealias(f, self.layout)
        along = sum(component * f[..., i] for i, component in enumerate(self.k))
        along = along / np.maximum(self.k2, 1)
        return f - jnp.stack([component * along for component in self.k], axis=-1)

    def step(self, u, _=None):
        """Advance the spectrum of the velocity by one step of Heun's method."""
        first = self.force(u)
        guess = self.decay * (u + self.dt * first)
        second = self.decay * (u + self.dt / 2 * first) + self.dt / 2 * self.force(guess)
        return second, self.enstrophy(u)

    def energy(self, u):
        """Return this rank's share of the mean of |u|² / 2."""
        return jnp.sum(fft.inverse(u, self.layout) ** 2) / 2 / self.grid.size

    def enstrophy(self, u):
        """Return this rank's share of the mean of |ω|² / 2."""
        return self.energy(self.curl(u))

    def final(self, velocity, steps):
        """Return this rank's share of the final enstrophy, and of that before each step."""
        last, before = mg.loops.scan(
            self.step,
            fft.forward(velocity, self.layout),
            steps,
            checkpoints=mg.loops.Budget(states=11),
        )
        return self.enstrophy(last), before


def main():
    """Compare with a series in time, test the gradient, and draw."""
    reynolds, dt, steps = 100.0, 0.02, 25
    flow = Flow(24, reynolds, dt)
    start = flow.start()
    final = functools.partial(flow.final, steps=steps)
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

    slices = [flow.grid.gather(field[..., 0]) for field in (start, gradient)]
    if flow.grid.comm.rank == 0:
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


if __name__ == "__main__":
    main()
