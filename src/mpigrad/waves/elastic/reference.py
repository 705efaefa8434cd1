"""Elastic waves as a JAX program over mpigrad's messages.

The native kernels are compared with this program, and it is the form for other devices than CPUs.
JAX differentiates it. Each rank sends two messages to every neighbour in each step. With the
differences D+ (half a cell further) and D- (half a cell back), step n is:

    vx += dt bx (D+x sxx + D-y sxy),    vy += dt by (D-x sxy + D+y syy)
    sxx, syy += dt (lambda + mu) (D-x vx + D-y vy) +- dt mu (D-x vx - D-y vy)
    sxy += dt mu (D+y vx + D+x vy)

(Virieux 1986, fourth order: Levander 1988). In the layers every difference g is replaced by
g + psi, with psi = b psi + a g.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mpigrad._shapes import Array, Float
from mpigrad.operations.indexing import put, take
from mpigrad.waves.elastic.absorbing import Layer
from mpigrad.waves.elastic.media import Media
from mpigrad.waves.elastic.scheme import REACH, Points, Scheme, points_of
from mpigrad.waves.elastic.state import State
from mpigrad.waves.face_exchange import exchange_faces

__all__ = ["propagate"]

NEAR, FAR = 27 / 24, 1 / 24

Inject = Callable[[jax.Array], jax.Array]


def propagate(
    scheme: Scheme,
    media: Media,
    amplitudes: Float[Array, "shots sources steps"],
    state: State,
) -> tuple[Float[Array, "shots components receivers steps"], State]:
    """Return this rank's share of the gathers (their sum over ranks), and the last state.

    If `scheme.checkpoints` is a number of steps, a gradient stores one state every so many steps
    and computes the steps between them again.
    """
    survey, shape = scheme.survey, scheme.tile.shape
    sources = points_of(scheme.source_table, survey.n_shots, survey.n_sources, shape)
    receivers = [
        points_of(table, survey.n_shots, survey.n_receivers, shape)
        for table in scheme.receiver_tables
    ]
    area = scheme.tile.grid.spacing[0] * scheme.tile.grid.spacing[1]

    def advance(state: State, amplitude: jax.Array) -> tuple[State, jax.Array]:
        fields = {"vx": state.vx, "vy": state.vy, "pressure": -(state.sxx + state.syy) / 2}
        samples = [
            _recorded(points, fields[component])
            for points, component in zip(receivers, scheme.components, strict=True)
        ]
        state = step(scheme, media, state, _injected(sources, amplitude, shape) / area)
        return state, jnp.stack(samples, axis=1)

    inputs = jnp.moveaxis(amplitudes, 2, 0)
    every = scheme.checkpoints
    if not 0 < every < scheme.steps:
        state, samples = lax.scan(advance, state, inputs)
    else:
        chunk = jax.checkpoint(lambda state, part: lax.scan(advance, state, part))
        whole = scheme.steps // every * every
        parts = inputs[:whole].reshape(-1, every, *inputs.shape[1:])
        state, samples = lax.scan(chunk, state, parts)
        samples = samples.reshape(whole, *samples.shape[2:])
        state, last = lax.scan(advance, state, inputs[whole:])
        samples = jnp.concatenate([samples, last])
    return jnp.moveaxis(samples, 0, 3), state


def step(scheme: Scheme, media: Media, state: State, drive: jax.Array) -> State:
    """Do one time step. `drive` (shots, x, y) is the force or rate of stress of the sources."""
    tile, dt, layers = scheme.tile, scheme.dt, scheme.layers
    memory_x, memory_y = ([m[:, k] for k in range(4)] for m in (state.memory_x, state.memory_y))

    def along(axis: int, k: int, field: jax.Array, *, further: bool) -> jax.Array:
        g = _difference(field, axis, further, tile.grid.spacing[axis])
        memory = (memory_x, memory_y)[axis]
        g, memory[k] = _absorbed(g, memory[k], layers[axis], axis, half=int(further))
        return g

    (sxx, sxy_x), (syy, sxy_y) = exchange_faces(
        tile, REACH, (state.sxx, state.sxy), (state.syy, state.sxy)
    )
    ax = along(0, 0, sxx, further=True) + along(1, 1, sxy_y, further=False)
    ay = along(0, 1, sxy_x, further=False) + along(1, 0, syy, further=True)
    if scheme.source == "force_x":
        ax = ax + drive
    if scheme.source == "force_y":
        ay = ay + drive
    vx = state.vx + dt * media.buoyancy_x * ax
    vy = state.vy + dt * media.buoyancy_y * ay

    (vx_x, vy_x), (vy_y, vx_y) = exchange_faces(tile, REACH, (vx, vy), (vy, vx))
    exx, eyy = along(0, 2, vx_x, further=False), along(1, 2, vy_y, further=False)
    exy = along(1, 3, vx_y, further=True) + along(0, 3, vy_x, further=True)
    mean, deviation = media.bulk * (exx + eyy), media.shear * (exx - eyy)
    if scheme.source == "explosive":
        mean = mean + drive
    return State(
        vx=vx,
        vy=vy,
        sxx=state.sxx + dt * (mean + deviation),
        syy=state.syy + dt * (mean - deviation),
        sxy=state.sxy + dt * media.corner_shear * exy,
        memory_x=jnp.stack(memory_x, axis=1),
        memory_y=jnp.stack(memory_y, axis=1),
    )


def _difference(field: jax.Array, axis: int, further: bool, spacing: float) -> jax.Array:
    """Return the fourth-order difference of a field that is padded by REACH cells along an axis."""
    cells = field.shape[1 + axis] - 2 * REACH

    def at(k: int) -> jax.Array:
        start = REACH + k + further
        return lax.slice_in_dim(field, start, start + cells, axis=1 + axis)

    return (NEAR / spacing) * (at(0) - at(-1)) - (FAR / spacing) * (at(1) - at(-2))


def _absorbed(
    g: jax.Array, psi: jax.Array, layer: Layer, axis: int, half: int
) -> tuple[jax.Array, jax.Array]:
    """Return a difference with its part in the layers, and the updated memory."""
    cells, across = g.shape[1 + axis], (-1, 1) if axis == 0 else (1, -1)
    axis = 1 + axis
    a, b = (jnp.asarray(c[half].reshape(across), g.dtype) for c in (layer.a, layer.b))
    before, middle, after = jnp.split(g, [layer.before, cells - layer.after], axis)
    psi = b * psi + a * jnp.concatenate([before, after], axis)
    first, last = jnp.split(psi, [layer.before], axis)
    return jnp.concatenate([before + first, middle, after + last], axis), psi


def _injected(points: Points, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a field (shots, x, y) that sums values (shots, points)."""
    parts = take(values.ravel(), points.points) * jnp.asarray(points.weights, values.dtype)
    size = points.count[0] * shape[0] * shape[1]
    return put(size, points.cells, parts).reshape(points.count[0], *shape)


def _recorded(points: Points, field: jax.Array) -> jax.Array:
    """Return the values (shots, points) of a field (shots, x, y)."""
    parts = take(field.ravel(), points.cells) * jnp.asarray(points.weights, field.dtype)
    return put(points.count[0] * points.count[1], points.points, parts).reshape(points.count)
