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
    """This rank's fields between two steps, on its tile with the layers next to it.

    Velocities (m/s) are half a time step behind the stresses (Pa). `memory_x` holds the C-PML's
    memory of the x-derivatives of (sigma_xx, sigma_xy, v_x, v_y) in the layers before and after
    the tile along x. `memory_y` holds that of the y-derivatives of (sigma_yy, sigma_xy, v_y, v_x).
    """

    vx: Field
    vy: Field
    sxx: Field
    syy: Field
    sxy: Field
    memory_x: Float[Array, "shots 4 px y"]
    memory_y: Float[Array, "shots 4 x py"]


def at_rest(shots: int, shape: tuple[int, ...], layers: tuple[int, int], dtype: np.dtype) -> State:
    """Return zero fields on a wave tile of `shape` cells, with `layers` of them in the C-PML."""
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
    """Return the arrays of the native kernels, with (sxx + syy) / 2 and (sxx - syy) / 2."""
    mean, deviation = (state.sxx + state.syy) / 2, (state.sxx - state.syy) / 2
    memories = state.memory_x, state.memory_y
    return [state.vx, state.vy, mean, deviation, state.sxy, *memories]


def from_native(arrays: Sequence[jax.Array]) -> State:
    """Return the state of the arrays of the native kernels."""
    vx, vy, mean, deviation, sxy, *memories = arrays
    return State(vx, vy, mean + deviation, mean - deviation, sxy, *memories)
