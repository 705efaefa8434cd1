"""In which numbers a posterior is sampled: random effects, or the patients' own parameters.

Where each patient was measured often, its parameters are known, and its random effects, which are
counted from the typical patient, follow every step of that one: a sampler has to go along narrow
valleys. There the parameters themselves are the better coordinates (centred, in the literature of
hierarchical models); where little is known of a patient, the random effects are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from mpigrad.problems.population.model import Unknowns

__all__ = ["centred", "from_centred", "to_centred"]


def to_centred(unknowns: Unknowns) -> Unknowns:
    """With `typical + spread · effects` in place of effects; arrays of shape (..., patients, 5)."""
    shared, effects = unknowns
    spread = jnp.exp(shared.log_spread)[..., None, :]
    return Unknowns(shared, shared.typical[..., None, :] + spread * effects)


def from_centred(unknowns: Unknowns) -> Unknowns:
    """The inverse of `to_centred`."""
    shared, parameters = unknowns
    spread = jnp.exp(shared.log_spread)[..., None, :]
    return Unknowns(shared, (parameters - shared.typical[..., None, :]) / spread)


def centred(density: Callable[[Unknowns], Array]) -> Callable[[Unknowns], Float[Array, ""]]:
    """The log density of what `to_centred` gives, of that of the unknowns."""

    def of_centred(unknowns: Unknowns) -> Array:
        volume = len(unknowns.effects) * jnp.sum(unknowns.shared.log_spread)
        return density(from_centred(unknowns)) - volume

    return of_centred
