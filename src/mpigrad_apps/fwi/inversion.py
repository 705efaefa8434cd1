"""The inverse problem: a parametrized model, recorded gathers, and the loss between them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped
from mpi4py import MPI

import mpigrad
from mpigrad.collective_errors import call_on_root
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid import Grid
from mpigrad.waves import Storage
from mpigrad_apps.fwi.inputs import Inputs, read_inputs
from mpigrad_apps.fwi.layout import Layout, TileLayout
from mpigrad_apps.fwi.memory import check_memory
from mpigrad_apps.fwi.misfit import Misfit, make_misfit
from mpigrad_apps.fwi.parametrization import (
    BoxValues,
    CellValues,
    NetworkValues,
    Parametrization,
    Unknown,
)
from mpigrad_apps.fwi.regularization import tikhonov, total_variation, window_with_neighbors
from mpigrad_apps.fwi.settings import Settings
from mpigrad_apps.fwi.volume_inputs import find_volumes, read_volume_inputs
from mpigrad_apps.shots.acoustic_physics import AcousticPhysics
from mpigrad_apps.shots.elastic_physics import ElasticPhysics
from mpigrad_apps.shots.experiment import Experiment
from mpigrad_apps.shots.physics import Physics
from mpigrad_apps.shots.shot_group import ShotGroup, make_shot_group

__all__ = ["Inversion", "LossWeights", "prepare_inversion"]

_STABLE = 0.999  # fraction of the largest stable velocity that bounds and trial models stay below


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """The weights of the loss, as the settings of the same names describe them."""

    normalize: str = "none"
    tikhonov: float = 0.0
    total_variation: float = 0.0


@dataclasses.dataclass(frozen=True)
class Inversion:
    """The search for the model that explains the recorded gathers.

    Attributes
    ----------
    inputs
        Model, start, mask and data.
    weights
        Weights of the loss.
    group
        This rank's group, with the physics and the group's shots.
    parametrization
        The unknown fields as functions of parameters.
    recorded
        Gathers of this group's shots, shape (shots, components, receivers, steps).
    data_source
        A short text that tells recordings apart, for the saves.
    """

    inputs: Inputs
    weights: LossWeights
    group: ShotGroup
    parametrization: Parametrization
    recorded: Float[np.ndarray, "shots components receivers steps"]
    data_source: str = ""

    @property
    def experiment(self) -> Experiment:
        """All shots."""
        return self.inputs.experiment

    @property
    def grid(self) -> Grid:
        """The grid of this rank's group."""
        return self.group.grid

    @property
    def layout(self) -> Layout:
        """The cells that this rank holds."""
        return self.inputs.layout

    @property
    def n_unknowns(self) -> int:
        """Number of parameters of all ranks."""
        values = self.parametrization
        if values.sharded is not None:
            return len(values.unknowns) * values.sharded.size
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: values.initial(0))))

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the loss, apart from the low pass. The same on all ranks (collective)."""
        whole = self.experiment
        words = self.group.physics.settings, self.data_source, self.weights
        digest = hashlib.sha256(repr((*words, whole.dt, whole.spacing)).encode())
        for array in (whole.sources, whole.receivers, whole.wavelets):
            digest.update(np.ascontiguousarray(array).tobytes())
        for field in whole.fields.values():
            self.layout.add_to(digest, field)
        return digest.hexdigest()[:16]

    def misfit(self, corner: float | None) -> Misfit:
        """Make the misfit of a stage with the low pass's corner frequency in Hz (collective)."""
        return make_misfit(
            self.recorded,
            self.weights.normalize,
            corner,
            self.experiment.dt,
            self.group.comm,
            self.grid.comm,
        )

    def tile(self, field: Shaped[np.ndarray, "*held"]) -> Shaped[np.ndarray, "*tile"]:
        """Return this rank's tile of a field in the held cells."""
        return self.layout.part(field, self.grid.slices)

    def tiles(self, parameters: Any) -> dict[str, Float[Array, "*tile"]]:
        """Return this rank's tiles of all fields. Differentiable."""
        return self.parametrization.fields(parameters, self.grid.slices)

    def predict(
        self, fields: dict[str, Float[Array, "*tile"]]
    ) -> Float[Array, "shots components receivers steps"]:
        """Return the gathers of this group's shots. Differentiable."""
        wavelets = jnp.asarray(self.group.experiment.wavelets)
        return self.group.physics.propagate(fields, wavelets, self.group.survey)[0]

    def loss_share(self, misfit: Misfit, parameters: Any) -> Float[Array, ""]:
        """Return this rank's share of the loss, which is the sum of all shares. Differentiable.

        The loss is the misfit plus the weighted regularization of differences relative to the mean
        of the start. It is NaN for a model that is not a valid material or for which the time step
        is not stable, so that a line search takes a shorter step.
        """
        tiles = self.tiles(parameters)
        physics = self.group.physics
        fixed = jax.lax.stop_gradient(tiles)
        limit = physics.limiting_velocity(fixed)
        valid = physics.is_valid(fixed) & (limit < _STABLE * physics.max_stable_velocity)
        invalid = (~valid).astype(jnp.float64)
        usable = mpigrad.allreduce(invalid, op=MPI.MAX, comm=self.group.comm) == 0
        start = self.parametrization.start(self.grid.slices)
        tiles = {name: jnp.where(usable, tiles[name], start[name]) for name in tiles}
        share = misfit.group_share(self.predict(tiles)) / self.grid.comm.size
        weights = self.weights
        if weights.tikhonov or weights.total_variation:
            window = window_with_neighbors(self.grid)
            fields = self.parametrization.fields(parameters, window)
            for weight, roughness in (
                (weights.tikhonov, tikhonov),
                (weights.total_variation, total_variation),
            ):
                if weight:
                    part = roughness(fields, self.grid, self._scales)
                    share = share + weight * part / self.group.n_groups
        return jnp.where(usable, share, jnp.nan)

    def value_and_grad(self, misfit: Misfit, parameters: Any) -> tuple[Float[Array, ""], Any]:
        """Return the loss, and its gradient as the parameters: equal on all ranks, or divided."""
        share = functools.partial(self.loss_share, misfit)
        replicated = 0 if self.parametrization.sharded is None else ()
        return mpigrad.value_and_grad(
            share, loss="share", replicated=replicated, comm=self.group.comm
        )(parameters)

    @property
    def _scales(self) -> dict[str, float]:
        """Means of the start's fields, to which differences are relative."""
        return {unknown.name: unknown.mean for unknown in self.parametrization.unknowns}

    def error(self, parameters: Any) -> float | None:
        """Return the model's error, None if the truth is not known (collective).

        It is the root of the mean over unknown fields of |m - m_true|^2 / |m_true|^2 in the cells
        that may change.
        """
        truth = self.inputs.truth
        if truth is None:
            return None
        active = self.tile(self.parametrization.active)
        tiles = jax.tree.map(np.asarray, self.compiled_tiles(parameters))
        sums = []
        for unknown in self.parametrization.unknowns:
            true = self.tile(truth[unknown.name])
            sums.append(
                [np.sum(active * (tiles[unknown.name] - true) ** 2), np.sum(active * true**2)]
            )
        off, size = np.sum(self.grid.comm.mpi.allgather(np.asarray(sums)), axis=0).T
        return math.sqrt(float(np.mean(off / size)))

    @functools.cached_property
    def compiled_tiles(self) -> Any:
        """`tiles` as a compiled program."""
        return mpigrad.jit(self.tiles)


def prepare_inversion(settings: Settings, comm: Communicator | None = None) -> Inversion:
    """Prepare the inversion that the settings describe (collective).

    Raises
    ------
    ValueError, OSError, RuntimeError
        On every rank, before the first time step, if settings or files are not valid.
    """
    comm = resolve(comm)
    with jax.enable_x64(True):
        volumes, split = call_on_root(comm, lambda: find_volumes(settings)), None
        if volumes is None:
            inputs = call_on_root(comm, lambda: read_inputs(settings))
        else:
            inputs, split = read_volume_inputs(settings, volumes, comm)
        experiment = inputs.experiment
        _check_frequencies(settings.frequencies, experiment.dt)
        physics = _physics_factory(settings)
        group = make_shot_group(comm, settings.groups, experiment, physics, split)
        if isinstance(inputs.layout, TileLayout):
            check_memory(settings, inputs.layout, group.grid, comm, group)
        values = _parametrization(settings, inputs, group.physics.max_stable_velocity)
        if inputs.data is None:
            recorded = _simulate(inputs, group, settings.noise, settings.seed)
            source = f"computed with noise {settings.noise}, seed {settings.seed}"
        else:
            recorded = inputs.data[group.shots]
            source = "" if settings.data is None else settings.data.name
        weights = LossWeights(settings.normalize, settings.tikhonov, settings.total_variation)
        return Inversion(inputs, weights, group, values, recorded, source)


def _physics_factory(settings: Settings) -> Callable[[Grid, Experiment], Physics]:
    """Return the function that makes the physics of an experiment on a grid."""
    kernels = settings.kernels
    storage = Storage(
        None if settings.storage == "auto" else settings.storage,
        settings.storage_memory,
        settings.storage_precision,
        settings.storage_directory,
    )
    if settings.physics == "elastic":
        elastic_options = settings.source, settings.quality
        return lambda grid, whole: ElasticPhysics(
            grid, whole.dt, kernels(2), whole.peak, *elastic_options, storage=storage
        )
    return lambda grid, whole: AcousticPhysics(grid, whole.dt, kernels(grid.ndim), storage=storage)


def _check_frequencies(corners: tuple[float, ...], dt: float) -> None:
    if corners and corners[-1] >= 0.5 / dt:
        raise ValueError(
            f"--frequencies: got {corners[-1]} Hz, but with {dt:g} s between samples there are "
            f"{0.5 / dt:g} Hz at most. Use lower frequencies."
        )


def _parametrization(
    settings: Settings, inputs: Inputs, max_stable_velocity: float
) -> Parametrization:
    start, names = inputs.start, settings.invert
    bounds = settings.bounds_by_field()
    unknowns = tuple(
        _unknown(name, np.asarray(start[name]), bounds.get(name), max_stable_velocity, inputs)
        for name in names
    )
    fixed = {name: field for name, field in start.items() if name not in names}
    arguments = unknowns, fixed, inputs.active, inputs.layout
    if settings.unknown == "network":
        return NetworkValues(*arguments, fineness=settings.fineness)
    if settings.box:
        return BoxValues(*arguments)
    return CellValues(*arguments, smoothing=settings.smoothing)


def _unknown(
    name: str,
    start: Float[np.ndarray, "*held"],
    bounds: tuple[float, float] | None,
    max_stable_velocity: float,
    inputs: Inputs,
) -> Unknown:
    """Return an unknown field with its bounds (collective)."""
    reduce = inputs.layout.reduce
    smallest, mean, largest = (reduce(start, how) for how in ("min", "mean", "max"))
    low, high = bounds or (0.5 * smallest, 1.5 * largest)
    if name == "vp":
        if bounds and high > max_stable_velocity:
            raise ValueError(
                f"--bounds: got vp up to {high:g} m/s, but the time step is stable up to "
                f"{max_stable_velocity:g} m/s. Use a smaller --dt or a lower bound."
            )
        high = min(high, _STABLE * max_stable_velocity)
    inside = ((start > low) & (start < high)).astype(float)
    if bounds and not reduce(inside, "max"):
        raise ValueError(
            f"--bounds: no cell of the start has {name} between {low:g} and {high:g}. Use wider "
            "bounds."
        )
    return Unknown(name, start, mean, low, high)


def _simulate(
    inputs: Inputs, group: ShotGroup, noise: float, seed: int
) -> Float[np.ndarray, "shots components receivers steps"]:
    """Compute the data of this group's shots for the true model and add noise."""
    fields = {
        name: jnp.asarray(inputs.layout.part(field, group.grid.slices))
        for name, field in inputs.experiment.fields.items()
    }
    wavelets = jnp.asarray(group.experiment.wavelets)
    compute = mpigrad.jit(lambda f, w: group.physics.propagate(f, w, group.survey)[0])
    gathers = np.array(compute(fields, wavelets), np.float64)
    if noise:
        level = noise * np.sqrt(np.mean(gathers**2, axis=(1, 2, 3)))
        for k, shot in enumerate(group.shots):
            draw = np.random.default_rng([seed, int(shot)])
            gathers[k] += level[k] * draw.standard_normal(gathers[k].shape)
    return gathers
