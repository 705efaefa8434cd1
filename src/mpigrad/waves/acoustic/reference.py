"""The acoustic wave equation as a JAX program over mpigrad's messages.

The native kernels are compared with this program, and it is the form for other devices than CPUs.
One step on two axes, with the pressure w at step n and u at step n - 1, the dampings sigma and
tau along x and y, and the source s:

    (1 + (sigma + tau) dt/2) w_next = (2 - sigma tau dt^2) w - (1 - (sigma + tau) dt/2) u
                                      + dt^2 c^2 (w_xx + w_yy + phi_x + psi_y + s)
    phi_next = exp(-sigma dt) phi + g(sigma) (tau - sigma) w_x,   g(s) = (1 - exp(-s dt)) / s
    psi_next = exp(-tau dt) psi + g(tau) (sigma - tau) w_y

On axes x, y, z with the dampings s_i, p_i = s_i dt/2, e_2 = p_x p_y + p_y p_z + p_z p_x and
e_3 = p_x p_y p_z:

    (1 + p_x)(1 + p_y)(1 + p_z) w_next = (2 - 2 e_2 - 4 e_3) w - (1 - p_x)(1 - p_y)(1 - p_z) u
        - 8 e_3 psi + dt^2 c^2 (sum of w_ii and of the derivative of phi_i along i + s)
    psi_next = psi + w          (in cells of two or three layers)
    phi_i_next = exp(-s_i dt) phi_i + g(s_i) times the derivative along i of
        (s_j + s_k - s_i) w + s_j s_k dt psi_next

psi, the sum of the earlier pressures, acts only where two or three layers overlap, and only there
a step changes it. With the shift Z of one step, the terms without derivatives are the product of
the three factors (Z - 1) + p_i (Z + 1), divided by Z (Z - 1): all dampings are averaged over the
same steps, as on two axes. The sum in phi includes w: without it, waves would grow in thin layers.

The phi are integrated exactly for constant derivatives. This is the layer of Grote and Sim
("Efficient PML for the wave equation", 2010) for u_tt = c^2 Laplacian(u): with c^2 outside, the
memories do not depend on the model. On two axes the adjoint of a step is the same step with the
factors of phi on the other side of the derivative.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Float
from mpigrad.operations.indexing import put, take
from mpigrad.waves.acoustic.scheme import Scheme
from mpigrad.waves.acoustic.state import State, overlaps, pack, unpack
from mpigrad.waves.face_exchange import exchange_faces
from mpigrad.waves.interpolation import PointTable
from mpigrad.waves.stability import SECOND_DERIVATIVES

__all__ = ["propagate"]

Transfer = Callable[[jax.Array], jax.Array]

# Coefficients of the first derivative, for the differences one and two cells away.
FIRST_DERIVATIVES = {2: (1 / 2,), 4: (2 / 3, -1 / 12)}


def propagate(
    scheme: Scheme,
    velocity: Float[Array, "*tile"],
    amplitudes: Float[Array, "shots sources steps"],
    state: State,
) -> tuple[Float[Array, "shots receivers steps"], State]:
    """Return this rank's share of the gathers (their sum over ranks), and the last state."""
    tile, dt, dtype = scheme.tile, scheme.dt, velocity.dtype
    c2 = jnp.pad(velocity, tile.extension, mode="edge") ** 2
    axes = range(tile.grid.ndim)
    dampings = [
        jnp.asarray(s, dtype).reshape([-1 if i == axis else 1 for i in axes])
        for axis, s in enumerate(scheme.sigma)
    ]
    keeps = [jnp.exp(-s * dt) for s in dampings]
    gains = [jnp.where(s > 0, -jnp.expm1(-s * dt) / jnp.where(s > 0, s, 1), dt) for s in dampings]
    others = [[s for j, s in enumerate(dampings) if j != i] for i in axes]
    slopes = [gains[i] * (_total(others[i]) - dampings[i]) for i in axes]
    edges = [gains[i] * math.prod(others[i]) * dt for i in axes]
    if tile.grid.ndim == 3:  # the sum up to this step is psi + w
        slopes = [slope + edge for slope, edge in zip(slopes, edges, strict=True)]
    p = [s * (dt / 2) for s in dampings]
    pairs = _total([p[i] * p[j] for i in axes for j in axes if i < j])
    before, after = (math.prod([1 + sign * x for x in p]) for sign in (-1, 1))
    triple = 4 * math.prod(p)
    shared = jnp.asarray(overlaps(tile), dtype)
    spacing, order, three = tile.grid.spacing, scheme.order, tile.grid.ndim == 3
    volume = math.prod(spacing)
    inject, _ = _transfers(scheme, scheme.sources, scheme.survey.n_sources)
    _, record = _transfers(scheme, scheme.receivers, scheme.survey.n_receivers)

    def step(carry: tuple[jax.Array, ...], s: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        w, u, *memories = carry
        phis, psis = memories[: len(axes)], memories[len(axes) :]  # psi on three axes only
        padded = exchange_faces(tile, scheme.reach, *((w, phi, *psis) for phi in phis))
        drive = _total(
            [_second(padded[i][0], i, spacing[i], order) for i in axes]
            + [_first(padded[i][1], i, spacing[i], order) for i in axes]
            + [inject(s) / volume]
        )
        known = (2 - 2 * pairs) * w - before * u
        if three:
            known = known - triple * (w + 2 * psis[0])
        following = (known + dt**2 * c2 * drive) / after
        phis = [
            keeps[i] * phis[i] + slopes[i] * _first(padded[i][0], i, spacing[i], order)
            for i in axes
        ]
        if three:
            phis = [phis[i] + edges[i] * _first(padded[i][2], i, spacing[i], order) for i in axes]
        psis = [psi + shared * w for psi in psis]
        return (following, w, *phis, *psis), record(w)

    first = (state.field, state.previous, *unpack(tile, state.memory))
    (w, u, *memories), samples = jax.lax.scan(step, first, jnp.moveaxis(amplitudes, 2, 0))
    return jnp.moveaxis(samples, 0, 2), State(w, u, pack(tile, *memories))


def _total(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _transfers(scheme: Scheme, table: PointTable, n_points: int) -> tuple[Transfer, Transfer]:
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


def _inner(f: jax.Array, axis: int, reach: int, shift: int) -> jax.Array:
    """Return a padded field without its halo, moved by `shift` cells."""
    n = f.shape[axis + 1] - 2 * reach
    return jax.lax.slice_in_dim(f, reach + shift, reach + shift + n, axis=axis + 1)


def _second(f: jax.Array, axis: int, h: float, order: int) -> jax.Array:
    center, *others = SECOND_DERIVATIVES[order]
    reach = order // 2
    total = center * _inner(f, axis, reach, 0)
    for k, c in enumerate(others, 1):
        total = total + c * (_inner(f, axis, reach, k) + _inner(f, axis, reach, -k))
    return total / h**2


def _first(f: jax.Array, axis: int, h: float, order: int) -> jax.Array:
    reach = order // 2
    total = sum(
        c * (_inner(f, axis, reach, k) - _inner(f, axis, reach, -k))
        for k, c in enumerate(FIRST_DERIVATIVES[order], 1)
    )
    return total / h  # type: ignore[operator]
