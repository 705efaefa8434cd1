"""Train a network that reads digits, or your own model, by stochastic gradients on all ranks."""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad_apps.sgd.comparison import SGDResult as SGDResult
    from mpigrad_apps.sgd.comparison import run as run
    from mpigrad_apps.sgd.digits import read_digits as read_digits
    from mpigrad_apps.sgd.run_log import EpochRecord as EpochRecord
    from mpigrad_apps.sgd.run_log import RunLog as RunLog
    from mpigrad_apps.sgd.run_log import StepRecord as StepRecord
    from mpigrad_apps.sgd.settings import Settings as Settings
    from mpigrad_apps.sgd.task import Task as Task
    from mpigrad_apps.sgd.task import load_task as load_task

_NAMES = {
    "RunLog": "run_log",
    "EpochRecord": "run_log",
    "SGDResult": "comparison",
    "Settings": "settings",
    "StepRecord": "run_log",
    "Task": "task",
    "read_digits": "digits",
    "load_task": "task",
    "run": "comparison",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
