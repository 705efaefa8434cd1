"""An electrode of a battery, and what its voltage says about it.

Porous electrode theory (Newman and Tiedemann, AIChE Journal 21, 1975): at each depth there are
particles, whose lithium c diffuses along their radius, the potential of the solid, and that of the
liquid between. Neither potential has a time derivative, so the equations are differential and
algebraic. Three constants are found from the voltage under pulses of current: the diffusivity in
the particles, the rate of the reaction at their surface, and the conductivity of the liquid.
Potentials are in units of RT/F, 25.7 mV. Depth, radius, and the time of a full charge are 1.

    mpigrad launch -n 2 examples/battery.py battery.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import ode, optimize, sparse

jax.config.update("jax_enable_x64", True)

n, shells = 32, 8
grid = mg.Grid((n,), (1 / n,))
(x,) = grid.centers()
h = 1 / n
faces = np.linspace(0, 1, shells + 1)
areas, volumes = faces[1:-1] ** 2, np.diff(faces**3) / 3
solid = 20.0  # its conductivity
at_collector = x > 1 - h
pulses = np.array([[0.02, 0.14], [0.24, 0.36], [0.46, 0.58]])
times = np.linspace(0, 0.66, 34)


def current(t):
    """Return the current at time t: pulses that rise and fall smoothly, as the equations need."""
    rise, fall = jnp.tanh((t - pulses[:, 0]) / 2e-3), jnp.tanh((t - pulses[:, 1]) / 2e-3)
    return jnp.sum(rise - fall) / 2


def open_voltage(c):
    """Return the voltage of particles with lithium c at rest."""
    return 150 - 12 * c + jnp.log((1 - c) / c)


def rate(t, y, constants):
    """Return the rate of the lithium, and the two balances of charge: y is (cells, shells + 2)."""
    diffusivity, reaction, liquid = constants
    c, potentials = y[:, :-2], y[:, -2:]
    surface = c[:, -1]
    excess = potentials[:, 0] - potentials[:, 1] - open_voltage(surface)
    leaving = 2 * reaction * jnp.sqrt(surface * (1 - surface)) * jnp.sinh(excess / 2)
    inward = diffusivity * jnp.diff(c) * shells * areas
    outer = jnp.concatenate([inward, -leaving[:, None]], axis=1)
    lithium = (outer - jnp.pad(inward, ((0, 0), (1, 0)))) / volumes

    p = mg.halo_exchange(potentials, grid)
    steps = jnp.diff(p, axis=0) / h
    # At the separator, x = 0, the potential of the liquid is 0. The current leaves at x = 1.
    first = jnp.where(x < h, 2 * potentials[:, 1] / h, steps[:-1, 1])
    last = jnp.where(at_collector, -current(t) / solid, steps[1:, 0])
    in_solid = solid * (last - steps[:-1, 0]) / h
    in_liquid = liquid * (steps[1:, 1] - first) / h
    charge = jnp.stack([in_solid - 3 * leaving, in_liquid + 3 * leaving], axis=1)
    return jnp.concatenate([lithium, charge], axis=1)


charged = jnp.full((*grid.local_shape, shells), 0.2)
start = jnp.concatenate([charged, jnp.stack([open_voltage(charged[:, 0]), 0 * x], axis=1)], axis=1)
mass = jnp.ones_like(start).at[:, -2:].set(0)
true = np.array([1.0, 2.0, 0.4])
pattern = sparse.find_pattern(lambda y: rate(0.03, y, true), start, grid)


def states(constants):
    """Return the states at all times."""
    return ode.integrate(
        rate, start, times, (constants,), ode.Kvaerno3(), mass=mass, pattern=pattern, rtol=1e-4,
        atol=1e-6, solver=sparse.GMRES(restart=60, rtol=1e-9), linear_rtol=1e-6, max_steps=512,
    ).value  # fmt: skip


def voltage(states):
    """Return the voltage at all times, on the rank that has the collector, and 0 on the others."""
    drop = jax.vmap(current)(times) * h / 2 / solid
    return jnp.where(at_collector, states[:, :, -2] - drop[:, None], 0).sum(axis=1)


noise = np.random.default_rng(1).normal(0, 0.2 / 25.7, len(times))
run = mg.jit(states)
true_states = run(true)
measured = jnp.where(at_collector.any(), voltage(true_states) + noise, 0)


def misfit(logarithms):
    """Return this rank's share: half the sum of squares in units of 0.2 mV."""
    difference = voltage(states(jnp.exp(logarithms))) - measured  # 0 on the other ranks
    return 0.5 * jnp.sum((difference / (0.2 / 25.7)) ** 2)


guess = np.log([0.4, 0.7, 1.2])
found = optimize.minimize(misfit, jnp.asarray(guess), replicated=True, max_steps=60, rtol=1e-5)
constants = np.exp(found.value)
assert np.allclose(constants, true, rtol=0.05), constants

curves = [measured, *(voltage(run(c)) for c in (np.exp(guess), constants))]
curves, lithium = mg.allreduce(np.stack(curves)), grid.gather(true_states[14, :, :-2])
if lithium is not None:
    names = ("diffusivity", "reaction", "conductivity")
    print(", ".join(f"{name} {c:.3f}" for name, c in zip(names, constants, strict=True)))
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        points, first, last = 25.7e-3 * curves
        left.plot(times, first, "--", color="gray", label="first guess")
        left.plot(times, last, color="tab:red", label="found")
        left.plot(times, points, ".", color="black", label="measured")
        left.set_xlabel("time")
        left.set_ylabel("voltage (V)")
        left.legend()
        image = right.imshow(lithium.T, origin="lower", extent=(0, 1, 0, 1), cmap="viridis")
        right.set_title(f"lithium at t = {times[14]:.2f}")
        right.set_xlabel("depth in the electrode")
        right.set_ylabel("radius in a particle")
        figure.colorbar(image, ax=right)
        figure.savefig(sys.argv[-1], dpi=110)
