"""Acoustic waves in two dimensions, differentiable in velocity, source and initial state."""

from mpigrad.waves.acoustic.model import Acoustic, Recording
from mpigrad.waves.acoustic.state import State
from mpigrad.waves.survey import Survey

__all__ = ["Acoustic", "Recording", "State", "Survey"]
