"""Lynx and hare: a model of predators and prey, fitted to the pelt counts of 1900-1920.

The Hudson Bay Company counted the pelts that it bought. Hares u and lynx v (thousands of pelts)
follow the equations of Lotka and Volterra,

    u' = (alpha - beta v) u,    v' = (delta u - gamma) v,

and the counts are u and v with log-normal errors. The unknowns are the four rates, the populations
in 1900 and the size of the errors. The likelihood of twenty years is too small to be divided among
ranks. The Markov chains that explore the posterior are independent of each other: each chain is a
job.

    mpigrad launch -n 2 examples/lynx_hare.py pelts.png
"""

import functools
import sys

import mpigrad as mg  # first: blackjax computes something when it is imported

# isort: split
import blackjax
import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.adaptation.base import get_filter_adapt_info_fn

from mpigrad_apps.population import by_forward_mode

jax.config.update("jax_enable_x64", True)

# Pelts in thousands, in the years 1900 to 1920.
HARES = [30, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22, 25.4, 27.1, 40.3, 57, 76.6, 52.3, 19.5,
         11.2, 7.6, 14.6, 16.2, 24.7]  # fmt: skip
LYNX = [4, 6.1, 9.8, 35.2, 59.4, 41.7, 19, 13, 8.3, 9.1, 7.4, 8, 12.3, 19.5, 45.7, 51.1, 29.7,
        15.8, 9.7, 10.1, 8.6]  # fmt: skip
YEARS = np.arange(21.0)

# The unknowns are logarithms of alpha, beta, gamma, delta, of u and v in 1900, and of both errors.
MEDIANS = np.array([0.6, 0.03, 0.8, 0.03, 30.0, 5.0, 0.3, 0.3])
FACTORS = np.array([0.5, 0.7, 0.5, 0.7, 0.5, 0.5, 0.5, 0.5])

CHAINS, WARMUP, DRAWS = 4, 80, 50  # use more if run time does not matter


@by_forward_mode
def populations(logarithms):
    """Return log hares and log lynx of every year, for logarithms of rates and first counts."""
    alpha, beta, gamma, delta = jnp.exp(logarithms[:4])

    def rates(t, now, _):  # rates of the logarithms, which stay finite
        hare, lynx = jnp.exp(now)
        return jnp.stack([alpha - beta * lynx, delta * hare - gamma])

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(rates),
        diffrax.Tsit5(),
        YEARS[0],
        YEARS[-1],
        0.1,
        logarithms[4:],
        saveat=diffrax.SaveAt(ts=YEARS),
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
        adjoint=diffrax.ForwardMode(),
        max_steps=1000,
        throw=False,
    )
    return solution.ys


def log_density(x, pelts):
    """Return the log density of the unknowns up to a constant. `pelts` are logarithms."""
    errors = (pelts - populations(x[:6])) / jnp.exp(x[6:])
    prior = (x - np.log(MEDIANS)) / FACTORS
    return -0.5 * jnp.sum(errors**2) - 21 * jnp.sum(x[6:]) - 0.5 * jnp.sum(prior**2)


def chain(pelts, start, item):
    """Run one job, a chain of the no-U-turn sampler with its own warm-up. Returns (draws, 8)."""
    density = functools.partial(log_density, pelts=pelts)
    first, later = jax.random.split(jax.random.key(item["seed"]))
    quiet = get_filter_adapt_info_fn()  # keeps nothing of the warm-up
    warmup = blackjax.window_adaptation(blackjax.nuts, density, adaptation_info_fn=quiet)
    (state, parameters), _ = warmup.run(first, start, WARMUP)
    sampler = blackjax.nuts(density, **parameters)

    def draw(state, key):
        state, _ = sampler.step(key, state)
        return state, state.position

    return jax.lax.scan(draw, state, jax.random.split(later, DRAWS))[1]


pelts = jnp.log(jnp.array([HARES, LYNX]).T)
starts = np.log(MEDIANS) + 0.05 * np.random.default_rng(0).normal(size=(CHAINS, 8))

with mg.jobs.pool() as pool:
    data = pool.put([{"seed": np.uint32(number)} for number in range(CHAINS)])
    draws = mg.jit(pool.map(chain, data))(pelts, jnp.asarray(starts))

names = ("alpha", "beta", "gamma", "delta", "hares 1900", "lynx 1900", "error u", "error v")
values = np.exp(np.asarray(draws))  # (chains, draws, 8)
rhats, sizes = blackjax.rhat(values), blackjax.ess(values)
if pool.comm.rank == 0:
    for k, name in enumerate(names):
        low, middle, high = np.quantile(values[..., k], [0.05, 0.5, 0.95])
        print(
            f"{name:>10}  {middle:8.4f}  ({low:.4f} to {high:.4f})   "
            f"effective draws {sizes[k]:.0f}, R-hat {rhats[k]:.3f}"
        )
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 3.4), layout="constrained")
        axes = figure.add_subplot()
        some = draws.reshape(-1, 8)[:: CHAINS * DRAWS // 40, :6]
        curves = np.exp(jax.jit(jax.vmap(populations))(some))  # (40, years, 2)
        for k, (name, counted, colour) in enumerate(
            (("hares", HARES, "#4477aa"), ("lynx", LYNX, "#cc6677"))
        ):
            axes.plot(1900 + YEARS, curves[..., k].T, color=colour, alpha=0.15, lw=1)
            axes.plot(1900 + YEARS, counted, "o", color=colour, label=name)
        axes.set(ylabel="pelts, thousands", xticks=range(1900, 1921, 5))
        axes.legend()
        figure.savefig(sys.argv[-1], dpi=110)

# The means agree with published results for these counts, and the chains agree with each other.
np.testing.assert_allclose(
    np.mean(values, (0, 1)), [0.55, 0.028, 0.80, 0.024, 34.0, 5.9, 0.25, 0.25], rtol=0.15
)
assert np.max(rhats) < 1.2
