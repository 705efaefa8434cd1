"""The mode of the posterior."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import jax
from jaxtyping import Array

from mpigrad.communicator import Communicator
from mpigrad.optimize import LBFGS
from mpigrad.problems.population.model import Unknowns
from mpigrad.problems.training import train

__all__ = ["find_mode"]


def find_mode(
    density: Callable[[Unknowns], Array],
    start: Unknowns,
    iterations: int,
    history: pathlib.Path,
    comm: Communicator,
) -> tuple[Unknowns, float, int]:
    """Go up a log density by L-BFGS (collective).

    Parameters
    ----------
    density
        Equal on all ranks, and so are its gradients.

    Returns
    -------
    The unknowns of the largest density that was found, its logarithm, and the evaluations of
    density and gradient that it took.
    """
    trained = train(
        LBFGS(jax.value_and_grad(lambda u: -density(u)), memory=20, comm=comm),
        start,
        iterations,
        comm,
        save=lambda standing: None,
        history_file=history,
        advice="The density has no value where it starts: is --typical near these patients?",
    )
    best = min(trained.history, key=lambda record: record.loss)
    return trained.parameters, -best.loss, trained.history[-1].evaluations
