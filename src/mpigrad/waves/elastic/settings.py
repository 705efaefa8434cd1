"""Checks of the settings of elastic waves."""

from __future__ import annotations

import math
from typing import Any

from mpigrad.waves import arguments
from mpigrad.waves.elastic.free_surface import CELLS, surface_of
from mpigrad.waves.elastic.scheme import REACH, SOURCES, components_of

__all__ = ["check_settings"]


def check_settings(model: Any) -> None:
    """Raise a ValueError if a setting of an `Elastic` is not valid."""
    arguments.check_settings(model, ("dt", "steps", "frequency"), REACH, axes=(2, 3))
    axes = model.grid.ndim
    components = components_of(axes)
    sources = tuple(name for name, field in SOURCES.items() if field in components)
    if model.source not in sources:
        raise ValueError(
            f"Elastic: source must be one of {sources} on {axes} axes, got {model.source!r}."
        )
    if not model.components or not set(model.components) <= set(components):
        raise ValueError(
            f"Elastic: components must be some of {components} on {axes} axes, got "
            f"{model.components!r}."
        )
    _check_reference(model)
    surface = surface_of(model.free_surface, axes)
    if surface and model.grid.smallest_tile[surface.axis] < CELLS:
        raise ValueError(
            f"Elastic: the smallest tile has {model.grid.smallest_tile[surface.axis]} cells along "
            f"the axis of the free surface, {surface.axis}, and needs {CELLS}. Use other dims or "
            "more cells."
        )


def _check_reference(model: Any) -> None:
    if model.reference is None:
        return
    if model.relaxation is None:
        raise ValueError(
            f"Elastic: reference={model.reference} needs a relaxation. Give one, or leave the "
            "reference out."
        )
    if not (model.reference > 0 and math.isfinite(model.reference)):
        raise ValueError(f"Elastic: reference must be positive and finite, got {model.reference}.")
