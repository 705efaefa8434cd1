"""The fields of elastic waves on a rank's wave tile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Float

__all__ = [
    "AnelasticState",
    "Fields",
    "State",
    "VolumeState",
    "at_rest",
    "axis_pairs",
    "from_native",
    "join",
    "split",
    "state_shapes",
    "to_native",
]

Field = Float[Array, "shots x y"]
VolumeField = Float[Array, "shots x y z"]


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


class VolumeState(NamedTuple):
    """This rank's fields of a run on three axes, as `State` has those of two.

    `memory_x` holds the memory of the x-derivatives of (sigma_xx, sigma_xy, sigma_xz, v_x, v_y,
    v_z). In `memory_y` and `memory_z` the fields of the axis come first too: (sigma_yy, sigma_xy,
    sigma_yz, v_y, v_x, v_z) and (sigma_zz, sigma_xz, sigma_yz, v_z, v_x, v_y).
    """

    vx: VolumeField
    vy: VolumeField
    vz: VolumeField
    sxx: VolumeField
    syy: VolumeField
    szz: VolumeField
    sxy: VolumeField
    sxz: VolumeField
    syz: VolumeField
    memory_x: Float[Array, "shots 6 px y z"]
    memory_y: Float[Array, "shots 6 x py z"]
    memory_z: Float[Array, "shots 6 x y pz"]


class AnelasticState(NamedTuple):
    """This rank's fields of a run with attenuation.

    Attributes
    ----------
    elastic
        Velocities, stresses and the memories of the layers.
    strain
        Memories of the strain rates of xx, yy (zz), 2 xy (2 xz, 2 yz), for each mechanism.
    """

    elastic: State | VolumeState
    strain: Float[Array, "shots mechanisms components ..."]


class Fields(NamedTuple):
    """The arrays of a state, in groups of one array for each axis or pair of axes."""

    velocities: tuple[jax.Array, ...]
    normals: tuple[jax.Array, ...]
    shears: tuple[jax.Array, ...]
    memories: tuple[jax.Array, ...]


def axis_pairs(axes: int) -> list[tuple[int, int]]:
    """Return the pairs of axes in the order of the shear stresses: xy, xz, yz."""
    return list(itertools.combinations(range(axes), 2))


def split(state: State | VolumeState) -> Fields:
    """Return the arrays of a state in groups."""
    n = 2 if isinstance(state, State) else 3
    ends = list(itertools.accumulate([0, n, n, len(axis_pairs(n)), n]))
    return Fields(*(tuple(state[a:b]) for a, b in itertools.pairwise(ends)))


def join(fields: Fields) -> State | VolumeState:
    """Return the state of arrays in groups."""
    kind = State if len(fields.velocities) == 2 else VolumeState
    return kind(*itertools.chain(*fields))


def at_rest(
    shots: int, shape: tuple[int, ...], layers: tuple[int, ...], dtype: np.dtype
) -> State | VolumeState:
    """Return zero fields on a wave tile of `shape` cells, with `layers` of them in the C-PML."""
    kind = State if len(shape) == 2 else VolumeState
    return kind(*(jnp.zeros((shots, *array), dtype) for array in state_shapes(shape, layers)))


def state_shapes(shape: tuple[int, ...], layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a state's arrays without their axis of shots, as for `at_rest`."""
    n = len(shape)
    memories = [
        (2 * n, *shape[:axis], width, *shape[axis + 1 :]) for axis, width in enumerate(layers)
    ]
    return (*(shape,) * (2 * n + len(axis_pairs(n))), *memories)


def to_native(state: State | VolumeState) -> list[jax.Array]:
    """Return the arrays of the native kernels.

    On two axes they have (sxx + syy) / 2 and (sxx - syy) / 2 instead of sxx and syy.
    """
    if isinstance(state, VolumeState):
        return list(state)
    mean, deviation = (state.sxx + state.syy) / 2, (state.sxx - state.syy) / 2
    memories = state.memory_x, state.memory_y
    return [state.vx, state.vy, mean, deviation, state.sxy, *memories]


def from_native(arrays: Sequence[jax.Array]) -> State | VolumeState:
    """Return the state of the arrays of the native kernels."""
    if len(arrays) == len(VolumeState._fields):
        return VolumeState(*arrays)
    vx, vy, mean, deviation, sxy, *memories = arrays
    return State(vx, vy, mean + deviation, mean - deviation, sxy, *memories)
