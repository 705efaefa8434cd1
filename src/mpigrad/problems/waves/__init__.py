"""What all waves share: surveys, off-grid points, absorbing layers, and the native time loop."""

from mpigrad.problems.waves.survey import Survey

__all__ = ["Survey"]
