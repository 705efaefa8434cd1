"""Stochastic gradients on several ranks: a network that reads digits, or a model of one's own."""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.sgd.comparison import Result as Result
    from mpigrad_apps.sgd.comparison import run as run
    from mpigrad_apps.sgd.course import Course as Course
    from mpigrad_apps.sgd.course import Epoch as Epoch
    from mpigrad_apps.sgd.course import Step as Step
    from mpigrad_apps.sgd.digits import read_digits as read_digits
    from mpigrad_apps.sgd.settings import Settings as Settings
    from mpigrad_apps.sgd.task import Task as Task
    from mpigrad_apps.sgd.task import load as load

_NAMES = {
    "Course": "course",
    "Epoch": "course",
    "Result": "comparison",
    "Settings": "settings",
    "Step": "course",
    "Task": "task",
    "read_digits": "digits",
    "load": "task",
    "run": "comparison",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
