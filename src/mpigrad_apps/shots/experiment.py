"""An experiment: a model, its shots and its receivers, from files, options or defaults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from mpigrad.collective_errors import call_on_root
from mpigrad.communicator import Communicator
from mpigrad.waves import ricker
from mpigrad.waves.arguments import limiting_square
from mpigrad_apps.shots.model_files import Acquisition, ModelFile, read_model, read_wavelets
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.positions import select_evenly, survey_positions
from mpigrad_apps.shots.volumes import Volume

__all__ = [
    "Experiment",
    "Fields",
    "Speeds",
    "default_model",
    "experiment_of",
    "limiting_velocity",
    "make_experiment",
    "p_velocity",
    "require_distances",
    "slowest_velocity",
    "spacing_of",
    "speeds_of",
    "stable_step",
]

Fields = Mapping[str, Float[np.ndarray, "..."]]
_STABLE = 0.6  # default time step over h / v in one dimension: 0.7 of the largest stable one
_CELLS = 10  # in the shortest wave at the peak frequency of the default wavelet


class Speeds(NamedTuple):
    """Velocities of a model in m/s.

    Attributes
    ----------
    fastest
        The largest velocity of P waves.
    slowest
        The smallest velocity of any wave. The S velocity of water is not counted.
    limiting
        The velocity that limits the time step.
    """

    fastest: float
    slowest: float
    limiting: float


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A numerical experiment with waves, the same on every rank, apart from the fields of a volume.

    Attributes
    ----------
    fields
        Whole fields (nx, ny) by name: vp, vs in m/s and rho in kg/m^3, or lambda, mu in Pa and rho.
        Of a volume, the cells that this rank holds, with `shape` and `speeds` of the whole.
    spacing
        Size of a cell in m.
    dt
        Time step in s.
    sources
        Shape (n_shots, n_sources, axes), in m.
    receivers
        Shape (n_shots | 1, n_receivers, axes), in m.
    wavelets
        Shape (n_shots | 1, n_sources, steps).
    peak
        Frequency of the peak of the wavelets' spectrum, in Hz.
    ricker
        True for a Ricker wavelet, false for the user's own.
    shape
        Number of cells along each axis.
    speeds
        Velocities of the whole model.
    """

    fields: Fields
    spacing: tuple[float, ...]
    dt: float
    sources: Float[np.ndarray, "shots sources axes"]
    receivers: Float[np.ndarray, "some receivers axes"]
    wavelets: Float[np.ndarray, "others sources steps"]
    peak: float
    ricker: bool
    shape: tuple[int, ...]
    speeds: Speeds

    @property
    def wavelet(self) -> str:
        """Description of the wavelet."""
        return f"{'Ricker' if self.ricker else 'own'}, {self.peak:.4g} Hz"

    @property
    def size(self) -> tuple[float, ...]:
        """Extent of the model in m."""
        return tuple(n * h for n, h in zip(self.shape, self.spacing, strict=True))

    @property
    def n_shots(self) -> int:
        """Number of shots."""
        return len(self.sources)

    @property
    def steps(self) -> int:
        """Number of time steps."""
        return self.wavelets.shape[-1]

    def shots(self, chosen: np.ndarray) -> Experiment:
        """Return the experiment with some of the shots."""
        receivers, wavelets = self.receivers, self.wavelets
        return dataclasses.replace(
            self,
            sources=self.sources[chosen],
            receivers=receivers if len(receivers) == 1 else receivers[chosen],
            wavelets=wavelets if len(wavelets) == 1 else wavelets[chosen],
        )


def make_experiment(
    options: WaveOptions, comm: Communicator, complete: Callable[[Fields], Fields]
) -> Experiment:
    """Make the experiment that the options describe (collective). See `experiment_of`.

    Raises
    ------
    ValueError, OSError
        On every rank, if options or files are not valid.
    """

    def make() -> Experiment:
        options.check()
        model = default_model(options.cells) if options.model is None else read_model(options.model)
        return experiment_of(options, model, complete(model.fields))

    return call_on_root(comm, make)


def spacing_of(options: WaveOptions, model: ModelFile | Volume) -> tuple[float, ...]:
    """Return the size of the cells of a model in m: the option's, the file's, or 10 m.

    Raises
    ------
    ValueError
        If the option has another number of axes than the model, or other lengths than the file, or
        if --cells has other numbers than the file. The default of 10 m must fit a SEG-Y file, too.
    """
    axes = len(model.shape)
    if options.cells not in (WaveOptions.cells, model.shape):
        raise ValueError(
            f"--cells: got {options.cells}, but {options.model or 'the model'} has {model.shape} "
            "cells. Leave the option out."
        )
    spacing = options.spacing or model.spacing or (10.0,) * axes
    if len(spacing) != axes:
        raise ValueError(
            f"--spacing: expected {axes} numbers, one for each axis of the model, got "
            f"{len(spacing)}."
        )
    if options.spacing and model.spacing and not np.allclose(options.spacing, model.spacing):
        raise ValueError(
            f"--spacing: got {options.spacing}, but {options.model} has the spacing "
            f"{model.spacing}. Leave the option out."
        )
    require_distances("--spacing", options.model, model, spacing)
    return spacing


def require_distances(
    option: str, path: Any, model: ModelFile | Volume, spacing: tuple[float, ...]
) -> None:
    """Raise a ValueError if the traces of a SEG-Y file have other distances than the cells."""
    for h, distance in zip(spacing, model.distances, strict=False):
        if distance is not None and abs(h - distance[0]) > distance[1]:
            raise ValueError(
                f"{option}: expected {distance[0]:g} m, the distance of the traces of {path} in "
                f"CDP_X and CDP_Y (bytes 181-188), got {h:g} m. Give the sizes of the cells by "
                "--spacing."
            )


def experiment_of(
    options: WaveOptions, model: ModelFile | Volume, fields: Fields, speeds: Speeds | None = None
) -> Experiment:
    """Return the experiment of a model (on one rank).

    Defaults, if neither a file nor an option gives a value: the positions of `survey_positions`. A
    Ricker wavelet with 10 cells in the shortest wave at its peak frequency. A time step of 0.6 h /
    v in one dimension (0.7 of the largest stable one at order 4), and enough steps for waves to
    cross the model's diagonal twice.

    Parameters
    ----------
    model
        The contents of the model file, or the default model.
    fields
        The fields that the physics needs (`Physics.complete`).
    speeds
        Velocities of the whole model. Default: those of `fields`.
    """
    spacing = spacing_of(options, model)
    acquisition = model.acquisition
    size = tuple(n * h for n, h in zip(model.shape, spacing, strict=True))
    speeds = speeds_of(fields, options) if speeds is None else speeds
    fast, slow, limiting = speeds
    stable = stable_step(limiting, spacing)
    dt = options.dt or (acquisition.dt if acquisition else stable)
    peak = options.frequency or slow / (_CELLS * max(spacing))
    steps = options.steps
    if steps is None:
        steps = math.ceil((2 * math.hypot(*size) / fast + 1.5 / peak) / dt)
        if acquisition:
            steps = math.ceil(acquisition.steps * acquisition.dt / dt - 1e-9)
    has_file_sources = options.survey is None and options.depth is None
    sources, receivers = survey_positions(options, acquisition, spacing, model.shape)
    wavelets, file = ricker(peak, dt, steps)[None, None, :], None
    if options.wavelet is not None:
        wavelets, file = read_wavelets(options.wavelet, steps, dt), options.wavelet
    elif (
        acquisition
        and acquisition.wavelets is not None
        and has_file_sources
        and options.frequency is None
    ):
        wavelets, file = _resample(acquisition, steps, dt), options.model
        wavelets = wavelets[select_evenly(options.shots, len(wavelets), "--shots")]
    if len(wavelets) not in (1, len(sources)) or wavelets.shape[1] not in (1, sources.shape[1]):
        raise ValueError(
            f"{file}: got wavelets of {wavelets.shape[0]} shots and {wavelets.shape[1]} sources, "
            f"but there are {sources.shape[0]} shots of {sources.shape[1]} sources. Give one "
            "wavelet, or one for each source."
        )
    wavelets = np.repeat(wavelets, sources.shape[1] // wavelets.shape[1], axis=1)
    for name, points in (("source", sources), ("receiver", receivers)):
        outside = ~np.all((points >= 0) & (points <= size), axis=-1)
        if outside.any():
            shot, k = np.argwhere(outside)[0]
            origin = options.model if options.depth is None else "--depth"
            origin = origin if options.survey is None else "--survey"
            raise ValueError(
                f"{origin}: {name} {k} of shot {shot} at {tuple(points[shot, k].tolist())} m lies "
                f"outside the model of {' x '.join(f'{length:g} m' for length in size)}. Move it "
                "into the model."
            )
    if file is not None:
        if not np.any(wavelets):
            raise ValueError(f"{file}: the wavelets are all zero. Check the file.")
        spectrum = np.abs(np.fft.rfft(wavelets, 8 * steps)).sum(axis=(0, 1))
        peak = max(1, int(np.argmax(spectrum))) / (8 * steps * dt)
    return Experiment(
        fields, spacing, dt, sources, receivers, wavelets, peak, file is None, model.shape, speeds
    )


def _resample(
    acquisition: Acquisition, steps: int, dt: float
) -> Float[np.ndarray, "shots sources steps"]:
    """Interpolate a file's wavelets linearly at the time steps of the run, zero after their end."""
    assert acquisition.wavelets is not None
    if steps == acquisition.steps and math.isclose(dt, acquisition.dt):
        return acquisition.wavelets
    file_times = np.arange(acquisition.steps) * acquisition.dt
    wanted = np.arange(steps) * dt
    return np.apply_along_axis(
        lambda w: np.interp(wanted, file_times, w, right=0.0), -1, acquisition.wavelets
    )


def p_velocity(fields: Mapping[str, Any]) -> Any:
    """Return the velocity of P waves in m/s, of NumPy or JAX fields."""
    if "vp" in fields:
        return fields["vp"]
    return ((fields["lambda"] + 2 * fields["mu"]) / fields["rho"]) ** 0.5


def limiting_velocity(fields: Fields, options: WaveOptions) -> float:
    """Return the velocity that limits the time step of elastic waves, in m/s."""
    square, density = p_velocity(fields) ** 2, fields["rho"]
    extremes = np.max(square), np.min(density), np.max(density * square)
    return float(np.sqrt(limiting_square(options.order, options.free_surface, *extremes)))


def speeds_of(fields: Fields, options: WaveOptions | None = None) -> Speeds:
    """Return the velocities of a model, or of the cells of a volume that a rank holds.

    Elastic waves have options.
    """
    fastest = limiting = float(np.max(p_velocity(fields)))
    if options is not None and "rho" in fields:
        limiting = limiting_velocity(fields, options)
    return Speeds(fastest, slowest_velocity(fields), limiting)


def stable_step(velocity: float, spacing: tuple[float, ...]) -> float:
    """Return the default time step in s, 0.7 of the largest stable one at order 4."""
    return _STABLE / (velocity * math.hypot(*(1 / h for h in spacing)))


def slowest_velocity(fields: Fields) -> float:
    """Return the smallest velocity of any wave in m/s. The S velocity of water is not counted."""
    velocities = [p_velocity(fields)]
    if "vs" in fields:
        velocities.append(fields["vs"])
    elif "mu" in fields:
        velocities.append(np.sqrt(fields["mu"] / fields["rho"]))
    return float(min(np.min(v[v > 0]) for v in velocities if np.any(v > 0)))


def default_model(cells: tuple[int, ...]) -> ModelFile:
    """Return water over four slightly dipping layers of growing velocity with a slow lens."""
    x, y = np.meshgrid(*((np.arange(n) + 0.5) / n for n in cells), indexing="ij")
    depth = y + 0.05 * np.sin(2 * np.pi * x)
    vp = 1700 + 350 * np.digitize(depth, [0.3, 0.48, 0.66, 0.84]) + 300 * y
    vp = np.where(((x - 0.5) / 0.16) ** 2 + ((y - 0.5) / 0.12) ** 2 < 1, 0.85 * vp, vp)
    return ModelFile({"vp": np.where(y < 0.12, 1500.0, vp)})
