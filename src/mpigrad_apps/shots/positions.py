"""Positions of sources and receivers: from files, or evenly spaced ones."""

from __future__ import annotations

import math
import pathlib

import numpy as np
from jaxtyping import Float

from mpigrad_apps.shots.model_files import Acquisition, real
from mpigrad_apps.shots.options import WaveOptions

__all__ = ["select_evenly", "survey_positions"]

_LINE = 32  # receivers along an axis of a volume, at most

Points = Float[np.ndarray, "_ _ axes"]


def survey_positions(
    options: WaveOptions,
    own: Acquisition | None,
    spacing: tuple[float, ...],
    shape: tuple[int, ...],
) -> tuple[Points, Points]:
    """Return sources and receivers: those of --survey, else the file's, else evenly spaced ones.

    Evenly spaced ones are two cells deep. Sources lie between a tenth and nine tenths of each
    horizontal axis, on a grid as square as their count allows, 4 by default. There is a receiver
    over each cell, but in volumes over at most 32 cells along an axis.

    Returns
    -------
    Sources of shape (shots, n_sources, axes) and receivers of shape (shots | 1, n_receivers, axes),
    in m from the grid's first corner.

    Raises
    ------
    ValueError
        If the file of the survey is not valid, or has fewer shots or receivers than the options.
    """
    axes = len(shape)
    if options.survey is not None:
        sources, receivers = _read_survey(options.survey, axes)
    elif own is not None and options.depth is None:
        sources, receivers = own.sources, own.receivers
    else:
        widths = [n * h for n, h in zip(shape[:-1], spacing[:-1], strict=True)]
        depth = options.depth or 2.5 * spacing[-1]
        counts = _grid_of(options.shots or 4, widths)
        along = [
            width * (np.linspace(0.1, 0.9, count) if count > 1 else np.array([0.5]))
            for width, count in zip(widths, counts, strict=True)
        ]
        sources = _plane(along, depth)[:, None, :]
        counts = [n if axes == 2 else min(n, _LINE) for n in shape[:-1]]
        if options.receivers:
            counts = _grid_of(options.receivers, widths)
        along = [
            (np.arange(count) + 0.5) * width / count
            for width, count in zip(widths, counts, strict=True)
        ]
        if axes == 3:  # at cell centres, where they cost no interpolation
            along = [(np.floor(x / h) + 0.5) * h for x, h in zip(along, spacing, strict=False)]
        receivers = _plane(along, depth)[None]
    shots = select_evenly(options.shots, len(sources), "--shots")
    receivers = receivers if len(receivers) == 1 else receivers[shots]
    chosen = select_evenly(options.receivers, receivers.shape[1], "--receivers")
    return sources[shots], receivers[:, chosen]


def select_evenly(count: int | None, available: int, option: str) -> np.ndarray:
    """Return the indices of `count` evenly spaced elements (None: all) of those available."""
    if count is None or count >= available:
        if count is not None and count > available:
            raise ValueError(f"{option}: expected at most {available} of the file, got {count}.")
        return np.arange(available)
    if count == 1:
        return np.array([available // 2])
    return np.rint(np.linspace(0, available - 1, count)).astype(int)


def _grid_of(count: int, widths: list[float]) -> list[int]:
    """Return how many of `count` points lie along each horizontal axis, so that they are even."""
    if len(widths) == 1:
        return [count]
    pairs = [(a, count // a) for a in range(1, count + 1) if count % a == 0]
    wanted = math.log(widths[0] / widths[1])
    return list(min(pairs, key=lambda pair: (abs(math.log(pair[0] / pair[1]) - wanted), -pair[0])))


def _plane(along: list[np.ndarray], depth: float) -> Float[np.ndarray, "points axes"]:
    """Return all points with these horizontal coordinates, the last axis fastest."""
    across = np.meshgrid(*along, indexing="ij")
    points = np.stack([axis.ravel() for axis in across], axis=1)
    return np.concatenate([points, np.full((len(points), 1), depth)], axis=1)


def _read_survey(path: pathlib.Path, axes: int) -> tuple[Points, Points]:
    try:
        with np.load(path, allow_pickle=False) as file:
            unknown = set(file.files) - {"sources", "receivers", "gathers", "dt", "wavelets"}
            if unknown:
                raise ValueError(f"{', '.join(sorted(unknown))} is not applied; leave it out")
            sources, receivers = (real(file[name]) for name in ("sources", "receivers"))
    except Exception as error:
        raise ValueError(
            f"--survey: {path} cannot be read as .npz with sources and receivers: {error}"
        ) from error
    sources = sources[:, None, :] if sources.ndim == 2 else sources
    receivers = receivers[None] if receivers.ndim == 2 else receivers
    for name, points in (("sources", sources), ("receivers", receivers)):
        if points.ndim != 3 or points.shape[-1] != axes or not np.all(np.isfinite(points)):
            raise ValueError(
                f"--survey: {path}: expected finite coordinates, sources (shots, {axes}) and "
                f"receivers (k, {axes}) or (shots, k, {axes}), got {name} of shape {points.shape}."
            )
    if len(receivers) not in (1, len(sources)):
        raise ValueError(
            f"--survey: {path}: expected receivers of 1 shot or of all {len(sources)}, got those "
            f"of {len(receivers)}."
        )
    return sources, receivers
