"""Public names of the release before: they work for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["RENAMED", "old_names", "resolve_old_name"]

# For each public module the old name and the place of the new one, "module:name". A name without
# a module is in the same module. Functions that had the name of their module are not here, because
# the name is the module now: fwi.inversion, fwi.misfit, heat.experiment, sgd.digits.
RENAMED: dict[str, dict[str, str]] = {
    "mpigrad.checkpoint": {"Saved": "Snapshot", "Saving": "CheckpointSession"},
    "mpigrad.collective_errors": {
        "equal_everywhere": "assert_same_on_all_ranks",
        "from_root": "call_on_root",
        "together": "raise_on_all_ranks",
    },
    "mpigrad.communicator": {"default": "default_communicator"},
    "mpigrad.grid": {"choose_dims": "mpigrad.grid.decomposition:choose_dims"},
    "mpigrad.jobs": {"root_driven": "root_pool"},
    "mpigrad.optimize": {"Served": "RootObjective", "stages": "continuation"},
    "mpigrad.sparse": {"even_stripe": "local_range"},
    "mpigrad.training": {"Flat": "FlatBuffer", "Record": "StepRecord"},
    "mpigrad_apps.heat": {"Result": "HeatResult"},
    "mpigrad_apps.poisson": {
        "Result": "PoissonResult",
        "at_cells": "observe_cells",
        "at_points": "observe_points",
    },
    "mpigrad_apps.population": {
        "Fit": "Prediction",
        "Record": "PatientRecord",
        "Result": "PopulationResult",
        "fit": "predict_patient",
        "put": "put_patients",
        "read": "read_patients",
        "record": "make_patient_record",
        "write": "write_patients",
    },
    "mpigrad_apps.report": {"write_fields": "mpigrad.io:write_zarr"},
    "mpigrad_apps.sgd": {
        "Course": "RunLog",
        "Epoch": "EpochRecord",
        "Result": "SGDResult",
        "Step": "StepRecord",
        "load": "load_task",
    },
}


def resolve_old_name(module: str, name: str, stacklevel: int = 3) -> Any:
    """Return what an old name of a module means now, with a warning.

    Raises
    ------
    AttributeError
        If the module never had this name.
    """
    new = RENAMED.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    place, _, new_name = new.rpartition(":")
    place = place or module
    warnings.warn(
        f"{module}.{name} is now called {place}.{new_name}. The old name will be removed in the "
        "next release.",
        FutureWarning,
        stacklevel=stacklevel,
    )
    return getattr(importlib.import_module(place), new_name)


def old_names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module with old names."""
    return lambda name: resolve_old_name(module, name)
