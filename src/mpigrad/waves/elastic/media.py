"""The fields of elastic waves, effective media, and sides without traction."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mpigrad.extend import Array, Float, as_array
from mpigrad.grid import halo_exchange
from mpigrad.waves.absorbing import Surface, WaveTile
from mpigrad.waves.arguments import STAGGERED_DIFFERENCES

__all__ = [
    "AnelasticState",
    "ElasticMedium",
    "Fields",
    "Media",
    "State",
    "VolumeState",
    "at_rest",
    "axis_pairs",
    "effective_media",
    "is_at",
    "join",
    "lame",
    "native_models",
    "near_differences",
    "source_factors",
    "split",
    "stagger_of",
    "state_shapes",
    "surface_cells",
    "surface_profile",
    "without_traction",
]

# ---- The fields of elastic waves on a rank's wave tile ----


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


# ---- A side of an elastic model without traction, by summation by parts ----
#
# The surface is the side of the grid. Points that lie half a cell from the cell centres along its
# axis, of the normal velocity and of two shear stresses, lie on it. Next to the surface the
# differences are one-sided. With the weights W of the points, the difference to half points is
# -(W D)^T of the difference D to cell centres. So the traction of the surface vanishes in the
# equations of motion, energy is conserved, and the positions of a source and a receiver can be
# exchanged (O'Reilly et al., "Energy stable and high-order-accurate finite difference methods on
# staggered grids", J. Comput. Phys. 346, 2017). Those of order 4 are from this paper, and second
# order next to the surface. Those of order 8 are third order there: of all with 7 rows, the ones
# with the smallest change of the coefficients and weights of the inside.


class SurfaceDifferences(NamedTuple):
    """Differences next to a surface per spacing, from the surface inwards, and weights.

    Attributes
    ----------
    to_centers
        Rows for the centres 1/2, 3/2, ... from the half points 0, 1, ...
    to_halves
        Rows for the half points from the centres.
    center_weights, half_weights
        Weights W of the first points. Those of other points are 1.
    """

    to_centers: Float[np.ndarray, "rows points"]
    to_halves: Float[np.ndarray, "rows points"]
    center_weights: Float[np.ndarray, " rows"]
    half_weights: Float[np.ndarray, " rows"]


# Order 4.
_TO_CENTERS = np.array([
    [-79 / 78, 27 / 26, -1 / 26, 1 / 78, 0],
    [2 / 21, -9 / 7, 9 / 7, -2 / 21, 0],
    [1 / 75, 0, -27 / 25, 83 / 75, -1 / 25],
])  # fmt: skip
_TO_HALVES = np.array([
    [79 / 28, -3 / 14, -1 / 28, 0, 0],
    [-1, 1, 0, 0, 0],
    [1 / 24, -9 / 8, 9 / 8, -1 / 24, 0],
    [-1 / 71, 6 / 71, -83 / 71, 81 / 71, -3 / 71],
])  # fmt: skip
_CENTER_WEIGHTS = np.array([13 / 12, 7 / 8, 25 / 24])
_HALF_WEIGHTS = np.array([7 / 18, 9 / 8, 1, 71 / 72])
_ROWS, _EXACT = 7, 3  # of order 8: rows, and the degree of polynomials that they differentiate


@functools.cache
def surface_differences(order: int) -> SurfaceDifferences:
    """Return the differences next to a surface."""
    if order == 4:
        return SurfaceDifferences(_TO_CENTERS, _TO_HALVES, _CENTER_WEIGHTS, _HALF_WEIGHTS)
    reach = order // 2
    inside = np.zeros((_ROWS + reach, _ROWS + reach))  # W D of the inside: centres, half points
    for n, c in enumerate(STAGGERED_DIFFERENCES[order]):
        inside += c * (np.eye(len(inside), k=1 + n) - np.eye(len(inside), k=-n))
    # The unknowns: W D of the first points, and both weights.
    count = _ROWS * _ROWS
    first = np.concatenate([inside[:_ROWS, :_ROWS].ravel(), np.ones(2 * _ROWS)])
    matrix, sides = [], []
    for row in range(_ROWS):
        for half in (False, True):
            # The points that are read, from the point that is written, in units of 8 cells.
            place = (np.arange(len(inside)) + (-0.5 - row, 0.5 - row)[half]) / 8
            for degree in range(_EXACT + 1):
                powers = place**degree
                of = np.zeros((_ROWS, _ROWS))
                if half:
                    of[:, row] = -powers[:_ROWS]
                    rest = -powers[_ROWS:] @ inside[_ROWS:, row]
                else:
                    of[row] = powers[:_ROWS]
                    rest = powers[_ROWS:] @ inside[row, _ROWS:]
                of_weights = np.zeros((2, _ROWS))
                of_weights[int(half), row] = -1 / 8 if degree == 1 else 0
                matrix.append(np.concatenate([of.ravel(), of_weights.ravel()]))
                # The half point on the surface lacks the traction there, which is zero.
                sides.append((half and row == 0 and degree == 0) - rest)
    system = np.array(matrix)
    best = first + np.linalg.lstsq(system, np.array(sides) - system @ first, rcond=1e-11)[0]
    weights = best[count:].reshape(2, _ROWS)
    inside[:_ROWS, :_ROWS] = best[:count].reshape(_ROWS, _ROWS)
    return SurfaceDifferences(
        inside[:_ROWS] / weights[0, :, None], -inside[:, :_ROWS].T / weights[1, :, None], *weights
    )


def surface_cells(order: int) -> int:
    """Return the cells that a tile next to the surface needs, for its differences."""
    return len(surface_differences(order).to_halves) + order // 2


def is_at(surface: Surface | None, tile: WaveTile) -> bool:
    """Return whether this rank's tile lies at the surface."""
    if surface is None:
        return False
    coordinate, tiles = tile.grid.coords[surface.axis], tile.grid.dims[surface.axis]
    return coordinate == (0, tiles - 1)[surface.end]


def stagger_of(surface: Surface | None, axis: int) -> int:
    """Return 1 if the half points of an axis lie behind the cell centres, -1 if before them.

    So that half points lie on the surface, they lie before the centres if it is the first side.
    """
    return -1 if surface == (axis, 0) else 1


def near_differences(
    field: Float[Array, ...],
    g: Float[Array, ...],
    surface: Surface,
    order: int,
    spacing: float,
    half: bool,
) -> Float[Array, ...]:
    """Return differences g of a field with the shots first, with those next to the surface.

    Parameters
    ----------
    half
        True for differences at half points, of a field at the cell centres.
    """
    axis = surface.axis + 1 - g.ndim
    near = surface_differences(order)
    table = near.to_halves if half else near.to_centers
    rows, reach = table.shape
    table = table / spacing
    if surface.end == 1:  # mirrored
        table = -table[::-1, ::-1]
    cells = g.shape[axis]
    cut = lax.slice_in_dim(field, *_ends(surface, reach, cells), axis=axis + g.ndim)
    rest = lax.slice_in_dim(
        g, *((rows, cells) if surface.end == 0 else (0, cells - rows)), axis=axis + g.ndim
    )
    first = jnp.moveaxis(
        jnp.tensordot(jnp.asarray(table, g.dtype), cut, ((1,), (axis + g.ndim,))), 0, axis
    )
    return jnp.concatenate([first, rest] if surface.end == 0 else [rest, first], axis)


def without_traction(
    shears: tuple[Float[Array, "*cells"], ...], surface: Surface, tile: WaveTile
) -> tuple[Float[Array, "*cells"], ...]:
    """Return the shear moduli with zeros on the surface, so that its shear stress stays zero."""
    if not is_at(surface, tile):
        return shears
    row = 0 if surface.end == 0 else -1
    index = (*(slice(None),) * surface.axis, row)
    pairs = axis_pairs(tile.grid.ndim)
    return tuple(
        mu.at[index].set(0) if surface.axis in pair else mu
        for pair, mu in zip(pairs, shears, strict=True)
    )


def source_factors(
    surface: Surface | None, tile: WaveTile, order: int, half: bool
) -> Float[np.ndarray, "*ones"]:
    """Return 1 / weight of the points next to the surface, which sources are multiplied by."""
    axes = tile.grid.ndim
    if surface is None or not is_at(surface, tile):
        return np.ones((1,) * axes)
    weights = np.ones(tile.shape[surface.axis])
    near = surface_differences(order)[3 if half else 2]
    weights[: len(near)] = near
    if surface.end == 1:
        weights = weights[::-1]
    return (1 / weights).reshape([-1 if axis == surface.axis else 1 for axis in range(axes)])


def surface_profile(order: int) -> Float[np.ndarray, " values"]:
    """Return the differences and the weights of a last side as elastic_rows.h reads them.

    For differences to the centres and to half points, and for each distance of the point from the
    surface, these are the coefficients of the last points less those of the inside, per spacing.
    Then the weights of the points.
    """
    differences = surface_differences(order)
    rows, points = len(differences.to_halves), surface_cells(order)
    coefficients = np.zeros((2, rows, points))
    weights = np.ones((2, rows))
    for half, (table, near) in enumerate(zip(differences[:2], differences[2:], strict=True)):
        weights[half, : len(near)] = near
        for depth, row in enumerate(table):
            coefficients[half, depth, : len(row)] = -row
            for n, c in enumerate(STAGGERED_DIFFERENCES[order]):
                for shift, sign in ((n, 1), (-1 - n, -1)):
                    if (at := depth - shift - half) >= 0:
                        coefficients[half, depth, at] -= sign * c
    return np.concatenate([coefficients.ravel(), weights.ravel()])


def _ends(surface: Surface, reach: int, cells: int) -> tuple[int, int]:
    return (0, reach) if surface.end == 0 else (cells - reach, cells)


# ---- Effective media: parameters of the cells, averaged to the points of the staggered fields


Tile = Float[Array, "*cells"]


class Media(NamedTuple):
    """Parameters on a rank's wave tile. The centre of cell (i, j) is at (i, j).

    Half points lie before the cell centres along an axis whose first side is a free surface.

    Attributes
    ----------
    bulk, shear
        lambda + mu and mu at the cell centres.
    shears
        mu at the points of sigma_xy, sigma_xz and sigma_yz, such as (i + 1/2, j + 1/2).
    buoyancies
        1/rho at the points of v_x, v_y and v_z, such as (i + 1/2, j).
    """

    bulk: Tile
    shear: Tile
    shears: tuple[Tile, ...]
    buoyancies: tuple[Tile, ...]


def native_models(media: Any) -> list[jax.Array]:
    """Return the arrays of `Media` or of a `Loss` for the native kernels.

    On three axes lambda + 2/3 mu is the first one.
    """
    if media.bulk.ndim == 3:
        media = media._replace(bulk=media.bulk - media.shear / 3)
    return jax.tree.leaves(media)


def lame(
    vp: Float[ArrayLike, "*cells"], vs: Float[ArrayLike, "*cells"], rho: Float[ArrayLike, "*cells"]
) -> tuple[Float[ArrayLike, "*cells"], Float[ArrayLike, "*cells"]]:
    """Compute the Lame parameters of P and S velocities and a density.

    Differentiable. The results are rho vp^2 - 2 rho vs^2 and rho vs^2.

    Parameters
    ----------
    vp, vs
        Velocities in m/s, of any shape.
    rho
        Density in kg/m3.

    Returns
    -------
    tuple
        lambda and mu, in Pa.

    Examples
    --------
    >>> from mpigrad.waves import lame
    >>> lame(vp=3000.0, vs=1500.0, rho=2000.0)
    (9000000000.0, 4500000000.0)
    """
    mu = rho * vs**2
    return rho * vp**2 - 2 * mu, mu


class ElasticMedium(NamedTuple):
    """This rank's tiles of an elastic medium, without absorbing layers: a pytree.

    All tiles have one shape, (lx, ly) or (lx, ly, lz), and one dtype, float32 or float64.

    Attributes
    ----------
    lam, mu
        The Lame parameters in Pa. Cells with mu = 0 are fluid.
    rho
        The density in kg/m3.
    qp, qs
        The quality factors of P and S waves, for a model with a `relaxation`: each larger than
        `relaxation.smallest_q`, or infinite in cells without loss. None: no loss of these waves.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.waves import ElasticMedium
    >>> vp, vs, rho = (jnp.full((4, 3), v) for v in (2000.0, 1000.0, 1500.0))
    >>> float(ElasticMedium.from_velocities(vp, vs, rho).mu[0, 0])
    1500000000.0
    """

    lam: Float[Array, "*tile"]
    mu: Float[Array, "*tile"]
    rho: Float[Array, "*tile"]
    qp: Float[Array, "*tile"] | None = None
    qs: Float[Array, "*tile"] | None = None

    @classmethod
    def from_velocities(
        cls,
        vp: Float[Array | np.ndarray, "*tile"],
        vs: Float[Array | np.ndarray, "*tile"],
        rho: Float[Array | np.ndarray, "*tile"],
        qp: Float[Array | np.ndarray, "*tile"] | None = None,
        qs: Float[Array | np.ndarray, "*tile"] | None = None,
    ) -> ElasticMedium:
        """Return the medium with these velocities of P and S waves in m/s. Differentiable."""
        loss = (None if q is None else as_array(q) for q in (qp, qs))
        return cls(*map(as_array, (*lame(vp, vs, rho), rho)), *loss)


def effective_media(
    lam: Float[Array, "*tile"],
    mu: Float[Array, "*tile"],
    rho: Float[Array, "*tile"],
    tile: WaveTile,
    surface: Surface | None = None,
) -> Media:
    """Compute staggered parameters on the wave tile from this rank's tile (collective).

    The model is continued with the values at its edge. The density between two cells is the mean of
    the two. mu between four cells is the harmonic mean of the four, which is 0 if one of them is
    fluid (Moczo et al., "3D heterogeneous staggered-grid finite-difference modeling of seismic
    motion with volume harmonic and arithmetic averaging of elastic moduli and densities", BSSA 92,
    2002).
    """
    padded = halo_exchange(jnp.stack([lam, mu, rho], axis=-1), tile.grid, width=1, boundary="edge")
    padded = jnp.pad(padded, (*tile.extension, (0, 0)), mode="edge")
    lam, mu, rho = (padded[..., k] for k in range(3))

    def shifted(field: Array, shifts: Mapping[int, int]) -> Array:
        """Return the values `shifts[axis]` cells towards the half points along some axes."""
        starts = [1 + stagger_of(surface, a) * shifts.get(a, 0) for a in range(tile.grid.ndim)]
        return field[tuple(slice(k, k + n) for k, n in zip(starts, tile.shape, strict=True))]

    def corner(a: int, b: int) -> Array:
        along = [_in_series(shifted(mu, {b: k}), shifted(mu, {a: 1, b: k})) for k in (0, 1)]
        return 4 * _in_series(*along)

    n = tile.grid.ndim
    shears = tuple(corner(a, b) for a, b in axis_pairs(n))
    return Media(
        bulk=shifted(lam + mu, {}),
        shear=shifted(mu, {}),
        shears=shears if surface is None else without_traction(shears, surface, tile),
        buoyancies=tuple(2 / (shifted(rho, {}) + shifted(rho, {a: 1})) for a in range(n)),
    )


def _in_series(a: Array, b: Array) -> Array:
    """Return 1 / (1/a + 1/b), with its derivatives also for a = 0 or b = 0 (0 if both are 0)."""
    total = a + b
    return a * b / jnp.where(total > 0, total, 1)
