"""Apply the attributes of zarr arrays: axes, units, scale, offset and missing values.

The names of attributes are those of the CF conventions, as xarray writes them.
"""

from __future__ import annotations

import base64
import pathlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TIMES", "axis_labels", "decoded", "even_step", "unit_factor"]

TIMES = ("t", "time", "twt", "twtt")  # names of axes

_REGULAR = 1e-3  # largest error of a coordinate, in cells
_LENGTHS = {"m": 1.0, "km": 1e3, "ft": 0.3048}
_NAMES = {
    "meter": "m", "meters": "m", "metre": "m", "metres": "m", "foot": "ft", "feet": "ft",
    "kilometer": "km", "kilometers": "km", "kilometre": "km", "kilometres": "km",
    "second": "s", "seconds": "s", "milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns",
    "µs": "us", "μs": "us",
}  # fmt: skip
_UNITS = {
    "velocity": {"m/s": 1.0, "mm/s": 1e-3, "km/s": 1e3, "ft/s": 0.3048},
    "density": {"kg/m3": 1.0, "g/cm3": 1e3, "g/cc": 1e3},
    "modulus": {"Pa": 1.0, "kPa": 1e3, "MPa": 1e6, "GPa": 1e9},
    "length": _LENGTHS,
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}
_KINDS = {"vp": "velocity", "vs": "velocity", "rho": "density", "lambda": "modulus",
          "mu": "modulus", **dict.fromkeys(TIMES, "time")}  # fmt: skip


def axis_labels(array: Any) -> tuple[str, ...] | None:
    """Return the names of the axes of a zarr array in lower case, None if it has none."""
    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS")  # xarray in format 2
    return None if not names else tuple(str(name).lower() for name in names)


def decoded(array: Any, values: NDArray[Any]) -> NDArray[Any]:
    """Apply the fill value, the scale and the offset of a zarr array to its values.

    Missing values are NaN.

    Raises
    ------
    ValueError
        If one of these attributes is not a number.
    """
    attributes = dict(array.attrs)
    scale, offset = (attributes.get(name) for name in ("scale_factor", "add_offset"))
    fills = [attributes[name] for name in ("_FillValue", "missing_value") if name in attributes]
    if scale is None and offset is None and not fills:
        return values
    if values.dtype.kind not in "iuf":
        raise ValueError(f"expected real numbers, got {values.dtype}")
    missing = np.zeros(values.shape, bool)
    for fill in fills:
        number = _number(fill)
        missing |= values == (values.dtype.type(number) if values.dtype.kind == "f" else number)
    if scale is None and offset is None and not missing.any():
        return values
    result = values.astype(float)
    if scale is not None:
        result *= _number(scale)
    if offset is not None:
        result += _number(offset)
    result[missing] = np.nan
    return result


def _number(value: Any) -> float:
    """Return a number of an attribute, which xarray encodes in base 64 in format 3."""
    if isinstance(value, str) and len(value) == 12 and value.endswith("="):
        return float(np.frombuffer(base64.b64decode(value), "<f8")[0])
    return float(np.asarray(value).item())


def unit_factor(path: pathlib.Path, name: str, unit: str | None, kind: str | None = None) -> float:
    """Return the factor that converts an array to SI units.

    Parameters
    ----------
    name
        A field of a model, or the name of an axis.
    unit
        The attribute `units`, None if there is none.
    kind
        "velocity", "density", "modulus" (and pressure), "length" or "time". Default: that of the
        name, a length for other names.

    Raises
    ------
    ValueError
        If the unit is unknown or not one of this quantity.
    """
    if unit is None:
        return 1.0
    kind = kind or _KINDS.get(name, "length")
    factors = _UNITS[kind]
    plain = str(unit).strip()
    plain = plain if kind == "modulus" else plain.lower()  # mPa and MPa differ
    plain = plain.replace("³", "3").replace("^", "").replace("**", "")
    for power, base in (("-1", "s"), ("-3", "m"), ("-3", "cm")):  # m s-1, kg m-3, g cm-3
        for joint in (" ", ".", "*", "·"):
            plain = plain.replace(f"{joint}{base}{power}", f"/{base}{power[1:].replace('1', '')}")
    plain = _NAMES.get(plain, plain)
    if plain not in factors:
        raise ValueError(
            f"{path}: expected {name} in one of the units {', '.join(factors)}, got {unit!r}. "
            "Convert it, and its attribute `units`."
        )
    return factors[plain]


def even_step(
    path: pathlib.Path, axis: str, centers: NDArray[np.float64], what: str = "cell centres"
) -> float:
    """Return the distance between cell centres or samples, or raise an error if it varies."""
    step = float(np.mean(np.diff(centers))) if len(centers) > 1 else 0.0
    even = centers[0] + step * np.arange(len(centers))
    if not np.allclose(centers, even, rtol=0, atol=_REGULAR * abs(step)):
        raise ValueError(
            f"{path}: expected {what} {axis} at one distance, got {centers[0]:g}, "
            f"{centers[1]:g}, ..., {centers[-1]:g}. Interpolate the file onto a regular grid."
        )
    if len(centers) > 1 and step <= 0:
        raise ValueError(
            f"{path}: expected {what} {axis} that increase, got {centers[0]:g}, "
            f"{centers[1]:g}, ..., {centers[-1]:g}. Reverse the axis."
        )
    return step
