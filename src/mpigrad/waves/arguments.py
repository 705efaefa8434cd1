"""Checks of the settings and arguments that acoustic and elastic waves share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpigrad.grid.grid import Grid
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.checkpoints import check_checkpoints
from mpigrad.waves.options import check_options
from mpigrad.waves.survey import Survey

__all__ = [
    "check_gathers",
    "check_settings",
    "check_state",
    "check_tiles",
    "check_wavelets",
    "warn_of_units",
]


def check_settings(
    model: Any, positive: Iterable[str], reach: int, axes: tuple[int, ...] = (2,)
) -> None:
    """Raise a ValueError if a setting of a model is not valid.

    Parameters
    ----------
    model
        An `Acoustic` or `Elastic`.
    positive
        Names of the settings that must be positive and finite.
    reach
        Number of cells that the stencil reaches into the next tile.
    axes
        The numbers of axes that the waves can have.
    """
    name = type(model).__name__
    for setting in positive:
        value = getattr(model, setting)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: {setting} must be positive and finite, got {value!r}.")
    if not 0 < model.reflection < 1:
        raise ValueError(f"{name}: reflection must lie between 0 and 1, got {model.reflection}.")
    if model.max_velocity is not None and not model.max_velocity > 0:
        raise ValueError(
            f"{name}: max_velocity must be positive, got {model.max_velocity}. Leave it out to "
            "derive it from dt."
        )
    if model.threads is not None and model.threads < 1:
        raise ValueError(f"{name}: threads must be at least 1, got {model.threads}.")
    if model.method not in (None, "native", "xla"):
        raise ValueError(f'{name}: method must be "native", "xla" or None, got {model.method!r}.')
    model.tile.check(reach, axes)
    check_checkpoints(model.checkpoints, name)
    check_options(name, model)


_SMALL = 100  # times smaller than the largest stable step


def warn_of_units(model: Any, limit: Any, fastest: Any) -> None:
    """Warn, on rank 0, if `dt` is so much smaller than `limit` that a unit may be wrong.

    Values that are traced (inside jit) are not compared.
    """
    if model.grid.comm.rank > 0 or isinstance(limit, Tracer):
        return
    if _SMALL * model.dt < float(limit) < math.inf:
        warnings.warn(
            f"{type(model).__name__}: dt = {model.dt:.4g} is {float(limit) / model.dt:.0f} times "
            f"smaller than the largest stable step, for velocities up to {float(fastest):.4g} and "
            f"cells of {min(model.grid.spacing):.4g}. Give all of them in the same units (s, m/s "
            "and m).",
            stacklevel=3,
        )


def check_gathers(name: str, gathers: object) -> None:
    """Raise a ValueError of `name` unless `gathers` is valid."""
    if gathers not in ("complete", "share"):
        raise ValueError(f'{name}: gathers must be "complete" or "share", got {gathers!r}.')


def check_tiles(name: str, grid: Grid, tiles: dict[str, jax.Array]) -> None:
    """Raise a ValueError of `name` if this rank's tiles of a model differ in shape or dtype."""
    for field, tile in tiles.items():
        if tile.shape != grid.local_shape:
            raise ValueError(
                f"{name}: {field} has shape {tile.shape} on rank {grid.comm.rank}, but that rank's "
                f"tile has {grid.local_shape} cells. Give each rank its own tile."
            )
    dtypes = [tile.dtype for tile in tiles.values()]
    if len(set(dtypes)) > 1 or dtypes[0] not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"{name}: {', '.join(tiles)} must be float32 or float64"
            f"{', the same for all' * (len(tiles) > 1)}, got {', '.join(map(str, dtypes))} on rank "
            f"{grid.comm.rank}. Convert with astype."
        )


def check_wavelets(name: str, wavelets: jax.Array, survey: Survey, steps: int) -> None:
    """Raise a ValueError of `name` if wavelets do not fit a survey."""
    ends = (survey.n_sources, steps)
    if wavelets.shape not in ((1, *ends), (survey.n_shots, *ends)):
        raise ValueError(
            f"{name}: wavelets have shape {wavelets.shape}, expected ({survey.n_shots} or 1, "
            f"{survey.n_sources}, {steps}): shots, sources of a shot, steps."
        )


def check_state(name: str, tile: WaveTile, state: Any, expected: Any) -> None:
    """Raise a ValueError of `name` if an array of a state differs in shape or dtype."""
    for field, array, other in zip(state._fields, state, expected, strict=True):
        if (array.shape, array.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"{name}: {field} of the state is {array.dtype}{list(array.shape)} on rank "
                f"{tile.grid.comm.rank}, expected {other.dtype}{list(other.shape)}. Give the state "
                "of a recording with the same grid, layers, shots and dtype."
            )
