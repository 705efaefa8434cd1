"""Lower and upper bounds of the unknowns, as vectors that are distributed over the ranks."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.optimize.unknowns import Unknowns, Vector, dot

__all__ = ["Limits", "check_bounds", "check_pair", "clip", "projected_norm", "vectors_of_bounds"]

Limits = tuple[Vector, Vector]  # this rank's parts of the lower and upper bounds


def vectors_of_bounds(unknowns: Unknowns, bounds: Any, method: str) -> Limits:
    """Return lower and upper bounds of this rank's part of the vector, without messages.

    `bounds` is None or (lower, upper). Each is None or a pytree prefix of the unknowns with floats
    and arrays.
    """
    found = [unknowns.vector(tree) for tree in _trees(unknowns, bounds, method)]
    return found[0], found[1]


def _trees(unknowns: Unknowns, bounds: Any, method: str) -> list[Any]:
    example = jax.tree.unflatten(unknowns.structure, unknowns.shapes)
    found = []
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
        found.append(whole)
    return found


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
