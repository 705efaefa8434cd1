"""Elastic waves in two dimensions, differentiable in lambda, mu, rho, source and initial state."""

try:
    import jaxtyping as _jaxtyping  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mpigrad.problems needs {error.name}: pip install 'mpigrad[problems]'"
    ) from error

from mpigrad.problems.elastic.command import run
from mpigrad.problems.elastic.media import lame
from mpigrad.problems.elastic.model import Elastic, Recording
from mpigrad.problems.elastic.state import State
from mpigrad.problems.waves.survey import Survey

__all__ = ["Elastic", "Recording", "State", "Survey", "lame", "run"]
