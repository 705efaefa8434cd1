"""Models with three axes, of which each rank reads only the cells that it needs."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from mpigrad_apps.shots.model_files import FIELDS, check_zarr_size, checked_field
from mpigrad_apps.shots.segy import (
    SEGY,
    Distance,
    SegyLines,
    read_segy_lines,
    read_segy_window,
    trace_distance,
)
from mpigrad_apps.shots.thrust import thrust_velocity
from mpigrad_apps.shots.zarr_files import axis_labels, decoded, even_step, unit_factor

__all__ = ["ThrustVolume", "Volume", "Window", "open_volume"]

Window = tuple[slice, ...]
Cells = Float[np.ndarray, "lx ly lz"]


@dataclasses.dataclass(frozen=True)
class Volume(abc.ABC):
    """A model with the axes x, y and z, z downwards. It has no arrays, so ranks send it.

    Attributes
    ----------
    path
        The file, None for a model that the program makes itself.
    shape
        Number of cells along each axis.
    spacing
        Size of a cell in m, None if it is not in the file.
    distances
        As in `ModelFile`.
    """

    acquisition: ClassVar[None] = None  # as `ModelFile.acquisition`

    path: pathlib.Path | None
    shape: tuple[int, ...]
    spacing: tuple[float, ...] | None

    @property
    def distances(self) -> tuple[Distance | None, ...]:
        return ()

    @abc.abstractmethod
    def arrays(self, window: Window) -> Mapping[str, NDArray[Any]]:
        """Read the cells of a window from the file that exists (on this rank)."""

    def read(self, window: Window) -> dict[str, Cells]:
        """Read the fields in a window of the cells, in float64, and check them (on this rank).

        Raises
        ------
        FileNotFoundError, ValueError
            As `read_arrays`, or if a value is not finite or (velocity and density) not positive.
        """
        corner = tuple(part.start for part in window)
        source = self.path or pathlib.Path("model")
        arrays = self.read_arrays(window)
        return {name: checked_field(source, name, a, corner) for name, a in arrays.items()}

    def read_arrays(self, window: Window) -> Mapping[str, NDArray[Any]]:
        """Read the cells of a window (on this rank).

        Raises
        ------
        FileNotFoundError, ValueError
            If this rank finds no file, or cannot read it.
        """
        if self.path is not None and not self.path.exists():
            raise FileNotFoundError(
                f"there is no file {self.path} on the host of this rank. Use a directory that all "
                "hosts share."
            )
        try:
            return self.arrays(window)
        except Exception as error:  # every library has its own errors
            raise ValueError(f"{self.path} cannot be read: {error}") from error

    def require_shape(self, expected: tuple[int, ...], option: str) -> None:
        """Raise a ValueError if the volume has another shape than expected."""
        if self.shape == expected:
            return
        turned = sorted(self.shape) == sorted(expected)
        remedy = "Give one value for each cell of the model"
        if turned:
            remedy = "The axes seem to be in another order: transpose the array to x, y, z"
        raise ValueError(
            f"{option}: expected {_times(expected)} cells as in the model, got "
            f"{_times(self.shape)} in {self.path}. {remedy}."
        )


@dataclasses.dataclass(frozen=True)
class ThrustVolume(Volume):
    """The default model, see `thrust_velocity`."""

    def arrays(self, window: Window) -> Mapping[str, NDArray[Any]]:
        return {"vp": thrust_velocity(self.shape, window)}


@dataclasses.dataclass(frozen=True)
class NpyVolume(Volume):
    """An .npy file of vp, which is mapped into memory."""

    def arrays(self, window: Window) -> Mapping[str, NDArray[Any]]:
        assert self.path is not None
        return {"vp": np.array(np.load(self.path, mmap_mode="r", allow_pickle=False)[window])}


@dataclasses.dataclass(frozen=True)
class ZarrVolume(Volume):
    """A zarr array of vp, or a group of arrays. Only the chunks of a window are read.

    Attributes
    ----------
    names
        Names of the fields, None for an array without a group.
    factors
        Factors that convert fields to SI units.
    """

    names: tuple[str, ...] | None
    factors: Mapping[str, float]

    def arrays(self, window: Window) -> Mapping[str, NDArray[Any]]:
        import zarr

        node: Any = zarr.open(self.path, mode="r")
        nodes = {"vp": node} if self.names is None else {n: node[n] for n in self.names}
        parts = {n: decoded(array, np.asarray(array[window])) for n, array in nodes.items()}
        return {n: part * self.factors[n] if n in self.factors else part
                for n, part in parts.items()}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SegyVolume(Volume):
    """A SEG-Y file of vp: inlines along x, crosslines along y, samples downwards.

    Attributes
    ----------
    traces
        Index of the trace of each inline and crossline.
    is_mask
        True if the samples are not velocities.
    """

    lines: SegyLines
    is_mask: bool = False

    @property
    def distances(self) -> tuple[Distance | None, ...]:
        path, traces = self.path or pathlib.Path(), self.lines.traces
        return tuple(trace_distance(path, self.lines, line) for line in (traces[:, 0], traces[0]))

    def arrays(self, window: Window) -> Mapping[str, NDArray[Any]]:
        assert self.path is not None
        samples = read_segy_window(self.path, self.lines.traces, window)
        return {"vp": samples if self.is_mask else self.lines.velocity * samples}


def open_volume(path: pathlib.Path, name: str = "vp") -> Volume | None:
    """Return the description of a file's volume, None if the model has two axes (on one rank).

    The formats, by the ending of the file's name:

    .npy
        An array (nx, ny, nz): vp.
    .zarr
        Arrays (nx, ny, nz): `vp`, or `lambda`, `mu` and `rho`. A zarr array is vp. The spacing is
        the attribute `spacing`, or follows from arrays `x`, `y` and `z` of the cell centres.
    .sgy, .segy
        SEG-Y: vp, one trace for each pair of an inline (x) and a crossline (y).

    Parameters
    ----------
    name
        Name of an array without a name, and of one that is not a field of a model.

    Raises
    ------
    FileNotFoundError, ValueError, ImportError
        If the file does not exist or is damaged, or its headers do not make a regular grid.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    describe = _DESCRIPTIONS.get(path.suffix.lower())
    return None if describe is None else describe(path, name)


def _describe_npy(path: pathlib.Path, name: str) -> Volume | None:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as .npy: {error}") from error
    if array.ndim != 3:
        return None
    _require_cells(path, name, array.shape)
    return NpyVolume(path, array.shape, None)


def _describe_zarr(path: pathlib.Path, name: str) -> Volume | None:
    import zarr

    try:
        node: Any = zarr.open(path, mode="r")
        single = isinstance(node, zarr.Array)
        arrays = {name: node} if single else dict(node.arrays())
        fields = {n: array for n, array in arrays.items() if n in (*FIELDS, name)}
        if not any(array.ndim == 3 for array in fields.values()):
            return None
        check_zarr_size(path, fields)
        attribute = node.attrs.get("spacing")
        spacing = (
            None if attribute is None else np.broadcast_to(np.asarray(attribute, float).ravel(), 3)
        )
        labels = {field: axis_labels(array) for field, array in fields.items()}
        axes = next((axes for axes in labels.values() if axes), None) or ("x", "y", "z")
        centers = {
            n: np.asarray(decoded(arrays[n], np.asarray(arrays[n][:])), float)
            for n in axes
            if n in arrays and arrays[n].ndim == 1
        }
    except Exception as error:
        raise ValueError(f"{path} cannot be read as .zarr: {error}") from error
    shape = next(iter(fields.values())).shape
    for field, array in fields.items():
        if array.shape != shape:
            raise ValueError(
                f"{path}: expected the same {_times(shape)} cells in all fields, got {field} of "
                f"shape {array.shape}."
            )
        _require_cells(path, field, array.shape)
        _require_axes(path, field, labels[field])
    units = {n: str(a.attrs["units"]) for n, a in arrays.items() if "units" in a.attrs}
    factors = {n: unit_factor(path, n, units[n]) for n in fields if n in FIELDS and n in units}
    if centers and (spacing is None or len(centers) == 3):
        steps = _steps(path, shape, axes, centers, units)
        if spacing is not None and not np.allclose(spacing, steps, rtol=1e-3):
            raise ValueError(
                f"{path}: expected one spacing, got {spacing.tolist()} as an attribute and {steps} "
                "from the cell centres. Correct one of them."
            )
        spacing = steps if spacing is None else spacing
    if spacing is not None and not all(h > 0 and np.isfinite(h) for h in spacing):
        raise ValueError(
            f"{path}: expected a positive spacing of three axes, got {spacing}. Check the file."
        )
    lengths = None if spacing is None else tuple(float(h) for h in spacing)
    return ZarrVolume(path, shape, lengths, None if single else tuple(fields), factors)


def _describe_segy(path: pathlib.Path, name: str) -> Volume | None:
    try:
        lines = read_segy_lines(path)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read as {path.suffix}: {error}") from error
    if lines.is_section:
        return None
    shape = len(lines.inlines), len(lines.crosslines), lines.samples
    for axis, numbers in (("inline", lines.inlines), ("crossline", lines.crosslines)):
        steps = np.diff(numbers)
        if np.any(steps != steps[0]):
            k = int(np.argmax(steps != steps[0]))
            raise ValueError(
                f"{path}: expected {axis} numbers at one distance, which make a regular grid, got "
                f"{numbers[0]}, {numbers[1]}, ..., {numbers[k]}, {numbers[k + 1]}. Interpolate "
                "the model onto a regular grid."
            )
    if lines.n_traces != shape[0] * shape[1] or np.any(lines.traces < 0):
        missing = np.argwhere(lines.traces < 0)
        what = "some pairs have several traces"
        if len(missing):
            i, k = missing[0]
            what = f"inline {lines.inlines[i]}, crossline {lines.crosslines[k]} has none"
        raise ValueError(
            f"{path}: expected one trace for each pair of {shape[0]} inlines and {shape[1]} "
            f"crosslines, got {lines.n_traces} traces: {what}. Check the trace headers "
            "(bytes 189 and 193), or interpolate the model onto a regular grid."
        )
    return SegyVolume(path, shape, None, lines, name != "vp")


_DESCRIPTIONS = {
    ".npy": _describe_npy,
    ".zarr": _describe_zarr,
} | dict.fromkeys(SEGY, _describe_segy)


def _require_cells(path: pathlib.Path, name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or min(shape) == 0:
        raise ValueError(f"{path}: expected {name} of shape (nx, ny, nz), got shape {shape}.")


def _require_axes(path: pathlib.Path, name: str, labels: Sequence[str | None] | None) -> None:
    """Raise a ValueError if the labels of the axes say that they are not x, y and z."""
    lower = [str(label).lower() for label in labels or ()]
    place = {"depth": 2, "x": 0, "y": 1, "z": 2} | dict.fromkeys(("t", "time", "twt"), -1)
    if any(place.get(label, axis) != axis for axis, label in enumerate(lower)):
        raise ValueError(
            f"{path}: expected the axes x, y, z of {name}, got {', '.join(lower)}. Transpose the "
            "array."
        )


def _steps(
    path: pathlib.Path,
    shape: tuple[int, ...],
    axes: Sequence[str],
    centers: Mapping[str, NDArray[np.float64]],
    units: Mapping[str, str],
) -> list[float]:
    """Return the distances between cell centres in m, or raise an error if they do not fit."""
    for n, axis in zip(shape, axes, strict=True):
        if axis not in centers or centers[axis].shape != (n,):
            count = f"{len(centers[axis])} of them" if axis in centers else "none"
            raise ValueError(
                f"{path}: expected {n} cell centres {axis} for {_times(shape)} cells, got {count}. "
                "Save the centres of all axes, or the attribute spacing."
            )
    return [
        unit_factor(path, axis, units.get(axis)) * even_step(path, axis, centers[axis])
        for axis in axes
    ]


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
