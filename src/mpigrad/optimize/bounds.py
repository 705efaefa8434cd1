"""Lower and upper bounds of the unknowns, and the quadratic model of L-BFGS-B within them."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.operations import allreduce
from mpigrad.optimize.unknowns import Unknowns, Vector, dot

__all__ = [
    "Limits",
    "Path",
    "Restriction",
    "Trial",
    "check_bounds",
    "check_pair",
    "clip",
    "last_breakpoint",
    "model_path",
    "model_restriction",
    "projected_norm",
    "trial_direction",
    "vectors_of_bounds",
]

# ---- Lower and upper bounds of the unknowns, as vectors that are distributed over the ranks ----


Limits = tuple[Vector, Vector]  # this rank's parts of the lower and upper bounds


def vectors_of_bounds(unknowns: Unknowns, bounds: Any, method: str) -> Limits:
    """Return lower and upper bounds of this rank's part of the vector, without messages.

    `bounds` is None or (lower, upper). Each is None or a pytree prefix of the unknowns with floats
    and arrays.
    """
    limits = [unknowns.vector(tree) for tree in _trees(unknowns, bounds, method)]
    return limits[0], limits[1]


def _trees(unknowns: Unknowns, bounds: Any, method: str) -> list[Any]:
    example = jax.tree.unflatten(unknowns.structure, unknowns.shapes)
    trees = []
    for bound, none in zip(bounds or (None, None), (-np.inf, np.inf), strict=True):
        try:
            spread = jax.tree.broadcast(none if bound is None else bound, example)
            whole = jax.tree.map(
                lambda b, leaf: jnp.broadcast_to(jnp.asarray(b, leaf.dtype), leaf.shape),
                spread,
                example,
            )
        except ValueError as error:
            first = str(error).partition("\n")[0]
            raise ValueError(
                f"{method}: bounds do not fit the unknowns ({first}). Give (lower, upper), each a "
                "float, an array or a pytree prefix of x0."
            ) from error
        trees.append(whole)
    return trees


def check_pair(bounds: Any, method: str) -> None:
    """Raise an error unless the bounds are None or a tuple of two elements."""
    if bounds is not None and not (isinstance(bounds, tuple) and len(bounds) == 2):
        size = f" of {len(bounds)} elements" if hasattr(bounds, "__len__") else ""
        raise ValueError(
            f"{method}: bounds must be a tuple (lower, upper), got {type(bounds).__name__}{size}. "
            "Give two arrays, not a pair for each unknown."
        )


def check_bounds(unknowns: Unknowns, bounds: Any, method: str) -> None:
    """Raise an error on every rank if the bounds are not valid (collective)."""
    digests = []
    with raise_on_all_ranks(unknowns.comm):
        lower, upper = (jax.tree.leaves(tree) for tree in _trees(unknowns, bounds, method))
        for low, high in zip(lower, upper, strict=True):
            if not np.all(low <= high):  # false for NaN, too
                raise ValueError(
                    f"{method}: every lower bound must be at most its upper bound, and neither may "
                    f"be NaN, got {np.asarray(low)} and {np.asarray(high)}"
                )
        for i in unknowns.replicated:
            both = np.asarray(lower[i]).tobytes() + np.asarray(upper[i]).tobytes()
            digests.append(f"{unknowns.names[i]}: {hashlib.sha256(both).hexdigest()[:8]}")
    assert_same_on_all_ranks(
        unknowns.comm, digests, f"{method}: the bounds of replicated unknowns (digests)"
    )


def clip(x: Vector, limits: Limits) -> Vector:
    """Return the vector with entries outside the bounds moved onto them, without messages."""
    return tuple(jnp.clip(part, *ends) for part, *ends in zip(x, *limits, strict=True))


def projected_norm(unknowns: Unknowns, x: Vector, g: Vector, limits: Limits) -> float:
    """Return the two-norm of the projected gradient (collective).

    It is the step along -g, at most as long as g, that stays within the bounds. It is infinite if
    an entry of g is.
    """
    return math.sqrt(float(unknowns.compiled(_projected_square)(x, g, limits)))


def _projected_square(unknowns: Unknowns, x: Vector, g: Vector, limits: Limits) -> Any:
    # An infinite slope is no number to compute with, also where the bounds make the step finite.
    step = tuple(
        jnp.where(jnp.isinf(b), jnp.inf, jnp.clip(-b, low - a, high - a))
        for a, b, low, high in zip(x, g, *limits, strict=True)
    )
    with jax.enable_x64(True):
        return unknowns.sum(dot(step, step))


# ---- The quadratic model of L-BFGS-B within bounds: reductions over ranks for its minimisers
#
# The model at x is m(z) = g·z + z·B z / 2, with B = θ I - Rᵀ K R. R has the stored steps and
# changes of the gradient as its rows, and K is a small matrix. The path is z(t) = P(x - t g) - x,
# with P the projection onto the bounds. An unknown reaches its bound at its breakpoint.
#
# Small arrays are in float64 and the same on all ranks.


_BLOCK = 1 << 14  # columns of R that are converted and multiplied at a time


class Path(NamedTuple):
    """The path at several steps t, one row for each.

    Attributes
    ----------
    moving
        Σ g² of the unknowns that have not reached a bound.
    next
        The first breakpoint after t, or inf.
    of_z, of_d
        R z and R d, with d the derivative of z after t.
    """

    moving: NDArray[np.float64]
    next: NDArray[np.float64]
    of_z: NDArray[np.float64]
    of_d: NDArray[np.float64]


class Restriction(NamedTuple):
    """Products of R and of its columns of free unknowns, F, at one step of the path.

    Attributes
    ----------
    gram
        F Fᵀ.
    of_g, of_z
        F g and F z.
    of_all_z
        R z.
    """

    gram: NDArray[np.float64]
    of_g: NDArray[np.float64]
    of_z: NDArray[np.float64]
    of_all_z: NDArray[np.float64]


class Trial(NamedTuple):
    """A search direction, with its slope, its square, and two largest steps.

    Attributes
    ----------
    fraction
        The largest step, at most 1, from the Cauchy point to the minimiser of the subspace.
    longest
        The largest step along the direction.
    """

    direction: Vector
    slope: float
    square: float
    fraction: float
    longest: float


def model_path(
    unknowns: Unknowns, rows: Vector, x: Vector, g: Vector, limits: Limits, times: Any
) -> Path:
    """Return the path at steps t (collective)."""
    program = unknowns.compiled(_path)
    times = np.asarray(times, np.float64)
    with jax.enable_x64(True):
        sums, following = program(rows, x, g, limits, times)
    table = np.asarray(sums)
    of_z, of_d = np.split(table[:, 1:], 2, axis=1)
    return Path(table[:, 0], np.asarray(following), of_z, of_d)


def _path(
    unknowns: Unknowns, rows: Vector, x: Vector, g: Vector, limits: Limits, times: Any
) -> Any:
    def of_block(R: Any, x: Any, g: Any, low: Any, high: Any) -> Any:
        breaks = _breakpoints(x, g, low, high)
        d = jnp.where(times[:, None] < breaks, -g, 0.0)
        z = -g * jnp.minimum(times[:, None], breaks)
        moving = jnp.sum(d * d, axis=1, keepdims=True)
        after = jnp.where(breaks > times[:, None], breaks, jnp.inf)
        sums = jnp.concatenate([moving, z @ R.T, d @ R.T], axis=1)
        return sums, jnp.min(after, axis=1, initial=jnp.inf)

    sums, following = _blockwise(of_block, rows, x, g, *limits)
    return unknowns.sum(sums), allreduce(following, MPI.MIN, unknowns.comm)


def last_breakpoint(unknowns: Unknowns, x: Vector, g: Vector, limits: Limits) -> float:
    """Return the largest finite breakpoint, or 0.0 (collective)."""
    with jax.enable_x64(True):
        return float(unknowns.compiled(_last_breakpoint)(x, g, limits))


def _last_breakpoint(unknowns: Unknowns, x: Vector, g: Vector, limits: Limits) -> Any:
    def of_part(*parts: Any) -> Any:
        breaks = _breakpoints(*(part.astype("float64") for part in parts))
        return jnp.max(jnp.where(jnp.isfinite(breaks), breaks, 0.0), initial=0.0)

    last = [of_part(*parts) for parts in zip(x, g, *limits, strict=True)]
    return allreduce(functools.reduce(jnp.maximum, last), MPI.MAX, unknowns.comm)


def model_restriction(
    unknowns: Unknowns, rows: Vector, x: Vector, g: Vector, limits: Limits, t: float
) -> Restriction:
    """Return the products with the free unknowns at step t of the path (collective)."""
    with jax.enable_x64(True):
        sums = np.asarray(unknowns.compiled(_restriction)(rows, x, g, limits, np.float64(t)))
    gram, of_g, of_z, of_all_z = np.split(sums, np.cumsum([len(sums), 1, 1]), axis=1)
    return Restriction(gram, of_g[:, 0], of_z[:, 0], of_all_z[:, 0])


def _restriction(
    unknowns: Unknowns, rows: Vector, x: Vector, g: Vector, limits: Limits, t: Any
) -> Any:
    def of_block(R: Any, x: Any, g: Any, low: Any, high: Any) -> Any:
        z, free = _cauchy_step(x, g, low, high, t)
        columns = [jnp.where(free, R, 0.0).T, (free * g)[:, None], (free * z)[:, None]]
        return R @ jnp.concatenate([*columns, z[:, None]], axis=1), jnp.zeros(())

    return unknowns.sum(_blockwise(of_block, rows, x, g, *limits)[0])


def trial_direction(
    unknowns: Unknowns,
    rows: Vector,
    x: Vector,
    g: Vector,
    limits: Limits,
    t: float,
    theta: float,
    coefficients: NDArray[np.float64],
    fraction: float | None = None,
) -> Trial:
    """Return the direction to the minimiser of the model over the free unknowns (collective).

    That minimiser is z + d with d = -(g + θ z) / θ + Fᵀ coefficients. It is projected onto the
    bounds or, if `fraction` is given, replaced by z + fraction · d.
    """
    scalars = np.array([t, theta, -1.0 if fraction is None else fraction])
    with jax.enable_x64(True):
        direction, sums, least = unknowns.compiled(_direction)(
            rows, x, g, limits, scalars, coefficients
        )
    slope, square = np.asarray(sums).tolist()
    largest, longest = np.asarray(least).tolist()
    return Trial(direction, slope, square, min(1.0, largest), max(1.0, longest))


def _direction(
    unknowns: Unknowns,
    rows: Vector,
    x: Vector,
    g: Vector,
    limits: Limits,
    scalars: Any,
    coefficients: Any,
) -> Any:
    t, theta, fraction = scalars
    directions, least = [], jnp.full(2, jnp.inf)
    for part, *parts in zip(rows, x, g, *limits, strict=True):
        R = part.reshape(len(part), -1)
        dtype = R.dtype
        a, b, low, high = (v.ravel().astype("float64") for v in parts)
        z, free = _cauchy_step(a, b, low, high, t)
        d = -(b + theta * z) / theta + (coefficients.astype(dtype) @ R).astype("float64")
        d = jnp.where(free, d, 0.0)
        whole = jnp.where(fraction < 0, 1.0, fraction)
        step = jnp.clip(z + whole * d, low - a, high - a)
        least = jnp.minimum(
            least, jnp.stack([_longest(a + z, d, low, high), _longest(a, step, low, high)])
        )
        directions.append(step.astype(dtype).reshape(parts[0].shape))
    direction = tuple(directions)
    sums = unknowns.products((direction, g), (direction, direction))
    return direction, sums, allreduce(least, MPI.MIN, unknowns.comm)


def _breakpoints(x: Any, g: Any, low: Any, high: Any) -> Any:
    """Return the steps at which the unknowns reach their bounds along -g."""
    room = jnp.where(g > 0, x - low, high - x)
    return jnp.where(g == 0, jnp.inf, room / jnp.where(g == 0, 1.0, jnp.abs(g)))


def _cauchy_step(x: Any, g: Any, low: Any, high: Any, t: Any) -> tuple[Any, Any]:
    """Return z(t), and True for each unknown that is not at a bound there."""
    breaks = _breakpoints(x, g, low, high)
    bound = jnp.where(g > 0, low, high) - x
    z = jnp.where(breaks <= t, bound, -t * g)
    return z, (breaks > t) & (x + z > low) & (x + z < high)


def _longest(x: Any, d: Any, low: Any, high: Any) -> Any:
    """Return the largest step along d within the bounds."""
    room = jnp.where(d > 0, high - x, x - low)
    steps = jnp.where(d == 0, jnp.inf, room / jnp.where(d == 0, 1.0, jnp.abs(d)))
    return jnp.min(steps, initial=jnp.inf)


def _blockwise(of_block: Callable[..., Any], rows: Vector, *vectors: Vector) -> Any:
    """Return the sum and the minimum over blocks of columns of of_block(R, ...), in float64.

    A block is small, so that its conversion and its products take little memory.
    """
    total: Any = None
    for part, *parts in zip(rows, *vectors, strict=True):
        R, flat = part.reshape(len(part), -1), [v.ravel() for v in parts]
        whole, rest = divmod(R.shape[1], _BLOCK)

        def at(start: Any, size: int, R: Any = R, flat: Any = flat) -> Any:
            block = jax.lax.dynamic_slice_in_dim(R, start, size, 1)
            pieces = [jax.lax.dynamic_slice_in_dim(v, start, size) for v in flat]
            return of_block(*(v.astype("float64") for v in (block, *pieces)))

        def added(i: Any, total: Any, at: Any = at) -> Any:
            return _combined(total, at(i * _BLOCK, _BLOCK))

        last = at(whole * _BLOCK, rest)
        total = last if total is None else _combined(total, last)
        if whole:
            total = jax.lax.fori_loop(0, whole, added, total)
    return total


def _combined(one: Any, other: Any) -> Any:
    return one[0] + other[0], jnp.minimum(one[1], other[1])
