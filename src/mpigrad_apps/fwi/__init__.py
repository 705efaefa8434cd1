"""Full-waveform inversion: find the model of the ground that explains recorded waves.

L-BFGS reduces the misfit between predicted and recorded gathers, with gradients through all time
steps. The unknowns are one value per cell or the weights of a neural network. Groups of ranks share
the shots, and the ranks of a group divide the model.
"""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.fwi.estimation import run as run
    from mpigrad_apps.fwi.inputs import Inputs as Inputs
    from mpigrad_apps.fwi.inputs import read_inputs as read_inputs
    from mpigrad_apps.fwi.inversion import Inversion as Inversion
    from mpigrad_apps.fwi.inversion import LossWeights as LossWeights
    from mpigrad_apps.fwi.inversion import prepare_inversion as prepare_inversion
    from mpigrad_apps.fwi.misfit import Misfit as Misfit
    from mpigrad_apps.fwi.misfit import make_misfit as make_misfit
    from mpigrad_apps.fwi.parametrization import BoxValues as BoxValues
    from mpigrad_apps.fwi.parametrization import CellValues as CellValues
    from mpigrad_apps.fwi.parametrization import NetworkValues as NetworkValues
    from mpigrad_apps.fwi.parametrization import Parametrization as Parametrization
    from mpigrad_apps.fwi.parametrization import Unknown as Unknown
    from mpigrad_apps.fwi.result import Result as Result
    from mpigrad_apps.fwi.settings import Settings as Settings

_NAMES = {
    "BoxValues": "parametrization",
    "CellValues": "parametrization",
    "Inputs": "inputs",
    "Inversion": "inversion",
    "LossWeights": "inversion",
    "Misfit": "misfit",
    "NetworkValues": "parametrization",
    "Parametrization": "parametrization",
    "Result": "result",
    "Settings": "settings",
    "Unknown": "parametrization",
    "prepare_inversion": "inversion",
    "make_misfit": "misfit",
    "read_inputs": "inputs",
    "run": "estimation",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
