"""Predictions of each patient's concentrations."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad_apps.population.model import Model, Shared
from mpigrad_apps.population.records import PatientRecord

__all__ = ["Prediction", "predict_patient"]

_TIMES = 80


class Prediction(NamedTuple):
    """Quantiles of one patient's concentrations over draws, in mg/L.

    Attributes
    ----------
    times
        Shape (m,): times from the first dose to the last measurement, in h.
    low, middle, high
        Shape (m,): the quantiles 5 %, 50 % and 95 % at these times.
    at_measurements
        Shape (n,): the medians at the times of the record.
    """

    times: Float[np.ndarray | Array, " m"]
    low: Float[np.ndarray | Array, " m"]
    middle: Float[np.ndarray | Array, " m"]
    high: Float[np.ndarray | Array, " m"]
    at_measurements: Float[np.ndarray | Array, " n"]


def predict_patient(
    model: Model, shared: Shared, effects: Float[Array, "draws 5"], record: PatientRecord
) -> Prediction:
    """Predict the concentrations of one patient from draws of shared unknowns and effects."""
    start, end = record.dose_times[0], record.times[-1]
    times = start + (end - start) * jnp.linspace(1 / _TIMES, 1.0, _TIMES)

    every = jnp.concatenate([times, record.times])
    order = jnp.argsort(every)

    def concentrations(shared: Shared, effects: Array) -> Array:
        parameters = model.individual(shared, effects, record.weight)
        values = model.kinetics.concentrations(
            parameters, record.dose_times, record.doses, every[order]
        )
        return values[jnp.argsort(order)]

    curves = jax.vmap(concentrations)(shared, effects)
    low, middle, high = jnp.quantile(curves, jnp.array([0.05, 0.5, 0.95]), axis=0)
    return Prediction(times, low[:_TIMES], middle[:_TIMES], high[:_TIMES], middle[_TIMES:])
