"""The axes of gathers and wavelets: their order, and the times of samples."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mpigrad_apps.shots.zarr_files import TIMES, even_step, unit_factor

__all__ = ["in_order", "require_interval", "sample_interval"]

# Names of the axes of gathers, in the order of their axes.
_AXES = (
    ("shot", "shots", "source", "sources"),
    ("component", "components"),
    ("receiver", "receivers", "trace", "traces", "channel"),
    TIMES,
)
_START = 1e-3  # largest time of the first sample, in intervals


def in_order(
    path: pathlib.Path, name: str, values: NDArray[np.float64], labels: tuple[str, ...]
) -> NDArray[np.float64]:
    """Return gathers with the axes shots, components, receivers and time, in this order.

    Raises
    ------
    ValueError
        If time is not the last axis, and the names of the others do not say their order, or if an
        axis has no name.
    """
    if len(labels) != values.ndim:
        raise ValueError(
            f"{path}: expected a name for each of the {values.ndim} axes of {name}, got "
            f"{', '.join(labels)}. Correct the names."
        )
    places = [next((k for k, names in enumerate(_AXES) if a in names), None) for a in labels]
    known = [place for place in places if place is not None]
    if len(known) == len(places) == len(set(known)):
        return values.transpose(np.argsort(known))
    if places.index(len(_AXES) - 1) != len(places) - 1:
        raise ValueError(
            f"{path}: expected the axes shot, component, receiver and time of {name}, got "
            f"{', '.join(labels)}. Rename or transpose them."
        )
    return values


def sample_interval(
    path: pathlib.Path,
    samples: int,
    arrays: Mapping[str, NDArray[np.generic]],
    units: Mapping[str, str],
) -> tuple[float, float] | None:
    """Return the interval of a coordinate of time in s, and its uncertainty, None without one.

    Raises
    ------
    ValueError
        If the coordinate has another length, an unknown unit, uneven distances, or does not start
        at 0 s.
    """
    for name in [name for name in arrays if name.lower() in TIMES]:
        times = np.ravel(arrays[name])
        if times.dtype.kind not in "iuf" or len(times) != samples:
            raise ValueError(
                f"{path}: expected {name} as the {samples} times of samples, got shape "
                f"{arrays[name].shape} and dtype {times.dtype}. Correct it, or leave it out."
            )
        seconds = times.astype(float) * unit_factor(path, name.lower(), units.get(name), "time")
        if samples == 0:
            return None
        step = even_step(path, name, seconds, "samples")
        if abs(seconds[0]) > _START * (step or 1.0):
            raise ValueError(
                f"{path}: expected samples from 0 s, got the first one at {seconds[0]:g} s in "
                f"{name}. Pad the samples with zeros from 0 s, or cut them there."
            )
        if samples > 1:
            return step, 1e-4 * step
    return None


def require_interval(
    option: str, path: pathlib.Path, interval: tuple[float, float] | None, dt: float
) -> None:
    """Raise a ValueError if the samples of a file have another interval than a run."""
    if interval is not None and abs(interval[0] - dt) > interval[1]:
        raise ValueError(
            f"{option}: {path} has samples every {interval[0]:g} s, this run every {dt:g} s. "
            f"Use --dt {interval[0]!r}."
        )
