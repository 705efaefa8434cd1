"""Recover the diffusivity in a Poisson equation from observations of its solution.

The equation is div(kappa grad u) = f on the unit square, with u = 0 on the boundary. A neural
network or one value per cell represents kappa. L-BFGS minimizes the misfit between u and the
observations. This is ADCME's Poisson problem: Xu and Darve, "ADCME MPI: Distributed Machine
Learning for Computational Engineering".
"""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.poisson.estimation import run as run
    from mpigrad_apps.poisson.inverse import InverseProblem as InverseProblem
    from mpigrad_apps.poisson.inverse import inverse_problem as inverse_problem
    from mpigrad_apps.poisson.model import Model as Model
    from mpigrad_apps.poisson.model import poisson as poisson
    from mpigrad_apps.poisson.model import unit_square as unit_square
    from mpigrad_apps.poisson.network import Network as Network
    from mpigrad_apps.poisson.network import load_network as load_network
    from mpigrad_apps.poisson.network import save_network as save_network
    from mpigrad_apps.poisson.observations import Observations as Observations
    from mpigrad_apps.poisson.observations import draw_mask as draw_mask
    from mpigrad_apps.poisson.observations import observe_cells as observe_cells
    from mpigrad_apps.poisson.observations import observe_points as observe_points
    from mpigrad_apps.poisson.observations import read_data as read_data
    from mpigrad_apps.poisson.result import PoissonResult as PoissonResult
    from mpigrad_apps.poisson.settings import Settings as Settings

_NAMES = {
    "InverseProblem": "inverse",
    "Model": "model",
    "Network": "network",
    "Observations": "observations",
    "PoissonResult": "result",
    "Settings": "settings",
    "observe_cells": "observations",
    "observe_points": "observations",
    "draw_mask": "observations",
    "inverse_problem": "inverse",
    "load_network": "network",
    "poisson": "model",
    "read_data": "observations",
    "run": "estimation",
    "save_network": "network",
    "unit_square": "model",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
