"""Simulated patients with known parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mpigrad_apps.population.kinetics import Kinetics
from mpigrad_apps.population.model import Model, Shared
from mpigrad_apps.population.records import Cohort, make_patient_record

__all__ = ["Truth", "simulate"]

_TYPICAL = (1.2, 4.0, 35.0, 8.0, 60.0)  # ka (1/h), CL (L/h), V1 (L), Q (L/h), V2 (L)
_SPREAD = (0.4, 0.3, 0.2, 0.3, 0.3)
_NOISE = 0.15


@dataclasses.dataclass(frozen=True)
class Truth:
    """The true values of simulated patients. `individual` are log parameters."""

    shared: Shared
    individual: Float[np.ndarray, "patients 5"]


def simulate(patients: int, seed: int, kinetics: Kinetics) -> tuple[Cohort, Truth]:
    """Simulate patients of about 75 kg, and return them with their true values.

    One half of the patients gets 100 mg once. The other half gets 50 mg three times, every twelve
    hours. Each patient gives 6 to 12 blood samples within two days.

    Parameters
    ----------
    patients
        Number of patients.
    seed
        Seed of all random values.
    kinetics
        The kinetics of the drug.

    Examples
    --------
    >>> import jax
    >>> from mpigrad_apps.population import Kinetics, simulate
    >>> with jax.enable_x64(True):
    ...     cohort, truth = simulate(2, 0, Kinetics())
    >>> cohort.names, truth.individual.shape
    (('1', '2'), (2, 5))
    """
    model = Model(kinetics)
    shared = Shared(*(jnp.log(jnp.array(value)) for value in (_TYPICAL, _SPREAD, _NOISE)))
    concentrations = jax.jit(kinetics.concentrations)
    records, individual = [], []
    for patient in range(patients):
        generator = np.random.default_rng([seed, patient])
        weight = float(np.round(np.clip(generator.normal(75.0, 12.0), 45.0, 130.0), 1))
        doses = [(0.0, 100.0)] if patient % 2 == 0 else [(t, 50.0) for t in (0.0, 12.0, 24.0)]
        samples = int(generator.integers(6, 13))
        # Early samples show the absorption, late samples the second compartment.
        times = np.exp(generator.uniform(np.log(0.25), np.log(48.0), samples))
        times = np.unique(np.round(times, 2))
        effects = jnp.asarray(generator.normal(size=5))
        parameters = model.individual(shared, effects, jnp.asarray(weight))
        blank = make_patient_record(weight, doses, [(t, 1.0) for t in times])
        exact = concentrations(parameters, blank.dose_times, blank.doses, blank.times)
        errors = np.exp(_NOISE * generator.normal(size=len(times)))
        measured = np.asarray(exact)[: len(times)] * errors
        records.append(make_patient_record(weight, doses, zip(times, measured, strict=True)))
        individual.append(np.asarray(parameters))
    names = tuple(f"{patient + 1}" for patient in range(patients))
    return Cohort(names, tuple(records)), Truth(shared, np.stack(individual))
