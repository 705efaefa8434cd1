"""The rates of a stiff reaction, found from one snapshot of its pattern.

In the reaction of Gray and Scott, u feeds v, v decays, and both diffuse. `ode.integrate` takes
steps whose lengths follow the error, with a Newton solve over all ranks in each stage. The gradient
of the misfit is that of these steps, and L-BFGS finds the two rates.

    mpigrad launch -n 4 examples/gray_scott.py rates.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import ode, optimize, sparse

jax.config.update("jax_enable_x64", True)

n = 48
grid = mg.Grid((n, n), (1 / n, 1 / n), periodic=(True, True))
diffusion = np.array([2e-4, 1e-4])


def rate(t, w, rates):
    """Return dw/dt of the (lx, ly, 2) concentrations."""
    p = mg.halo_exchange(w, grid)
    spread = (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * w) * n**2
    u, v = w[..., 0], w[..., 1]
    eaten = u * v**2
    growth = jnp.stack([rates[0] * (1 - u) - eaten, eaten - (rates[0] + rates[1]) * v], axis=-1)
    return diffusion * spread + growth


x, y = grid.centers()
drop = jnp.exp(-(((x - 0.4) / 0.15) ** 2) - ((y - 0.5) / 0.12) ** 2)
start = jnp.stack([1 - 0.5 * drop, 0.25 * drop], axis=-1)
true, guess = jnp.array([0.037, 0.06]), jnp.array([0.035, 0.062])
pattern = sparse.find_pattern(lambda w: rate(0.0, w, true), start, grid)


def snapshot(rates):
    """Return the concentrations at t = 500."""
    times = jnp.array([0.0, 500.0])
    # With rates far from these the steps may become short: the concentrations are NaN then, and
    # the line search comes back.
    solution = ode.integrate(
        rate, start, times, (rates,), pattern=pattern, rtol=1e-4, atol=1e-6, max_steps=128,
        throw=False,
    )  # fmt: skip
    return solution.value[-1], solution.stats["num_steps"]


measured, steps = mg.jit(snapshot)(true)


def misfit(factors):
    """Return this rank's share."""
    return jnp.sum((snapshot(factors * guess)[0] - measured) ** 2) / n**2


found = optimize.minimize(misfit, jnp.ones(2), replicated=True, max_steps=30, rtol=1e-5)
rates = found.value * guess
assert np.allclose(rates, true, rtol=1e-2), found

before, _ = mg.jit(snapshot)(guess)
after, _ = mg.jit(snapshot)(rates)
fields = [grid.gather(w[..., 1]) for w in (measured, before, after)]
if fields[0] is not None:
    print(f"{int(steps)} steps; feed and kill rate: {np.round(rates, 5)}, true: {true}")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        top = max(np.max(field) for field in fields if field is not None)
        titles = ("v at t = 500, measured", "with the first guess", "with the rates found")
        for axes, field, title in zip(figure.subplots(1, 3), fields, titles, strict=True):
            image = axes.imshow(field.T, origin="lower", cmap="magma", vmin=0, vmax=top)
            axes.set_title(title)
            axes.set_xticks([])
            axes.set_yticks([])
        figure.colorbar(image, ax=figure.axes, shrink=0.8)
        figure.savefig(sys.argv[-1], dpi=110)
