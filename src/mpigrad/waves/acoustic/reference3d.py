"""The acoustic wave equation on three axes as a JAX program over mpigrad's messages.

One step, with the pressure w at step n and u at step n - 1, and the source s:

    w_next = 2 w - u + dt^2 c^2 (sum over the axes of k D + z, + s)
    D = the second derivative of w, with k between the cells, + the derivative of p
    p_next = b_half p + e_half times the derivative of w,   z_next = b z + e D

Outside of the layers of an axis D is the second derivative of w along this axis, and p = z = 0. In
the layers, D is d/dx (1/s) d/dx of w, and k D + z is 1/s of it, with the filter 1/s of
`layer_filter.py`. p and its derivatives lie between the cells. This is a convolutional layer
(Roden and Gedney 2000) in the form for second derivatives (Pasalic and McGarry 2010). The product
of the steps is symmetric up to factors in the layers, so waves in the model are reciprocal.

With a density rho, D is rho times the derivative of the flux (1/rho) w_x, and p is multiplied by
1/rho at its place. The density is constant along the axis in its layers, where p is.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Float
from mpigrad.waves.acoustic.buoyancy import Buoyancy, divergence
from mpigrad.waves.acoustic.differences import BETWEEN_DERIVATIVES, shifted
from mpigrad.waves.acoustic.scheme import Scheme
from mpigrad.waves.acoustic.state import State, pack, unpack
from mpigrad.waves.acoustic.transfers import point_transfers
from mpigrad.waves.face_exchange import exchange_faces
from mpigrad.waves.stability import SECOND_DERIVATIVES

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
        for n, c in enumerate(BETWEEN_DERIVATIVES[scheme.order]):
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
