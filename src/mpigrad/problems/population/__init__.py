"""A drug in a population of patients: two compartments, random effects, and what is known of them
from a few blood samples of each.
"""

try:
    # All of them now, not at the end of a long run.
    import blackjax as _blackjax  # noqa: F401
    import diffrax as _diffrax  # noqa: F401
    import matplotlib as _matplotlib  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mpigrad.problems.population needs {error.name}: pip install 'mpigrad[problems]'"
    ) from error

from mpigrad.problems.population.diagnostics import Summary, summarize
from mpigrad.problems.population.estimation import Result, put, run
from mpigrad.problems.population.kinetics import PARAMETERS, UNITS, Kinetics, decay_rate
from mpigrad.problems.population.model import Model, Prior, Shared, Unknowns, log_density
from mpigrad.problems.population.prediction import Fit, fit
from mpigrad.problems.population.records import Cohort, Record, read, record, write
from mpigrad.problems.population.sampling import NUTS, Posterior
from mpigrad.problems.population.sensitivities import by_forward_mode
from mpigrad.problems.population.settings import Settings
from mpigrad.problems.population.simulation import Truth, simulate

__all__ = [
    "NUTS",
    "PARAMETERS",
    "UNITS",
    "Cohort",
    "Fit",
    "Kinetics",
    "Model",
    "Posterior",
    "Prior",
    "Record",
    "Result",
    "Settings",
    "Shared",
    "Summary",
    "Truth",
    "Unknowns",
    "by_forward_mode",
    "decay_rate",
    "fit",
    "log_density",
    "put",
    "read",
    "record",
    "run",
    "simulate",
    "summarize",
    "write",
]
