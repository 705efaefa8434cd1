"""Heat from a moving source, whose power is found from four sensors.

A source goes round on a plate with a cold side. Its power changes with the time. Crank–Nicolson
steps compute the temperature, and one gradient through all steps gives the derivative in the power
at every time and in the conductivity. L-BFGS finds both from the temperatures of four sensors.

    mpigrad launch -n 2 examples/moving_source.py moving.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem, loops, optimize

jax.config.update("jax_enable_x64", True)

steps, dt = 24, 0.05
mesh = fem.box((24, 24), (1.0, 1.0))
space = fem.Space(mesh)
cold = space.fixed("xmin")
mass = fem.Energy(space, lambda p: 0.5 * p.u**2)()
conduction = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad)
spot = fem.Energy(
    space, lambda p, power, where: -power * jnp.exp(-60 * jnp.sum((p.x - where) ** 2)) * p.u
)
sensors = fem.Observation(space, [[0.3, 0.5], [0.5, 0.3], [0.7, 0.5], [0.5, 0.7]])


def place(t):
    """Return the centre of the source: once around the plate."""
    angle = 2 * jnp.pi * t / (steps * dt)
    return 0.5 + 0.22 * jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def temperatures(x):
    """Return the last field, and this rank's sensors at each time."""

    def step(u, now):
        t, before, after = now
        old, new = (
            conduction(jnp.exp(x["log_k"])) + spot(q, place(s))
            for q, s in ((before, t), (after, t + dt))
        )
        u = fem.theta_step(mass, new, u, dt, cold, before=old, rtol=1e-10).value
        return u, sensors.local(u)

    times = dt * jnp.arange(steps)
    return loops.scan(step, jnp.zeros(space.shape), steps, (times, x["power"][:-1], x["power"][1:]))


true = {
    "log_k": jnp.log(0.12),
    "power": 5 + 3 * jnp.sin(jnp.linspace(0, 2 * jnp.pi, steps + 1)),
}
field, data = mg.jit(temperatures)(true)


def misfit(x):
    """Return this rank's share of the loss. The power should change slowly."""
    difference = temperatures(x)[1] - data
    roughness = jnp.sum(jnp.diff(x["power"], 2) ** 2) / mesh.comm.size
    return jnp.sum(difference**2) + 1e-7 * roughness


start = {"log_k": jnp.log(0.2), "power": jnp.full(steps + 1, 4.0)}
mg.taylor_test(mg.jit(misfit), start, replicated=True)
found = optimize.minimize(misfit, start, replicated=True, max_steps=80, rtol=1e-5)
k = float(jnp.exp(found.value["log_k"]))
error = float(jnp.max(jnp.abs(found.value["power"] - true["power"])[1:-1]))
whole = mesh.gather_vertices(field)

if mesh.comm.rank == 0:
    print(f"conductivity {k:.4f} (true 0.12), error of the power {error:.2f}")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        image = left.imshow(
            np.reshape(whole, (25, 25)), origin="lower", extent=(0, 1, 0, 1), cmap="inferno"
        )
        left.plot([0.3, 0.5, 0.7, 0.5], [0.5, 0.3, 0.5, 0.7], "c.", label="sensors")
        left.plot(*place(dt * jnp.linspace(0, steps, 60)), "w:", label="path")
        left.legend()
        left.set_title("temperature at the end")
        figure.colorbar(image, ax=left)
        t = dt * np.arange(steps + 1)
        right.plot(t, true["power"], "k", label="true")
        right.plot(t, start["power"], ":", label="at the start")
        right.plot(t, found.value["power"], "--", label="found")
        right.set(xlabel="time", title="power of the source")
        right.legend()
        figure.savefig(sys.argv[-1], dpi=110)
assert abs(k - 0.12) < 2e-3 and error < 0.5
