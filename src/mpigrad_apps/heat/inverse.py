"""The inverse problem: which diffusivity explains what the thermometers show?"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import mpigrad
from mpigrad.communicator import Communicator
from mpigrad.operations.indexing import take
from mpigrad_apps import diffusion
from mpigrad_apps.heat.experiment import Experiment, make_experiment
from mpigrad_apps.heat.settings import Settings
from mpigrad_apps.poisson.observations import draw_mask
from mpigrad_apps.poisson.parametrization import CellValues, NetworkValues, Parametrization

__all__ = ["InverseProblem", "inverse_problem"]


@dataclasses.dataclass(frozen=True)
class InverseProblem:
    """Which kappa explains the observations?

    Attributes
    ----------
    experiment
        The discrete equation, the source and the true kappa, which the loss does not look at.
    thermometers
        Shape (k,): the cells of this rank's tile that have one, flattened.
    observed
        Shape (steps + 1, k): what they show at the times of all steps.
    norm
        Sum of the squares of what all ranks' thermometers show.
    parametrization
        What stands for kappa.
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
        """Share of this rank in sum (shown - observed)^2 / norm, plus the smoothing.

        NaN where kappa is so large that the time step is unstable: a line search then takes a
        shorter step.
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
        """The loss and its gradient, equal on all ranks."""
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
    """What this rank's thermometers show at the times of all steps; differentiable in kappa."""
    return plan.model.run(
        kappa, plan.initial, plan.source, lambda u: take(u.ravel(), thermometers), throw=throw
    )[1]


def inverse_problem(settings: Settings, comm: Communicator) -> InverseProblem:
    """The problem that the settings describe: the true kappa's heat is observed (collective).

    Thermometers and their errors are the same for any number of ranks.

    Raises
    ------
    ValueError
        On every rank, where the settings or the model file make no sense.
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
    """Sum of squares and number of values of all ranks, added up in one order everywhere."""
    square, count = np.sum(comm.mpi.allgather((np.sum(observed**2), observed.size)), axis=0)
    return float(square), int(count)
