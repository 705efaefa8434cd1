"""Acoustic waves on three axes: ranks, derivatives, the exact solution, layers, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Storage
from mpigrad.waves.absorbing import SHIFT, damping, largest_damping, layer_filter
from mpigrad.waves.acoustic import Acoustic, State, Survey
from mpigrad.waves.acoustic.scheme import memory_size, pack, unpack

SHAPE, SPACING, LAYERS, STEPS = (9, 8, 10), (10.0, 12.0, 9.0), ((2, 1), (3, 0), (1, 2)), 10
SURVEY = Survey(
    np.array([[[31.0, 47.0, 40.5]], [[12.3, 89.0, 80.0]]]),
    np.array([[[15.0, 18.0, 11.0], [74.2, 61.5, 70.0]]]),
)
SPEED = 2000.0
_OTHER_LAYERS = pytest.mark.full("thousands of steps with another order or other layers")


def model(comm, dims=None, **settings):
    return Acoustic(Grid(SHAPE, SPACING, comm, dims=dims), 1.2e-3, STEPS, pml=LAYERS, **settings)


def whole():
    """Velocity, wavelets and first fields of the whole domain, and a cotangent for each result."""
    draw = np.random.default_rng(3)
    padded = [n + sum(pair) for n, pair in zip(SHAPE, LAYERS, strict=True)]
    return (
        draw.uniform(1500, 2500, SHAPE),
        draw.standard_normal((2, 1, STEPS)),
        draw.standard_normal((8, 2, *padded)),
        draw.standard_normal((2, 2, STEPS)),
        draw.standard_normal((8, 2, *padded)),
    )


def cut(tile, field):
    """Return this rank's part of a field with layers."""
    begins = [o + before for o, (before, _) in zip(tile.origin, LAYERS, strict=True)]
    return field[..., *(slice(b, b + n) for b, n in zip(begins, tile.shape, strict=True))]


def state_of(tile, fields):
    w, u, *memories = (jnp.asarray(cut(tile, f)) for f in fields)
    return State(w, u, pack(tile, *memories))


def point(acoustic):
    """Return this rank's operands."""
    velocity, wavelets, fields, *_ = whole()
    tile = jnp.asarray(velocity[acoustic.grid.slices])
    return tile, jnp.asarray(wavelets), state_of(acoustic.tile, fields)


def everything(acoustic):
    """Return results and gradients of this rank."""
    *_, gather_weights, field_weights = whole()
    tile, comm = acoustic.tile, acoustic.grid.comm
    weights = state_of(tile, field_weights)

    def loss(velocity, wavelets, state):
        recording = acoustic.propagate(velocity, wavelets, SURVEY, state)
        share = sum(jnp.sum(w * s) for w, s in zip(weights, recording.state, strict=True))
        if comm.rank == 0:
            share += jnp.sum(gather_weights * recording.gathers)
        return share, recording

    run = mpigrad.jit(mpigrad.value_and_grad(loss, (0, 1, 2), has_aux=True, comm=comm))
    (_, recording), (dv, dw, ds) = run(*point(acoustic))
    fields = lambda s: jnp.stack([s.field, s.previous, *unpack(tile, s.memory)])
    wavelets = comm.mpi.allreduce(np.asarray(dw))
    return recording.gathers, wavelets, dv, fields(recording.state), fields(ds)


@functools.cache
def reference(comm, dims):
    """Return `everything` of the JAX program."""
    return everything(model(comm, dims, backend="xla"))


PLANE = pytest.mark.thin(4)  # tiles that are cut along two axes


@pytest.mark.long("four ranks compile two gradients each; two ranks are short")
@pytest.mark.parametrize("axis", [pytest.param(None, marks=PLANE), 0, 1, 2])
def test_ranks_agree_with_one_rank(comm, alone, axis):
    """Tiles cut along each axis, and as `Grid` chooses. Layers can be thicker than tiles."""
    dims = None if axis is None else tuple(comm.size if a == axis else 1 for a in range(3))
    if comm.size == 1 and axis != 1 and axis is not None:
        pytest.skip("one rank has one choice of dims")
    mine, other = model(comm, dims), model(alone)
    tile, slices = mine.tile, mine.grid.slices
    gathers, wavelets, dv, last, first = everything(other)
    expected = gathers, wavelets, dv[slices], cut(tile, last), cut(tile, first)
    scales = [np.max(np.abs(x)) for x in (gathers, wavelets, dv, last, first)]
    for value, other, scale in zip(everything(mine), expected, scales, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


ALONE = pytest.mark.thin(1)  # the settings do not depend on ranks, and the JAX program takes long


@pytest.mark.parametrize(("axis", "settings"), [
    pytest.param(None, {}, marks=ALONE), (0, {"storage": Storage(3)}),
    pytest.param(1, {"storage": Storage("all")}, marks=ALONE),
    pytest.param(2, {"storage": Storage(4)}, marks=ALONE),
    pytest.param(None, {"threads": 2}, marks=ALONE),
])  # fmt: skip
def test_kernels_agree_with_the_jax_program(comm, axis, settings):
    """Results and gradients, for tiles cut along each axis."""
    dims = None if axis is None else tuple(comm.size if a == axis else 1 for a in range(3))
    expected = reference(comm, dims if comm.size > 1 else None)
    values = everything(model(comm, dims, backend="native", **settings))
    for value, other in zip(values, expected, strict=True):
        scale = comm.mpi.allreduce(np.max(np.abs(other)), op=MPI.MAX)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_of_several_steps_do_not_change_bits(comm, axis):
    """The second run's four long passes have blocks of other sizes along the long middle axis."""
    shape, steps = (12, 400, 8), 19
    dims = tuple(comm.size if a == axis else 1 for a in range(3))
    grid = Grid(shape, (10.0,) * 3, comm, dims=dims)
    draw = np.random.default_rng(3)
    velocity = jnp.asarray(1500 + 900 * draw.random(shape))[grid.slices]
    wavelets = jnp.asarray(draw.standard_normal((1, 1, steps)))
    places = (np.array([[[5, 150, 4]], [[6, 130, 5]]]) + 0.5) * 10
    survey = Survey(places[0][None], places[1][None])
    pml = (0, 2), (2, 0), (2, 2)

    def gradient(backend):
        acoustic = Acoustic(grid, 1e-3, steps, pml=pml, backend=backend)

        def loss(velocity):
            recording = acoustic.propagate(velocity, wavelets, survey)
            return jnp.sum(recording.gathers**2) + jnp.sum(recording.state.field**2)

        return mpigrad.jit(mpigrad.grad(loss, comm=comm))

    native = gradient("native")
    first, second = np.asarray(native(velocity)), np.asarray(native(velocity))
    np.testing.assert_array_equal(first, second)
    expected = np.asarray(gradient("xla")(velocity))
    scale = comm.mpi.allreduce(np.max(np.abs(expected)), op=MPI.MAX)
    np.testing.assert_allclose(first, expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("shape", "pml", "order", "axis", "settings"), [
    ((17, 15, 30), ((2, 1), (3, 0), (1, 2)), 4, 0, {}),
    ((17, 19, 26), ((2, 3), (0, 1), (0, 0)), 4, 1, {"threads": 2}),
    ((19, 18, 40), ((4, 5), (0, 4), (6, 4)), 8, 2, {"memory": 1}),
    ((12, 14, 16), 0, 4, None, {}),  # everything is inside
    ((9, 8, 10), 3, 4, None, {}),  # nothing is
])  # fmt: skip
def test_boundary_saving(comm, shape, pml, order, axis, settings):
    """The gradient is that of the whole history up to rounding, for tiles cut along each axis."""
    settings = dict(settings)
    draw = np.random.default_rng(6)
    dims = None if axis is None else tuple(comm.size if a == axis else 1 for a in range(3))
    grid = Grid(shape, SPACING, comm, dims=dims)
    tile = jnp.asarray(draw.uniform(1500, 2500, shape)[grid.slices])
    wavelets = jnp.asarray(draw.standard_normal((2, 2, 25)))
    places = draw.uniform(0.1, 0.9, (2, 4, 3)) * shape * SPACING  # inside, and outside of it
    survey = Survey(places[:, :2], places[:, 2:])
    found = []
    boundary = Storage("boundary", memory=settings.pop("memory", None))
    for more in ({"storage": Storage("all")}, {"storage": boundary, **settings}):
        acoustic = Acoustic(grid, 1.2e-3, 25, order=order, pml=pml, **more)

        def loss(velocity, wavelets, acoustic=acoustic):
            share, state = acoustic.propagate(velocity, wavelets, survey, gathers="share")
            return jnp.sum(share**2) + jnp.sum(state.field**2)

        found.append(mpigrad.jit(mpigrad.grad(loss, (0, 1), comm=comm))(tile, wavelets))
    for value, other in zip(*found, strict=True):
        scale = comm.mpi.allreduce(np.max(np.abs(other)), op=MPI.MAX)
        assert scale > 0
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-11 * scale)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("shape", "pml", "steps", "order"), [
    # The ends of rows are stored apart from each other only in such tiles.
    ((24, 26, 40), ((3, 2), (0, 4), (5, 3)), 40, 4),
    pytest.param((20, 18, 40), ((4, 5), (0, 4), (6, 4)), 20, 8, marks=ALONE),
    # Rows are longer than what is computed at once, and the middle axis has several blocks.
    pytest.param((6, 200, 530), ((2, 1), (3, 0), (1, 2)), 4, 4, marks=ALONE),
])  # fmt: skip
def test_kernels_agree_on_tiles_larger_than_their_layers(comm, shape, pml, steps, order):
    velocity = np.random.default_rng(4).uniform(1500, 2500, shape)
    wavelets = jnp.asarray(np.random.default_rng(5).standard_normal((1, 1, steps)))
    places = np.array([(0.42, 0.47, 0.39), (0.62, 0.58, 0.51)]) * shape * SPACING
    survey = Survey(places[None, :1], places[None, 1:])
    grid = Grid(shape, SPACING, comm)
    tile = jnp.asarray(velocity[grid.slices])
    found = []
    for backend in ("native", "xla"):
        acoustic = Acoustic(grid, 1.2e-3, steps, order=order, pml=pml, backend=backend)

        def loss(velocity, start, acoustic=acoustic):
            gathers, state = acoustic.propagate(velocity, wavelets, survey, start)
            share = sum(jnp.sum(x**2) for x in state)
            return share + jnp.sum(gathers**2) / comm.size, (gathers, state)

        run = mpigrad.jit(mpigrad.value_and_grad(loss, (0, 1), has_aux=True, comm=comm))
        (_, aux), slope = run(tile, state_with_noise(acoustic.tile))
        found.append((aux, slope))
    for value, other in zip(*map(jax.tree.leaves, found), strict=True):
        scale = comm.mpi.allreduce(np.max(np.abs(other)), op=MPI.MAX)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


def state_with_noise(tile):
    draw = np.random.default_rng(6)
    field = jnp.asarray(draw.standard_normal((2, 1, *tile.shape)))
    return State(field[0], field[1], jnp.asarray(draw.standard_normal((1, memory_size(tile)))))


@pytest.mark.ranks(1, 2)
@pytest.mark.thin(1)
def test_tangents_agree_with_the_jax_program(comm):
    tangents = []
    for backend in ("native", "xla"):
        acoustic = model(comm, backend=backend)
        at = point(acoustic)
        directions = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), at)
        run = lambda *x, a=acoustic: a.propagate(*x[:2], SURVEY, x[2])
        tangents.append(mpigrad.jit(lambda x, dx, f=run: mpigrad.jvp(f, x, dx)[1])(at, directions))
    for value, other in zip(*map(jax.tree.leaves, tangents), strict=True):
        scale = comm.mpi.allreduce(np.max(np.abs(other)), op=MPI.MAX)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


@pytest.mark.cases("native", reason="its gradient and its tangent are compared with those of xla")
@pytest.mark.parametrize("backend", ["native", "xla"])
def test_the_adjoint_is_the_transpose(comm, backend):
    acoustic = model(comm, backend=backend)
    run = lambda v, w, s: acoustic.propagate(v, w, SURVEY, s)
    mpigrad.dot_test(run, *point(acoustic), comm=comm, rtol=1e-12)


@pytest.mark.ranks(1)
def test_order_8_has_a_smaller_error(comm):
    """Of coarse cells, with time steps so small that their error does not matter."""
    source, receivers, dt = (75.0, 85.0, 95.0), np.array([(135.0, 85, 95)]), 2.5e-4
    t = np.arange(640) * dt
    expected = ricker(t - 60 / SPEED, 30.0) / (4 * np.pi * 60)
    errors = []
    for order in (4, 8):
        u = gathers(
            comm, (18, 18, 18), dt, 640, source, receivers, pml=8, order=order, frequency=30.0
        )  # fmt: skip
        errors.append(np.max(np.abs(u[0] - expected)) / np.max(np.abs(expected)))
    assert errors[1] < errors[0] / 3, errors


@pytest.mark.parametrize("operand", ["velocity", "wavelets"])
def test_taylor_expansion(comm, operand):
    acoustic = model(comm)
    velocity, wavelets, state = point(acoustic)
    weights = whole()[3]

    def misfit(x):
        c, w = (x * 100, wavelets) if operand == "velocity" else (velocity, x)
        gathers = acoustic.propagate(c, w, SURVEY, state).gathers
        return jnp.sum((gathers - weights) ** 2) / comm.size

    x = velocity / 100 if operand == "velocity" else wavelets
    mpigrad.taylor_test(misfit, x, comm=comm, step=1e-2, halvings=3)


def ricker(t, frequency=15.0):
    a = (np.pi * frequency * (t - 1.2 / frequency)) ** 2
    return (1 - 2 * a) * np.exp(-a)


def gathers(comm, shape, dt, steps, source, receivers, velocity=None, frequency=15.0, **settings):
    grid = Grid(shape, (10.0,) * 3, comm)
    c = np.full(shape, SPEED) if velocity is None else velocity
    survey = Survey(np.array([[source]], float), np.array([receivers], float))
    wavelet = jnp.asarray(ricker(np.arange(steps) * dt, frequency))[None, None]
    acoustic = Acoustic(grid, dt, steps, **settings)
    return np.asarray(acoustic.propagate(jnp.asarray(c[grid.slices]), wavelet, survey).gathers)[0]


@pytest.mark.ranks(2)
def test_the_solution_in_a_homogeneous_medium(comm):
    """It is s(t - r/c) / (4 pi r)."""
    source, receivers = (75.0, 85.0, 95.0), np.array([(175.0, 165, 155), (145, 85, 95)])
    t = np.arange(160) * 1e-3
    u = gathers(comm, (24, 24, 24), 1e-3, 160, source, receivers, pml=10)
    for trace, r in zip(u, np.linalg.norm(receivers - source, axis=1), strict=True):
        expected = ricker(t - r / SPEED) / (4 * np.pi * r)
        assert np.max(np.abs(trace - expected)) < 1e-2 * np.max(np.abs(expected))


@pytest.mark.ranks(2, 3)
def test_reciprocity(comm):
    """Of points whose interpolation uses no cells of layers."""
    shape = (11, 10, 12)
    velocity = np.random.default_rng(1).uniform(1500, 2500, shape)
    a, b = (35.0, 51.3, 55.0), (75.0, 45.0, 61.7)
    run = lambda s, r: gathers(comm, shape, 1.5e-3, 80, s, [r], velocity, pml=3)[0]
    there, back = run(a, b), run(b, a)
    assert np.max(np.abs(there)) > 0
    np.testing.assert_allclose(there, back, rtol=0, atol=1e-12 * np.max(np.abs(there)))


@pytest.mark.ranks(2)
def test_layers_absorb(comm):
    """At normal incidence, and beside an edge and a corner."""
    n, wide = 16, 20
    source = np.array((85.0, 85.0, 25.0))
    receivers = np.array([(25.0, 85.0, 85.0), (145.0, 145.0, 85.0), (145.0, 145.0, 145.0)])
    near = gathers(comm, (n,) * 3, 2e-3, 120, source, receivers, pml=10)
    shift = 10.0 * wide
    far = gathers(
        comm, (n + 2 * wide,) * 3, 2e-3, 120, source + shift, receivers + shift, pml=10
    )  # fmt: skip
    decibel = 20 * np.log10(np.max(np.abs(near - far), axis=1) / np.max(np.abs(far), axis=1))
    assert np.all(decibel < -65), decibel


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("order", "width"), [
    (4, 3), *(pytest.param(*case, marks=_OTHER_LAYERS) for case in [(4, 1), (4, 8), (8, 4)])
])  # fmt: skip
def test_the_largest_step_is_stable_for_long(comm, order, width):
    shape = (10, 9, 8)
    velocity = np.random.default_rng(2).uniform(1500, 3000, shape)
    grid = Grid(shape, (10.0,) * 3, comm)
    dt = Acoustic(grid, 1e-4, 1, order=order).largest_time_step(velocity)
    pml = ((width, 0), (width, width), (width, width))
    u = gathers(
        comm, shape, dt, 5000, (50, 40, 36), [(30, 25, 20)], velocity, pml=pml, order=order
    )  # fmt: skip
    assert np.max(np.abs(u[:, -500:])) < 1e-2 * np.max(np.abs(u))


def test_bad_models_are_refused_before_the_first_step(comm):
    acoustic, wavelets = model(comm), np.ones((1, 1, STEPS))
    tile = np.full(acoustic.grid.local_shape, SPEED)
    bad = tile.copy()
    if comm.rank == comm.size - 1:
        bad[0, 0, 0] = np.nan
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        jax.block_until_ready(acoustic.propagate(bad, wavelets, SURVEY).gathers)
    with pytest.raises(RuntimeError, match="the largest stable one is"):
        jax.block_until_ready(acoustic.propagate(3 * tile, wavelets, SURVEY).gathers)


def test_bad_input_is_refused(comm):
    acoustic, wavelets = model(comm), np.ones((1, 1, STEPS))
    tile = np.full(acoustic.grid.local_shape, SPEED)
    inside = np.full((1, 1, 3), 40.0)
    with pytest.raises(ValueError, match=r"1 of 1 receivers lie outside .* \(0, 0, 0\) to"):
        acoustic.propagate(tile, wavelets, Survey(inside, inside + 60.0))
    plane = Survey(inside[..., :2], inside[..., :2])
    with pytest.raises(ValueError, match="sources have 2 coordinates, but the grid has 3 axes"):
        acoustic.propagate(tile, wavelets, plane)
    with pytest.raises(ValueError, match="sources with 3 coordinates and receivers with 2"):
        Survey(inside, inside[..., :2])
    grid = acoustic.grid
    with pytest.raises(ValueError, match=r"\(\(x0, x1\), \(y0, y1\), \(z0, z1\)\), got"):
        Acoustic(grid, 1e-3, 2, pml=((1, 1), (1, 1)))
    with pytest.raises(ValueError, match="expected a grid with 2 or 3 axes, got 1"):
        Acoustic(Grid((9,), (10.0,), comm), 1e-3, 2)
    flat = Grid((9, 8), (10.0, 12.0), comm)
    with pytest.raises(ValueError, match="sources have 3 coordinates, but the grid has 2 axes"):
        Acoustic(flat, 1e-3, STEPS).propagate(np.full(flat.local_shape, SPEED), wavelets, SURVEY)
    with pytest.raises(ValueError, match="pml must be 0 or at least 4 cells at order 8"):
        model(comm, order=8)
    if comm.size > 1:
        thin = Grid((comm.size, 8, 8), (10.0,) * 3, comm, dims=(comm.size, 1, 1))
        with pytest.raises(ValueError, match="the smallest tile has 1, but the stencil reaches 2"):
            Acoustic(thin, 1e-3, 2)


@pytest.mark.ranks(1)
def test_layers_filter_as_their_transfer_function(comm):
    """k + e / (Z - b) is 1/s at the frequency that the steps have, and 1 outside of the layers."""
    tile, dt, velocity = model(comm).tile, 1.2e-3, 4000.0
    iw = 2 / dt * 1j * np.tan(np.pi * 12.0 * dt)  # of the differences in time
    z = np.exp(2j * np.pi * 12.0 * dt)
    for axis, (before, behind) in enumerate(LAYERS):
        f = layer_filter(tile, axis, dt, velocity, 1e-4)
        alpha = SHIFT * largest_damping(
            min(w for w in (before, behind) if w) * SPACING[axis], velocity, 1e-4
        )
        for offset, (k, b, e) in ((0.0, f[:3]), (0.5, f[3:])):
            sigma = damping(tile, axis, velocity, 1e-4, offset)
            assert np.all(sigma[: before - 1] > 0) and sigma[before + 1] == 0
            expected = np.where(sigma > 0, (iw + alpha) / (iw + alpha + sigma), 1)
            np.testing.assert_allclose(k + e / (z - b), expected, rtol=1e-12)
