"""An estimate of the memory that the inversion of a volume needs on each rank."""

from __future__ import annotations

import math

import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves import Storage
from mpigrad.waves.native_run import default_memory
from mpigrad.waves.options import runs_native
from mpigrad_apps.fwi.inputs import BLUR
from mpigrad_apps.fwi.layout import TileLayout, wider
from mpigrad_apps.fwi.parametrization import cut_off
from mpigrad_apps.fwi.settings import Settings
from mpigrad_apps.shots.shot_group import ShotGroup

__all__ = ["check_memory", "memory_needs"]

_DOUBLE = 8  # bytes
# Numbers of arrays of a rank's cells. That of fields is measured: the peak minus the other parts.
_FIELDS = 80  # fields and their cotangents, constants of programs, indices of messages
_VECTORS = 10  # of the parameters, besides the steps that L-BFGS remembers
_WAVES = 8  # pressures, velocities, their gradient and layers of one shot, and copies of them
_STATES = 6  # last and first fields of all shots, and their cotangents
_GATHERS = 6  # recorded, predicted, filtered and their cotangents


def memory_needs(
    settings: Settings, layout: TileLayout, grid: Grid, group: ShotGroup | None = None
) -> dict[str, float]:
    """Return estimates of the bytes that this rank needs, by purpose.

    The history of the forward run is counted at its smallest size: of one shot, with the fewest
    fields that --storage leaves possible (docs/acoustic.md).

    Parameters
    ----------
    group
        This rank's group. None: estimate what does not depend on its shots.
    """
    held, n_local = (
        math.prod(part.stop - part.start for part in layout.held),
        math.prod(layout.local_shape),
    )
    reach = cut_off(BLUR) if settings.initial is None else cut_off(settings.smoothing)
    window = math.prod(part.stop - part.start for part in wider(layout.held, layout.shape, reach))
    vectors = 2 * settings.memory + _VECTORS if settings.unknown == "cells" else 0
    needs = {
        "fields": float(_DOUBLE * (_FIELDS * held + 3 * window)),
        "L-BFGS": float(_DOUBLE * vectors * n_local),
    }
    if group is None:
        return needs
    experiment, physics = group.experiment, group.physics
    size = np.dtype(physics.kernels.precision).itemsize
    cells = size * math.prod(physics.tile.shape)
    shots = 1 if settings.encode else experiment.n_shots
    if settings.subset is not None and not settings.encode:
        shots = settings.subset // settings.groups
    layers = 1 - math.prod(grid.local_shape) / math.prod(physics.tile.shape)
    stored = _stored_fields(physics.storage, experiment.steps, layers)
    if not runs_native(physics.model(1)):
        stored = 3 * shots * experiment.steps  # XLA programs store all fields
    gathers = experiment.n_shots * experiment.receivers.shape[1] * experiment.steps
    return needs | {
        "waves": float(cells * (_WAVES + _STATES * shots)),
        "history": cells * stored,
        "gathers": float(_DOUBLE * _GATHERS * gathers),
    }


def check_memory(
    settings: Settings,
    layout: TileLayout,
    grid: Grid,
    comm: Communicator,
    group: ShotGroup | None = None,
) -> None:
    """Raise a ValueError if the volume does not fit into the memory (collective).

    Raises
    ------
    ValueError
        On every rank: if a rank needs more than its part of the free memory of its host.
    """
    needs = memory_needs(settings, layout, grid, group)
    total, free = sum(needs.values()), 2.0 * default_memory()
    with raise_on_all_ranks(comm):
        if total > free:
            parts = ", ".join(f"{name} {_text(size)}" for name, size in needs.items())
            least = "" if group is not None else "at least "
            cells = " x ".join(map(str, grid.shape))
            raise ValueError(
                f"fwi: expected a volume that fits into the {_text(free)} of free memory of a "
                f"rank, but {cells} cells need {least}{_text(total)} ({parts}). Use more ranks on "
                "more hosts, fewer --groups, a smaller --memory, --encode, --storage-directory, or "
                "larger cells."
            )


def _stored_fields(storage: Storage, steps: int, layers: float) -> float:
    """Return the smallest number of fields of a shot that the kernels store in memory.

    Parameters
    ----------
    layers
        Fraction of the cells that lie in the absorbing layers.
    """
    history = 0.5 if storage.precision else 1.0
    in_files = storage.directory is not None
    match storage.keep:
        case None:
            return 0.0 if in_files else 2 * math.sqrt(2 * steps * history)
        case "all":
            return 0.0 if in_files else steps * history
        case "boundary":
            return steps * layers
        case k:
            return k * history + (0.0 if in_files else 2 * steps / k)


def _text(size: float) -> str:
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.4g} TB"
