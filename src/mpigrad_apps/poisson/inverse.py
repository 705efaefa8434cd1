"""The inverse problem: a model, observations, and the misfit between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import mpigrad
from mpigrad import sparse
from mpigrad.collective_errors import call_on_root
from mpigrad.communicator import Communicator, resolve
from mpigrad_apps.poisson import fields
from mpigrad_apps.poisson.model import Model, poisson, unit_square
from mpigrad_apps.poisson.observations import (
    Data,
    Observations,
    draw_mask,
    observe_cells,
    observe_points,
    read_data,
    relative_noise,
)
from mpigrad_apps.poisson.parametrization import CellValues, NetworkValues, Parametrization
from mpigrad_apps.poisson.settings import Settings

__all__ = ["InverseProblem", "best_constant", "inverse_problem"]


@dataclasses.dataclass(frozen=True)
class InverseProblem:
    """The problem to find the kappa that explains the observations.

    Attributes
    ----------
    model
        The discrete equation.
    observations
        The observations of u. Each lies on the rank that has its cell.
    parametrization
        The representation of kappa by parameters.
    solver
        The solver of the linear systems.
    smoothing
        Weight of the squared differences of log kappa between neighbouring cells.
    true_kappa
        This rank's tile of the kappa to be recovered, or None if it is not known.
    data
        The user's observations, or None without a data file.
    """

    model: Model
    observations: Observations
    parametrization: Parametrization
    solver: sparse.LinearSolver
    smoothing: float = 0.0
    true_kappa: Float[np.ndarray, "lx ly"] | None = None
    data: Data | None = None

    def loss_share(self, parameters: Any) -> Float[Array, ""]:
        """Compute this rank's share of the loss, the sum over ranks. It is differentiable."""
        return self.guessed_loss_share(parameters, None)[0]

    def guessed_loss_share(
        self, parameters: Any, guesses: sparse.Guesses | None
    ) -> tuple[Float[Array, ""], sparse.Guesses | None]:
        """Compute this rank's share of the loss, and the guesses for the next solve.

        The loss is `Observations.loss` plus `smoothing` times the mean over cells of the squared
        differences of log kappa. If the linear solve fails, the share is NaN, so that a line search
        takes a shorter step.
        """
        kappa = self.parametrization.kappa(parameters)
        solution = self.model.solve(kappa, self.solver, guesses, throw=False)
        u = solution.value.reshape(self.model.grid.local_shape)
        share = self.observations.loss(u)
        if self.smoothing:
            share = share + self.smoothing * self.model.roughness(jnp.log(kappa))
        share = jnp.where(solution.result == sparse.Result.SUCCESSFUL, share, jnp.nan)
        return share, solution.state

    def value_and_grad(self, parameters: Any) -> tuple[Float[Array, ""], Any]:
        """Compute the loss and its gradient, both equal on all ranks."""
        comm = self.model.grid.comm
        return mpigrad.value_and_grad(self.loss_share, loss="share", replicated=0, comm=comm)(
            parameters
        )


def inverse_problem(settings: Settings, comm: Communicator | None = None) -> InverseProblem:
    """Make the inverse problem that the settings describe (collective).

    Without a data file, the solution for the true kappa is observed in cells drawn at random.

    Parameters
    ----------
    settings
        The options of `mpigrad run poisson`.
    comm
        The ranks that take part; by default all ranks.

    Raises
    ------
    ValueError
        On every rank, if the settings or the data file are not valid.

    Examples
    --------
    >>> from mpigrad_apps.poisson import Settings, inverse_problem
    >>> problem = inverse_problem(Settings(cells=(8, 8), observed=1.0))
    >>> problem.observations.count
    64
    """
    comm = resolve(comm)
    call_on_root(comm, settings.check)
    with jax.enable_x64(True):
        grid = unit_square(settings.cells, comm)
        values = NetworkValues(grid) if settings.kappa == "network" else CellValues(grid)
        if settings.data is not None:
            data = read_data(settings.data, grid)
            source = np.broadcast_to(data.source, grid.shape)[grid.slices]
            model = poisson(grid, source)
            solver = sparse.default_solver(settings.tolerance, model.pattern)
            observed = observe_points(grid, data.coordinates, data.values, settings.misfit)
            return InverseProblem(model, observed, values, solver, settings.smoothing, data=data)
        truth = fields.TRUTHS[settings.truth]
        source = fields.SOURCES[settings.source](truth)
        kappa, f = jax.jit(lambda x, y: (truth(x, y), source(x, y)))(*grid.centers())
        model = poisson(grid, f)
        solver = sparse.default_solver(settings.tolerance, model.pattern)
        u = np.asarray(mpigrad.jit(lambda k: model.solution(k, solver))(kappa))
        mask = draw_mask(grid, settings.observed, settings.seed)
        if settings.noise:
            u = u * (1 + settings.noise * relative_noise(grid, settings.seed))
        observed = observe_cells(grid, mask, u, settings.misfit)
        return InverseProblem(
            model, observed, values, solver, settings.smoothing, np.asarray(kappa)
        )


def best_constant(problem: InverseProblem) -> float:
    """Compute the constant kappa that fits the observations best (u is proportional to 1/kappa)."""
    comm = problem.model.grid.comm
    seen = problem.observations

    def predict(kappa: Float[Array, "lx ly"]) -> Float[Array, " k"]:
        return seen.predict(problem.model.solution(kappa, problem.solver))

    one = jnp.ones(problem.model.grid.local_shape)
    predicted = np.asarray(mpigrad.jit(predict)(one)) / seen.scales
    sums = [float(predicted @ predicted), float(predicted @ (seen.values / seen.scales))]
    square, product = np.sum(comm.mpi.allgather(sums), axis=0)
    if not product > 0:
        raise ValueError(
            "poisson: expected a positive kappa to explain the observations, but they have the "
            "opposite sign of the solution for kappa = 1. Check the sign of the source: the "
            "equation is div(kappa grad u) = f, so f > 0 makes u < 0."
        )
    return float(square / product)
