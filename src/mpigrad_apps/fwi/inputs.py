"""The arrays of an inversion: model, start, mask and data."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
from jaxtyping import Bool, Float

from mpigrad_apps.fwi.layout import Layout, WholeLayout, Window, relative
from mpigrad_apps.fwi.parametrization import apply_along_axes, cut_off, gaussian
from mpigrad_apps.fwi.settings import Settings
from mpigrad_apps.shots.acoustic_physics import AcousticPhysics
from mpigrad_apps.shots.elastic_physics import ElasticPhysics
from mpigrad_apps.shots.experiment import (
    Experiment,
    Fields,
    default_model,
    experiment_of,
    require_distances,
    speeds_of,
)
from mpigrad_apps.shots.model_files import SEGY, read_array, read_model, read_samples
from mpigrad_apps.shots.physics import Physics
from mpigrad_apps.shots.time_axes import require_interval
from mpigrad_apps.shots.units import warn_of_units
from mpigrad_apps.shots.zarr_files import unit_factor

__all__ = [
    "BLUR",
    "PHYSICS",
    "Inputs",
    "blurred",
    "depth",
    "read_data",
    "read_inputs",
    "require_active",
    "require_spacing",
]

PHYSICS: dict[str, type[Physics]] = {"acoustic": AcousticPhysics, "elastic": ElasticPhysics}
# Standard deviation in cells of the Gaussian that makes a start of the true model.
BLUR = 6.0


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of an inversion, in the cells that this rank holds.

    In two dimensions they are whole and the same on every rank.

    Attributes
    ----------
    experiment
        All shots. Its fields are those of the true model if it is known, else those of the start.
    start
        The fields to start from.
    active
        Mask of the cells that may change.
    truth
        The true fields, None if they are not known.
    data
        Recorded gathers (shots, components, receivers, steps). None: computed for the true model.
    layout
        The held cells.
    """

    experiment: Experiment
    start: Fields
    active: Bool[np.ndarray, "*held"]
    truth: Fields | None
    data: Float[np.ndarray, "shots components receivers steps"] | None
    layout: Layout


def read_inputs(settings: Settings) -> Inputs:
    """Read the files of an inversion, each of them once, and check them (on one rank).

    Raises
    ------
    ValueError, OSError
        If a setting or a file is not valid.
    """
    settings.check()
    physics, names = PHYSICS[settings.physics], settings.invert
    initial = settings.initial
    has_truth = settings.data is None or settings.model is not None
    if not has_truth and initial is None:
        raise ValueError(
            "--data: expected --model or --initial with it, got neither. Give the model to start "
            "from with --initial."
        )
    options = settings if has_truth else dataclasses.replace(settings, model=initial)
    model = default_model(options.cells) if options.model is None else read_model(options.model)
    experiment = experiment_of(options, model, physics.complete(model.fields, names))
    warn_of_units(experiment)
    active = _active_cells(experiment, settings.water, settings.mask)
    if not has_truth:
        start = experiment.fields
    elif initial is None:
        held = tuple(slice(0, n) for n in experiment.shape)
        start = blurred(experiment.fields, held, held, experiment, settings.water)
    else:
        start = physics.complete(_read_start(initial, experiment), names)
        warn_of_units(
            dataclasses.replace(experiment, fields=start, speeds=speeds_of(start, options))
        )
    data = None
    if settings.data is not None:
        data = read_data(settings.data, len(physics.components), experiment)
    truth = experiment.fields if has_truth else None
    return Inputs(experiment, start, active, truth, data, WholeLayout(experiment.shape))


def _active_cells(
    experiment: Experiment, water: float, mask_file: pathlib.Path | None
) -> Bool[np.ndarray, "*cells"]:
    """Return the mask of the cells below the water for which the mask in the file is not 0."""
    active = np.array(np.broadcast_to(depth(experiment) > water, experiment.shape))
    if mask_file is not None:
        mask = read_array(mask_file, "mask")
        if mask.shape != experiment.shape:
            raise ValueError(
                f"--mask: {mask_file} has shape {mask.shape}, the model {experiment.shape}. Give "
                "one value for each cell."
            )
        active &= mask != 0
    require_active(bool(active.any()))
    return active


def require_active(some: bool) -> None:
    """Raise a ValueError unless some cells may change."""
    if not some:
        raise ValueError(
            "--water, --mask: no cell is left that may change. Give a smaller depth, or a mask "
            "with nonzero cells."
        )


def depth(experiment: Experiment) -> Float[np.ndarray, " cells"]:
    """Return the depth of the cell centres along the last axis, in m."""
    return (np.arange(experiment.shape[-1]) + 0.5) * experiment.spacing[-1]


def _read_start(path: pathlib.Path, experiment: Experiment) -> Fields:
    file = read_model(path, experiment.shape)
    require_spacing(path, file.spacing, experiment.spacing)
    require_distances("--initial", path, file, experiment.spacing)
    return file.fields


def require_spacing(
    path: pathlib.Path, found: tuple[float, ...] | None, expected: tuple[float, ...]
) -> None:
    """Raise a ValueError if the start has cells of another size than the model."""
    if found is not None and not np.allclose(found, expected):
        raise ValueError(
            f"--initial: {path} has cells of {found} m, the model of {expected} m. Interpolate one "
            "of them."
        )


def blurred(
    fields: Fields, given: Window, held: Window, experiment: Experiment, water: float
) -> Fields:
    """Return the fields, smoothed below the water by a Gaussian of `BLUR` cells.

    Parameters
    ----------
    given
        The cells of `fields`, as slices of the whole model.
    held
        The cells to return. In volumes the Gaussian ends at `cut_off` cells.
    """
    end = cut_off(BLUR) if len(held) == 3 else None
    matrices = [gaussian(n, BLUR, end) for n in experiment.shape]
    below = depth(experiment) > water
    # The water does not contribute to the cells below it.
    matrices[-1] = matrices[-1] * below[None, :]
    matrices[-1] = matrices[-1] / np.maximum(matrices[-1].sum(axis=1, keepdims=True), 1e-300)
    parts = [m[to][:, of] for m, to, of in zip(matrices, held, given, strict=True)]
    inner = relative(held, given, experiment.shape)
    return {
        name: np.where(below[held[-1]], apply_along_axes(parts, field, np), field[inner])
        for name, field in fields.items()
    }


def read_data(
    path: pathlib.Path, components: int, experiment: Experiment
) -> Float[np.ndarray, "shots components receivers steps"]:
    samples = read_samples(path, "gathers")
    shots, receivers = experiment.n_shots, experiment.receivers.shape[1]
    steps, dt = experiment.steps, experiment.dt
    shape = shots, components, receivers, steps
    accepted, traces = [shape], (shots * components * receivers, steps)
    if path.suffix.lower() in SEGY:  # the traces in this order
        accepted += [traces]
    if components == 1:  # the axis of components may be left out
        accepted += [(shots, receivers, steps), traces]
    data = samples.values
    if data.shape not in accepted:
        raise ValueError(
            f"--data: {path} has shape {data.shape}, expected {shots} shots, {components} "
            f"components, {receivers} receivers and {steps} steps, in this order."
        )
    if not np.all(np.isfinite(data)):
        raise ValueError(f"--data: {path} has values that are not finite. Check the file.")
    require_interval("--data", path, samples.interval, dt)
    if samples.unit is not None:
        kind = "modulus" if components == 1 else "velocity"  # pressures have its units
        data = data * unit_factor(path, "gathers", samples.unit, kind)
    return data.reshape(shape)
