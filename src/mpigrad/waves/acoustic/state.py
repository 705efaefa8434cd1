"""The fields of acoustic waves on a rank's wave tile."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Bool, Float
from mpigrad.waves.absorbing import WaveTile

__all__ = ["State", "at_rest", "in_layers", "memory_size", "overlaps", "pack", "unpack"]


class State(NamedTuple):
    """The fields of all shots at one time, on this rank's tile with its absorbing layers.

    Attributes
    ----------
    field
        The pressure, shape (n_shots, nx, ny) or (n_shots, nx, ny, nz) with the cells of
        `Acoustic.tile`.
    previous
        The pressure one step earlier, with the same shape.
    memory
        The memories of the absorbing layers one after the other, in this rank's cells of the
        layers in C order: phi and psi on two axes, phi of each axis and psi on three. Shape
        (n_shots, 2 n_cells) or (n_shots, 4 n_cells), with n_cells = 0 on a tile without layers.
        On three axes a step changes psi only in cells of two or three layers.
    """

    field: Float[Array, "shots ..."]
    previous: Float[Array, "shots ..."]
    memory: Float[Array, "shots m"]


def in_layers(tile: WaveTile) -> Bool[np.ndarray, "*cells"]:
    """Return a mask of this rank's cells that lie in absorbing layers."""
    inside = np.ones(tile.shape, bool)
    inside[tile.interior] = False
    return inside


def overlaps(tile: WaveTile) -> Bool[np.ndarray, "*cells"]:
    """Return a mask of this rank's cells that lie in layers of two or more axes."""
    count = np.zeros(tile.shape, int)
    for axis, part in enumerate(tile.interior):
        layers = np.moveaxis(count, axis, 0)
        layers[: part.start] += 1
        layers[part.stop :] += 1
    return count > 1


def at_rest(tile: WaveTile, n_shots: int, dtype: np.dtype) -> State:
    """Return a state whose fields are all zero."""
    field = jnp.zeros((n_shots, *tile.shape), dtype)
    return State(field, field, jnp.zeros((n_shots, memory_size(tile)), dtype))


def memory_size(tile: WaveTile) -> int:
    """Return the number of values that the layers of this rank keep for each shot."""
    return _memories(tile) * int(in_layers(tile).sum())


def _memories(tile: WaveTile) -> int:
    return 2 if tile.grid.ndim == 2 else tile.grid.ndim + 1


def unpack(tile: WaveTile, memory: jax.Array) -> tuple[jax.Array, ...]:
    """Return the memories as fields that are zero outside the layers."""
    cells = np.flatnonzero(in_layers(tile))
    shape = (memory.shape[0], math.prod(tile.shape))
    return tuple(
        jnp.zeros(shape, memory.dtype).at[:, cells].set(part).reshape(-1, *tile.shape)
        for part in jnp.split(memory, _memories(tile), axis=1)
    )


def pack(tile: WaveTile, *memories: jax.Array) -> jax.Array:
    """Return the values of the memories in the layers."""
    cells = np.flatnonzero(in_layers(tile))
    return jnp.concatenate([f.reshape(f.shape[0], -1)[:, cells] for f in memories], axis=1)
