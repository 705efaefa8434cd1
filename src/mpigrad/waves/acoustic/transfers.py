"""Sources and receivers of the JAX programs."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations.indexing import put, take
from mpigrad.waves.acoustic.scheme import Scheme
from mpigrad.waves.interpolation import PointTable

__all__ = ["point_transfers"]

Transfer = Callable[[jax.Array], jax.Array]


def point_transfers(scheme: Scheme, table: PointTable, n_points: int) -> tuple[Transfer, Transfer]:
    """Return functions that add values (shots, n_points) to a field, and that read them."""
    shots, shape = scheme.shots, scheme.tile.shape
    size = math.prod(shape)
    repeats = shots * n_points // (len(table.starts) - 1) if n_points else 1
    points, cells = table.points, table.cells
    if repeats == 1:
        cells = cells + (points // max(n_points, 1)) * size
    else:  # the same points in every shot
        shot = np.arange(shots)[:, None]
        points = (points + n_points * shot).ravel()
        cells = (cells + size * shot).ravel()
    weights = np.tile(table.weights, repeats)

    def inject(values: jax.Array) -> jax.Array:
        parts = take(values.ravel(), points) * jnp.asarray(weights, values.dtype)
        return put(shots * size, cells, parts).reshape(shots, *shape)

    def record(field: jax.Array) -> jax.Array:
        parts = take(field.ravel(), cells) * jnp.asarray(weights, field.dtype)
        return put(shots * n_points, points, parts).reshape(shots, n_points)

    return inject, record
