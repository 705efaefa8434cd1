"""The pattern of a Jacobian on a grid, found by the function itself.

A derivative along a vector with NaN in some cells is NaN in every cell that depends on them: NaN
times zero is NaN. So the pattern is found whatever the state is, through messages and kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.collective_errors import raise_error
from mpigrad.extend import CARRIER, as_array, with_carrier
from mpigrad.grid import Grid
from mpigrad.operations import jit
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["find_pattern"]

# (component of the result, component of x, offset of the cell)
Coupling = tuple[int, int, tuple[int, ...]]


def find_pattern(F: Callable[[Any], Any], x: Any, grid: Grid, *, reach: int = 1) -> Pattern:
    """Find the pattern of dF/dx of a function on a grid (collective).

    It takes (2 reach + 1)^d derivatives of F for each component of x on d axes, more along periodic
    axes, once. Call it outside of compiled functions.

    Parameters
    ----------
    F
        A function of a field on this rank's tile that returns a field of the same shape, and may
        exchange messages. A branch that depends on the values of x counts as it is at x.
    x
        A field, shape (*grid.local_shape, *components).
    grid
        The grid.
    reach
        The largest number of cells along an axis that F looks at: the width of its halos.

    Returns
    -------
    The pattern. Each cell couples to the offsets and components that any cell of the grid couples
    to, and each entry to itself. Rows and columns are the entries of x in C order on each rank.
    With one component on a grid that is not periodic it is a pattern of `Pattern.from_stencil`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if F looks farther than `reach` around the middle cell of the grid, for
        instance by a sum over all cells, if its derivative at x is not finite, or if shapes do not
        fit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad import sparse
    >>> grid = mg.Grid((8,), (1.0,))
    >>> def reaction(w):  # two components, of which the first diffuses
    ...     p = mg.halo_exchange(w[:, 0], grid)
    ...     u, v = w.T
    ...     return jnp.stack([p[2:] - 2 * u + p[:-2] - u * v, u * v], axis=-1)
    >>> pattern = sparse.find_pattern(reaction, jnp.zeros((*grid.local_shape, 2)), grid)
    >>> pattern.n_rows, mg.allreduce(pattern.nnz)
    (16, Array(46, dtype=int32))
    """
    if not isinstance(grid, Grid):
        raise TypeError(
            f"find_pattern: grid must be a mpigrad.Grid, got {type(grid).__name__}. Make one with "
            "Grid(shape, spacing)."
        )
    x = as_array(x)
    error: Exception | None = None
    try:
        _check(x, grid, reach)
    except (TypeError, ValueError) as problem:
        error = problem
    raise_error(grid.comm, error)
    components = x.size // max(grid.n_local, 1)
    components = max(grid.comm.mpi.allgather(components))
    found, error = set(), None
    try:
        found = _couplings(F, x, grid, reach, components)
    except ValueError as problem:
        error = problem
    raise_error(grid.comm, error)
    zero = (0,) * grid.ndim
    found |= {(k, k, zero) for k in range(components)}
    couplings = sorted(set().union(*grid.comm.mpi.allgather(found)))
    if components == 1 and not any(grid.periodic):
        return Pattern.from_stencil(grid, [offset for *_, offset in couplings])
    return _pattern(grid, couplings, components)


def _check(x: Any, grid: Grid, reach: Any) -> None:
    if not isinstance(reach, int | np.integer) or reach < 0:
        raise ValueError(
            f"find_pattern: reach must be a count of cells, got {reach!r}. Give the width of the "
            "halos of F."
        )
    if isinstance(x, Tracer):
        raise TypeError("find_pattern: x must be an array, got a tracer. Call it outside of jit.")
    if x.shape[: grid.ndim] != grid.local_shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"find_pattern: x must be a field of floating-point numbers, of shape "
            f"{grid.local_shape} and more axes for components on rank {grid.comm.rank}, got "
            f"{x.dtype}{list(x.shape)}. Give a state that F takes."
        )


def _couplings(
    F: Callable[[Any], Any], x: Any, grid: Grid, reach: int, components: int
) -> set[Coupling]:
    """Return the couplings of this rank's cells."""

    def along(seed: Any) -> Any:
        # With the carrier: F may ignore x on this rank.
        f = with_carrier(lambda x: as_array(F(x)))
        y = jax.jvp(f, (np.float32(0), x), (jnp.zeros((), CARRIER.dtype), seed))[1]
        if y.shape != x.shape:
            raise ValueError(
                f"find_pattern: F must return a field of the shape of x, {x.shape}, got {y.shape}. "
                "Return one value for each entry."
            )
        return jnp.isnan(y).reshape(*grid.local_shape, components)

    dependent = jit(along)
    offsets = list(itertools.product(range(-reach, reach + 1), repeat=grid.ndim))
    axes = [_Colours(n, reach, p) for n, p in zip(grid.shape, grid.periodic, strict=True)]
    cells = [np.arange(part.start, part.stop) for part in grid.slices]
    own = [a.of(c) for a, c in zip(axes, cells, strict=True)]
    found: set[Coupling] = set()
    unknown = ""
    with jax.debug_nans(False):
        if np.asarray(dependent(np.zeros(x.shape, x.dtype))).any():
            unknown = "the derivative of F at x is not finite. Take another x."
        far = _around_one_cell(dependent, x, grid, reach, components)
        for colour in itertools.product(*(range(a.count) for a in axes)):
            chosen = _all(o == c for o, c in zip(own, colour, strict=True))
            # Cells whose neighbour at an offset has this colour.
            near = {
                offset: _all(
                    a.of(c + step) == k
                    for a, c, step, k in zip(axes, cells, offset, colour, strict=True)
                )
                for offset in offsets
            }
            for k in range(components):
                seed = np.zeros((*grid.local_shape, components), x.dtype)
                seed[chosen, k] = np.nan
                hit = np.asarray(dependent(seed.reshape(x.shape)))
                for offset, mask in near.items():
                    rows = hit & mask[..., None]
                    found |= {(int(r), k, offset) for r in np.flatnonzero(rows.any(_axes(grid)))}
                    hit = hit & ~mask[..., None]
                if far is None and hit.any():  # the other ranks need this rank in the next rounds
                    far = np.argwhere(hit)[0][:-1] + [c[0] for c in cells]
    if unknown:
        raise ValueError(f"find_pattern: {unknown}")
    if far is not None:
        raise ValueError(
            f"find_pattern: F looks farther than reach={reach}: its result in cell "
            f"{tuple(map(int, far))} depends on cells outside of that. Raise reach, or solve "
            "without a pattern if F has a sum over all cells."
        )
    return found


def _around_one_cell(
    dependent: Callable[[Any], Any], x: Any, grid: Grid, reach: int, components: int
) -> np.ndarray | None:
    """Return a cell of this rank that depends on the middle cell, but is farther than `reach`.

    Other cells of its colour cannot be told from it, as they are NaN in the same derivative.
    """
    near, here = [], []
    for n, part, periodic in zip(grid.shape, grid.slices, grid.periodic, strict=True):
        distance = np.abs(np.arange(part.start, part.stop) - n // 2)
        here.append(distance == 0)
        near.append((np.minimum(distance, n - distance) if periodic else distance) <= reach)
    far = None
    for k in range(components):
        seed = np.zeros((*grid.local_shape, components), x.dtype)
        seed[_all(here), k] = np.nan
        hit = np.asarray(dependent(seed.reshape(x.shape))) & ~_all(near)[..., None]
        if hit.any():
            far = np.argwhere(hit)[0][:-1] + [part.start for part in grid.slices]
    return far


def _axes(grid: Grid) -> tuple[int, ...]:
    return tuple(range(grid.ndim))


def _all(masks: Any) -> np.ndarray:
    """Return the outer product of a mask for each axis."""
    return functools.reduce(np.logical_and.outer, masks)


class _Colours:
    """Colours of cells along an axis: no two cells of one colour within the reach of a cell."""

    def __init__(self, n: int, reach: int, periodic: bool) -> None:
        self.n, self.periodic = n, periodic
        self.width = min(2 * reach + 1, n)
        self.rest = n % self.width if periodic else 0
        self.count = self.width + self.rest

    def of(self, cell: np.ndarray) -> np.ndarray:
        """Return the colours, -1 outside the grid. The last cells have colours of their own."""
        if self.periodic:
            cell = cell % self.n
        last = cell - (self.n - self.rest)
        colour = np.where(last >= 0, self.width + last, cell % self.width)
        return np.where((cell >= 0) & (cell < self.n), colour, -1)


def _pattern(grid: Grid, couplings: Sequence[Coupling], components: int) -> Pattern:
    cells = [np.arange(part.start, part.stop) for part in grid.slices]
    here = grid.local_rows().reshape(-1)
    rows, columns = [], []
    for result, operand, offset in couplings:
        there = grid.rows(*np.ix_(*(c + step for c, step in zip(cells, offset, strict=True))))
        there = there.reshape(-1)
        inside = there >= 0
        rows.append(components * here[inside] + result)
        columns.append(components * there[inside] + operand)
    # On an axis of few periodic cells two offsets may reach the same cell.
    n = components * int(grid.row_offsets[-1])
    pairs = np.sort(np.concatenate(rows) * n + np.concatenate(columns))
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    pattern = Pattern(pairs // n, pairs % n, components * grid.n_local, grid.comm)
    pattern.colours = _colours(grid, couplings, components)
    return pattern


def _colours(grid: Grid, couplings: Sequence[Coupling], components: int) -> np.ndarray | None:
    """Return (w . cell + w_k) mod m of each column for the smallest m that separates each row.

    None if m would be more than twice the entries of a row: a graph then has fewer colours.
    """
    by_row = [
        np.array([(*offset, k) for r, k, offset in couplings if r == row])
        for row in range(components)
    ]
    pairs = [(a, b) for group in by_row for a, b in itertools.combinations(group, 2)]
    steps = np.array([a[:-1] - b[:-1] for a, b in pairs]).reshape(len(pairs), grid.ndim)
    first = np.array([a[-1] for a, _ in pairs], int)
    second = np.array([b[-1] for _, b in pairs], int)
    around = [n for n, p in zip(grid.shape, grid.periodic, strict=True) if p]
    axes = [axis for axis, p in enumerate(grid.periodic) if p]
    cells = np.meshgrid(*(np.arange(s.start, s.stop) for s in grid.slices), indexing="ij")
    most = max(map(len, by_row))
    for m in range(most, 2 * most + 1):
        for weights in itertools.product(range(m), repeat=grid.ndim):
            if any(weights[axis] * n % m for axis, n in zip(axes, around, strict=True)):
                continue
            moved = steps @ np.array(weights)
            if np.any(moved[first == second] % m == 0):
                continue
            shifts = _shifts(moved, first, second, components, m)
            if shifts is not None:
                cell = sum(w * c for w, c in zip(weights, cells, strict=True))
                return ((np.asarray(cell)[..., None] + np.array(shifts)) % m).ravel()
    return None


def _shifts(
    moved: np.ndarray, first: np.ndarray, second: np.ndarray, components: int, m: int
) -> list[int] | None:
    """Return a shift of the colours of each component, chosen one after the other."""
    shifts = [0]
    for k in range(1, components):
        for shift in range(m):
            every = np.array([*shifts, shift])
            last = ((first == k) & (second < k)) | ((second == k) & (first < k))
            total = moved[last] + every[first[last]] - every[second[last]]
            if np.all(total % m != 0):
                shifts.append(shift)
                break
        else:
            return None
    return shifts
