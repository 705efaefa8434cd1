"""The inverse problem: find the diffusivity that explains the temperatures."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import mpigrad
from mpigrad.communicator import Communicator
from mpigrad.extend import take
from mpigrad_apps import diffusion
from mpigrad_apps.heat.experiment import Experiment, make_experiment
from mpigrad_apps.heat.settings import Settings
from mpigrad_apps.poisson.observations import draw_mask
from mpigrad_apps.poisson.parametrization import CellValues, NetworkValues, Parametrization

__all__ = ["InverseProblem", "inverse_problem"]


@dataclasses.dataclass(frozen=True)
class InverseProblem:
    """The problem to find the kappa that explains the observations.

    Attributes
    ----------
    experiment
        The discrete equation, the source and the true kappa. The loss does not use the true kappa.
    thermometers
        Shape (k,): flat indices of the cells of this rank's tile that have a thermometer.
    observed
        Shape (steps + 1, k): their temperatures at the times of all steps.
    norm
        Sum of the squares of the observed temperatures of all ranks.
    parametrization
        The representation of kappa by parameters.
    smoothing
        Weight of the squared differences of log kappa between neighbouring cells.
    """

    experiment: Experiment
    thermometers: Int[np.ndarray, " k"]
    observed: Float[np.ndarray, "times k"]
    norm: float
    parametrization: Parametrization
    smoothing: float = 0.0

    def loss_share(self, parameters: Any) -> Float[Array, ""]:
        """Compute this rank's share of sum (predicted - observed)^2 / norm, plus the smoothing.

        The share is NaN if kappa is so large that the time step is unstable. A line search then
        takes a shorter step.
        """
        kappa = self.parametrization.kappa(parameters)
        shown = predict(self.experiment, kappa, self.thermometers, throw=False)
        share = jnp.sum((shown - self.observed) ** 2) / self.norm
        if self.smoothing:
            model = self.experiment.model
            rough = diffusion.roughness(jnp.log(kappa), model.grid, model.sides)
            share = share + self.smoothing * rough
        return share

    def value_and_grad(self, parameters: Any) -> tuple[Float[Array, ""], Any]:
        """Compute the loss and its gradient, both equal on all ranks."""
        comm = self.experiment.grid.comm
        return mpigrad.value_and_grad(self.loss_share, loss="share", replicated=0, comm=comm)(
            parameters
        )


def predict(
    plan: Experiment,
    kappa: Float[Array, "lx ly"],
    thermometers: Int[np.ndarray, " k"],
    throw: bool = True,
) -> Float[Array, "times k"]:
    """Compute the temperatures of this rank's thermometers at the times of all steps."""
    return plan.model.run(
        kappa, plan.initial, plan.source, lambda u: take(u.ravel(), thermometers), throw=throw
    )[1]


def inverse_problem(settings: Settings, comm: Communicator) -> InverseProblem:
    """Make the problem that the settings describe, with simulated observations (collective).

    The thermometers and their errors are the same for any number of ranks.

    Raises
    ------
    ValueError
        On every rank, if the settings or the model file are not valid.
    """
    plan = make_experiment(settings, comm)
    grid = plan.grid
    places = np.flatnonzero(draw_mask(grid, settings.observed, settings.seed))
    observed = np.asarray(mpigrad.jit(lambda k: predict(plan, k, places))(plan.kappa))
    norm, count = _sums(comm, observed)
    if settings.noise:
        key = jax.random.fold_in(jax.random.key(settings.seed), 1)
        numbers = jnp.asarray(grid.natural_ids().ravel()[places])
        errors = jax.vmap(
            lambda cell: jax.random.normal(jax.random.fold_in(key, cell), (len(observed),))
        )(numbers).T
        observed = observed + settings.noise * np.sqrt(norm / count) * np.asarray(errors)
        norm, _ = _sums(comm, observed)
    values = NetworkValues(grid) if settings.unknown == "network" else CellValues(grid)
    return InverseProblem(plan, places, observed, norm, values, settings.smoothing)


def _sums(comm: Communicator, observed: Float[np.ndarray, "times k"]) -> tuple[float, int]:
    """Return the sum of squares and the number of values of all ranks, equal on all ranks."""
    square, count = np.sum(comm.mpi.allgather((np.sum(observed**2), observed.size)), axis=0)
    return float(square), int(count)
