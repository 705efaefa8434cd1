"""Central differences of fields that are padded along one axis, for the JAX programs."""

from __future__ import annotations

import jax

from mpigrad.waves.stability import SECOND_DERIVATIVES

__all__ = ["BETWEEN_DERIVATIVES", "first_difference", "second_difference", "shifted"]

# Coefficients of the first derivative, for the differences one and two cells away.
FIRST_DERIVATIVES = {2: (1 / 2,), 4: (2 / 3, -1 / 12)}

# The same between the cells, for the differences 1/2, 3/2 and more cells away.
BETWEEN_DERIVATIVES = {
    2: (1.0,),
    4: (9 / 8, -1 / 24),
    8: (1225 / 1024, -245 / 3072, 49 / 5120, -5 / 7168),
}


def shifted(f: jax.Array, axis: int, reach: int, shift: int) -> jax.Array:
    """Return a padded field without its margin of `reach` cells, moved by `shift` cells."""
    n = f.shape[axis + 1] - 2 * reach
    return jax.lax.slice_in_dim(f, reach + shift, reach + shift + n, axis=axis + 1)


def second_difference(f: jax.Array, axis: int, h: float, order: int) -> jax.Array:
    """Return the second derivative of a padded field."""
    center, *others = SECOND_DERIVATIVES[order]
    reach = order // 2
    total = center * shifted(f, axis, reach, 0)
    for k, c in enumerate(others, 1):
        total = total + c * (shifted(f, axis, reach, k) + shifted(f, axis, reach, -k))
    return total / h**2


def first_difference(f: jax.Array, axis: int, h: float, order: int) -> jax.Array:
    """Return the first derivative of a padded field in the cells."""
    reach = order // 2
    total = sum(
        c * (shifted(f, axis, reach, k) - shifted(f, axis, reach, -k))
        for k, c in enumerate(FIRST_DERIVATIVES[order], 1)
    )
    return total / h  # type: ignore[operator]
