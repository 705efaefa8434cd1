"""The fields of acoustic waves on a rank's wave tile."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Bool, Float
from mpigrad.waves.absorbing import WaveTile

__all__ = ["State", "at_rest", "in_layers", "pack", "unpack"]


class State(NamedTuple):
    """The fields of all shots at one time, on this rank's tile with its absorbing layers.

    Attributes
    ----------
    field
        The pressure, shape (n_shots, nx, ny) with the cells of `Acoustic.tile`.
    previous
        The pressure one step earlier, with the same shape.
    memory
        phi, then psi, of the absorbing layers in this rank's cells of the layers in C order. Shape
        (n_shots, 2 n_cells), with n_cells = 0 on a tile without layers.
    """

    field: Float[Array, "shots nx ny"]
    previous: Float[Array, "shots nx ny"]
    memory: Float[Array, "shots m"]


def in_layers(tile: WaveTile) -> Bool[np.ndarray, "nx ny"]:
    """Return a mask of this rank's cells that lie in absorbing layers."""
    inside = np.ones(tile.shape, bool)
    inside[tile.interior] = False
    return inside


def at_rest(tile: WaveTile, n_shots: int, dtype: np.dtype) -> State:
    """Return a state whose fields are all zero."""
    field = jnp.zeros((n_shots, *tile.shape), dtype)
    return State(field, field, jnp.zeros((n_shots, 2 * int(in_layers(tile).sum())), dtype))


def unpack(tile: WaveTile, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return phi and psi as fields that are zero outside the layers."""
    cells = np.flatnonzero(in_layers(tile))
    shape = (memory.shape[0], tile.shape[0] * tile.shape[1])
    phi, psi = (
        jnp.zeros(shape, memory.dtype).at[:, cells].set(part).reshape(-1, *tile.shape)
        for part in jnp.split(memory, 2, axis=1)
    )
    return phi, psi


def pack(tile: WaveTile, phi: jax.Array, psi: jax.Array) -> jax.Array:
    """Return the values of phi and psi in the layers."""
    cells = np.flatnonzero(in_layers(tile))
    return jnp.concatenate([f.reshape(f.shape[0], -1)[:, cells] for f in (phi, psi)], axis=1)
