"""Check that all ranks do the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpigrad.collective_errors import assert_same_settings
from mpigrad.communicator import Communicator
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.history import History
from mpigrad.waves.survey import Survey

__all__ = ["assert_same_run", "common_settings", "fingerprint"]


def fingerprint(values: Any) -> int:
    """Return a hash of 48 bits of the printed form of `values`."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big")


def common_settings(
    tile: WaveTile, dt: float, steps: int, survey: Survey, checkpoints: int, history: History
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
        "checkpoints": checkpoints,
        "precision of the history": history.precision,
        "history in files": history.directory is not None,
    }


def assert_same_run(
    name: str, settings: Mapping[str, Any], run: int, dtype: np.dtype, comm: Communicator
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
    run
        The fingerprint of the settings.
    dtype
        The dtype of the fields on this rank, float32 or float64.
    """
    found = run, np.dtype(dtype).name
    if len(set(comm.mpi.allgather(found))) > 1:
        assert_same_settings(comm, {**settings, "dtype": found[1]}, name)
