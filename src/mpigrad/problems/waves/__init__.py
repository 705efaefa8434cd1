"""What all waves share: surveys, off-grid points, absorbing layers, and the native time loop."""

import os

from mpigrad.operations.sites import pass_over
from mpigrad.problems.waves.survey import Survey

__all__ = ["Survey"]

pass_over(os.path.dirname(__file__))
