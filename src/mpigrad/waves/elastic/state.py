"""The fields of elastic waves on a rank's wave tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Float

__all__ = ["State", "at_rest", "from_native", "to_native"]

Field = Float[Array, "shots x y"]


class State(NamedTuple):
    """This rank's fields between two steps: its tile with the layers that lie next to it.

    Velocities (m/s) are half a time step behind the stresses (Pa). `memory_x` holds the C-PML's
    memory of the x-derivatives of (sigma_xx, sigma_xy, v_x, v_y) in the layers before and after
    the tile along x, `memory_y` that of the y-derivatives of (sigma_yy, sigma_xy, v_y, v_x).
    """

    vx: Field
    vy: Field
    sxx: Field
    syy: Field
    sxy: Field
    memory_x: Float[Array, "shots 4 px y"]
    memory_y: Float[Array, "shots 4 x py"]


def at_rest(shots: int, shape: tuple[int, int], layers: tuple[int, int], dtype: np.dtype) -> State:
    """All fields zero on a wave tile of `shape` cells, `layers` of them in the C-PML per axis."""
    field = jnp.zeros((shots, *shape), dtype)
    return State(
        field,
        field,
        field,
        field,
        field,
        jnp.zeros((shots, 4, layers[0], shape[1]), dtype),
        jnp.zeros((shots, 4, shape[0], layers[1]), dtype),
    )


def to_native(state: State) -> list[jax.Array]:
    """The arrays of the native kernels: half the sum and half the difference of sxx and syy."""
    mean, deviation = (state.sxx + state.syy) / 2, (state.sxx - state.syy) / 2
    memories = state.memory_x, state.memory_y
    return [state.vx, state.vy, mean, deviation, state.sxy, *memories]


def from_native(arrays: Sequence[jax.Array]) -> State:
    """The state that the arrays of the native kernels are."""
    vx, vy, mean, deviation, sxy, *memories = arrays
    return State(vx, vy, mean + deviation, mean - deviation, sxy, *memories)
