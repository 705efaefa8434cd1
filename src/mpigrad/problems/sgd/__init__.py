"""Stochastic gradients on several ranks: a network that reads digits, or a model of one's own."""

try:
    # All of them now, not at the end of a long run.
    import matplotlib as _matplotlib  # noqa: F401
    import optax as _optax  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mpigrad.problems.sgd needs {error.name}: pip install 'mpigrad[problems]'"
    ) from error

from mpigrad.problems.sgd.comparison import Result, run
from mpigrad.problems.sgd.course import Course, Epoch, Step
from mpigrad.problems.sgd.digits import digits
from mpigrad.problems.sgd.settings import Settings
from mpigrad.problems.sgd.task import Task, load

__all__ = ["Course", "Epoch", "Result", "Settings", "Step", "Task", "digits", "load", "run"]
