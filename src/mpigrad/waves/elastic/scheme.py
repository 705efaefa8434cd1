"""All that a run of elastic waves takes beside its fields: static, made once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import numpy as np

from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.elastic.absorbing import Layer
from mpigrad.waves.interpolation import PointTable, point_table
from mpigrad.waves.native_run import ELASTIC, Run, default_memory
from mpigrad.waves.run_agreement import fingerprint
from mpigrad.waves.survey import Survey

__all__ = [
    "COMPONENTS",
    "REACH",
    "SOURCES",
    "Component",
    "Points",
    "Scheme",
    "Source",
    "points_of",
    "tables",
]

Source = Literal["explosive", "force_x", "force_y"]
Component = Literal["vx", "vy", "pressure"]

REACH = 2  # cells that a difference reaches beyond a tile
# Where the fields lie, in cells from the cells' centres.
OFFSETS = {"vx": (0.5, 0.0), "vy": (0.0, 0.5), "pressure": (0.0, 0.0)}
COMPONENTS = tuple(OFFSETS)
_NUMBERS = {"pressure": 0, "vx": 1, "vy": 2}  # in native/waves/elastic.h
# The field that each kind of source drives.
SOURCES = {"explosive": "pressure", "force_x": "vx", "force_y": "vy"}


@dataclasses.dataclass(frozen=True, eq=False)
class Points:
    """Cells around points, one entry for each of a shot's point and cell.

    Entry k has weight weights[k] for point points[k] (numbered shot after shot) in cell cells[k]
    (of all shots' fields in C order).
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
    source_table, receiver_tables
        The cells of the sources of all shots, and for each component of the receivers: shot after
        shot, or of one shot where all have the same.
    """

    tile: WaveTile
    dt: float
    steps: int
    layers: tuple[Layer, Layer]
    absorbs: tuple[float, float, float]  # what the layers are made for: v, frequency, reflection
    survey: Survey
    source: Source
    components: tuple[Component, ...]
    source_table: PointTable
    receiver_tables: tuple[PointTable, ...]
    checkpoints: int  # as native_number has it
    threads: int
    memory: int | None

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number of what all ranks must have alike."""
        grid = self.tile.grid
        common = (grid.shape, grid.spacing, grid.dims, self.tile.pml, self.dt, self.steps)
        own = (self.absorbs, self.source, self.components, self.checkpoints, self.survey.digest())
        return fingerprint((common, own))

    @functools.cached_property
    def native(self) -> Run:
        """This scheme as the native library takes it."""
        survey, (nx, ny) = self.survey, self.tile.shape
        px, py = (layer.before + layer.after for layer in self.layers)
        return Run(
            ELASTIC,
            self.tile,
            reach=REACH,
            settings=(
                self.steps,
                survey.n_shots,
                self.threads,
                self.checkpoints,
                default_memory() if self.memory is None else self.memory,
            ),
            fingerprint=self.fingerprint,
            reals=(
                self.dt,
                float(_NUMBERS[SOURCES[self.source]]),
                float(max(survey.n_receivers, 1)),
                *(float(_NUMBERS[component]) for component in self.components),
            ),
            profiles=[
                c[half] for layer in self.layers for half in (0, 1) for c in (layer.a, layer.b)
            ],
            tables=(
                (survey.n_shots, survey.n_sources, self.source_table),
                (
                    survey.receivers.shape[0],
                    len(self.components) * survey.n_receivers,
                    _joined(self.receiver_tables, survey.n_receivers),
                ),
            ),
            shapes=((nx, ny),) * 5 + ((4, px, ny), (4, nx, py)),
            gathers=(survey.n_shots, len(self.components) * survey.n_receivers, self.steps),
        )


def _joined(tables: tuple[PointTable, ...], count: int) -> PointTable:
    """Tables of `count` points per shot as one: of each shot the first table's, then the next's."""
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
    tile: WaveTile, survey: Survey, source: Source, components: tuple[Component, ...]
) -> tuple[PointTable, tuple[PointTable, ...]]:
    """The cells of the sources, and of the receivers for each component."""
    sources, receivers = (p.reshape(-1, 2) for p in (survey.sources, survey.receivers))
    return point_table(sources, tile, "sources", OFFSETS[SOURCES[source]]), tuple(
        point_table(receivers, tile, "receivers", OFFSETS[component]) for component in components
    )


def points_of(table: PointTable, shots: int, count: int, shape: tuple[int, int]) -> Points:
    """A table with the cells of every shot's fields, of `shape` cells each."""
    size, points, cells = shape[0] * shape[1], table.points, table.cells
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
