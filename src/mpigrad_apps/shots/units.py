"""Warnings about numbers of an experiment that look as if they had another unit."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np

from mpigrad_apps.shots.experiment import Experiment, stable_step

__all__ = ["warn_of_units"]

_VELOCITIES = (100.0, 20e3)  # m/s. The largest one of a model of the ground lies between.
_DENSITIES = (100.0, 30e3)  # kg/m3, likewise
_CELLS = (0.1, 20e3)  # m
_SMALL_STEP = 100  # times smaller than the largest stable one
_WAVELENGTH = (1.0, 10.0)  # cells, and diagonals of the model


def warn_of_units(experiment: Experiment) -> None:
    """Print a warning for each number that looks as if it had another unit (on one rank)."""
    for text in _doubts(experiment):
        print(f"mpigrad: warning: {text}", file=sys.stderr, flush=True)


def _doubts(whole: Experiment) -> Iterator[str]:
    fastest = whole.speeds.fastest
    low, high = _VELOCITIES
    if fastest < low:
        yield (
            f"the P velocities go up to {fastest:.4g} m/s, so a time step is "
            f"{whole.dt * 1e3:.4g} ms. If the model is in km/s (densities in g/cm3, moduli in "
            "GPa), convert it to m/s (kg/m3, Pa)."
        )
    elif fastest > high:
        yield f"the P velocities go up to {fastest:.4g} m/s. The model must be in m/s."
    if "rho" in whole.fields:
        heaviest = float(np.max(whole.fields["rho"]))
        if not _DENSITIES[0] <= heaviest <= _DENSITIES[1]:
            yield (
                f"the densities go up to {heaviest:.4g} kg/m3. If the model is in g/cm3, multiply "
                "its densities by 1000."
            )
    cells = [h for h in whole.spacing if not _CELLS[0] <= h <= _CELLS[1]]
    if cells:
        yield (
            f"a cell is {cells[0]:.4g} m long, and the model {whole.size[0]:.4g} m. Give the "
            "spacing in m."
        )
    stable = stable_step(whole.speeds.limiting, whole.spacing)
    if whole.dt * _SMALL_STEP < stable:
        yield (
            f"the time step of {whole.dt:.4g} s is {stable / whole.dt:.0f} times smaller than the "
            f"default. Give dt in s, velocities in m/s (here up to {fastest:.4g} m/s) and the "
            f"spacing in m (here {whole.spacing[0]:.4g} m)."
        )
    wave, cell = whole.speeds.slowest / whole.peak, max(whole.spacing)
    if wave < _WAVELENGTH[0] * cell or wave > _WAVELENGTH[1] * math.hypot(*whole.size):
        yield (
            f"at the peak frequency of {whole.peak:.4g} Hz the shortest wave is {wave:.4g} m long, "
            f"a cell {cell:.4g} m, and the model {whole.size[0]:.4g} m. Give the frequency in Hz, "
            "and the times of a wavelet in s."
        )
    points = np.concatenate([p.reshape(-1, p.shape[-1]) for p in (whole.sources, whole.receivers)])
    extent = float(np.max(np.ptp(points, axis=0)))
    if len(np.unique(points, axis=0)) > 2 and extent < min(whole.spacing):
        yield (
            f"all sources and receivers lie within {extent:.4g} m, less than a cell. Give their "
            "positions in m."
        )
