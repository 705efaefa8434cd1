"""The statistical model: random effects of patients, and errors of measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad_apps.population.kinetics import Kinetics, decay_rate
from mpigrad_apps.population.records import PatientRecord

__all__ = ["Model", "Prior", "Shared", "Unknowns", "log_density"]

_WEIGHT = 70.0  # kg
# Exponent of the weight in each parameter: rates of elimination and exchange scale with the weight
# to the power 3/4, volumes scale with the weight.
_ALLOMETRY = np.array([0.0, 0.75, 1.0, 0.75, 1.0])


class Shared(NamedTuple):
    """The unknowns that all patients share.

    Attributes
    ----------
    typical
        Shape (5,): logarithms of ka, CL, V1, Q, V2 of a typical patient of 70 kg.
    log_spread
        Shape (5,): logarithms of the standard deviations of patients' log parameters.
    log_noise
        Shape (): logarithm of the standard deviation of log concentrations around the model's.
    """

    typical: Float[Array, " 5"]
    log_spread: Float[Array, " 5"]
    log_noise: Float[Array, ""]


class Unknowns(NamedTuple):
    """All unknowns. `effects`, shape (patients, 5), are the random effects, N(0, 1)."""

    shared: Shared
    effects: Float[Array, "patients 5"]


@dataclasses.dataclass(frozen=True)
class Prior:
    """The prior of the shared unknowns.

    It is typical ~ N(log medians, factor²), spread ~ half-normal(spread) and
    noise ~ half-normal(noise). In addition, the odds are (ka / α)^fast that the typical patient
    absorbs faster than at the rate α, the larger rate at which a dose in the blood decays
    (`decay_rate`). A slow absorption into a small V1 has nearly the same concentrations as a fast
    absorption into a large V1 ("flip-flop"), so a posterior without these odds may have two modes.
    `fast` = 0 allows both, for depots that release slowly.
    """

    medians: tuple[float, ...] = (1.0, 5.0, 30.0, 10.0, 50.0)
    factor: float = 1.0
    spread: float = 0.5
    noise: float = 0.5
    fast: float = 20.0

    def start(self, patients: int) -> Unknowns:
        """Return unknowns to start from: typical patients, a spread of 0.3 and a noise of 0.3."""
        small = jnp.log(jnp.array([0.3] * 6))
        shared = Shared(jnp.log(jnp.asarray(self.medians)), small[:5], small[5])
        return Unknowns(shared, jnp.zeros((patients, 5)))

    def scales(self, patients: int) -> Unknowns:
        """Return rough standard deviations of a posterior, the first metric of a sampler."""
        typical, spread = 0.3 / patients**0.5, (2 * patients) ** -0.5
        shared = Shared(jnp.full(5, typical), jnp.full(5, spread), jnp.asarray(0.1))
        return Unknowns(shared, jnp.full((patients, 5), 0.5))


@dataclasses.dataclass(frozen=True)
class Model:
    """The statistical model: log-normal random effects and log-normal errors.

    log parameters of patient i = typical + allometry · log(weight_i / 70) + spread · effects_i
    log measured = log model + noise · N(0, 1)
    """

    kinetics: Kinetics = dataclasses.field(default_factory=Kinetics)
    prior: Prior = dataclasses.field(default_factory=Prior)

    def individual(
        self, shared: Shared, effects: Float[Array, " 5"], weight: Float[Array | np.ndarray, ""]
    ) -> Float[Array, " 5"]:
        """Compute the log parameters of one patient from the shared unknowns and the effects."""
        body = _ALLOMETRY * jnp.log(weight / _WEIGHT)
        return shared.typical + body + jnp.exp(shared.log_spread) * effects

    def log_likelihood(
        self, shared: Shared, effects: Float[Array, " 5"], record: PatientRecord
    ) -> Float[Array, ""]:
        """Compute the log density of one patient's measurements and effects, NaN on failure."""
        parameters = self.individual(shared, effects, record.weight)
        measured = jnp.isfinite(record.concentrations)
        concentrations = self.kinetics.concentrations(
            parameters, record.dose_times, record.doses, record.times
        )
        # Concentrations below the accuracy of the integration cannot be compared.
        least = self.kinetics.rtol * 1e-3 * jnp.max(record.doses) / jnp.exp(parameters[2])
        concentrations = jnp.where(concentrations < least, least, concentrations)  # a NaN stays one
        error = jnp.log(jnp.where(measured, record.concentrations, 1.0)) - jnp.log(concentrations)
        scaled = jnp.where(measured, error, 0.0) * jnp.exp(-shared.log_noise)
        constants = jnp.sum(measured) * (shared.log_noise + 0.5 * jnp.log(2 * jnp.pi))
        return -0.5 * jnp.sum(scaled**2) - constants + jnp.sum(_normal(effects))

    def log_prior(self, shared: Shared) -> Float[Array, ""]:
        """Compute the log density of the shared unknowns under the prior."""
        faster = shared.typical[0] - jnp.log(decay_rate(jnp.exp(shared.typical)))
        away = (shared.typical - jnp.log(jnp.asarray(self.prior.medians))) / self.prior.factor
        return (
            jnp.sum(_normal(away) - jnp.log(self.prior.factor))
            + jnp.sum(_log_half_normal(shared.log_spread, self.prior.spread))
            + _log_half_normal(shared.log_noise, self.prior.noise)
            + jax.nn.log_sigmoid(self.prior.fast * faster)
        )


def log_density(
    model: Model, likelihood: Callable[[Shared, Array], Array]
) -> Callable[[Unknowns], Float[Array, ""]]:
    """Return the log density as a function of all unknowns.

    Parameters
    ----------
    model
        The statistical model.
    likelihood
        Function (shared, effects) -> the sum of `model.log_likelihood` over all patients, for
        instance `pool.sum(model.log_likelihood, data)`.
    """

    def density(unknowns: Unknowns) -> Array:
        return model.log_prior(unknowns.shared) + likelihood(unknowns.shared, unknowns.effects)

    return density


def _normal(x: Array) -> Array:
    return -0.5 * x**2 - 0.5 * jnp.log(2 * jnp.pi)


def _log_half_normal(logarithm: Array, scale: float) -> Array:
    """Compute the log density of the logarithm of a half-normal value."""
    return jnp.log(2) + _normal(jnp.exp(logarithm) / scale) - jnp.log(scale) + logarithm
