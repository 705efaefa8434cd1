"""Full-waveform inversion: the model of the ground whose waves are those that were recorded.

The misfit between predicted and recorded gathers is reduced by L-BFGS over one value per cell or
over the weights of a neural network, with gradients through all time steps, on shots that groups
of ranks share and models that the ranks of a group divide.
"""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.fwi.estimation import run as run
    from mpigrad_apps.fwi.inversion import Inversion as Inversion
    from mpigrad_apps.fwi.inversion import prepare_inversion as prepare_inversion
    from mpigrad_apps.fwi.misfit import Misfit as Misfit
    from mpigrad_apps.fwi.misfit import make_misfit as make_misfit
    from mpigrad_apps.fwi.parametrization import CellValues as CellValues
    from mpigrad_apps.fwi.parametrization import NetworkValues as NetworkValues
    from mpigrad_apps.fwi.parametrization import Parametrization as Parametrization
    from mpigrad_apps.fwi.parametrization import Unknown as Unknown
    from mpigrad_apps.fwi.result import Result as Result
    from mpigrad_apps.fwi.settings import Settings as Settings

_NAMES = {
    "CellValues": "parametrization",
    "Inversion": "inversion",
    "Misfit": "misfit",
    "NetworkValues": "parametrization",
    "Parametrization": "parametrization",
    "Result": "result",
    "Settings": "settings",
    "Unknown": "parametrization",
    "prepare_inversion": "inversion",
    "make_misfit": "misfit",
    "run": "estimation",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
