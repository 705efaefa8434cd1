"""The heat equation u_t = div(kappa grad u) + f: simulate it, or recover kappa from data."""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.heat.estimation import HeatResult as HeatResult
    from mpigrad_apps.heat.estimation import run as run
    from mpigrad_apps.heat.experiment import Experiment as Experiment
    from mpigrad_apps.heat.experiment import make_experiment as make_experiment
    from mpigrad_apps.heat.inverse import InverseProblem as InverseProblem
    from mpigrad_apps.heat.inverse import inverse_problem as inverse_problem
    from mpigrad_apps.heat.model import Heat as Heat
    from mpigrad_apps.heat.settings import Settings as Settings
    from mpigrad_apps.heat.simulation import Film as Film
    from mpigrad_apps.heat.simulation import simulate as simulate

_NAMES = {
    "Experiment": "experiment",
    "Film": "simulation",
    "Heat": "model",
    "InverseProblem": "inverse",
    "HeatResult": "estimation",
    "Settings": "settings",
    "make_experiment": "experiment",
    "inverse_problem": "inverse",
    "run": "estimation",
    "simulate": "simulation",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
