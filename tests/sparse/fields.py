"""Diffusion, a shift and a wind on a grid: on this rank's tile, and on the whole grid."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.grid import Grid, halo_exchange
from mpigrad.sparse import Pattern

SHAPE = (5, 4)
_INSIDE = (slice(1, -1), slice(1, -1))
_STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1))


def _beside(v: Any, step: tuple[int, int]) -> Any:
    return v[tuple(slice(1 + s, n - 1 + s) for s, n in zip(step, v.shape, strict=True))]


def flux(k: Any, v: Any, wind: Any) -> Any:
    """A v on the inner cells of padded arrays."""
    inner = v[_INSIDE]
    out = 0.7 * inner + wind * (_beside(v, (1, 0)) - inner)
    for step in _STEPS:
        out += (k[_INSIDE] + _beside(k, step)) / 2 * (inner - _beside(v, step))
    return out


class Field:
    """A field of SHAPE on the grid of all ranks, continued by its own edge."""

    def __init__(self, comm: Communicator) -> None:
        self.grid = Grid(SHAPE, (1.0, 1.0), comm)
        self.mine = self.grid.slices

    def tile(self, whole: Any) -> Any:
        return jnp.asarray(whole[self.mine])

    def pad(self, v: Any) -> Any:
        return halo_exchange(v, self.grid)

    def pattern(self) -> Pattern:
        n = self.grid.n_local
        rows = np.arange(n) + int(self.grid.row_offsets[self.grid.comm.rank])
        numbers = rows.reshape(self.grid.local_shape).astype(float)
        padded = np.asarray(halo_exchange(jnp.asarray(numbers), self.grid, boundary=-1.0))
        columns = np.stack([_beside(padded, step) for step in ((0, 0), *_STEPS)]).astype(int)
        rows = np.broadcast_to(rows.reshape(self.grid.local_shape), columns.shape)
        return Pattern.from_coo(rows[columns >= 0], columns[columns >= 0], n, self.grid.comm)


def pad_whole(v: Any) -> Any:
    return jnp.pad(v, 1, mode="edge")


def dense(f: Any) -> Any:
    """The matrix of a linear function of a whole field."""
    flat = lambda v: f(v.reshape(SHAPE)).ravel()
    return jax.jacobian(flat)(jnp.zeros(SHAPE[0] * SHAPE[1]))
