"""The acoustic wave equation on two axes as a JAX program over mpigrad's messages.

The native kernels are compared with this program, and it is the form for other devices than CPUs.
One step, with the pressure w at step n and u at step n - 1, the dampings sigma and tau along x and
y, and the source s:

    (1 + (sigma + tau) dt/2) w_next = (2 - sigma tau dt^2) w - (1 - (sigma + tau) dt/2) u
                                      + dt^2 c^2 (w_xx + w_yy + phi_x + psi_y + s)
    phi_next = exp(-sigma dt) phi + g(sigma) (tau - sigma) w_x,   g(s) = (1 - exp(-s dt)) / s
    psi_next = exp(-tau dt) psi + g(tau) (sigma - tau) w_y

phi and psi are integrated exactly for constant derivatives. This is the layer of Grote and Sim
("Efficient PML for the wave equation", 2010) for u_tt = c^2 Laplacian(u): with c^2 outside, the
memories do not depend on the model. The adjoint of a step is the same step with the factors of phi
and psi on the other side of the derivative.

With a density rho, w_xx + phi_x becomes rho times the derivative of (1/rho) w_x + (1/rho) phi.
1/rho is constant in time, so it commutes with the filter of the layers. They are exact for any
density before discretisation, and phi and psi do not depend on it. `buoyancy.py` says how 1/rho is
discretised.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from mpigrad._shapes import Array, Float
from mpigrad.waves.acoustic.buoyancy import Buoyancy, divergence
from mpigrad.waves.acoustic.differences import first_difference, second_difference
from mpigrad.waves.acoustic.scheme import Scheme
from mpigrad.waves.acoustic.state import State, pack, unpack
from mpigrad.waves.acoustic.transfers import point_transfers
from mpigrad.waves.face_exchange import exchange_faces

__all__ = ["propagate"]


def propagate(
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
