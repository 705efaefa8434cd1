"""The acoustic wave equation as JAX programs over mpigrad's messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import Array, Float, put, take
from mpigrad.grid import Grid, halo_exchange
from mpigrad.waves.absorbing import WaveTile, exchange_faces
from mpigrad.waves.acoustic.scheme import Scheme, State, pack, unpack
from mpigrad.waves.arguments import (
    SECOND_DERIVATIVES,
    STAGGERED_DIFFERENCES,
    wave_equation_limit,
)
from mpigrad.waves.survey import PointTable

__all__ = [
    "Buoyancy",
    "buoyancy_of",
    "divergence",
    "first_difference",
    "limiting_square",
    "point_transfers",
    "propagate_plane",
    "propagate_volume",
    "second_difference",
    "shifted",
]

# ---- Central differences of fields that are padded along one axis, for the JAX programs ----


# Coefficients of the first derivative, for the differences one and more cells away.
FIRST_DERIVATIVES = {4: (2 / 3, -1 / 12), 8: (4 / 5, -1 / 5, 4 / 105, -1 / 280)}


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


# ---- The buoyancies 1/rho of acoustic waves with a variable density, for the JAX programs ----
#
# The second derivative along an axis, with the coefficients c_n of `SECOND_DERIVATIVES`, becomes
#
#     rho[j] sum over n of c_n (b_n[j] (w[j+n] - w[j]) - b_n[j-n] (w[j] - w[j-n])) / h^2
#
# with the buoyancy b_n[j] between the cells j and j + n. Its inverse is the mean of the densities
# of these two cells. This has the order of accuracy of the differences for smooth densities,
# because both factors of a difference have expansions in even powers of n h around its middle.
#
# A heavy cell between light ones would make the operator indefinite, because c_2 is negative:
# waves would grow with any time step. So the inverse of b_n is at least 2/3 of the mean density
# along the path from j to j + n (the integral between these cells by the trapezoidal rule). Then,
# by the inequality of Cauchy and Schwarz, the terms with negative c_n are smaller than the term
# with c_1.
#
# On two axes a layer along x adds the derivative of beta psi along y, and psi is the integral in
# time of a multiple of w_y. Its waves do not grow if the squares of w_y, with the weight beta,
# have a sum that is not larger than the energy of the fluxes above. With beta = 1/rho this is not
# so where the density changes from cell to cell, because the derivatives of psi are wider. So
#
#     1/beta[j] = rho[j] + sum over 0 < |k| <= reach of (rho[j+k] - rho[j])^2 / (2 rho[j])
#
# which differs from rho by a term of second order for smooth densities. With half of this term
# the condition held in all tested densities along a line, with ratios up to 1000 between cells.


# The mean density along a path, over the smallest density that its difference has. Below 1.93 the
# operator is definite at all orders. From a ratio of 2 between a cell and its neighbours the two
# means differ by this.
PATH = 1.5


class Buoyancy(NamedTuple):
    """Densities and buoyancies on this rank's tile with its layers.

    Attributes
    ----------
    density
        rho in the cells.
    cells
        1/rho in the cells.
    wide
        For each axis beta in the cells, which multiplies the memories of layers on two axes.
    between
        For each axis, and for n = 1, 2, ... up to the stencil's reach, the buoyancy between the
        cells j - n and j. It has n more cells than the tile along the axis.
    """

    density: Float[Array, "*cells"]
    cells: Float[Array, "*cells"]
    wide: Any
    between: Any


def buoyancy_of(tile: WaveTile, order: int, density: Float[Array, "*tile"]) -> Buoyancy:
    """Return the buoyancies of a density (collective).

    Densities of the neighbouring tiles come by one message to each of them. Layers, and what is
    beyond them, have the density of the nearest cell.

    Parameters
    ----------
    density
        This rank's tile of the model.
    """
    axes, reach = tile.grid.ndim, order // 2
    halos = halo_exchange(density, tile.grid, width=reach, boundary="edge")
    padded = jnp.pad(halos, tile.extension, mode="edge")
    between, wide = [], []
    for axis in range(axes):
        line = padded
        for other in set(range(axes)) - {axis}:
            line = _cells(line, other, reach, tile.shape[other])
        between.append(
            tuple(_between(line, axis, reach, tile.shape[axis], n) for n in range(1, reach + 1))
        )
        wide.append(_wide(line, axis, reach, tile.shape[axis]))
    inner = padded
    for axis in range(axes):
        inner = _cells(inner, axis, reach, tile.shape[axis])
    return Buoyancy(inner, 1 / inner, tuple(wide), tuple(between))


def divergence(
    w: Float[Array, "*padded"],
    buoyancy: Buoyancy,
    axis: int,
    h: float,
    order: int,
    factors: Any = None,
) -> Float[Array, "*shots_and_cells"]:
    """Return the derivative of b times the derivative, both along an axis.

    Parameters
    ----------
    w
        The fields of all shots, padded along the axis.
    factors
        Functions of the layers: factors(n) is what multiplies the buoyancy halfway to the cells
        that lie n further on. Default: 1.
    """
    reach, cells = order // 2, buoyancy.density.shape[axis]
    total: Any = 0.0  # of no dtype of its own
    for n, (c, b) in enumerate(
        zip(SECOND_DERIVATIVES[order][1:], buoyancy.between[axis], strict=True), 1
    ):
        ahead, behind = _cells(b, axis, n, cells), _cells(b, axis, 0, cells)
        if factors is not None:
            ahead, behind = factors(n) * ahead, factors(-n) * behind
        here = shifted(w, axis, reach, 0)
        rise = ahead * (shifted(w, axis, reach, n) - here)
        total = total + c / h**2 * (rise - behind * (here - shifted(w, axis, reach, -n)))
    return total


def limiting_square(
    grid: Grid, order: int, velocity: Float[Array, "*n"], buoyancy: Buoyancy
) -> Float[Array, ""]:
    """Return the square of the velocity that limits the time step, largest on this rank's tile.

    The eigenvalues of the operator are at most twice the sums of its rows over the positive
    coefficients, which belong to odd n. With a constant density this is the square of the
    velocity.

    Parameters
    ----------
    velocity
        In the cells of the tile with its layers.
    """
    total: Any = 0.0  # of no dtype of its own
    for axis, h in enumerate(grid.spacing):
        cells = velocity.shape[axis]
        for n, (c, b) in enumerate(
            zip(SECOND_DERIVATIVES[order][1:], buoyancy.between[axis], strict=True), 1
        ):
            if c > 0:
                both = _cells(b, axis, n, cells) + _cells(b, axis, 0, cells)
                total = total + 2 * c / h**2 * both
    square = (wave_equation_limit(grid, order) / 2) ** 2
    return jnp.max(velocity**2 * buoyancy.density * total) * square


def _between(line: jax.Array, axis: int, reach: int, cells: int, n: int) -> jax.Array:
    """Return the buoyancy between the cells j - n and j, for j = 0 to cells + n - 1."""
    path = [_cells(line, axis, reach - n + m, cells + n) for m in range(n + 1)]
    ends = (path[0] + path[-1]) / 2
    if n > 1:
        ends = jnp.maximum(ends, (ends + sum(path[1:-1])) / (n * PATH))
    return 1 / ends


def _wide(line: jax.Array, axis: int, reach: int, cells: int) -> jax.Array:
    here = _cells(line, axis, reach, cells)
    others = [_cells(line, axis, k, cells) for k in range(2 * reach + 1) if k != reach]
    squares = sum((other - here) ** 2 for other in others)
    return 1 / (here + squares / (2 * here))


def _cells(f: jax.Array, axis: int, start: int, cells: int) -> jax.Array:
    return jax.lax.slice_in_dim(f, start, start + cells, axis=axis)


# ---- Sources and receivers of the JAX programs ----


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


# ---- The acoustic wave equation on two axes as a JAX program over mpigrad's messages ----
#
# The native kernels are compared with this program, and it is the form for other devices than
# CPUs. One step, with the pressure w at step n and u at step n - 1, the dampings sigma and tau
# along x and y, and the source s:
#
#     (1 + (sigma + tau) dt/2) w_next = (2 - sigma tau dt^2) w - (1 - (sigma + tau) dt/2) u
#                                       + dt^2 c^2 (w_xx + w_yy + phi_x + psi_y + s)
#     phi_next = exp(-sigma dt) phi + g(sigma) (tau - sigma) w_x,   g(s) = (1 - exp(-s dt)) / s
#     psi_next = exp(-tau dt) psi + g(tau) (sigma - tau) w_y
#
# phi and psi are integrated exactly for constant derivatives. This is the layer of Grote and Sim
# ("Efficient PML for the wave equation", 2010) for u_tt = c^2 Laplacian(u): with c^2 outside, the
# memories do not depend on the model. The adjoint of a step is the same step with the factors of
# phi and psi on the other side of the derivative.
#
# With a density rho, w_xx + phi_x becomes rho times the derivative of (1/rho) w_x + (1/rho) phi.
# 1/rho is constant in time, so it commutes with the filter of the layers. They are exact for any
# density before discretisation, and phi and psi do not depend on it. The section on buoyancies says
# how 1/rho is discretised.


def propagate_plane(
    scheme: Scheme,
    velocity: Float[Array, "*tile"],
    amplitudes: Float[Array, "shots sources steps"],
    state: State,
    buoyancy: Buoyancy | None = None,
) -> tuple[Float[Array, "shots receivers steps"], State]:
    """Return this rank's share of the gathers (their sum over ranks), and the last state.

    Without a buoyancy the density is constant.
    """
    tile, dt, dtype = scheme.tile, scheme.dt, velocity.dtype
    c2 = jnp.pad(velocity, tile.extension, mode="edge") ** 2
    dampings = [
        jnp.asarray(s, dtype).reshape([-1 if i == axis else 1 for i in range(2)])
        for axis, s in enumerate(scheme.layers)
    ]
    keeps = [jnp.exp(-s * dt) for s in dampings]
    gains = [jnp.where(s > 0, -jnp.expm1(-s * dt) / jnp.where(s > 0, s, 1), dt) for s in dampings]
    slopes = [gains[i] * (dampings[1 - i] - dampings[i]) for i in range(2)]
    p, q = (s * (dt / 2) for s in dampings)
    before, after = ((1 + sign * p) * (1 + sign * q) for sign in (-1, 1))
    spacing, order = tile.grid.spacing, scheme.order
    volume = math.prod(spacing)
    inject, _ = point_transfers(scheme, scheme.sources, scheme.survey.n_sources)
    _, record = point_transfers(scheme, scheme.receivers, scheme.survey.n_receivers)

    # Only w is stored for the adjoint run, not its differences.
    of_fluxes = jax.checkpoint(divergence, static_argnums=(2, 3, 4), prevent_cse=False)

    def step(carry: tuple[jax.Array, ...], s: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        w, u, *phis = carry
        fluxes = phis
        if buoyancy is not None:
            fluxes = [b * phi for b, phi in zip(buoyancy.wide, phis, strict=True)]
        padded = exchange_faces(tile, scheme.reach, *((w, flux) for flux in fluxes))
        first = [first_difference(padded[i][1], i, spacing[i], order) for i in range(2)]
        if buoyancy is None:
            second = [second_difference(padded[i][0], i, spacing[i], order) for i in range(2)]
            drive = second[0] + second[1] + first[0] + first[1]
        else:
            second = [of_fluxes(padded[i][0], buoyancy, i, spacing[i], order) for i in range(2)]
            drive = buoyancy.density * (second[0] + second[1] + first[0] + first[1])
        drive = drive + inject(s) / volume
        following = ((2 - 2 * (p * q)) * w - before * u + dt**2 * c2 * drive) / after
        phis = [
            keeps[i] * phis[i] + slopes[i] * first_difference(padded[i][0], i, spacing[i], order)
            for i in range(2)
        ]
        return (following, w, *phis), record(w)

    first = (state.field, state.previous, *unpack(tile, state.memory))
    (w, u, *memories), samples = jax.lax.scan(step, first, jnp.moveaxis(amplitudes, 2, 0))
    return jnp.moveaxis(samples, 0, 2), State(w, u, pack(tile, *memories))


# ---- The acoustic wave equation on three axes as a JAX program over mpigrad's messages ----
#
# One step, with the pressure w at step n and u at step n - 1, and the source s:
#
#     w_next = 2 w - u + dt^2 c^2 (sum over the axes of k D + z, + s)
#     D = the second derivative of w, with k between the cells, + the derivative of p
#     p_next = b_half p + e_half times the derivative of w,   z_next = b z + e D
#
# Outside of the layers of an axis D is the second derivative of w along this axis, and p = z = 0.
# In the layers, D is d/dx (1/s) d/dx of w, and k D + z is 1/s of it, with the filter 1/s of
# `absorbing.py`. p and its derivatives lie between the cells. This is a convolutional layer
# (Roden and Gedney 2000) in the form for second derivatives (Pasalic and McGarry 2010). The
# product of the steps is symmetric up to factors in the layers, so waves in the model are
# reciprocal.
#
# With a density rho, D is rho times the derivative of the flux (1/rho) w_x, and p is multiplied
# by 1/rho at its place. The density is constant along the axis in its layers, where p is.


def propagate_volume(
    scheme: Scheme,
    velocity: Float[Array, "*tile"],
    amplitudes: Float[Array, "shots sources steps"],
    state: State,
    buoyancy: Buoyancy | None = None,
) -> tuple[Float[Array, "shots receivers steps"], State]:
    """Return this rank's share of the gathers (their sum over ranks), and the last state.

    Without a buoyancy the density is constant.
    """
    tile, dtype, reach = scheme.tile, velocity.dtype, scheme.reach
    k_step = (scheme.dt * jnp.pad(velocity, tile.extension, mode="edge")) ** 2
    volume = math.prod(tile.grid.spacing)
    inject, _ = point_transfers(scheme, scheme.sources, scheme.survey.n_sources)
    _, record = point_transfers(scheme, scheme.receivers, scheme.survey.n_receivers)

    def filtered(
        axis: int, buoyancy: Buoyancy | None, w: jax.Array, p: jax.Array, z: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return k D + z, and the next p and z, for w with its halos along the axis."""
        layers, h = scheme.layers[axis], tile.grid.spacing[axis]
        flux = p if buoyancy is None else buoyancy.cells * p
        p_padded = jnp.pad(flux, [(reach, reach) if i == axis + 1 else (0, 0) for i in range(4)])

        def along(x: np.ndarray) -> jax.Array:
            return jnp.asarray(x, dtype).reshape([-1 if i == axis else 1 for i in range(3)])

        def at(f: jax.Array, shift: int) -> jax.Array:
            return shifted(f, axis, reach, shift)

        d, slope = jnp.zeros_like(p), jnp.zeros_like(p)
        if buoyancy is None:
            for n, c in enumerate(SECOND_DERIVATIVES[scheme.order][1:], 1):
                ahead, behind = at(w, n) - at(w, 0), at(w, 0) - at(w, -n)
                d = d + c / h**2 * (
                    along(layers.between(n)) * ahead - along(layers.between(-n)) * behind
                )
        else:
            d = divergence(w, buoyancy, axis, h, scheme.order, lambda n: along(layers.between(n)))
        for n, c in enumerate(STAGGERED_DIFFERENCES[scheme.order]):
            slope = slope + c / h * (at(w, n + 1) - at(w, -n))
            d = d + c / h * (at(p_padded, n) - at(p_padded, -n - 1))
        if buoyancy is not None:
            d = buoyancy.density * d
        next_p = along(layers.b_half) * p + along(layers.e_half) * slope
        return along(layers.k) * d + z, next_p, along(layers.b) * z + along(layers.e) * d

    if buoyancy is not None:  # only w, p and z are stored for the adjoint run
        filtered = jax.checkpoint(filtered, static_argnums=0, prevent_cse=False)

    def step(carry: tuple[jax.Array, ...], s: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        w, u, *memories = carry
        padded = exchange_faces(tile, reach, (w,), (w,), (w,))
        drive, following = inject(s) / volume, []
        for axis in range(3):
            term, p, z = filtered(
                axis, buoyancy, padded[axis][0], *memories[2 * axis : 2 * axis + 2]
            )
            drive = drive + term
            following += [p, z]
        return (2 * w - u + k_step * drive, w, *following), record(w)

    first = (state.field, state.previous, *unpack(tile, state.memory))
    (w, u, *memories), samples = jax.lax.scan(step, first, jnp.moveaxis(amplitudes, 2, 0))
    return jnp.moveaxis(samples, 0, 2), State(w, u, pack(tile, *memories))
