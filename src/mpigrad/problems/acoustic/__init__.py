"""Acoustic waves in two dimensions, differentiable in velocity, source and initial state."""

try:
    import jaxtyping as _jaxtyping  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mpigrad.problems needs {error.name}: pip install 'mpigrad[problems]'"
    ) from error

import os

from mpigrad.operations.sites import pass_over
from mpigrad.problems.acoustic.model import Acoustic, Recording
from mpigrad.problems.acoustic.state import State
from mpigrad.problems.waves.survey import Survey

__all__ = ["Acoustic", "Recording", "State", "Survey"]

pass_over(os.path.dirname(__file__))
