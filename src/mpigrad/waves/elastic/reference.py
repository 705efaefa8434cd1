"""Elastic waves as a JAX program over mpigrad's messages.

The native kernels are compared with this program. It is the form for other devices than CPUs. JAX
differentiates it. Each rank sends two messages to every neighbour in each step. With the
differences D+ (half a cell further) and D- (half a cell back), step n is:

    v_i += dt b_i (D+i s_ii + sum of D-j s_ij)
    s_ii += dt ((lambda + mu) e + mu (2 D-i v_i - e)),    e = sum of D-j v_j
    s_ij += dt mu (D+j v_i + D+i v_j)

with the velocities v, the buoyancies b and the stresses s (Virieux 1986, fourth order: Levander
1988, three axes: Graves 1996, eighth order: Fornberg 1988). In the layers every difference g is
replaced by g + psi, with psi = b psi + a g. At a free surface they are those of `free_surface`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mpigrad.extend import Array, Float, put, take
from mpigrad.waves.absorbing import Layer, exchange_faces
from mpigrad.waves.arguments import STAGGERED_DIFFERENCES
from mpigrad.waves.elastic.attenuation import Loss, relax
from mpigrad.waves.elastic.media import (
    AnelasticState,
    Fields,
    Media,
    State,
    VolumeState,
    axis_pairs,
    is_at,
    join,
    near_differences,
    source_factors,
    split,
    stagger_of,
)
from mpigrad.waves.elastic.scheme import (
    SOURCES,
    Points,
    Scheme,
    axis_of,
    points_of,
)

__all__ = ["propagate", "step"]

AnyState = State | VolumeState | AnelasticState


def propagate(
    scheme: Scheme,
    media: Media,
    amplitudes: Float[Array, "shots sources steps"],
    state: AnyState,
    loss: Loss | None = None,
) -> tuple[Float[Array, "shots components receivers steps"], AnyState]:
    """Return this rank's share of the gathers (their sum over ranks), and the last state.

    If `scheme.storage.keep` is a number of steps, a gradient stores one state every so many steps
    and computes the steps between them again. On three axes it is the square root of the number of
    steps by default.
    """
    survey, shape, n = scheme.survey, scheme.tile.shape, scheme.tile.grid.ndim
    sources = points_of(scheme.source_table, survey.n_shots, survey.n_sources, shape)
    receivers = [
        points_of(table, survey.n_shots, survey.n_receivers, shape)
        for table in scheme.receiver_tables
    ]
    driven = axis_of(SOURCES[scheme.source])
    on_half = scheme.surface is not None and driven == scheme.surface.axis
    factors = source_factors(scheme.surface, scheme.tile, scheme.order, on_half)
    factors = jnp.asarray(factors / math.prod(scheme.tile.grid.spacing), amplitudes.dtype)

    def recorded(state: AnyState, component: str) -> jax.Array:
        fields = split(state.elastic if isinstance(state, AnelasticState) else state)
        axis = axis_of(component)
        return -_total(fields.normals) / n if axis is None else fields.velocities[axis]

    def advance(state: AnyState, amplitude: jax.Array) -> tuple[AnyState, jax.Array]:
        samples = [
            _recorded(points, recorded(state, component))
            for points, component in zip(receivers, scheme.components, strict=True)
        ]
        drive = factors * _injected(sources, amplitude, shape)
        state = step(scheme, media, state, drive, loss)
        return state, jnp.stack(samples, axis=1)

    inputs = jnp.moveaxis(amplitudes, 2, 0)
    every = scheme.storage.keep_code
    if every == 0 and n == 3:
        every = round(math.sqrt(scheme.steps))
    if not 0 < every < scheme.steps:
        state, samples = lax.scan(advance, state, inputs)
    else:
        chunk = jax.checkpoint(lambda state, part: lax.scan(advance, state, part))
        whole = scheme.steps // every * every
        parts = inputs[:whole].reshape(-1, every, *inputs.shape[1:])
        state, samples = lax.scan(chunk, state, parts)
        samples = samples.reshape(whole, *samples.shape[2:])
        if whole < scheme.steps:
            state, last = lax.scan(advance, state, inputs[whole:])
            samples = jnp.concatenate([samples, last])
    return jnp.moveaxis(samples, 0, 3), state


def step(
    scheme: Scheme, media: Media, state: AnyState, drive: jax.Array, loss: Loss | None = None
) -> AnyState:
    """Do one time step. `drive` (shots, *cells) is the force or rate of stress of the sources.

    A run with attenuation has the unrelaxed moduli in `media`, and a loss.
    """
    tile, dt, n = scheme.tile, scheme.dt, scheme.tile.grid.ndim
    axes, pairs, driven = range(n), axis_pairs(n), axis_of(SOURCES[scheme.source])
    # The fields with a derivative along an axis: that of the axis itself first.
    orders = [(a, *(b for b in axes if b != a)) for a in axes]
    fields = split(state.elastic if isinstance(state, AnelasticState) else state)
    memories = [[m[:, k] for k in range(2 * n)] for m in fields.memories]

    def padded(field: Callable[[int, int], jax.Array]) -> tuple[list[jax.Array], ...]:
        return exchange_faces(tile, scheme.reach, *[[field(a, b) for b in orders[a]] for a in axes])

    def stress(a: int, b: int) -> jax.Array:
        return fields.normals[a] if a == b else fields.shears[pairs.index((min(a, b), max(a, b)))]

    def slope(group: tuple[list[jax.Array], ...], axis: int, b: int, *, half: bool) -> jax.Array:
        """Return a derivative along an axis, at half points or at cell centres."""
        k = orders[axis].index(b)
        field, h = group[axis][k], tile.grid.spacing[axis]
        further = half == (stagger_of(scheme.surface, axis) > 0)
        g = _difference(field, axis, further, scheme.order, h)
        if scheme.surface and scheme.surface.axis == axis and is_at(scheme.surface, tile):
            reach, cells = scheme.reach, field.shape[1 + axis]
            inside = lax.slice_in_dim(field, reach, cells - reach, axis=1 + axis)
            g = near_differences(inside, g, scheme.surface, scheme.order, h, half)
        memory = memories[axis]
        k = k if group is stresses else n + k
        g, memory[k] = _absorbed(g, memory[k], scheme.layers[axis], axis, half=int(half))
        return g

    stresses = padded(stress)
    velocities = []
    for a, v in enumerate(fields.velocities):
        force = _total([slope(stresses, b, a, half=a == b) for b in axes])
        if driven == a:
            force = force + drive
        velocities.append(v + dt * media.buoyancies[a] * force)

    motion = padded(lambda _, b: velocities[b])
    stretch = [slope(motion, a, a, half=False) for a in axes]
    slide = [slope(motion, b, a, half=True) + slope(motion, a, b, half=True) for a, b in pairs]
    rates, strain = _stress_rates(media, stretch, slide), None
    if loss is not None and isinstance(state, AnelasticState) and scheme.relaxation is not None:
        means, strain = relax(scheme.relaxation, dt, state.strain, [*stretch, *slide])
        lost = _stress_rates(loss, means[:n], means[n:])
        rates = [rate - other for rate, other in zip(rates, lost, strict=True)]
    if driven is None:
        rates = [*(rate + drive for rate in rates[:n]), *rates[n:]]
    following = join(
        Fields(
            tuple(velocities),
            tuple(s + dt * rate for s, rate in zip(fields.normals, rates[:n], strict=True)),
            tuple(s + dt * rate for s, rate in zip(fields.shears, rates[n:], strict=True)),
            tuple(jnp.stack(memory, axis=1) for memory in memories),
        )
    )
    return following if strain is None else AnelasticState(following, strain)


def _stress_rates(
    moduli: Media | Loss, stretch: Sequence[jax.Array], slide: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the rates of the normal and the shear stresses (Hooke's law)."""
    trace = _total(stretch)
    mean = moduli.bulk * trace
    normals = [mean + moduli.shear * (2 * e - trace) for e in stretch]
    return [*normals, *(mu * e for mu, e in zip(moduli.shears, slide, strict=True))]


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _difference(
    field: jax.Array, axis: int, further: bool, order: int, spacing: float
) -> jax.Array:
    """Return the difference of a field that is padded by order / 2 cells along an axis."""
    cells = field.shape[1 + axis] - order

    def at(k: int) -> jax.Array:
        start = order // 2 + k + further
        return lax.slice_in_dim(field, start, start + cells, axis=1 + axis)

    return _total(
        (c / spacing) * (at(n) - at(-1 - n)) for n, c in enumerate(STAGGERED_DIFFERENCES[order])
    )


def _absorbed(
    g: jax.Array, psi: jax.Array, layer: Layer, axis: int, half: int
) -> tuple[jax.Array, jax.Array]:
    """Return a difference with its part in the layers, and the updated memory."""
    if psi.size == 0:
        return g, psi
    axis = 1 + axis
    cells = g.shape[axis]
    across = [-1 if i == axis else 1 for i in range(1, g.ndim)]
    a, b = (jnp.asarray(c[half].reshape(across), g.dtype) for c in (layer.a, layer.b))
    before, middle, after = jnp.split(g, [layer.before, cells - layer.after], axis)
    psi = b * psi + a * jnp.concatenate([before, after], axis)
    first, last = jnp.split(psi, [layer.before], axis)
    return jnp.concatenate([before + first, middle, after + last], axis), psi


def _injected(points: Points, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a field (shots, *cells) that sums values (shots, points)."""
    parts = take(values.ravel(), points.points) * jnp.asarray(points.weights, values.dtype)
    size = points.count[0] * math.prod(shape)
    return put(size, points.cells, parts).reshape(points.count[0], *shape)


def _recorded(points: Points, field: jax.Array) -> jax.Array:
    """Return the values (shots, points) of a field (shots, *cells)."""
    parts = take(field.ravel(), points.cells) * jnp.asarray(points.weights, field.dtype)
    return put(points.count[0] * points.count[1], points.points, parts).reshape(points.count)
