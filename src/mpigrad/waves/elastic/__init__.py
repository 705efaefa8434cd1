"""Elastic waves in two dimensions, differentiable in lambda, mu, rho, source and initial state."""

from mpigrad.waves.elastic.media import lame
from mpigrad.waves.elastic.model import Elastic, Recording
from mpigrad.waves.elastic.state import State
from mpigrad.waves.survey import Survey

__all__ = ["Elastic", "Recording", "State", "Survey", "lame"]
