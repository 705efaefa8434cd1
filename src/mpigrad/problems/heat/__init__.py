"""The heat equation u_t = div(kappa grad u) + f, forward, and kappa from observations of u."""

try:
    # All of them now, not at the end of a long run.
    import equinox as _equinox  # noqa: F401
    import matplotlib as _matplotlib  # noqa: F401
    import zarr as _zarr  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mpigrad.problems needs {error.name}: pip install 'mpigrad[problems]'"
    ) from error

from mpigrad.problems.heat.estimation import Result, run
from mpigrad.problems.heat.experiment import Experiment, experiment
from mpigrad.problems.heat.inverse import InverseProblem, inverse_problem
from mpigrad.problems.heat.model import Heat
from mpigrad.problems.heat.settings import Settings
from mpigrad.problems.heat.simulation import Film, simulate

__all__ = [
    "Experiment",
    "Film",
    "Heat",
    "InverseProblem",
    "Result",
    "Settings",
    "experiment",
    "inverse_problem",
    "run",
    "simulate",
]
