"""Elastic waves in two or three dimensions, with their gradients."""

from mpigrad.waves.elastic.media import AnelasticState, ElasticMedium, State, VolumeState, lame
from mpigrad.waves.elastic.model import Elastic, Recording
from mpigrad.waves.survey import Survey

__all__ = [
    "AnelasticState",
    "Elastic",
    "ElasticMedium",
    "Recording",
    "State",
    "Survey",
    "VolumeState",
    "lame",
]
