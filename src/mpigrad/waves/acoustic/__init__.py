"""Acoustic waves in two or three dimensions, with their gradients."""

from mpigrad.waves.acoustic.model import Acoustic, Recording
from mpigrad.waves.acoustic.scheme import AcousticMedium, State
from mpigrad.waves.survey import Survey

__all__ = ["Acoustic", "AcousticMedium", "Recording", "State", "Survey"]
