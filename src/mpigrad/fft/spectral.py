"""Derivatives, and constant-coefficient solves as strategies of `mpigrad.sparse.solve`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.fft.layout import Layout
from mpigrad.fft.transforms import forward, inverse
from mpigrad.sparse import LinearSolver, LinearSystem, Matrix, Pattern, Preconditioner

__all__ = [
    "Direct",
    "Helmholtz",
    "as_factor",
    "dealias",
    "eigenvalues",
    "gradient",
    "laplacian",
    "solve_helmholtz",
]

# ---- Derivatives and constant-coefficient solves by Fourier transforms ----


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
    >>> (du,) = fft.gradient(jnp.sin(x), fft.Layout(grid, real=True))
    >>> bool(jnp.allclose(du, jnp.cos(x), atol=1e-5))
    True
    """
    if {"dct", "dst"} & set(layout.kinds):
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
    >>> u = fft.solve_helmholtz(4 * jnp.sin(2 * x), fft.Layout(grid, real=True))
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
        limit = cells / 3 if kind in ("fft", "rfft") else 2 * cells / 3
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


# ---- Solves by transforms as strategies of `mpigrad.sparse.solve` ----


@dataclasses.dataclass(frozen=True)
class Helmholtz(Preconditioner):
    """The inverse of shift u - diffusivity laplacian(u), by one transform forward and one back.

    As a preconditioner of `PCG`, `GMRES` or `BiCGStab` it suits matrices on the cells of a grid
    whose coefficients vary moderately. For a function in place of a matrix give it to `Operator`:
    `Operator(f, inverse=Helmholtz(layout))`. `Direct` solves with it alone.

    Making one is collective: all ranks of the grid make it, with the same arguments.

    Attributes
    ----------
    layout
        The layout of the spectrum, with real=True for real systems on periodic axes. Axes of kind
        "fft" are periodic, "dct" has no flux through the walls, and "dst" is zero there.
    shift
        A Python number, not negative. Without shift and without a "dst" axis the operator maps
        constants to zero. The mean is then divided by the smallest other eigenvalue, so that the
        preconditioner is positive definite.
    diffusivity
        A positive Python number, for example the mean of the coefficient that varies.
    stencil
        True for the second-order stencil of 3, 5 or 7 points on the cells, False for the exact
        Laplacian.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument has the wrong type, is out of range, or differs between ranks.
        When it is used, on its own rank: if the vector is not on the tiles of the layout's grid.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fft, sparse
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((16, 8), spacing=(1.0, 1.0), periodic=True)
    >>> layout = fft.Layout(grid, real=True)
    >>> kappa = 1 + 0.1 * jnp.sin(grid.centers()[0])
    >>> A = sparse.Operator(
    ...     lambda u: u - kappa * fft.laplacian(kappa * u, layout),
    ...     inverse=fft.Helmholtz(layout, shift=1.0),
    ... )
    >>> solver = sparse.PCG(rtol=1e-4)
    >>> int(sparse.solve(A, jnp.ones((16, 8)), solver).stats["num_steps"]) < 20
    True
    """

    layout: Layout
    shift: float = 0.0
    diffusivity: float = 1.0
    stencil: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise TypeError(
                f"fft.Helmholtz: layout must be a fft.Layout, got {type(self.layout).__name__}. "
                "Make one with fft.Layout(grid, real=True)."
            )
        comm = self.layout.grid.comm
        with raise_on_all_ranks(comm):
            _check_number("shift", self.shift, zero=True)
            _check_number("diffusivity", self.diffusivity, zero=False)
        settings = float(self.shift), float(self.diffusivity), bool(self.stencil)
        assert_same_on_all_ranks(comm, settings, "fft.Helmholtz: shift, diffusivity and stencil")

    @property
    def is_singular(self) -> bool:
        """True if the operator maps constants to zero."""
        return self.shift == 0 and "dst" not in self.layout.kinds

    def __call__(self, f: Any) -> Any:
        """Return the inverse times this rank's tile of a field, of shape (lx, ly, *rest)."""
        spectrum = forward(f, self.layout)
        values = self.diffusivity * eigenvalues(self.layout, stencil=self.stencil) + self.shift
        if self.is_singular:
            values = np.where(values == 0, self._smallest_eigenvalue(), values)
        return inverse(spectrum / as_factor(values, spectrum), self.layout)

    def inverse(self, A: Matrix) -> Callable[[jax.Array], jax.Array]:
        self.check(A.pattern)
        return self.flat

    def check(self, pattern: Pattern) -> None:
        """Raise an error on all ranks if the rows of a matrix are not the cells of the grid."""
        grid = self.layout.grid
        with raise_on_all_ranks(grid.comm):
            if pattern.comm != grid.comm or pattern.n_local != grid.n_local:
                raise ValueError(
                    "fft.Helmholtz: the matrix must have one row for each cell of the layout's "
                    f"grid, in tile numbering, got {pattern.n_local} rows on rank "
                    f"{grid.comm.rank}, whose tile has {grid.n_local} cells. Make the pattern and "
                    "the layout of one grid."
                )

    def flat(self, r: jax.Array) -> jax.Array:
        """Return the inverse times a vector, whose entries are those of the tile in C order."""
        grid = self.layout.grid
        if r.size % grid.n_local:
            raise ValueError(
                f"fft.Helmholtz: the vector must be on the tile of shape {grid.local_shape}, got "
                f"{r.size} entries on rank {grid.comm.rank}. Give the field (lx, ly, *rest) on "
                "the grid of the layout."
            )
        z = self(r.reshape(*grid.local_shape, r.size // grid.n_local))
        return z.reshape(r.shape)

    def _smallest_eigenvalue(self) -> float:
        """Return the smallest eigenvalue of the operator that is not zero."""
        candidates = []
        for axis, kind in zip(self.layout.axes, self.layout.kinds, strict=True):
            n, h = self.layout.grid.shape[axis], self.layout.grid.spacing[axis]
            k = (np.pi if kind == "dct" else 2 * np.pi) / (n * h)
            if n > 1:
                candidates.append((2 * np.sin(k * h / 2) / h) ** 2 if self.stencil else k**2)
        return self.diffusivity * min(candidates, default=1.0)


@dataclasses.dataclass(frozen=True)
class Direct(LinearSolver):
    """The solver for operators with constant coefficients: two transforms, without iterations.

    `solve` computes the residual with the matrix or the function that it is given. If the operator
    is not that of `operator`, all ranks raise an error.

    Attributes
    ----------
    operator
        The operator, as a `Helmholtz` that is not singular.
    rtol
        The tolerance |b - A x| <= rtol |b|. Rounding allows about 1e-4 in single precision.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if `operator` is not a `Helmholtz`, or is singular. Then solutions are unique
        only up to a constant, and so are adjoint solves: use `solve_helmholtz`, which ignores the
        mean.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fft, sparse
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((16,), spacing=(2 * jnp.pi / 16,), periodic=True)
    >>> layout = fft.Layout(grid, real=True)
    >>> solver = fft.Direct(fft.Helmholtz(layout, shift=2.0), rtol=1e-4)
    >>> (x,) = grid.centers()
    >>> u = sparse.solve(lambda u: 2 * u - fft.laplacian(u, layout), 3 * jnp.sin(x), solver).value
    >>> bool(jnp.allclose(u, jnp.sin(x), atol=1e-5))
    True
    """

    operator: Helmholtz
    rtol: float = 1e-8
    max_steps: int = dataclasses.field(default=2, init=False, repr=False)
    preconditioner: Preconditioner | None = dataclasses.field(default=None, init=False, repr=False)
    symmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.operator, Helmholtz):
            raise TypeError(
                "fft.Direct: operator must be a fft.Helmholtz, got "
                f"{type(self.operator).__name__}. Write Direct(Helmholtz(layout, shift=1.0))."
            )
        if not 0 < self.rtol < 1:
            raise ValueError(
                f"fft.Direct: rtol must lie between 0 and 1, got rtol={self.rtol}. Choose one such "
                "as 1e-8."
            )
        if self.operator.is_singular:
            raise ValueError(
                "fft.Direct: the operator must not be singular, got shift=0 without a "
                '"dst" axis. Then the solution is unique only up to a constant. Use '
                "fft.solve_helmholtz(f, layout), which ignores the mean, or give a shift."
            )

    def check(self, pattern: Pattern, dtype: Any) -> None:
        self.operator.check(pattern)

    def iterate(self, system: LinearSystem) -> tuple[jax.Array, Any]:
        return self.operator.flat(system.b), jnp.ones((), "int32")


def _check_number(name: str, value: Any, *, zero: bool) -> None:
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise TypeError(
            f"fft.Helmholtz: {name} must be a Python number, got {type(value).__name__}. Settings "
            "are constants. For derivatives, solve with a matrix or function that has the value."
        )
    if not (value > 0 or (zero and value == 0)) or not np.isfinite(value):
        least = "not negative" if zero else "positive"
        raise ValueError(
            f"fft.Helmholtz: {name} must be {least} and finite, got {name}={value}. Choose one "
            "such as 1.0."
        )
