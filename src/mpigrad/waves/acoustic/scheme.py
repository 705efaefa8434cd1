"""The static data and the fields of a run of acoustic waves."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import Array, Float, Int
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.arguments import common_settings, fingerprint, wave_equation_limit
from mpigrad.waves.native_run import AcousticSettings, Run, RunSettings, native_axes
from mpigrad.waves.options import Storage
from mpigrad.waves.survey import PointTable, Survey

__all__ = [
    "AcousticMedium",
    "Scheme",
    "State",
    "at_rest",
    "memory_cells",
    "memory_size",
    "pack",
    "unpack",
]

# ---- The medium, and the fields of acoustic waves on a rank's wave tile ----


class AcousticMedium(NamedTuple):
    """This rank's tiles of an acoustic medium, without absorbing layers: a pytree.

    Attributes
    ----------
    velocity
        In m/s, shape (lx, ly) or (lx, ly, lz), float32 or float64.
    density
        In kg/m3, with the shape and dtype of the velocity. Only its ratios matter. None: constant.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.waves import AcousticMedium
    >>> AcousticMedium(jnp.full((4, 3), 1500.0)).density is None
    True
    """

    velocity: Float[Array, "*tile"]
    density: Float[Array, "*tile"] | None = None


class State(NamedTuple):
    """The fields of all shots at one time, on this rank's tile with its absorbing layers.

    Attributes
    ----------
    field
        The pressure, shape (n_shots, nx, ny) or (n_shots, nx, ny, nz) with the cells of
        `Acoustic.tile`.
    previous
        The pressure one step earlier, with the same shape.
    memory
        The memories of the absorbing layers one after the other, each in C order, shape (n_shots,
        n). On two axes they are phi and psi in this rank's cells of all layers. On three axes they
        are p and z along x, then along y, then along z, in the cells of the layers of this axis.
        Without layers n = 0.
    """

    field: Float[Array, "shots ..."]
    previous: Float[Array, "shots ..."]
    memory: Float[Array, "shots m"]


def memory_cells(tile: WaveTile) -> list[Int[np.ndarray, " _"]]:
    """Return for each memory the cells in which it exists, as indices of this rank's tile."""
    along = []  # in the layers of each axis
    for axis, part in enumerate(tile.interior):
        layers = np.zeros(tile.shape, bool)
        view = np.moveaxis(layers, axis, 0)
        view[: part.start] = view[part.stop :] = True
        along.append(layers)
    if tile.grid.ndim == 2:
        return [np.flatnonzero(along[0] | along[1])] * 2
    return [np.flatnonzero(layers) for layers in along for _ in range(2)]


def at_rest(tile: WaveTile, n_shots: int, dtype: np.dtype) -> State:
    """Return a state whose fields are all zero."""
    field = jnp.zeros((n_shots, *tile.shape), dtype)
    return State(field, field, jnp.zeros((n_shots, memory_size(tile)), dtype))


def memory_size(tile: WaveTile) -> int:
    """Return the number of values that the layers of this rank keep for each shot."""
    return sum(cells.size for cells in memory_cells(tile))


def unpack(tile: WaveTile, memory: jax.Array) -> tuple[jax.Array, ...]:
    """Return the memories as fields that are zero where they do not exist."""
    cells = memory_cells(tile)
    ends = np.cumsum([c.size for c in cells])
    shape = (memory.shape[0], math.prod(tile.shape))
    return tuple(
        jnp.zeros(shape, memory.dtype).at[:, c].set(part).reshape(-1, *tile.shape)
        for c, part in zip(cells, jnp.split(memory, ends[:-1], axis=1), strict=True)
    )


def pack(tile: WaveTile, *memories: jax.Array) -> jax.Array:
    """Return the values of the memories where they exist."""
    cells = memory_cells(tile)
    return jnp.concatenate(
        [f.reshape(f.shape[0], -1)[:, c] for c, f in zip(cells, memories, strict=True)], axis=1
    )


# ---- The static data of a run of acoustic waves ----


@dataclasses.dataclass(frozen=True, eq=False)
class Scheme:
    """The discretisation of one survey on this rank.

    Attributes
    ----------
    absorbs
        The velocity and the reflection that the layers are made for.
    layers
        For each axis the damping of this rank's cells along it, in 1/s. On three axes the filter.
    sources
        Cells of the sources, shot after shot.
    receivers
        Cells of the receivers, shot after shot, or of one shot if all shots have the same ones.
    """

    tile: WaveTile
    dt: float
    steps: int
    order: int
    absorbs: tuple[float, float]
    layers: tuple[Any, ...]
    survey: Survey
    sources: PointTable
    receivers: PointTable
    threads: int
    storage: Storage

    @property
    def reach(self) -> int:
        """Number of cells that the stencil reaches."""
        return self.order // 2

    @property
    def shots(self) -> int:
        """Number of shots."""
        return self.survey.n_shots

    @property
    def limit(self) -> float:
        """The largest stable time step times the largest velocity."""
        return wave_equation_limit(self.tile.grid, self.order)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that must be the same on all ranks, by name."""
        common = common_settings(self.tile, self.dt, self.steps, self.survey, self.storage)
        return common | {
            "order": self.order,
            "velocity and frequency of the layers": self.absorbs,
        }

    @functools.cached_property
    def fingerprint(self) -> int:
        """Hash of the settings."""
        return fingerprint(self.settings)

    @functools.cached_property
    def native(self) -> Run:
        """This scheme for the native library."""
        points = (self.shots, self.survey.n_sources, self.sources)
        return self._run(AcousticSettings(self.limit), points)

    @functools.cached_property
    def native_with_density(self) -> Run:
        """The same with buoyancies. Each cell of a source is a source of its own."""
        most, places = self._source_cells
        starts = np.zeros(self.shots * most + 1, int)
        starts[places + 1] = 1
        cells = PointTable(np.cumsum(starts), self.sources.cells, np.ones(places.size))
        return self._run(AcousticSettings(math.inf, density=True), (self.shots, most, cells))

    def _run(self, physics: AcousticSettings, sources: tuple[int, int, PointTable]) -> Run:
        survey = self.survey
        receiver_shots = survey.receivers.shape[0]
        return Run(
            self.tile,
            RunSettings(
                reach=self.reach,
                steps=self.steps,
                shots=self.shots,
                threads=self.threads,
                storage=self.storage,
                fingerprint=self.fingerprint,
                dt=self.dt,
            ),
            physics,
            profiles=tuple(np.asarray(self.layers[a]) for a in native_axes(self.tile.grid.ndim)),
            tables=(sources, (receiver_shots, survey.n_receivers, self.receivers)),
            shapes=(self.tile.shape, self.tile.shape, (memory_size(self.tile),)),
            gathers=(self.shots, survey.n_receivers, self.steps),
        )

    @functools.cached_property
    def _source_cells(self) -> tuple[int, Int[np.ndarray, " k"]]:
        """The largest number of source cells of a shot, and the place of each one among so many."""
        shots = self.sources.points // max(self.survey.n_sources, 1)
        counts = np.bincount(shots, minlength=self.shots)
        most = max(int(counts.max()), 1)
        within = np.arange(len(shots)) - np.repeat(np.cumsum(counts) - counts, counts)
        return most, shots * most + within

    def spread(
        self, amplitudes: Float[Array, "shots sources steps"], factors: Float[Array, "*cells"]
    ) -> Float[Array, "shots _ steps"]:
        """Return the amplitudes of each cell of the sources, times its factor."""
        most, places = self._source_cells
        flat = amplitudes.reshape(-1, amplitudes.shape[-1])
        weights = factors.ravel()[self.sources.cells] * self.sources.weights.astype(flat.dtype)
        whole = jnp.zeros((self.shots * most, flat.shape[-1]), flat.dtype)
        whole = whole.at[places].set(weights[:, None] * flat[self.sources.points])
        return whole.reshape(self.shots, most, flat.shape[-1])
