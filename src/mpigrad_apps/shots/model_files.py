"""Read models and recordings from files: .npy, .npz, .mat, SEG-Y and zarr.

All functions run on one rank (see `collective_errors.call_on_root`) and open a file once.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from mpigrad_apps.shots.mat_files import read_mat
from mpigrad_apps.shots.segy import SEGY, Distance, SegyFile, read_segy, trace_distance
from mpigrad_apps.shots.time_axes import in_order, require_interval, sample_interval
from mpigrad_apps.shots.zarr_files import TIMES, axis_labels, decoded, even_step, unit_factor

__all__ = [
    "FORMATS",
    "SEGY",
    "Acquisition",
    "ModelFile",
    "Samples",
    "check_zarr_size",
    "checked_field",
    "read_array",
    "read_model",
    "read_samples",
    "read_wavelets",
    "real",
]

FIELDS = ("vp", "vs", "rho", "lambda", "mu")
_MAY_BE_ZERO = ("vs", "lambda", "mu")  # in water
_METADATA = ("spacing", "dt")  # not data
_STEPS = ("dx", "dy", "dz")
_DEPTHS = ("y", "depth", "z")  # y, as in files of two axes that mpigrad writes
_LARGEST_ZARR = 1 << 26  # bytes of an array that may have no chunks in files
_SMALLEST_CHUNK = 10_000  # times larger than its file
FORMATS = ".npy, .npz, .mat, .sgy, .segy, .zarr"


@dataclasses.dataclass(frozen=True)
class Acquisition:
    """Acquisition of a model file: sources, receivers, wavelets and time steps.

    Attributes
    ----------
    sources
        Shape (n_shots, n_sources, 2): coordinates in m, from the grid's first corner.
    receivers
        Shape (n_shots | 1, n_receivers, 2).
    wavelets
        Shape (n_shots, n_sources, steps).
    dt
        Time step in s.
    steps
        Number of time steps.
    """

    sources: Float[np.ndarray, "shots sources 2"]
    receivers: Float[np.ndarray, "some receivers 2"]
    wavelets: Float[np.ndarray, "shots sources steps"] | None
    dt: float
    steps: int


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """The checked contents of a model file.

    Attributes
    ----------
    fields
        Arrays (nx, ny), x first, y downwards: vp, vs in m/s, rho in kg/m^3, lambda, mu in Pa.
    spacing
        Size of the cells in m, None if it is not in the file.
    acquisition
        None if it is not in the file.
    distances
        Distances of traces along horizontal axes, from the coordinates of a SEG-Y file.
    """

    fields: Mapping[str, Float[np.ndarray, "nx ny"]]
    spacing: tuple[float, ...] | None = None
    acquisition: Acquisition | None = None
    distances: tuple[Distance | None, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells along x and y."""
        return next(iter(self.fields.values())).shape


@dataclasses.dataclass(frozen=True)
class Samples:
    """An array of a file, and the time between its samples.

    Attributes
    ----------
    interval
        Time between samples in s, and its uncertainty. None if it is not in the file. SEG-Y files
        have whole microseconds, rounded or truncated.
    unit
        The unit of the values, None if it is not in the file.
    """

    values: NDArray[np.float64]
    interval: tuple[float, float] | None
    unit: str | None = None


def read_model(path: pathlib.Path, shape: tuple[int, ...] | None = None) -> ModelFile:
    """Read a model and check it (on one rank).

    The formats, by the ending of the file's name:

    .npy
        An array (nx, ny): vp.
    .npz, .zarr
        Arrays (nx, ny): `vp`, optionally `vs` and `rho`, or `lambda`, `mu` and `rho`. The spacing
        is the array `spacing` (hx, hy), in zarr also an attribute, or `dx` and `dy` or `dz`, or
        follows from arrays `x` and `y`, `z` or `depth` of the cell centres. A zarr array is vp.
        If the axes of a zarr array have names, the depth may be its first axis. The attributes
        `units`, `scale_factor`, `add_offset` and `_FillValue` are applied.
    .mat
        As .npz. With `source{k}` (`ix`, `iy`, `vec`),
        `receiver{k}` (`ix`, `iy`), `dt` and `nt` also the acquisition. The first cell has the index
        0, because such files are written by Python. Sources and receivers are at cell centres.
    .sgy, .segy
        SEG-Y with one trace for each x and samples downwards: vp, in ft/s if the binary header
        says feet.

    Raises
    ------
    FileNotFoundError, ValueError, ImportError
        If the file does not exist, its format is unknown or damaged, an array does not have two
        axes or the expected `shape`, or a value is not finite or (velocity and density) not
        positive.
    """
    contents = _read(path)
    if contents.lines is not None and min(contents.lines) > 1:
        raise ValueError(
            f"{path}: expected a section with one trace for each x, got a volume with "
            f"{contents.lines[0]} inlines and {contents.lines[1]} crosslines. Extract a section. "
            "Volumes: mpigrad run fwi."
        )
    model = _model(path, _with_units_and_axes(path, contents), shape)
    distances = () if contents.segy is None else (trace_distance(path, contents.segy),)
    return dataclasses.replace(model, distances=distances)


def read_samples(path: pathlib.Path, name: str = "") -> Samples:
    """Read an array, and the time between its samples if it is in the file (on one rank).

    The array is that of an .npy file, the traces of a SEG-Y file, or the array of an .npz, .mat or
    zarr file. If the file has several, it is the one with this name, apart from `spacing`, `dt` and
    coordinates of the axes. Axes with the names of gathers are put into the order of `in_order`.

    Raises
    ------
    FileNotFoundError, ValueError, ImportError
        If the file does not exist, does not have such an array, or its samples do not start at 0 s.
    """
    contents = _read(path)
    axes = {*TIMES, *(label for labels in contents.labels.values() for label in labels)}
    arrays = {
        key: array
        for key, array in contents.arrays.items()
        if array.dtype.kind in "biuf" and key not in _METADATA and key.lower() not in axes
    }
    if name not in arrays and len(arrays) != 1:
        called = f" called {name}" * bool(name)
        raise ValueError(
            f"{path}: expected one array{called}, got {', '.join(sorted(arrays)) or 'none'}. "
            "Save the array alone."
        )
    if contents.delay:
        raise ValueError(
            f"{path}: expected traces that start at 0 s, got {contents.delay:g} s in bytes 109-110 "
            "of a trace header. Pad the traces with zeros, and set the words to 0."
        )
    chosen = name if name in arrays else next(iter(arrays))
    values = np.asarray(arrays[chosen], float)
    labels = contents.labels.get(chosen, ())
    if set(labels) & set(TIMES):
        values = in_order(path, chosen, values, labels)
    elif len(labels) == 2 and _is_turned(path, chosen, labels):
        values = values.T
    samples = values.shape[-1] if values.ndim else 0
    times = sample_interval(path, samples, contents.arrays, contents.units)
    interval, dt = contents.interval, contents.arrays.get("dt")
    if interval is None and dt is not None and dt.size == 1:
        if dt.dtype.kind not in "iuf":
            raise ValueError(f"{path}: expected dt as a number, got {dt.dtype}. Check the file.")
        interval = float(dt.item()), 1e-6 * float(dt.item())
    if times is not None:
        if interval is not None and abs(times[0] - interval[0]) > times[1]:
            raise ValueError(
                f"{path}: expected one interval, got dt {interval[0]:g} s and {times[0]:g} s from "
                "the times of the samples. Correct one of them."
            )
        interval = interval or times
    return Samples(values, interval, contents.units.get(chosen))


def read_array(path: pathlib.Path, name: str = "") -> NDArray[np.float64]:
    """Read an array (on one rank). See `read_samples`."""
    return read_samples(path, name).values


def read_wavelets(
    path: pathlib.Path, steps: int, dt: float
) -> Float[np.ndarray, "shots sources steps"]:
    """Read own source time functions, sampled at the time steps (on one rank).

    Parameters
    ----------
    path
        File of an array (steps,), (n_shots, steps) or (n_shots, n_sources, steps), in a format
        of `read_array`. A longer array is truncated, a shorter one is padded with zeros.
    dt
        Time step in s.

    Returns
    -------
    ndarray
        Shape (n_shots, n_sources, steps), with n_shots = 1 for the same wavelet in all shots.

    Raises
    ------
    ValueError
        If the array has another number of axes, or a value that is not finite, or the file has
        another time between samples.
    """
    samples = read_samples(path, "wavelets")
    require_interval("--wavelet", path, samples.interval, dt)
    values = samples.values
    if values.ndim not in (1, 2, 3):
        raise ValueError(
            f"{path}: expected wavelets with one to three axes, time last, got shape "
            f"{values.shape}."
        )
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{path}: the wavelets have samples that are not finite. Check the file.")
    wavelets = (
        values.reshape((1,) * (2 - values.ndim) + values.shape) if values.ndim < 3 else values
    )
    if wavelets.ndim == 2:
        wavelets = wavelets[:, None, :]
    fitting = np.zeros((*wavelets.shape[:2], steps))
    n = min(steps, wavelets.shape[-1])
    fitting[..., :n] = wavelets[..., :n]
    return fitting


class _Contents(NamedTuple):
    """The contents of a file.

    Attributes
    ----------
    arrays
        Arrays by name. An array without a name is vp.
    interval
        As in `Samples`, from the header of a SEG-Y file.
    delay
        Time of the first sample of a SEG-Y file in s, as in `SegyFile`.
    lines
        Numbers of inlines and crosslines of a SEG-Y file, (1, traces) for a section.
    velocity
        Factor that converts the velocities of a SEG-Y file to m/s.
    segy
        The SEG-Y file itself.
    labels, units
        Names of the axes and units of the arrays of a zarr file that have them.
    """

    arrays: dict[str, NDArray[Any]]
    interval: tuple[float, float] | None = None
    delay: float = 0.0
    lines: tuple[int, int] | None = None
    velocity: float = 1.0
    segy: SegyFile | None = None
    labels: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    units: Mapping[str, str] = MappingProxyType({})


def _read(path: pathlib.Path) -> _Contents:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ValueError(f"{path}: the file has an unknown format. Known formats: {FORMATS}.")
    try:
        return read(path)
    except ImportError:
        raise
    except Exception as error:  # every library has its own errors
        raise ValueError(f"{path} cannot be read as {path.suffix}: {error}") from error


def _read_npy(path: pathlib.Path) -> _Contents:
    return _Contents({"vp": np.load(path, allow_pickle=False)})


def _read_npz(path: pathlib.Path) -> _Contents:
    with np.load(path, allow_pickle=False) as file:
        return _without_units({name: file[name] for name in file.files})


def _without_units(arrays: dict[str, NDArray[Any]]) -> _Contents:
    """Return arrays, or raise an error if one of them has a unit of another one."""
    for name in [name for name in arrays if "unit" in name.lower()]:
        raise ValueError(
            f"expected numbers in SI units, got the array {name} with {arrays[name]}. Convert the "
            "numbers, and leave it out."
        )
    return _Contents(arrays)


def _read_zarr(path: pathlib.Path) -> _Contents:
    import zarr

    node = zarr.open(path, mode="r")
    nodes = {"vp": node} if isinstance(node, zarr.Array) else dict(node.arrays())
    check_zarr_size(path, nodes)
    arrays = {name: decoded(array, np.asarray(array[...])) for name, array in nodes.items()}
    labels = {name: axis_labels(array) for name, array in nodes.items()}
    units = {name: str(a.attrs["units"]) for name, a in nodes.items() if "units" in a.attrs}
    attributes = {n: np.asarray(node.attrs[n], float) for n in _METADATA if n in node.attrs}
    named = {name: axes for name, axes in labels.items() if axes is not None}
    return _Contents(arrays | attributes, labels=named, units=units)


def check_zarr_size(path: pathlib.Path, nodes: Mapping[str, Any]) -> None:
    """Raise a ValueError if arrays are much larger than their files, as damaged sizes are.

    An array may be larger than its files, because chunks of one value are not written.
    """
    largest = _LARGEST_ZARR + _SMALLEST_CHUNK * sum(f.stat().st_size for f in path.rglob("*"))
    for name, array in nodes.items():
        if array.nbytes > largest:
            raise ValueError(f"{name} of shape {array.shape} does not fit the size of the files")


def _read_segy(path: pathlib.Path) -> _Contents:
    file = read_segy(path)
    return _Contents(
        {"vp": file.traces}, file.interval, file.delay, file.lines, file.velocity, file
    )


_READERS: dict[str, Callable[[pathlib.Path], _Contents]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".mat": lambda path: _without_units(read_mat(path)),
    ".zarr": _read_zarr,
} | dict.fromkeys(SEGY, _read_segy)


def _with_units_and_axes(path: pathlib.Path, contents: _Contents) -> dict[str, NDArray[Any]]:
    """Return the arrays in SI units, with x as the first axis and depth as the second one."""
    arrays = dict(contents.arrays)
    if contents.velocity != 1.0:
        arrays["vp"] = contents.velocity * np.asarray(arrays["vp"], float)
    order: dict[str, tuple[str, str]] = {}
    for name in [n for n in FIELDS if n in arrays]:
        if name in contents.units and arrays[name].dtype.kind in "iuf":
            arrays[name] = arrays[name] * unit_factor(path, name, contents.units[name])
        labels = contents.labels.get(name)
        if labels is not None and len(labels) == 2:
            turned = _is_turned(path, name, labels)
            arrays[name] = arrays[name].T if turned else arrays[name]
            order[name] = (labels[1], labels[0]) if turned else (labels[0], labels[1])
    if len(set(order.values())) > 1:
        listing = ", ".join(f"{n} ({', '.join(axes)})" for n, axes in order.items())
        raise ValueError(
            f"{path}: expected the same axes of all fields, got {listing}. Rename them."
        )
    axes = {"x", *_DEPTHS, *next(iter(order.values()), ())}
    for name in [n for n in contents.arrays if n.lower() in axes]:
        centers, unit = arrays.pop(name), contents.units.get(name)
        if centers.ndim == 1 and centers.dtype.kind in "iuf" and unit is not None:
            centers = centers * unit_factor(path, name.lower(), unit)
        arrays[name.lower()] = centers
    centers = _spacing_of_centers(path, arrays, next(iter(order.values()), None))
    if centers is not None:
        spacing = _spacing(path, arrays)
        if spacing is not None and not np.allclose(spacing, centers, rtol=1e-3):
            raise ValueError(
                f"{path}: expected one spacing, got {spacing} in the file and {centers} from its "
                "cell centres. Correct one of them."
            )
        if spacing is None:
            arrays["spacing"] = np.array(centers)
    return arrays


def _is_turned(path: pathlib.Path, name: str, labels: tuple[str, ...]) -> bool:
    """Return whether the first axis is depth, or raise an error if the names do not say it."""
    times = [label for label in labels if label in TIMES]
    if times and name in FIELDS:
        raise ValueError(
            f"{path}: expected the axes x and depth of {name}, got {', '.join(labels)}. Convert "
            f"the axis {times[0]} to depth."
        )
    first, second = (label in _DEPTHS for label in labels)
    if (first and second) and "y" in labels:  # y is horizontal if there is z
        first, second = (label in _DEPTHS and label != "y" for label in labels)
    if first and second:
        raise ValueError(
            f"{path}: expected the axes x and depth of {name}, got {', '.join(labels)}. Rename "
            "the horizontal axis to x."
        )
    return first


def _spacing_of_centers(
    path: pathlib.Path, arrays: Mapping[str, NDArray[Any]], order: tuple[str, str] | None
) -> tuple[float, ...] | None:
    """Return the distances between the cell centres in a file, None if it has none."""
    field = next((arrays[name] for name in FIELDS if name in arrays), None)
    if field is None or field.ndim != 2:
        return None
    if order is None:
        down = [name for name in _DEPTHS if name in arrays]
        if "x" not in arrays or not down:
            return None
        order = "x", down[-1] if len(down) < 3 else "z"
    centers = {axis: arrays[axis] for axis in order if axis in arrays}
    if not centers:
        return None
    for n, axis in zip(field.shape, order, strict=True):
        if axis not in centers and "spacing" in arrays:
            return None
        if axis not in centers or centers[axis].size != n or centers[axis].dtype.kind not in "iuf":
            description = "none" if axis not in centers else f"shape {centers[axis].shape}"
            raise ValueError(
                f"{path}: expected {n} cell centres {axis} for {' x '.join(map(str, field.shape))} "
                f"cells, got {description}. Save the centres of both axes, or the spacing."
            )
    return tuple(even_step(path, a, np.ravel(v).astype(float)) for a, v in centers.items())


def _model(
    path: pathlib.Path, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...] | None
) -> ModelFile:
    fields = {name: np.asarray(arrays[name]) for name in FIELDS if name in arrays}
    if not fields:
        raise ValueError(
            f"{path}: expected one of the fields {', '.join(FIELDS)}, got {sorted(arrays)}."
        )
    spacing = _spacing(path, arrays)
    acquisition = None
    if {"source", "receiver", "dt", "nt"} <= arrays.keys() and spacing is not None:
        try:
            acquisition = _acquisition(arrays, spacing)
        except Exception as error:
            raise ValueError(
                f"{path}: `source`, `receiver`, `dt` and `nt` are not as expected: {error}"
            ) from error
    if spacing is not None and not all(h > 0 and np.isfinite(h) for h in spacing):
        raise ValueError(f"{path}: expected a positive spacing, got {spacing}. Check the file.")
    first = next(iter(fields.values()))
    expected = first.shape if shape is None else shape
    checked = {name: _checked(path, name, field, expected) for name, field in fields.items()}
    return ModelFile(checked, spacing, acquisition)


def _spacing(path: pathlib.Path, arrays: Mapping[str, NDArray[Any]]) -> tuple[float, float] | None:
    """Return the spacing of a file, None if it has none."""
    names = [name for name in _STEPS if name in arrays]
    steps = None
    if names:
        if len(names) != 2 or names[0] != "dx":
            raise ValueError(
                f"{path}: expected the spacing as dx and one of dy and dz, got "
                f"{', '.join(names)}. Save these two."
            )
        steps = _number(path, arrays, names[0]), _number(path, arrays, names[1])
    if "spacing" not in arrays:
        return steps
    try:
        both = np.broadcast_to(real(arrays["spacing"]).ravel(), 2)
        spacing = float(both[0]), float(both[1])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the spacing as one or two numbers, got others: {error}. Check the "
            "file."
        ) from error
    if steps is not None and not np.allclose(steps, spacing):
        raise ValueError(
            f"{path}: expected one spacing, got spacing {spacing} and {' and '.join(names)} "
            f"{steps}. Correct one of them."
        )
    return spacing


def real(values: Any) -> NDArray[np.float64]:
    """Return an array in float64, or raise a TypeError for one that is not of real numbers."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":  # masks are of booleans
        raise TypeError(f"expected real numbers, got {array.dtype}")
    return array.astype(float)


def _number(path: pathlib.Path, arrays: Mapping[str, NDArray[Any]], name: str) -> float:
    values = np.unique(arrays[name]) if arrays[name].dtype.kind in "iuf" else np.zeros(0)
    if len(values) != 1:
        raise ValueError(
            f"{path}: expected {name} as one number, got {len(values)} of shape "
            f"{arrays[name].shape} and dtype {arrays[name].dtype}. Interpolate the model onto a "
            "regular grid."
        )
    return float(values[0])


def _acquisition(arrays: Mapping[str, NDArray[Any]], spacing: tuple[float, float]) -> Acquisition:
    """Return the acquisition of a .mat file: cell arrays of structures, one for each shot."""

    def entry(structure: Any, name: str) -> NDArray[np.float64]:
        while isinstance(structure, np.ndarray) and structure.dtype.names is None:
            structure = structure.ravel()[0]
        return real(np.ravel(structure[name])[0])

    def coordinates(structure: Any) -> NDArray[np.float64]:
        cells = np.stack([entry(structure, name).ravel() for name in ("ix", "iy")], axis=1)
        return (cells + 0.5) * spacing

    sources = np.stack([coordinates(shot) for shot in arrays["source"].ravel()])
    receivers = np.stack([coordinates(shot) for shot in arrays["receiver"].ravel()])
    wavelets = np.stack([np.atleast_2d(entry(shot, "vec")) for shot in arrays["source"].ravel()])
    dt, steps = float(real(arrays["dt"]).ravel()[0]), int(real(arrays["nt"]).ravel()[0])
    if wavelets.shape != (*sources.shape[:2], steps):
        raise ValueError(
            f"expected wavelets of {sources.shape[0]} shots of {sources.shape[1]} sources and "
            f"{steps} steps, got shape {wavelets.shape}."
        )
    if len(receivers) not in (1, len(sources)):
        raise ValueError(f"got {len(receivers)} sets of receivers for {len(sources)} shots.")
    if not (dt > 0 and np.isfinite(dt) and steps > 0):
        raise ValueError(f"expected a positive time step and number of steps, got {dt}, {steps}.")
    for name, values in (("positions", sources), ("positions", receivers), ("vec", wavelets)):
        if not np.all(np.isfinite(values)):
            raise ValueError(f"the {name} are not all finite.")
    return Acquisition(sources, receivers, wavelets, dt, steps)


def _checked(
    path: pathlib.Path, name: str, values: NDArray[Any], expected: tuple[int, ...]
) -> Float[np.ndarray, "nx ny"]:
    """Return a field in float64, or raise an error if it is not valid."""
    field = checked_field(path, name, values)
    if field.ndim != 2 or field.size == 0:
        hint = "" if field.ndim != 3 else " Save a volume for mpigrad run fwi as .npy or .zarr."
        raise ValueError(
            f"{path}: expected {name} of shape (nx, ny), got shape {field.shape}.{hint}"
        )
    if field.shape != expected:
        raise ValueError(
            f"{path}: expected {' x '.join(map(str, expected))} cells, got {name} of "
            f"{field.shape[0]} x {field.shape[1]} cells."
        )
    return field


def checked_field(
    path: pathlib.Path, name: str, given: NDArray[Any], corner: tuple[int, ...] | None = None
) -> Float[np.ndarray, "*cells"]:
    """Return a field in float64, or raise an error if it has a value that is not valid.

    Parameters
    ----------
    corner
        Index of the first cell, if the field is a part of a larger one.
    """
    if given.dtype.kind not in "iuf":
        raise ValueError(
            f"{path}: expected real numbers in {name}, got {given.dtype}. Check the file."
        )
    field = np.asarray(given, float)

    def cell(place: Any) -> str:
        first = corner or (0,) * field.ndim
        return str(tuple(int(i + k) for i, k in zip(place, first, strict=True)))

    if not np.all(np.isfinite(field)):
        place = tuple(np.argwhere(~np.isfinite(field))[0])
        raise ValueError(f"{path}: {name} is {field[place]} in cell {cell(place)}. Check the file.")
    may_be_zero = name in _MAY_BE_ZERO
    if np.any(field < 0 if may_be_zero else field <= 0):
        place = np.unravel_index(np.argmin(field), field.shape)
        raise ValueError(
            f"{path}: {name} is {field[place]:g} in cell {cell(place)}, but it must "
            f"{'not be negative' if may_be_zero else 'be positive'}. Check the file."
        )
    return field
