"""Full-waveform inversion: the model of the ground whose waves are those that were recorded.

The misfit between predicted and recorded gathers is reduced by L-BFGS over one value per cell or
over the weights of a neural network, with gradients through all time steps, on shots that groups
of ranks share and models that the ranks of a group divide.
"""

try:
    # All of them now, not at the end of a long run.
    import equinox as _equinox  # noqa: F401
    import matplotlib as _matplotlib  # noqa: F401
    import zarr as _zarr  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mpigrad.problems needs {error.name}: pip install 'mpigrad[problems]'"
    ) from error

from mpigrad.problems.fwi.estimation import run
from mpigrad.problems.fwi.inversion import Inversion, inversion
from mpigrad.problems.fwi.misfit import Misfit, misfit
from mpigrad.problems.fwi.parametrization import (
    CellValues,
    NetworkValues,
    Parametrization,
    Unknown,
)
from mpigrad.problems.fwi.result import Result
from mpigrad.problems.fwi.settings import Settings

__all__ = [
    "CellValues",
    "Inversion",
    "Misfit",
    "NetworkValues",
    "Parametrization",
    "Result",
    "Settings",
    "Unknown",
    "inversion",
    "misfit",
    "run",
]
