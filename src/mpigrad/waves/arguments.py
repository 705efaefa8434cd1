"""Checks of settings and arguments: agreement of the ranks, and stable time steps."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.collective_errors import assert_same_settings
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.options import Storage, check_options
from mpigrad.waves.survey import Survey

__all__ = [
    "SECOND_DERIVATIVES",
    "STAGGERED_DIFFERENCES",
    "assert_same_run",
    "check_gathers",
    "check_settings",
    "check_state",
    "check_tiles",
    "check_wavelets",
    "common_settings",
    "fingerprint",
    "limiting_square",
    "staggered_limit",
    "warn_of_units",
    "wave_equation_limit",
]

# ---- The largest stable time steps of the schemes ----


# Coefficients of the second derivative by order: for the cell itself, one and more cells away.
SECOND_DERIVATIVES = {
    4: (-5 / 2, 4 / 3, -1 / 12),
    8: (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560),
}
# Of the difference between points half a cell away on both sides, one and a half, and so on.
STAGGERED_DIFFERENCES = {
    4: (27 / 24, -1 / 24),
    8: (1225 / 1024, -245 / 3072, 49 / 5120, -5 / 7168),
}


def wave_equation_limit(grid: Grid, order: int) -> float:
    """Return the largest stable leapfrog step of u_tt = v^2 (u_xx + u_yy), times v (a length).

    It is 2 / sqrt(sum of k / h^2 over the axes). The lowest eigenvalue of the second derivative is
    -k / h^2 with k = 16/3 at order 4 and 2048/315 at order 8.
    """
    center, *others = SECOND_DERIVATIVES[order]
    k = -center - 2 * sum(c * (-1) ** (i + 1) for i, c in enumerate(others))
    return 2 / math.sqrt(k * sum(1 / h**2 for h in grid.spacing))


def staggered_limit(grid: Grid, order: int, surface_axis: int | None = None) -> float:
    """Return the largest stable step of the elastic scheme, times the limiting velocity (a length).

    It is 2 / sqrt(sum of (norm / h)^2 over the axes). The norm of a difference is 7/3 at order 4
    and 2.5726 at order 8. With a free surface it is 2.34289 at order 4, and not larger at order 8.
    """
    inside = 2 * sum(map(abs, STAGGERED_DIFFERENCES[order]))
    surface = 2.34289 if order == 4 else inside
    norms = [surface if axis == surface_axis else inside for axis in range(grid.ndim)]
    squares = sum((norm / h) ** 2 for norm, h in zip(norms, grid.spacing, strict=True))
    return 2 / math.sqrt(squares)


# The part of a difference next to a free surface that comes from more than half a cell away: its
# norm over that of the whole difference.
_FAR_AT_SURFACE = {4: 0.0733, 8: 0.0974}
# Inside: the largest that any pattern of layers was found to need (decision 0119).
_FAR_INSIDE = {4: 0.0437, 8: 0.0708}


def limiting_square(order: int, surface: bool, square: Any, lightest: Any, stiffest: Any) -> Any:
    """Return the square of the velocity that limits the time step of elastic waves, (m/s)^2.

    A fraction of each difference, 4 % at order 4 and 7 % at order 8, comes from more than half a
    cell away. Its square couples light cells to stiff cells. Next to a free surface the norms of
    both parts are added, which is a bound for any contrast.

    Parameters
    ----------
    square
        The largest (lambda + 2 mu) / rho.
    lightest
        The smallest rho.
    stiffest
        The largest lambda + 2 mu.
    """
    if surface:
        far = _FAR_AT_SURFACE[order]
        return ((1 - far) * square**0.5 + far * (stiffest / lightest) ** 0.5) ** 2
    beyond = stiffest / lightest - square  # 0 in a homogeneous medium
    return square + beyond * _FAR_INSIDE[order] ** 2


# ---- Check that all ranks do the same run ----


def fingerprint(values: Any) -> int:
    """Return a hash of 48 bits of the printed form of `values`."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big")


def common_settings(
    tile: WaveTile, dt: float, steps: int, survey: Survey, storage: Storage
) -> dict[str, Any]:
    """Return the settings of any run that must be the same on all ranks, by name."""
    grid = tile.grid
    return {
        "shape of the grid": grid.shape,
        "spacing": grid.spacing,
        "dims of the grid": grid.dims,
        "pml": tile.pml,
        "dt": dt,
        "steps": steps,
        "checksum of the survey": survey.digest(),
        "storage: keep": storage.keep,
        "storage: precision": storage.precision,
        "storage: files": storage.directory is not None,
    }


def assert_same_run(
    name: str, settings: Mapping[str, Any], dtype: np.dtype, comm: Communicator
) -> None:
    """Raise a ValueError on all ranks if their runs differ (collective, while a run is traced).

    Native runs compare the fingerprints again (native/waves/propagate.h): their programs may have
    been traced earlier.

    Parameters
    ----------
    name
        The name of the function.
    settings
        All settings that must be the same on all ranks, by name.
    dtype
        The dtype of the fields on this rank, float32 or float64.
    """
    settings = {**settings, "dtype": np.dtype(dtype).name}
    if len(set(comm.mpi.allgather(fingerprint(settings)))) > 1:
        assert_same_settings(comm, settings, name)


# ---- Checks of the settings and arguments that acoustic and elastic waves share ----


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
    if model.backend not in (None, "native", "xla"):
        raise ValueError(f'{name}: backend must be "native", "xla" or None, got {model.backend!r}.')
    model.tile.check(reach, axes)
    if not isinstance(model.storage, Storage):
        raise TypeError(
            f"{name}: storage must be a mpigrad.waves.Storage, got {model.storage!r}. Write "
            'storage=Storage("boundary"), for instance.'
        )
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
