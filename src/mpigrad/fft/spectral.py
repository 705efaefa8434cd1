"""Derivatives and constant-coefficient solves by Fourier transforms."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from mpigrad.fft.layout import Layout
from mpigrad.fft.transforms import forward, inverse

__all__ = [
    "as_factor",
    "dealias",
    "eigenvalues",
    "gradient",
    "laplacian",
    "solve_helmholtz",
]


def gradient(u: Any, layout: Layout) -> tuple[Any, ...]:
    """Return the derivatives of a field along the axes of `layout`, exact for resolved modes.

    The highest mode of an even number of cells has no derivative on the grid and gives zero.

    Parameters
    ----------
    u
        This rank's tile of a field, of shape (lx, ly, *rest) on a grid with two axes.
    layout
        The layout of the spectrum, of periodic axes.

    Returns
    -------
    tuple
        One array like `u` for each of `layout.axes`: units of `u` per unit of length. One exchange
        brings all of them back.

    Raises
    ------
    ValueError
        If an axis of `layout` has walls, where the derivative is a transform of another kind.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fft
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((16,), spacing=(2 * jnp.pi / 16,), periodic=True)
    >>> (x,) = grid.centers()
    >>> (du,) = fft.gradient(jnp.sin(x), fft.Layout.of(grid, real=True))
    >>> bool(jnp.allclose(du, jnp.cos(x), atol=1e-5))
    True
    """
    if {"cosine", "sine"} & set(layout.kinds):
        raise ValueError(
            f"fft.gradient: expected periodic axes, got {layout!r}. The derivative of "
            "cosines is made of sines: multiply the spectrum, and invert it in the other layout."
        )
    spectrum = forward(u, layout)
    parts = [
        spectrum * (1j * as_factor(np.where(_is_highest(layout, i, m), 0, k), spectrum))
        for i, (m, k) in enumerate(zip(layout.modes(), layout.wavenumbers(), strict=True))
    ]
    return tuple(inverse(parts, layout))


def laplacian(u: Any, layout: Layout) -> Any:
    """Return the sum of the second derivatives along the axes of `layout`.

    Parameters
    ----------
    u
        This rank's tile of a field.
    layout
        The layout of the spectrum. Its walls are those of the field.

    Returns
    -------
    An array like `u`, in units of `u` per unit of length squared.
    """
    spectrum = forward(u, layout)
    return inverse(spectrum * as_factor(-eigenvalues(layout, stencil=False), spectrum), layout)


def solve_helmholtz(f: Any, layout: Layout, shift: Any = 0.0, *, stencil: bool = False) -> Any:
    """Solve shift u - laplacian(u) = f, by one transform forward and one back.

    Use it for problems with constant coefficients. `Helmholtz` is the same solve as a strategy of
    `mpigrad.sparse.solve`, for example as the preconditioner of problems whose coefficients vary.

    Parameters
    ----------
    f
        This rank's tile of the right-hand side.
    layout
        The layout of the spectrum. Axes of kind "fft" are periodic, "dct" has no flux through the
        walls, and "dst" is zero there.
    shift
        A number, not negative, the same on all ranks. Derivatives with respect to it are exact.
    stencil
        True to invert the second-order stencil of 3, 5 or 7 points on the cells instead of the
        exact Laplacian.

    Returns
    -------
    An array like `f`. Without shift and without a "dst" axis the solution is unique up to a
    constant: its mean is zero, and the mean of `f` is ignored.

    Raises
    ------
    ValueError
        If `shift` is an array with axes, or is known and is negative or not finite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fft
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((16,), spacing=(2 * jnp.pi / 16,), periodic=True)
    >>> (x,) = grid.centers()
    >>> u = fft.solve_helmholtz(4 * jnp.sin(2 * x), fft.Layout.of(grid, real=True))
    >>> bool(jnp.allclose(u, jnp.sin(2 * x), atol=1e-5))
    True
    """
    _check_shift(shift)
    spectrum = forward(f, layout)
    symbol = as_factor(eigenvalues(layout, stencil=stencil), spectrum) + jnp.asarray(
        shift, spectrum.real.dtype
    )
    singular = symbol == 0
    safe = jnp.where(singular, 1, symbol)
    return inverse(jnp.where(singular, 0, spectrum / safe), layout)


def dealias(spectrum: Any, layout: Layout) -> Any:
    """Return the spectrum without the modes that products of two fields would fold back.

    These are the modes above a third of the cells of a periodic axis (the two-thirds rule of
    Orszag, J. Atmos. Sci. 28, 1971), and above two thirds of the cells between walls.

    Parameters
    ----------
    spectrum
        This rank's part of a spectrum, of shape (*layout.local_shape, *rest).
    layout
        The layout of the spectrum.
    """
    keep: Any = np.True_
    for axis, kind, modes in zip(layout.axes, layout.kinds, layout.modes(), strict=True):
        cells = layout.grid.shape[axis]
        limit = cells / 3 if kind in ("complex", "real") else 2 * cells / 3
        keep = keep & (np.abs(modes) < limit)
    keep = keep.reshape(keep.shape + (1,) * (jnp.ndim(spectrum) - keep.ndim))
    return jnp.where(keep, spectrum, 0)


def _check_shift(shift: Any) -> None:
    if jnp.ndim(shift) != 0:
        raise ValueError(
            f"fft.solve_helmholtz: shift must be a number, got shape {jnp.shape(shift)}. For a "
            "coefficient that varies, solve with PCG and the preconditioner fft.Helmholtz."
        )
    if not isinstance(shift, Tracer) and not 0 <= float(shift) < np.inf:
        raise ValueError(
            f"fft.solve_helmholtz: shift must be finite and not negative, got {shift}. Choose one "
            "such as 1.0."
        )


def _is_highest(layout: Layout, i: int, modes: NDArray[Any]) -> NDArray[Any]:
    """Return True for the highest mode of an even number of cells, which has no sign."""
    return 2 * np.abs(modes) == layout.grid.shape[layout.axes[i]]


def eigenvalues(layout: Layout, *, stencil: bool) -> NDArray[Any]:
    """Return the eigenvalues of minus the Laplacian of this rank's modes."""
    total: Any = np.zeros((1,) * layout.grid.ndim)
    for axis, k in zip(layout.axes, layout.wavenumbers(), strict=True):
        h = layout.grid.spacing[axis]
        total = total + ((2 * np.sin(k * h / 2) / h) ** 2 if stencil else k**2)
    return total


def as_factor(values: NDArray[Any], spectrum: Any) -> Any:
    """Return values of this rank's modes in the shape and precision of a spectrum's factor."""
    return jnp.asarray(values, spectrum.real.dtype).reshape(
        values.shape + (1,) * (spectrum.ndim - values.ndim)
    )
