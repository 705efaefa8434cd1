"""A drug in a population of patients: two compartments, random effects, and what is known of them
from a few blood samples of each.
"""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.population.diagnostics import Summary as Summary
    from mpigrad_apps.population.diagnostics import summarize as summarize
    from mpigrad_apps.population.estimation import Result as Result
    from mpigrad_apps.population.estimation import put as put
    from mpigrad_apps.population.estimation import run as run
    from mpigrad_apps.population.kinetics import PARAMETERS as PARAMETERS
    from mpigrad_apps.population.kinetics import UNITS as UNITS
    from mpigrad_apps.population.kinetics import Kinetics as Kinetics
    from mpigrad_apps.population.kinetics import decay_rate as decay_rate
    from mpigrad_apps.population.model import Model as Model
    from mpigrad_apps.population.model import Prior as Prior
    from mpigrad_apps.population.model import Shared as Shared
    from mpigrad_apps.population.model import Unknowns as Unknowns
    from mpigrad_apps.population.model import log_density as log_density
    from mpigrad_apps.population.prediction import Fit as Fit
    from mpigrad_apps.population.prediction import fit as fit
    from mpigrad_apps.population.records import Cohort as Cohort
    from mpigrad_apps.population.records import Record as Record
    from mpigrad_apps.population.records import read as read
    from mpigrad_apps.population.records import record as record
    from mpigrad_apps.population.records import write as write
    from mpigrad_apps.population.sampling import NUTS as NUTS
    from mpigrad_apps.population.sampling import Posterior as Posterior
    from mpigrad_apps.population.sensitivities import by_forward_mode as by_forward_mode
    from mpigrad_apps.population.settings import Settings as Settings
    from mpigrad_apps.population.simulation import Truth as Truth
    from mpigrad_apps.population.simulation import simulate as simulate

_NAMES = {
    "Cohort": "records",
    "Fit": "prediction",
    "Kinetics": "kinetics",
    "Model": "model",
    "NUTS": "sampling",
    "PARAMETERS": "kinetics",
    "Posterior": "sampling",
    "Prior": "model",
    "Record": "records",
    "Result": "estimation",
    "Settings": "settings",
    "Shared": "model",
    "Summary": "diagnostics",
    "Truth": "simulation",
    "UNITS": "kinetics",
    "Unknowns": "model",
    "by_forward_mode": "sensitivities",
    "decay_rate": "kinetics",
    "fit": "prediction",
    "log_density": "model",
    "put": "estimation",
    "read": "records",
    "record": "records",
    "run": "estimation",
    "simulate": "simulation",
    "summarize": "diagnostics",
    "write": "records",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
