"""A drug in a population of patients, estimated from a few blood samples of each patient.

The model has two compartments and random effects.
"""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.population.diagnostics import Summary as Summary
    from mpigrad_apps.population.diagnostics import summarize as summarize
    from mpigrad_apps.population.estimation import PopulationResult as PopulationResult
    from mpigrad_apps.population.estimation import put_patients as put_patients
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
    from mpigrad_apps.population.prediction import Prediction as Prediction
    from mpigrad_apps.population.prediction import predict_patient as predict_patient
    from mpigrad_apps.population.records import Cohort as Cohort
    from mpigrad_apps.population.records import PatientRecord as PatientRecord
    from mpigrad_apps.population.records import make_patient_record as make_patient_record
    from mpigrad_apps.population.records import read_patients as read_patients
    from mpigrad_apps.population.records import write_patients as write_patients
    from mpigrad_apps.population.sampling import NUTS as NUTS
    from mpigrad_apps.population.sampling import Posterior as Posterior
    from mpigrad_apps.population.sensitivities import by_forward_mode as by_forward_mode
    from mpigrad_apps.population.settings import Settings as Settings
    from mpigrad_apps.population.simulation import Truth as Truth
    from mpigrad_apps.population.simulation import simulate as simulate

_NAMES = {
    "Cohort": "records",
    "Prediction": "prediction",
    "Kinetics": "kinetics",
    "Model": "model",
    "NUTS": "sampling",
    "PARAMETERS": "kinetics",
    "Posterior": "sampling",
    "Prior": "model",
    "PatientRecord": "records",
    "PopulationResult": "estimation",
    "Settings": "settings",
    "Shared": "model",
    "Summary": "diagnostics",
    "Truth": "simulation",
    "UNITS": "kinetics",
    "Unknowns": "model",
    "by_forward_mode": "sensitivities",
    "decay_rate": "kinetics",
    "predict_patient": "prediction",
    "log_density": "model",
    "put_patients": "estimation",
    "read_patients": "records",
    "make_patient_record": "records",
    "run": "estimation",
    "simulate": "simulation",
    "summarize": "diagnostics",
    "write_patients": "records",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
