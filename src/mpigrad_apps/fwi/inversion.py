"""The inverse problem: a parametrized model, recorded gathers, and the loss between them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from mpi4py import MPI

import mpigrad
from mpigrad.collective_errors import call_on_root
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid import Grid
from mpigrad_apps.fwi.misfit import Misfit, make_misfit
from mpigrad_apps.fwi.parametrization import (
    CellValues,
    NetworkValues,
    Parametrization,
    Unknown,
    gaussian,
)
from mpigrad_apps.fwi.regularization import tikhonov, total_variation, window_with_neighbors
from mpigrad_apps.fwi.settings import Settings
from mpigrad_apps.shots.acoustic_physics import AcousticPhysics
from mpigrad_apps.shots.elastic_physics import ElasticPhysics
from mpigrad_apps.shots.experiment import Experiment, Fields, make_experiment
from mpigrad_apps.shots.files import SEGY, read_array, read_model, read_time_step
from mpigrad_apps.shots.physics import Physics
from mpigrad_apps.shots.shot_group import Team, team_of

__all__ = ["Inversion", "prepare_inversion"]

_DEFAULT_BLUR = 6.0  # cells: what a start is smoothed by that is made of the true model
_STABLE = 0.999  # of the largest stable velocity: what bounds and trial models stay below


@dataclasses.dataclass(frozen=True)
class Inversion:
    """Which model explains the recorded gathers?

    Attributes
    ----------
    team
        This rank's group, with the waves and the group's shots.
    experiment
        All shots; its fields are the true model's where that is known, else the start's.
    parametrization
        What stands for the unknown fields.
    recorded
        Gathers of this group's shots, shape (shots, components, receivers, steps).
    settings
        Weights of the loss.
    truth
        The true fields (nx, ny), where they are known.
    """

    team: Team
    experiment: Experiment
    parametrization: Parametrization
    recorded: Float[np.ndarray, "shots components receivers steps"]
    settings: Settings
    truth: Fields | None

    @property
    def grid(self) -> Grid:
        """The grid of this rank's group."""
        return self.team.grid

    @functools.cached_property
    def digest(self) -> str:
        """What is minimised, but for the low pass, as a short text; equal on all ranks."""
        whole, s = self.experiment, self.settings
        words = (
            s.physics,
            s.data and s.data.name,
            s.noise,
            s.seed,
            s.normalize,
            s.tikhonov,
            s.total_variation,
        )
        digest = hashlib.sha256(repr((*words, whole.dt, whole.spacing)).encode())
        for array in (whole.sources, whole.receivers, whole.wavelets, *whole.fields.values()):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def misfit(self, corner: float | None) -> Misfit:
        """The misfit of a stage, by its low pass's corner in Hz (collective)."""
        return make_misfit(
            self.recorded,
            self.settings.normalize,
            corner,
            self.experiment.dt,
            self.team.comm,
            self.grid.comm,
        )

    def tiles(self, parameters: Any) -> dict[str, Float[Array, "lx ly"]]:
        """This rank's tiles of all fields; differentiable."""
        return self.parametrization.fields(parameters, _window(self.grid))

    def predict(
        self, fields: dict[str, Float[Array, "lx ly"]]
    ) -> Float[Array, "shots components receivers steps"]:
        """The gathers of this group's shots; differentiable."""
        some = self.team.experiment
        wavelets = jnp.asarray(some.wavelets)
        return self.team.physics.propagate(fields, wavelets, self.team.survey)[0]

    def loss_share(self, measure: Misfit, parameters: Any) -> Float[Array, ""]:
        """Share of this rank in the loss, the sum of all shares; differentiable.

        The misfit, plus `tikhonov` and `total_variation` times what they weigh (on differences
        over the mean of the start). The loss of a model that no material has, or for which the
        time step is not stable, is NaN, so that a line search takes a shorter step.
        """
        tiles = self.tiles(parameters)
        physics = self.team.physics
        fixed = jax.lax.stop_gradient(tiles)
        limit = physics.limiting_velocity(fixed)
        possible = physics.sound(fixed) & (limit < _STABLE * self.team.fastest)
        impossible = (~possible).astype(jnp.float64)
        usable = mpigrad.allreduce(impossible, op=MPI.MAX, comm=self.team.comm) == 0
        start = self.parametrization.start(_window(self.grid))
        tiles = {name: jnp.where(usable, tiles[name], start[name]) for name in tiles}
        share = measure.of_group(self.predict(tiles)) / self.grid.comm.size
        settings = self.settings
        if settings.tikhonov or settings.total_variation:
            window = window_with_neighbors(self.grid)
            fields = self.parametrization.fields(parameters, window)
            for weight, rough in (
                (settings.tikhonov, tikhonov),
                (settings.total_variation, total_variation),
            ):
                if weight:
                    share = (
                        share + weight * rough(fields, self.grid, self._scales) / self.team.count
                    )
        return jnp.where(usable, share, jnp.nan)

    def value_and_grad(self, measure: Misfit, parameters: Any) -> tuple[Float[Array, ""], Any]:
        """The loss and its gradient, equal on all ranks."""
        share = functools.partial(self.loss_share, measure)
        return mpigrad.value_and_grad(share, loss="share", replicated=0, comm=self.team.comm)(
            parameters
        )

    @functools.cached_property
    def _scales(self) -> dict[str, float]:
        """What differences of a field are measured by."""
        return {u.name: float(np.mean(u.start)) for u in self.parametrization.unknowns}

    def error(self, parameters: Any) -> float | None:
        """The model's error, None where the truth isn't known (collective).

        The root of the mean over unknown fields of |m - m_true|^2 / |m_true|^2, in the cells that
        may change.
        """
        if self.truth is None:
            return None
        window = _window(self.grid)
        active = self.parametrization.active[window]
        tiles = jax.tree.map(np.asarray, self._compiled_tiles(parameters))
        sums = []
        for unknown in self.parametrization.unknowns:
            true = self.truth[unknown.name][window]
            sums.append(
                [np.sum(active * (tiles[unknown.name] - true) ** 2), np.sum(active * true**2)]
            )
        off, size = np.sum(self.grid.comm.mpi.allgather(np.asarray(sums)), axis=0).T
        return math.sqrt(float(np.mean(off / size)))

    @functools.cached_property
    def _compiled_tiles(self) -> Any:
        return mpigrad.jit(self.tiles)


def _window(grid: Grid) -> tuple[slice, slice]:
    x, y = grid.slices
    return x, y


def prepare_inversion(settings: Settings, comm: Communicator | None = None) -> Inversion:
    """The problem that the settings describe (collective).

    Raises
    ------
    ValueError, OSError, RuntimeError
        On every rank, before the first time step, where settings or files make no sense.
    """
    comm = resolve(comm)
    call_on_root(comm, settings.check)
    names, (physics, physics_on) = settings.invert, _physics(settings)
    with jax.enable_x64(True):
        known = settings.data is None or settings.model is not None
        if not known and settings.initial is None:
            raise ValueError("fwi: --data without a model file needs --initial, where to start")
        options = settings if known else dataclasses.replace(settings, model=settings.initial)
        whole = make_experiment(options, comm, lambda fields: physics.complete(fields, names))
        active = _active(settings, whole, comm)
        start = _start(settings, whole, comm, physics)
        team = team_of(comm, settings.groups, whole, physics_on)
        if settings.frequencies and settings.frequencies[-1] >= 0.5 / whole.dt:
            raise ValueError(
                f"--frequencies: {settings.frequencies[-1]} Hz; {whole.dt:g} s between samples "
                f"show {0.5 / whole.dt:g} Hz at most"
            )
        unknowns = tuple(_unknown(name, start, team.fastest, settings) for name in names)
        fixed = {name: field for name, field in start.items() if name not in names}
        parts = unknowns, fixed, active
        values: Parametrization = (
            NetworkValues(*parts, fineness=settings.fineness)
            if settings.unknown == "network"
            else CellValues(*parts, smoothing=settings.smoothing)
        )
        recorded = _recorded(settings, whole, team)
        return Inversion(team, whole, values, recorded, settings, whole.fields if known else None)


def _physics(settings: Settings) -> tuple[type[Physics], Callable[[Grid, Experiment], Physics]]:
    """The class of the waves, and what makes them of an experiment on a grid."""
    if settings.physics == "elastic":
        return ElasticPhysics, lambda grid, whole: ElasticPhysics(
            grid, whole.dt, settings, whole.peak, settings.source
        )
    return AcousticPhysics, lambda grid, whole: AcousticPhysics(
        grid, whole.dt, settings, settings.order
    )


def _active(settings: Settings, whole: Experiment, comm: Communicator) -> Bool[np.ndarray, "nx ny"]:
    """The cells that may change: below the water, and where the mask is not 0."""
    depth = (np.arange(whole.shape[1]) + 0.5) * whole.spacing[1]
    active = np.broadcast_to(depth > settings.water, whole.shape)
    path = settings.mask
    if path is not None:
        mask = call_on_root(comm, lambda: _read_mask(path, whole.shape))
        active = active & (mask != 0)
    if not active.any():
        raise ValueError("--water, --mask: no cell is left that may change")
    return np.array(active)


def _read_mask(path: pathlib.Path, shape: tuple[int, int]) -> Float[np.ndarray, "nx ny"]:
    mask = read_array(path, "mask")
    if mask.shape != shape:
        raise ValueError(f"--mask: {path} has shape {mask.shape}, the model {shape}")
    return mask


def _start(
    settings: Settings, whole: Experiment, comm: Communicator, physics: type[Physics]
) -> Fields:
    """The fields to start from: the file's, or the true ones smoothed, but not above the water."""
    if settings.initial is not None:
        file = read_model(settings.initial, comm, whole.shape)
        if file.spacing is not None and not np.allclose(file.spacing, whole.spacing):
            raise ValueError(
                f"--initial: {settings.initial} has cells of {file.spacing} m, the model of "
                f"{whole.spacing} m"
            )
        return physics.complete(file.fields, settings.invert)
    blur_x, blur_y = (gaussian(n, _DEFAULT_BLUR) for n in whole.shape)
    below = (np.arange(whole.shape[1]) + 0.5) * whole.spacing[1] > settings.water
    # What lies above the water does not blur into what is below.
    blur_y = blur_y * below[None, :]
    blur_y = blur_y / np.maximum(blur_y.sum(axis=1, keepdims=True), 1e-300)
    return {
        name: np.where(below[None, :], blur_x @ field @ blur_y.T, field)
        for name, field in whole.fields.items()
    }


def _unknown(name: str, start: Fields, fastest: float, settings: Settings) -> Unknown:
    field = start[name]
    given = settings.limits().get(name)
    low, high = given or (0.5 * float(field.min()), 1.5 * float(field.max()))
    if name == "vp":
        if given and high > fastest:
            raise ValueError(
                f"--bounds: vp up to {high:g} m/s; the time step is stable up to {fastest:g} m/s"
            )
        high = min(high, _STABLE * fastest)
    if given and not np.any((field > low) & (field < high)):
        raise ValueError(f"--bounds: no cell of the start has {name} between {low:g} and {high:g}")
    return Unknown(name, np.asarray(field), low, high)


def _recorded(
    settings: Settings, whole: Experiment, team: Team
) -> Float[np.ndarray, "shots components receivers steps"]:
    """The data of this group's shots: from the file, or computed for the true model."""
    shape = (
        whole.n_shots,
        len(team.physics.components),
        whole.receivers.shape[1],
        whole.steps,
    )
    path = settings.data
    if path is not None:
        return call_on_root(team.comm, lambda: _read_data(path, shape, whole.dt))[team.shots]
    window = _window(team.grid)
    fields = {name: jnp.asarray(field[window]) for name, field in whole.fields.items()}
    wavelets = jnp.asarray(team.experiment.wavelets)
    compute = mpigrad.jit(lambda f, w: team.physics.propagate(f, w, team.survey)[0])
    gathers = np.array(compute(fields, wavelets), np.float64)
    if settings.noise:
        level = settings.noise * np.sqrt(np.mean(gathers**2, axis=(1, 2, 3)))
        for k, shot in enumerate(team.shots):
            draw = np.random.default_rng([settings.seed, int(shot)])
            gathers[k] += level[k] * draw.standard_normal(gathers[k].shape)
    return gathers


def _read_data(
    path: pathlib.Path, shape: tuple[int, int, int, int], dt: float
) -> Float[np.ndarray, "shots components receivers steps"]:
    data = read_array(path, "gathers")
    shots, components, receivers, steps = shape
    accepted, traces = [shape], (shots * components * receivers, steps)
    if path.suffix.lower() in SEGY:  # in this order
        accepted += [traces]
    if components == 1:  # of which nothing has to be said
        accepted += [(shots, receivers, steps), traces]
    if data.shape not in accepted:
        raise ValueError(
            f"--data: {path} has shape {data.shape}; {shots} shots, {components} components, "
            f"{receivers} receivers and {steps} steps are expected, in this order"
        )
    if not np.all(np.isfinite(data)):
        raise ValueError(f"--data: {path} has values that are not finite")
    recorded = read_time_step(path)
    if recorded is not None and abs(recorded[0] - dt) > recorded[1]:
        raise ValueError(
            f"--data: {path} has samples every {recorded[0]:g} s, this run every {dt:g} s; give "
            f"--dt {recorded[0]!r}"
        )
    return data.reshape(shape)
