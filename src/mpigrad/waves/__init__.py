"""Acoustic and elastic waves: propagators with exact gradients."""

from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.acoustic import Acoustic, AcousticMedium
from mpigrad.waves.elastic import Elastic, ElasticMedium, lame
from mpigrad.waves.options import Storage
from mpigrad.waves.relaxation import Relaxation, fit_relaxation
from mpigrad.waves.survey import Survey, ricker

__all__ = [
    "Acoustic",
    "AcousticMedium",
    "Elastic",
    "ElasticMedium",
    "Relaxation",
    "Storage",
    "Survey",
    "WaveTile",
    "fit_relaxation",
    "lame",
    "ricker",
]
