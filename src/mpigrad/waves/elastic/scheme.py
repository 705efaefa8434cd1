"""The static data of a run of elastic waves, and checks of its settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import numpy as np

from mpigrad.waves import arguments
from mpigrad.waves.absorbing import Layer, Surface, WaveTile, surface_of
from mpigrad.waves.arguments import STAGGERED_DIFFERENCES, common_settings, fingerprint
from mpigrad.waves.elastic.attenuation import step_constants
from mpigrad.waves.elastic.media import (
    stagger_of,
    state_shapes,
    surface_cells,
    surface_profile,
)
from mpigrad.waves.native_run import ElasticSettings, Run, RunSettings
from mpigrad.waves.options import Storage
from mpigrad.waves.relaxation import Relaxation
from mpigrad.waves.survey import PointTable, Survey, point_table

__all__ = [
    "SOURCES",
    "Component",
    "Points",
    "Scheme",
    "Source",
    "axis_of",
    "check_settings",
    "components_of",
    "points_of",
    "tables",
]

# ---- The static data of a run of elastic waves ----


Source = Literal["explosive", "force_x", "force_y", "force_z"]
Component = Literal["vx", "vy", "vz", "pressure"]

_KINDS = {"pressure": 0, "vx": 1, "vy": 2, "vz": 3}  # Kind in native/waves/elastic.h
# The field that each kind of source drives.
SOURCES = {"explosive": "pressure", "force_x": "vx", "force_y": "vy", "force_z": "vz"}


def components_of(axes: int) -> tuple[str, ...]:
    """Return the components that receivers can record on a grid with 2 or 3 axes."""
    return (*("vx", "vy", "vz")[:axes], "pressure")


def axis_of(component: str) -> int | None:
    """Return the axis of a velocity, and None for the pressure."""
    return None if component == "pressure" else "xyz".index(component[1])


def offset_of(component: str, axes: int, surface: Surface | None) -> tuple[float, ...]:
    """Return the place of a field, in cells from the cell centres."""
    return tuple(
        0.5 * stagger_of(surface, axis) if axis == axis_of(component) else 0.0
        for axis in range(axes)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Points:
    """Cells around points, one entry for each cell of each point of each shot.

    Entry k has weight weights[k] for point points[k] (counted shot after shot) in cell cells[k]
    (counted in C order over the fields of all shots).
    """

    count: tuple[int, int]  # shots, points of a shot
    points: np.ndarray
    cells: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Scheme:
    """The discretisation of one survey on this rank.

    Attributes
    ----------
    absorbs
        Velocity, frequency and reflection that the layers are made for.
    source_table
        Cells of the sources, shot after shot.
    receiver_tables
        For each component, cells of the receivers, shot after shot, or of one shot if all shots
        have the same ones.
    reference
        Frequency of the given velocities in Hz, if there is a relaxation.
    """

    tile: WaveTile
    order: int
    dt: float
    steps: int
    layers: tuple[Layer, ...]
    absorbs: tuple[float, float, float]
    survey: Survey
    source: Source
    components: tuple[Component, ...]
    source_table: PointTable
    receiver_tables: tuple[PointTable, ...]
    threads: int
    storage: Storage
    surface: Surface | None
    relaxation: Relaxation | None
    reference: float

    @property
    def reach(self) -> int:
        """Number of cells that a difference reaches beyond a tile."""
        return self.order // 2

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that must be the same on all ranks, by name."""
        common = common_settings(self.tile, self.dt, self.steps, self.survey, self.storage)
        return common | {
            "order": self.order,
            "velocity, frequency and reflection of the layers": self.absorbs,
            "source": self.source,
            "components": self.components,
            "free_surface": self.surface,
            "relaxation": self.relaxation,
            "reference": self.reference,
        }

    @functools.cached_property
    def fingerprint(self) -> int:
        """Hash of the settings."""
        return fingerprint(self.settings)

    @functools.cached_property
    def native(self) -> Run:
        """This scheme for the native library."""
        survey = self.survey
        widths = tuple(layer.before + layer.after for layer in self.layers)
        shapes, constants, mechanisms = state_shapes(self.tile.shape, widths), [], 0
        if self.relaxation is not None:
            mechanisms = len(self.relaxation.times)
            keep, gain, half = step_constants(self.relaxation, self.dt)
            constants = [np.stack([keep, gain / self.dt, half * self.dt], axis=-1).ravel()]
            strains = len(shapes) - 2 * self.tile.grid.ndim
            shapes = (*shapes, (mechanisms, strains, *self.tile.shape))
        # The kernels have surfaces on last sides.
        mirrored = self.surface.axis if self.surface and self.surface.end == 0 else None
        profiles = [c[half] for layer in self.layers for half in (0, 1) for c in (layer.a, layer.b)]
        return Run(
            self.tile,
            RunSettings(
                reach=self.reach,
                steps=self.steps,
                shots=survey.n_shots,
                threads=self.threads,
                storage=self.storage,
                fingerprint=self.fingerprint,
                dt=self.dt,
            ),
            ElasticSettings(
                source_kind=_KINDS[SOURCES[self.source]],
                component_kinds=tuple(_KINDS[component] for component in self.components),
                receivers=survey.n_receivers,
                surface=self.surface.axis if self.surface else None,
                mechanisms=mechanisms,
            ),
            profiles=[
                profile[::-1] if k // 4 == mirrored else profile
                for k, profile in enumerate(profiles)
            ]
            + constants
            + ([surface_profile(self.order)] if self.surface else []),
            tables=(
                (survey.n_shots, survey.n_sources, self.source_table),
                (
                    survey.receivers.shape[0],
                    len(self.components) * survey.n_receivers,
                    _joined(self.receiver_tables, survey.n_receivers),
                ),
            ),
            shapes=shapes,
            gathers=(survey.n_shots, len(self.components) * survey.n_receivers, self.steps),
            mirrored=mirrored,
        )


def _joined(tables: tuple[PointTable, ...], count: int) -> PointTable:
    """Join tables of `count` points per shot: for each shot the rows of one table after another."""
    counts, cells, weights = [], [], []
    for start in range(0, len(tables[0].starts) - 1, max(count, 1)):
        for table in tables:
            starts = table.starts[start : start + count + 1]
            counts.append(np.diff(starts))
            cells.append(table.cells[starts[0] : starts[-1]])
            weights.append(table.weights[starts[0] : starts[-1]])
    starts = np.concatenate([[0], np.cumsum(np.concatenate([[], *counts]))]).astype(np.int64)
    return PointTable(
        starts, np.concatenate([[], *cells]).astype(np.int64), np.concatenate([[], *weights])
    )


def tables(
    tile: WaveTile,
    survey: Survey,
    source: Source,
    components: tuple[Component, ...],
    surface: Surface | None,
) -> tuple[PointTable, tuple[PointTable, ...]]:
    """Return the cells of the sources, and of the receivers for each component."""
    sources, receivers = (p.reshape(-1, p.shape[2]) for p in (survey.sources, survey.receivers))

    def table(points: np.ndarray, what: str, component: str) -> PointTable:
        offset = offset_of(component, tile.grid.ndim, surface)
        return point_table(points, tile, what, offset, surface)

    return table(sources, "sources", SOURCES[source]), tuple(
        table(receivers, "receivers", component) for component in components
    )


def points_of(table: PointTable, shots: int, count: int, shape: tuple[int, ...]) -> Points:
    """Expand a table to the cells of the fields of all shots, with `shape` cells each."""
    size, points, cells = math.prod(shape), table.points, table.cells
    if len(table.starts) - 1 == shots * count:
        cells = cells + points // max(count, 1) * size
        return Points((shots, count), points, cells, table.weights)
    shot = np.arange(shots)[:, None]  # the same points in every shot
    return Points(
        (shots, count),
        (points + count * shot).ravel(),
        (cells + size * shot).ravel(),
        np.tile(table.weights, shots),
    )


# ---- Checks of the settings of elastic waves ----


def check_settings(model: Any) -> None:
    """Raise a ValueError if a setting of an `Elastic` is not valid."""
    if not (isinstance(model.order, int) and model.order in STAGGERED_DIFFERENCES):
        raise ValueError(
            f"Elastic: order must be one of {tuple(STAGGERED_DIFFERENCES)}, got {model.order!r}."
        )
    arguments.check_settings(model, ("dt", "steps", "frequency"), model.order // 2, axes=(2, 3))
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
    if model.relaxation is not None and model.storage.keep == "boundary":
        raise ValueError(
            'Elastic: Storage("boundary") runs waves backwards, which a relaxation does not allow. '
            "Leave keep out, or give a number of steps."
        )
    surface = surface_of(model.free_surface, axes, "Elastic")
    cells = surface_cells(model.order)
    if surface and model.grid.smallest_tile[surface.axis] < cells:
        raise ValueError(
            f"Elastic: the smallest tile has {model.grid.smallest_tile[surface.axis]} cells along "
            f"the axis of the free surface, {surface.axis}, and needs {cells}. Use other dims or "
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
