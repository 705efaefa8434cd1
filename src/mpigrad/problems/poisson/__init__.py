"""The diffusivity in a Poisson equation, from observations of its solution.

The equation is div(kappa grad u) = f on the unit square, u = 0 on its boundary; kappa is given by
a neural network or by one value per cell, and found by L-BFGS on the misfit between u and what was
observed of it (ADCME's Poisson problem: Xu and Darve, "ADCME MPI: Distributed Machine Learning for
Computational Engineering").
"""

try:
    # All of them now, not at the end of a long run.
    import equinox as _equinox  # noqa: F401
    import matplotlib as _matplotlib  # noqa: F401
    import optax as _optax  # noqa: F401
    import zarr as _zarr  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mpigrad.problems needs {error.name}: pip install 'mpigrad[problems]'"
    ) from error

from mpigrad.problems.lbfgs import LBFGS
from mpigrad.problems.poisson.estimation import run
from mpigrad.problems.poisson.inverse import InverseProblem, inverse_problem
from mpigrad.problems.poisson.model import Model, poisson, unit_square
from mpigrad.problems.poisson.network import Network, load_network, save_network
from mpigrad.problems.poisson.observations import (
    Observations,
    at_cells,
    at_points,
    draw_mask,
    read_data,
)
from mpigrad.problems.poisson.result import Result
from mpigrad.problems.poisson.settings import Settings

__all__ = [
    "LBFGS",
    "InverseProblem",
    "Model",
    "Network",
    "Observations",
    "Result",
    "Settings",
    "at_cells",
    "at_points",
    "draw_mask",
    "inverse_problem",
    "load_network",
    "poisson",
    "read_data",
    "run",
    "save_network",
    "unit_square",
]
