"""The acoustic wave equation as a JAX program over mpigrad's messages.

The native kernels are compared with this program, and it is the form for other devices than CPUs.
One step, with the pressure w at step n and u at step n - 1, the dampings sigma and tau along x and
y, and the source s:

    (1 + (sigma + tau) dt/2) w_next = (2 - sigma tau dt^2) w - (1 - (sigma + tau) dt/2) u
                                      + dt^2 c^2 (w_xx + w_yy + phi_x + psi_y + s)
    phi_next = exp(-sigma dt) phi + g(sigma) (tau - sigma) w_x,   g(s) = (1 - exp(-s dt)) / s
    psi_next = exp(-tau dt) psi + g(tau) (sigma - tau) w_y

phi and psi are integrated exactly for constant w_x and w_y. This is the layer of Grote and Sim
("Efficient PML for the wave equation", 2010) for u_tt = c^2 (u_xx + u_yy): with c^2 outside, phi
and psi do not depend on the model, and the adjoint of a step is the same step with the factors of
phi and psi on the other side of the derivative.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Float
from mpigrad.operations.indexing import put, take
from mpigrad.waves.acoustic.scheme import Scheme
from mpigrad.waves.acoustic.state import State, pack, unpack
from mpigrad.waves.face_exchange import exchange_faces
from mpigrad.waves.interpolation import PointTable
from mpigrad.waves.stability import SECOND_DERIVATIVES

__all__ = ["propagate"]

Transfer = Callable[[jax.Array], jax.Array]

# Coefficients of the first derivative, for the differences one and two cells away.
FIRST_DERIVATIVES = {2: (1 / 2,), 4: (2 / 3, -1 / 12)}


def propagate(
    scheme: Scheme,
    velocity: Float[Array, "lx ly"],
    amplitudes: Float[Array, "shots sources steps"],
    state: State,
) -> tuple[Float[Array, "shots receivers steps"], State]:
    """Return this rank's share of the gathers (their sum over ranks), and the last state."""
    tile, dt, dtype = scheme.tile, scheme.dt, velocity.dtype
    c2 = jnp.pad(velocity, tile.extension, mode="edge") ** 2
    sigma, tau = (
        jnp.asarray(s, dtype) for s in (scheme.sigma[0][:, None], scheme.sigma[1][None, :])
    )
    (keep_x, gain_x), (keep_y, gain_y) = (
        (jnp.exp(-s * dt), jnp.where(s > 0, -jnp.expm1(-s * dt) / jnp.where(s > 0, s, 1), dt))
        for s in (sigma, tau)
    )
    p, q = sigma * (dt / 2), tau * (dt / 2)
    hx, hy = tile.grid.spacing
    inject, _ = _transfers(scheme, scheme.sources, scheme.survey.n_sources)
    _, record = _transfers(scheme, scheme.receivers, scheme.survey.n_receivers)

    def step(carry: tuple[jax.Array, ...], s: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        w, u, phi, psi = carry
        (wx, phix), (wy, psiy) = exchange_faces(tile, scheme.reach, (w, phi), (w, psi))
        drive = (
            _second(wx, 0, hx, scheme.order)
            + _second(wy, 1, hy, scheme.order)
            + _first(phix, 0, hx, scheme.order)
            + _first(psiy, 1, hy, scheme.order)
            + inject(s) / (hx * hy)
        )
        following = ((2 - 2 * p * q) * w - (1 - p) * (1 - q) * u + dt**2 * c2 * drive) / (
            (1 + p) * (1 + q)
        )
        phi = keep_x * phi + gain_x * (tau - sigma) * _first(wx, 0, hx, scheme.order)
        psi = keep_y * psi + gain_y * (sigma - tau) * _first(wy, 1, hy, scheme.order)
        return (following, w, phi, psi), record(w)

    first = (state.field, state.previous, *unpack(tile, state.memory))
    (w, u, phi, psi), samples = jax.lax.scan(step, first, jnp.moveaxis(amplitudes, 2, 0))
    return jnp.moveaxis(samples, 0, 2), State(w, u, pack(tile, phi, psi))


def _transfers(scheme: Scheme, table: PointTable, n_points: int) -> tuple[Transfer, Transfer]:
    """Return functions that add values (shots, n_points) to a field, and that read them."""
    shots, (nx, ny) = scheme.shots, scheme.tile.shape
    repeats = shots * n_points // (len(table.starts) - 1) if n_points else 1
    points, cells = table.points, table.cells
    if repeats == 1:
        cells = cells + (points // max(n_points, 1)) * nx * ny
    else:  # the same points in every shot
        shot = np.arange(shots)[:, None]
        points = (points + n_points * shot).ravel()
        cells = (cells + nx * ny * shot).ravel()
    weights = np.tile(table.weights, repeats)

    def inject(values: jax.Array) -> jax.Array:
        parts = take(values.ravel(), points) * jnp.asarray(weights, values.dtype)
        return put(shots * nx * ny, cells, parts).reshape(shots, nx, ny)

    def record(field: jax.Array) -> jax.Array:
        parts = take(field.ravel(), cells) * jnp.asarray(weights, field.dtype)
        return put(shots * n_points, points, parts).reshape(shots, n_points)

    return inject, record


def _inner(f: jax.Array, axis: int, reach: int, shift: int) -> jax.Array:
    """Return a padded field without its halo, moved by `shift` cells."""
    n = f.shape[axis - 2] - 2 * reach
    return jax.lax.slice_in_dim(f, reach + shift, reach + shift + n, axis=axis - 2 + f.ndim)


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
