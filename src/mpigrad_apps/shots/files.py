"""Models and recordings in files: .npy, .npz, .mat, SEG-Y and zarr, read on rank 0."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from mpigrad.collective_errors import call_on_root
from mpigrad.communicator import Communicator

__all__ = [
    "FORMATS",
    "SEGY",
    "Acquisition",
    "ModelFile",
    "read_array",
    "read_model",
    "read_time_step",
    "read_wavelets",
]

FIELDS = ("vp", "vs", "rho", "lambda", "mu")
_MAY_VANISH = ("vs", "lambda", "mu")  # in water
_ABOUT = ("spacing", "dt")  # an array, what else a file may say
FORMATS = ".npy, .npz, .mat, .sgy, .segy, .zarr"


@dataclasses.dataclass(frozen=True)
class Acquisition:
    """How data were recorded: what a model file may say besides the model.

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
    """What a model file says, checked; the same on every rank.

    Attributes
    ----------
    fields
        Arrays (nx, ny), x first, y downwards: vp, vs in m/s, rho in kg/m^3, lambda, mu in Pa.
    spacing
        Of the cells, in m; None where the file doesn't say.
    acquisition
        None where the file doesn't say.
    """

    fields: Mapping[str, Float[np.ndarray, "nx ny"]]
    spacing: tuple[float, float] | None = None
    acquisition: Acquisition | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells along x and y."""
        nx, ny = next(iter(self.fields.values())).shape
        return nx, ny


def read_model(
    path: pathlib.Path, comm: Communicator, shape: tuple[int, int] | None = None
) -> ModelFile:
    """Read a model on rank 0, check it, and give it to every rank (collective).

    The formats, by the ending of the file's name:

    .npy
        An array (nx, ny): vp.
    .npz, .zarr
        Arrays `vp`, and if you have them `vs`, `rho`, or `lambda`, `mu`, `rho`, all (nx, ny);
        `spacing` (hx, hy) as an array, in zarr also as an attribute. A zarr array is vp.
    .mat
        As .npz, spacing as `dx` and `dy`; with `source{k}` (`ix`, `iy`, `vec`), `receiver{k}`
        (`ix`, `iy`), `dt` and `nt` also the acquisition. Its indices count cells from 0, the
        first: such files are written by Python. Sources and receivers are at cells' centres.
    .sgy, .segy
        SEG-Y, one trace for each x, samples downwards: vp.

    Raises
    ------
    FileNotFoundError, ValueError, ImportError
        On every rank: where there is no file, its format is unknown or damaged, an array does not
        have two axes or not the `shape` that is expected, or a value is not finite or (velocity
        and density) not positive.
    """
    return call_on_root(comm, lambda: _read(path, shape))


def read_array(path: pathlib.Path, name: str = "") -> NDArray[np.float64]:
    """The array in a file (on one rank): .npy, SEG-Y's traces, an .npz or zarr with one array.

    Where there are several, the one of that name; `spacing` and `dt` say something about it.

    Raises
    ------
    FileNotFoundError, ValueError, ImportError
        Where there is no file or no single array in it.
    """
    arrays = {k: v for k, v in _arrays(path).items() if v.dtype.kind in "iuf" and k not in _ABOUT}
    if name in arrays:
        return np.asarray(arrays[name], float)
    if len(arrays) != 1:
        called = f" called {name}" * bool(name)
        raise ValueError(
            f"{path}: one array{called} is expected, it has {', '.join(sorted(arrays)) or 'none'}"
        )
    return np.asarray(next(iter(arrays.values())), float)


def read_wavelets(path: pathlib.Path, steps: int) -> Float[np.ndarray, "shots sources steps"]:
    """A user's own source time functions, sampled at the time steps (on one rank).

    Parameters
    ----------
    path
        File of an array (steps,), (n_shots, steps) or (n_shots, n_sources, steps), in a format
        that `read_array` knows. A longer array is cut off, a shorter one continued by zeros.

    Returns
    -------
    (n_shots | 1, n_sources, steps)

    Raises
    ------
    ValueError
        Where the file holds no such array, or a number in it is not finite.
    """
    given = read_array(path, "wavelets")
    if given.ndim not in (1, 2, 3):
        raise ValueError(f"{path}: wavelets of shape {given.shape}; one to three axes, time last")
    if not np.all(np.isfinite(given)):
        raise ValueError(f"{path}: a wavelet has samples that are not finite")
    wavelets = given.reshape((1,) * (2 - given.ndim) + given.shape) if given.ndim < 3 else given
    if wavelets.ndim == 2:
        wavelets = wavelets[:, None, :]
    fitting = np.zeros((*wavelets.shape[:2], steps))
    n = min(steps, wavelets.shape[-1])
    fitting[..., :n] = wavelets[..., :n]
    return fitting


def read_time_step(path: pathlib.Path) -> tuple[float, float] | None:
    """Seconds between a file's samples, and by how much they may be off (on one rank).

    None where the file doesn't say. SEG-Y's are whole microseconds, rounded or cut off.
    """
    if path.suffix.lower() in SEGY:
        return _read_interval(path)
    found = _arrays(path).get("dt")
    if found is None or found.size != 1:
        return None
    return float(found.item()), 1e-6 * float(found.item())


def _arrays(path: pathlib.Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name; a nameless one is vp."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ValueError(f"{path}: a file of an unknown format; known are {FORMATS}")
    try:
        return read(path)
    except ImportError:
        raise
    except Exception as error:  # every library has errors of its own
        raise ValueError(f"{path} cannot be read as {path.suffix}: {error}") from error


def _read_npy(path: pathlib.Path) -> dict[str, NDArray[Any]]:
    return {"vp": np.load(path, allow_pickle=False)}


def _read_npz(path: pathlib.Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _read_zarr(path: pathlib.Path) -> dict[str, NDArray[Any]]:
    import zarr

    node = zarr.open(path, mode="r")
    arrays = {"vp": node} if isinstance(node, zarr.Array) else dict(node.arrays())
    found = {name: np.asarray(array[...]) for name, array in arrays.items()}
    return found | {n: np.asarray(node.attrs[n], float) for n in _ABOUT if n in node.attrs}


def _read_mat(path: pathlib.Path) -> dict[str, NDArray[Any]]:
    from scipy.io import loadmat

    return {k: v for k, v in loadmat(path).items() if not k.startswith("__")}


def _open_segy(path: pathlib.Path) -> Any:
    try:
        import segyio
    except ImportError as error:
        raise ImportError(
            "mpigrad: SEG-Y files need segyio: pip install 'mpigrad[apps]'"
        ) from error
    return segyio.open(str(path), strict=False, ignore_geometry=True)


def _read_segy(path: pathlib.Path) -> dict[str, NDArray[Any]]:
    with _open_segy(path) as file:
        return {"vp": np.asarray(file.trace.raw[:])}


def _read_interval(path: pathlib.Path) -> tuple[float, float] | None:
    import segyio

    with _open_segy(path) as file:
        microseconds = segyio.tools.dt(file, fallback_dt=0.0)
    dt = microseconds / 1e6
    return (dt, min(1e-6, 5e-3 * dt)) if dt > 0 else None


def _refuse_volume(path: pathlib.Path) -> None:
    import segyio

    with _open_segy(path) as file:
        lines = [
            len(np.unique(file.attributes(field)[:]))
            for field in (segyio.TraceField.INLINE_3D, segyio.TraceField.CROSSLINE_3D)
        ]
    if min(lines) > 1:
        raise ValueError(
            f"{path} has {lines[0]} inlines and {lines[1]} crosslines, a volume; a section, one "
            "trace for each x, is expected"
        )


SEGY = (".sgy", ".segy")
_READERS: dict[str, Callable[[pathlib.Path], dict[str, NDArray[Any]]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".mat": _read_mat,
    ".zarr": _read_zarr,
} | dict.fromkeys(SEGY, _read_segy)


def _read(path: pathlib.Path, shape: tuple[int, ...] | None) -> ModelFile:
    arrays = _arrays(path)
    if path.suffix.lower() in SEGY:
        _refuse_volume(path)
    fields = {name: np.asarray(arrays[name]) for name in FIELDS if name in arrays}
    if not fields:
        raise ValueError(
            f"{path}: none of the fields {', '.join(FIELDS)} in it, but {sorted(arrays)}"
        )
    spacing = None
    if "spacing" in arrays:
        given = np.broadcast_to(np.ravel(arrays["spacing"]), 2)
        spacing = float(given[0]), float(given[1])
    elif "dx" in arrays and "dy" in arrays:
        spacing = float(arrays["dx"].ravel()[0]), float(arrays["dy"].ravel()[0])
    acquisition = None
    if {"source", "receiver", "dt", "nt"} <= arrays.keys() and spacing is not None:
        try:
            acquisition = _acquisition(arrays, spacing)
        except Exception as error:
            raise ValueError(
                f"{path}: `source`, `receiver`, `dt` and `nt` are not as expected: {error}"
            ) from error
    if spacing is not None and not all(h > 0 and np.isfinite(h) for h in spacing):
        raise ValueError(f"{path}: spacing {spacing}; positive lengths are expected")
    first = next(iter(fields.values()))
    expected = first.shape if shape is None else shape
    checked = {name: _checked(path, name, field, expected) for name, field in fields.items()}
    return ModelFile(checked, spacing, acquisition)


def _acquisition(arrays: Mapping[str, NDArray[Any]], spacing: tuple[float, float]) -> Acquisition:
    """The survey of a .mat file: cell arrays of structures, one for each shot."""

    def entry(structure: Any, name: str) -> NDArray[np.float64]:
        while isinstance(structure, np.ndarray) and structure.dtype.names is None:
            structure = structure.ravel()[0]
        return np.asarray(np.ravel(structure[name])[0], float)

    def coordinates(structure: Any) -> NDArray[np.float64]:
        cells = np.stack([entry(structure, name).ravel() for name in ("ix", "iy")], axis=1)
        return (cells + 0.5) * spacing

    sources = np.stack([coordinates(shot) for shot in arrays["source"].ravel()])
    receivers = np.stack([coordinates(shot) for shot in arrays["receiver"].ravel()])
    wavelets = np.stack([np.atleast_2d(entry(shot, "vec")) for shot in arrays["source"].ravel()])
    dt, steps = float(arrays["dt"].ravel()[0]), int(arrays["nt"].ravel()[0])
    if wavelets.shape != (*sources.shape[:2], steps):
        raise ValueError(
            f"wavelets of shape {wavelets.shape} for {sources.shape[0]} shots of "
            f"{sources.shape[1]} sources and {steps} steps"
        )
    if len(receivers) not in (1, len(sources)):
        raise ValueError(f"{len(receivers)} sets of receivers for {len(sources)} shots")
    return Acquisition(sources, receivers, wavelets, dt, steps)


def _checked(
    path: pathlib.Path, name: str, given: NDArray[Any], expected: tuple[int, ...]
) -> Float[np.ndarray, "nx ny"]:
    """A field in float64, or an error that says what is wrong with it."""
    if given.dtype.kind not in "iuf":
        raise ValueError(f"{path}: {name} holds no real numbers but {given.dtype}")
    field = np.asarray(given, float)
    if field.ndim != 2 or field.size == 0:
        raise ValueError(f"{path}: {name} has shape {field.shape}; (nx, ny) is expected")
    if field.shape != expected:
        raise ValueError(
            f"{path}: {name} has {field.shape[0]} x {field.shape[1]} cells, "
            f"{' x '.join(map(str, expected))} are expected"
        )
    if not np.all(np.isfinite(field)):
        i, j = np.argwhere(~np.isfinite(field))[0]
        raise ValueError(f"{path}: {name} is {field[i, j]} in cell ({i}, {j})")
    vanishes = name in _MAY_VANISH
    if np.any(field < 0 if vanishes else field <= 0):
        i, j = np.unravel_index(np.argmin(field), field.shape)
        raise ValueError(
            f"{path}: {name} is {field[i, j]:g} in cell ({i}, {j}); it must "
            f"{'not be negative' if vanishes else 'be positive'}"
        )
    return field
