"""Lynx and hare: what the hunters' record of 1900-1920 says of predators and their prey.

The Hudson Bay Company counted the pelts that it bought. Hares u and lynx v (thousands of pelts)
follow the equations of Lotka and Volterra,

    u' = (alpha - beta v) u,    v' = (delta u - gamma) v,

and what was counted is u and v with log-normal errors. Unknown are the four rates, the numbers of
1900 and the size of the errors. A likelihood of twenty years is too small to be divided; but the
Markov chains that explore the posterior know nothing of each other: each chain is a job.

    mpigrad launch -n 2 examples/lynx_hare.py
"""

import blackjax
import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.adaptation.base import get_filter_adapt_info_fn

import mpigrad
from mpigrad import jobs
from mpigrad.problems.population import by_forward_mode

jax.config.update("jax_enable_x64", True)

# Years 1900 to 1920: pelts of hares and of lynx, in thousands.
RECORD = np.array(
    """30 4  47.2 6.1  70.2 9.8  77.4 35.2  36.3 59.4  20.6 41.7  18.1 19  21.4 13  22 8.3
    25.4 9.1  27.1 7.4  40.3 8  57 12.3  76.6 19.5  52.3 45.7  19.5 51.1  11.2 29.7  7.6 15.8
    14.6 9.7  16.2 10.1  24.7 8.6""".split(),
    float,
).reshape(21, 2)
YEARS = np.arange(21.0)

# The unknowns are logarithms of alpha, beta, gamma, delta; u, v in 1900; errors of u and of v.
MEDIANS = np.array([0.6, 0.03, 0.8, 0.03, 30.0, 5.0, 0.3, 0.3])
FACTORS = np.array([0.5, 0.7, 0.5, 0.7, 0.5, 0.5, 0.5, 0.5])


@by_forward_mode
def populations(logarithms):
    """Logarithms of hares and lynx in every year, from those of rates and of first numbers."""
    alpha, beta, gamma, delta = jnp.exp(logarithms[:4])

    def rates(t, now, _):  # of the logarithms, which stay finite
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
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
        adjoint=diffrax.ForwardMode(),
        max_steps=1000,
        throw=False,
    )
    return solution.ys


def log_density(x):
    """Log density of the unknowns, but for a constant."""
    errors = (np.log(RECORD) - populations(x[:6])) / jnp.exp(x[6:])
    prior = (x - np.log(MEDIANS)) / FACTORS
    return -0.5 * jnp.sum(errors**2) - 21 * jnp.sum(x[6:]) - 0.5 * jnp.sum(prior**2)


def chain(sizes, start, record):
    """One job: a chain of the no-U-turn sampler, warmed up by itself; (draws, 8)."""
    warmup, draws = sizes
    key, later = jax.random.split(jax.random.key(record["seed"]))
    quiet = get_filter_adapt_info_fn()
    adapt = blackjax.window_adaptation(blackjax.nuts, log_density, adaptation_info_fn=quiet)
    (state, parameters), _ = adapt.run(key, start, warmup)
    sampler = blackjax.nuts(log_density, **parameters)

    def draw(state, key):
        state, _ = sampler.step(key, state)
        return state, state.position

    return jax.lax.scan(draw, state, jax.random.split(later, draws))[1]
