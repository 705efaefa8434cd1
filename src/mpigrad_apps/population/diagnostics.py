"""The quality of a posterior: intervals, effective sample sizes and the agreement of chains."""

from __future__ import annotations

import dataclasses

import numpy as np

try:
    from blackjax.diagnostics import ess_bulk, rhat
except ImportError:  # blackjax 1.3, the newest for JAX 0.8: without rank normalisation
    from blackjax.diagnostics import effective_sample_size as ess_bulk
    from blackjax.diagnostics import potential_scale_reduction as rhat
from jaxtyping import Float

from mpigrad_apps.population.kinetics import PARAMETERS
from mpigrad_apps.population.model import Shared

__all__ = ["FEWEST_DRAWS", "Summary", "shared_names", "shared_values", "summarize"]


FEWEST_DRAWS = 4  # of each chain, for effective sample sizes and R-hat


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median, 5 % and 95 % quantiles, bulk effective sample size and rank-normalised R-hat."""

    median: float
    low: float
    high: float
    ess: float
    rhat: float


def shared_names() -> tuple[str, ...]:
    """Return the names of the shared values: the typical patient, the spreads, the noise."""
    return (*PARAMETERS, *(f"spread of {name}" for name in PARAMETERS), "noise")


def shared_values(shared: Shared) -> Float[np.ndarray, "*batch 11"]:
    """Return the shared values instead of their logarithms, in the order of `shared_names`."""
    parts = (shared.typical, shared.log_spread, np.asarray(shared.log_noise)[..., None])
    return np.exp(np.concatenate([np.asarray(part) for part in parts], axis=-1))


def summarize(shared: Shared) -> dict[str, Summary]:
    """Summarize draws of shape (chains, draws, ...) for each shared value.

    Effective sample sizes and R-hat need four draws. They are NaN for fewer, as in a stopped run.
    """
    draws = shared_values(shared)
    low, median, high = np.quantile(draws, [0.05, 0.5, 0.95], axis=(0, 1))
    sizes = agreement = np.full(draws.shape[-1], np.nan)
    if draws.shape[1] >= FEWEST_DRAWS:
        sizes, agreement = np.asarray(ess_bulk(draws)), np.asarray(rhat(draws))
    return {
        name: Summary(*(float(values[k]) for values in (median, low, high, sizes, agreement)))
        for k, name in enumerate(shared_names())
    }
