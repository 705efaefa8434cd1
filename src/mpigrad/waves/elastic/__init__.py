"""Elastic waves in two or three dimensions, with their gradients."""

from mpigrad.waves.elastic.media import lame
from mpigrad.waves.elastic.model import Elastic, Recording
from mpigrad.waves.elastic.state import AnelasticState, State, VolumeState
from mpigrad.waves.survey import Survey

__all__ = ["AnelasticState", "Elastic", "Recording", "State", "Survey", "VolumeState", "lame"]
