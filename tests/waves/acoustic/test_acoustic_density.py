"""Acoustic waves with a variable density, by the kernels and by the JAX program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Acoustic, AcousticMedium, Storage, Survey
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.acoustic.reference import PATH, buoyancy_of, divergence
from mpigrad.waves.acoustic.scheme import State, memory_size, pack, unpack
from mpigrad.waves.arguments import SECOND_DERIVATIVES

SHAPE, SPACING, LAYERS, STEPS = (9, 8, 10), (10.0, 12.0, 9.0), ((2, 1), (3, 0), (1, 2)), 12
PLACES = np.array([(31.0, 47.0, 40.5), (12.3, 89.0, 80.0), (15.0, 18.0, 11.0), (74.2, 61.5, 70.0)])
SPEED = 2000.0
LIGHT, HEAVY = 1000.0, 2200.0
_OTHER_LAYERS = pytest.mark.full("another order or other layers, by the same program")
_OTHER_AXES = pytest.mark.full("tiles cut along the other axes, by the same program")
BOTH = pytest.mark.parametrize("axes", [2, 3])


def survey_of(axes):
    return Survey(PLACES[:2, None, :axes], PLACES[None, 2:, :axes])


def model(comm, axes, dims=None, **settings):
    grid = Grid(SHAPE[:axes], SPACING[:axes], comm, dims=dims)
    return Acoustic(grid, 1e-3, STEPS, **{"pml": LAYERS[:axes]} | settings)


def whole(pml):
    """Return arrays of the whole domain: velocity, density, wavelets, fields and cotangents."""
    draw, axes = np.random.default_rng(3), len(pml)
    padded = [n + sum(pair) for n, pair in zip(SHAPE[:axes], pml, strict=True)]
    fields = 2 + 2 * (1 if axes == 2 else axes)
    return (
        draw.uniform(1500, 2500, SHAPE[:axes]),
        draw.uniform(800, 2600, SHAPE[:axes]),
        draw.standard_normal((2, 1, STEPS)),
        draw.standard_normal((fields, 2, *padded)),
        draw.standard_normal((2, 2, STEPS)),
        draw.standard_normal((fields, 2, *padded)),
    )


def cut(tile, field):
    """Return this rank's part of a field with layers."""
    begins = [o + before for o, (before, _) in zip(tile.origin, tile.pml, strict=True)]
    return field[..., *(slice(b, b + n) for b, n in zip(begins, tile.shape, strict=True))]


def state_of(tile, fields):
    w, u, *memories = (jnp.asarray(cut(tile, f)) for f in fields)
    return State(w, u, pack(tile, *memories))


def point(acoustic):
    """Return this rank's operands: velocity, density, wavelets and state."""
    velocity, density, wavelets, fields, *_ = whole(acoustic.pml)
    c, rho = (jnp.asarray(x[acoustic.grid.slices]) for x in (velocity, density))
    return c, rho, jnp.asarray(wavelets), state_of(acoustic.tile, fields)


def run_of(acoustic):
    survey = survey_of(acoustic.grid.ndim)
    return lambda c, rho, w, s: acoustic.propagate(AcousticMedium(c, rho), w, survey, s)


def values(acoustic):
    """Return gathers and last fields of this rank."""
    gathers, state = mpigrad.jit(run_of(acoustic))(*point(acoustic))
    return gathers, jnp.stack([state.field, state.previous, *unpack(acoustic.tile, state.memory)])


def everything(acoustic):
    """Return results and gradients of this rank."""
    *_, gather_weights, field_weights = whole(acoustic.pml)
    tile, comm, run = acoustic.tile, acoustic.grid.comm, run_of(acoustic)
    weights = state_of(tile, field_weights)

    def loss(*operands):
        recording = run(*operands)
        share = sum(jnp.sum(w * s) for w, s in zip(weights, recording.state, strict=True))
        if comm.rank == 0:
            share += jnp.sum(gather_weights * recording.gathers)
        return share, recording

    program = mpigrad.jit(mpigrad.value_and_grad(loss, (0, 1, 2, 3), has_aux=True, comm=comm))
    (_, recording), (dc, drho, dw, ds) = program(*point(acoustic))
    fields = lambda s: jnp.stack([s.field, s.previous, *unpack(tile, s.memory)])
    wavelets = comm.mpi.allreduce(np.asarray(dw))
    return recording.gathers, wavelets, dc, drho, fields(recording.state), fields(ds)


@pytest.mark.thin(1)
@BOTH
def test_a_constant_density_changes_nothing(comm, axes):
    """Layers included. Without a density, other kernels compute the run."""
    acoustic, survey = model(comm, axes), survey_of(axes)
    c, rho, wavelets, state = point(acoustic)
    constant = jnp.full_like(rho, 1234.5)

    def loss(velocity, density):
        recording = acoustic.propagate(AcousticMedium(velocity, density), wavelets, survey, state)
        gathers, last = recording
        share = sum(jnp.sum(x**2) for x in last) + jnp.sum(gathers**2) / comm.size
        return share, recording

    run = mpigrad.jit(mpigrad.value_and_grad(loss, has_aux=True, comm=comm))
    expected, values = run(c, None), run(c, constant)
    for value, other in zip(*map(jax.tree.leaves, (values, expected)), strict=True):
        scale = comm.mpi.allreduce(np.max(np.abs(other), initial=0), op=MPI.MAX)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


@pytest.mark.long("it compiles the JAX program on each rank")
@pytest.mark.parametrize(("axes", "order"), [
    (2, 4), (3, 4), *(pytest.param(*case, marks=_OTHER_LAYERS) for case in [(2, 8), (3, 8)])
])  # fmt: skip
def test_the_kernels_are_the_jax_program(comm, axes, order):
    """Results and gradients, from any state."""
    settings = {} if order == 4 else {"order": 8, "pml": ((4, 5), (4, 0), (0, 4))[:axes]}
    if order == 8 and comm.size > 2:
        pytest.skip("its stencil reaches four cells, more than these tiles have")
    native, program = (
        everything(model(comm, axes, backend=backend, **settings)) for backend in ("native", "xla")
    )
    for value, other in zip(native, program, strict=True):
        scale = comm.mpi.allreduce(np.max(np.abs(other), initial=0), op=MPI.MAX)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


@BOTH
@pytest.mark.parametrize("keep", [
    "boundary", pytest.param(5, marks=pytest.mark.full("states are stored as without a density"))
])  # fmt: skip
def test_every_storage_has_the_same_gradient(comm, axes, keep):
    kept, whole = (everything(model(comm, axes, storage=Storage(k))) for k in (keep, "all"))
    for value, other in zip(kept, whole, strict=True):
        scale = comm.mpi.allreduce(np.max(np.abs(other), initial=0), op=MPI.MAX)
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


CUTS = pytest.mark.parametrize(("axes", "axis"), [
    (2, 0), (2, 1), (3, 1), *(pytest.param(3, a, marks=_OTHER_AXES) for a in (0, 2))
])  # fmt: skip


@pytest.mark.cases("2-0", "3-1", reason="both numbers of axes, cut across rows and along them")
@CUTS
def test_values_agree_with_one_rank(comm, alone, axes, axis):
    """Tiles cut along each axis. Layers can be thicker than tiles."""
    own = model(comm, axes, tuple(comm.size if a == axis else 1 for a in range(axes)))
    gathers, last = values(model(alone, axes))
    for value, other, whole in zip(
        values(own), (gathers, cut(own.tile, last)), (gathers, last), strict=True
    ):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * np.max(np.abs(whole)))


@pytest.mark.full("the dot test and the Taylor expansion test gradients on 2 ranks")
@CUTS
def test_ranks_agree_with_one_rank(comm, alone, axes, axis):
    """Results and gradients."""
    dims = tuple(comm.size if a == axis else 1 for a in range(axes))
    own, one = model(comm, axes, dims), model(alone, axes)
    tile, slices = own.tile, own.grid.slices
    gathers, wavelets, dc, drho, last, first = everything(one)
    expected = gathers, wavelets, dc[slices], drho[slices], cut(tile, last), cut(tile, first)
    scales = [np.max(np.abs(x)) for x in (gathers, wavelets, dc, drho, last, first)]
    for value, other, scale in zip(everything(own), expected, scales, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-12 * scale)


@pytest.mark.cases("3", reason="two axes have the Taylor expansion")
@BOTH
def test_the_adjoint_is_the_transpose(comm, axes):
    acoustic = model(comm, axes)
    mpigrad.dot_test(mpigrad.jit(run_of(acoustic)), *point(acoustic), comm=comm, rtol=1e-12)


@pytest.mark.parametrize("axes", [
    2, pytest.param(3, marks=pytest.mark.full("a dot test has three axes, and takes less time"))
])  # fmt: skip
def test_taylor_expansion(comm, axes):
    """Of a misfit, in velocity and density at once."""
    acoustic = model(comm, axes)
    c, rho, wavelets, state = point(acoustic)
    run, weights = run_of(acoustic), whole(acoustic.pml)[4]

    def misfit(x):
        gathers = run(c * x[0], rho * x[1], wavelets, state).gathers
        return jnp.sum((gathers - weights) ** 2) / comm.size

    x = jnp.ones((2, *c.shape))
    mpigrad.taylor_test(mpigrad.jit(misfit), x, comm=comm, step=1e-2, halvings=3)


@pytest.mark.ranks(1)
def test_single_precision(comm):
    acoustic = model(comm, 2)
    operands = point(acoustic)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    run = mpigrad.jit(run_of(acoustic))
    gathers, expected = (run(*x).gathers for x in (single, operands))
    assert gathers.dtype == jnp.float32
    np.testing.assert_allclose(gathers, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))


@pytest.mark.ranks(2)
@pytest.mark.cases("0", reason="the same differences along the other axis")
@pytest.mark.parametrize("axis", [0, 1])
def test_reflection_at_a_step_of_density(comm, axis):
    """The coefficients of a plane wave, with the same velocity on both sides.

    The free sides along the other axis are too far away to be felt at the receivers.
    """
    h, cells, wide, steps = 10.0, 160, 160, 120
    shape = (cells, wide) if axis == 0 else (wide, cells)
    grid = Grid(shape, (h, h), comm)
    acoustic = Acoustic(grid, 0.9 * 0.433 * h / SPEED * 1.4, steps, pml=0)
    tile = acoustic.tile
    place = np.array(grid.centers()[axis]) * np.ones(tile.shape)
    face = 100 * h
    density = jnp.asarray(np.where(place < face, LIGHT, HEAVY))
    pulse = lambda x: np.exp(-(((x - 60 * h) / (8 * h)) ** 2))  # travels to larger x
    field, before = (jnp.asarray(pulse(place - SPEED * t))[None] for t in (0, -acoustic.dt))
    state = State(field, before, jnp.zeros((1, memory_size(tile))))
    points = np.full((1, 2, 2), wide / 2 * h + h / 2)
    points[0, :, axis] = 80.5 * h, 120.5 * h
    survey = Survey(np.full((1, 1, 2), 500.0), points)
    velocity = jnp.full(tile.shape, SPEED)
    run = mpigrad.jit(
        lambda rho: acoustic.propagate(
            AcousticMedium(velocity, rho), np.zeros((1, 1, steps)), survey, state
        )
    )
    (there, beyond), (incident, through) = (
        np.asarray(run(rho).gathers[0]) for rho in (density, None)
    )
    expected = (HEAVY - LIGHT) / (HEAVY + LIGHT)
    reflected = (there - incident)[np.argmax(np.abs(there - incident))] / incident.max()
    transmitted = beyond.max() / through.max()
    assert abs(reflected / expected - 1) < 1e-2
    assert abs(transmitted / (1 + expected) - 1) < 1e-2


@pytest.mark.ranks(2, 3)
@pytest.mark.cases("2", reason="three axes have the dot test")
@BOTH
def test_reciprocity(comm, axes):
    """p / rho(source) is reciprocal between cell centres: the source is (1/rho) w delta."""
    shape = (13, 11, 12)[:axes]
    draw = np.random.default_rng(1)
    velocity, density = (draw.uniform(a, b, shape) for a, b in ((1500, 2500), (500, 3000)))
    grid = Grid(shape, (10.0,) * axes, comm)
    acoustic = Acoustic(grid, 1.2e-3, 90, pml=3)
    ends = [(5, 5, 6)[:axes], (8, 4, 5)[:axes]]
    wavelet = jnp.asarray(ricker(np.arange(90) * 1.2e-3, 20.0))[None, None]
    c, rho = (jnp.asarray(x[grid.slices]) for x in (velocity, density))
    places = np.array(ends)[:, None] * 10.0 + 5.0
    survey = Survey(places, places[::-1])  # a shot at each end
    run = mpigrad.jit(lambda *x: acoustic.propagate(AcousticMedium(*x), wavelet, survey).gathers)
    found = [p * density[end] for p, end in zip(np.asarray(run(c, rho)), ends, strict=True)]
    assert np.max(np.abs(found[0])) > 0
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12 * np.max(np.abs(found[0])))


def ricker(t, frequency):
    a = (np.pi * frequency * (t - 1.2 / frequency)) ** 2
    return (1 - 2 * a) * np.exp(-a)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("order", [4, 8])
def test_the_order_for_smooth_densities(comm, order):
    """Of rho times the derivative of (1/rho) w_x, with half as large cells."""
    errors = []
    for cells in (60, 120):
        h = 1 / cells
        tile = WaveTile(Grid((cells, 8), (h, h), comm), 0)
        x = (np.arange(cells) + 0.5)[:, None] * h * np.ones((1, 8))
        w, slope, bend = np.sin(9 * x), 9 * np.cos(9 * x), -81 * np.sin(9 * x)
        rho, change = np.exp(np.sin(7 * x)), 7 * np.cos(7 * x)  # log(rho)' of rho

        @mpigrad.jit
        def derivative(rho, w, tile=tile, h=h):
            buoyancy = buoyancy_of(tile, order, rho)
            padded = jnp.pad(w[None], ((0, 0), (order // 2,) * 2, (0, 0)))
            return (buoyancy.density * divergence(padded, buoyancy, 0, h, order))[0]

        error = np.asarray(derivative(rho, w)) - (bend - change * slope)
        errors.append(np.max(np.abs(error[cells // 4 : -cells // 4])))
    rate = np.log2(errors[0] / errors[1])
    assert abs(rate - order) < 0.3


def assert_longest_coefficients(matrix, rho, order):
    """Compare the coefficients of the cells furthest apart, along each axis, with their formula."""
    n, indices = order // 2, np.arange(rho.size).reshape(rho.shape)
    for axis in range(rho.ndim):
        cells, index = (np.moveaxis(x, axis, 0) for x in (rho, indices))
        path = np.stack([cells[m : len(cells) - n + m] for m in range(n + 1)])
        mean = np.maximum((path[0] + path[n]) / 2, np.trapezoid(path, axis=0) / (n * PATH))
        expected = SECOND_DERIVATIVES[order][n] / SPACING[axis] ** 2 / mean
        np.testing.assert_allclose(matrix[index[:-n], index[n:]], expected, rtol=1e-9)


@pytest.mark.ranks(1)
@pytest.mark.cases("2-4", "3-8", reason="each order, and each number of axes")
@pytest.mark.parametrize(("axes", "order"), [(2, 4), (2, 8), (3, 4), (3, 8)])
def test_the_largest_step_is_safe_for_any_contrast(comm, axes, order):
    """Against the eigenvalues of the operator, which must all be positive."""
    cells = (12, 10) if axes == 2 else (6, 6, 5)
    acoustic = Acoustic(Grid(cells, SPACING[:axes], comm), 1e-3, 1, order=order, pml=0)
    tile, draw = acoustic.tile, np.random.default_rng(4)
    n = tile.grid.n_local
    basis = jnp.eye(n).reshape(n, *cells)
    alternating = np.indices(cells).sum(0) % 2
    step = np.indices(cells)[0] >= 5

    @mpigrad.jit
    def operator(rho):
        buoyancy = buoyancy_of(tile, order, rho)
        total = 0.0
        for axis, h in enumerate(SPACING[:axes]):
            widths = [(order // 2,) * 2 if i == axis + 1 else (0, 0) for i in range(axes + 1)]
            total += divergence(jnp.pad(basis, widths), buoyancy, axis, h, order)
        return total.reshape(n, n)

    for rho in (
        np.ones(cells), np.exp(draw.uniform(0, np.log(1e4), cells)), 1 + 999.0 * alternating,
        1 + 829.0 * step, 1 + 99.0 * (draw.uniform(size=cells) < 0.1),
    ):  # fmt: skip
        c = draw.uniform(1500, 2500, cells) if rho.min() < rho.max() else np.full(cells, SPEED)
        matrix = np.asarray(operator(rho))
        np.testing.assert_allclose(matrix, matrix.T, rtol=0, atol=1e-12 * np.max(np.abs(matrix)))
        assert_longest_coefficients(matrix, rho, order)
        root = c.ravel() * np.sqrt(rho.ravel())
        values = np.linalg.eigvalsh(-root[:, None] * matrix * root)
        ratio = acoustic.largest_time_step(AcousticMedium(c, rho)) / (2 / np.sqrt(values[-1]))
        assert values[0] > 0
        assert 0.6 < ratio < 1
    plain = acoustic.largest_time_step(c)
    assert acoustic.largest_time_step(AcousticMedium(c, np.full(cells, 7.0))) == pytest.approx(
        plain, rel=1e-12
    )


@pytest.mark.ranks(1)
@pytest.mark.cases("random-4-3", reason="it has the steps of the others in every cell")
@pytest.mark.parametrize(("order", "width"), [
    (4, 3), *(pytest.param(*case, marks=_OTHER_LAYERS) for case in [(4, 1), (4, 6), (8, 4), (8, 6)])
])  # fmt: skip
@pytest.mark.parametrize("contrast", ["random", "smooth", "step"])
def test_no_wave_grows_in_layers_on_two_axes(comm, contrast, order, width):
    """The eigenvalues of a step, the largest stable one, for random densities and a step."""
    shape, draw = (9, 8), np.random.default_rng(5)
    grid = Grid(shape, SPACING[:2], comm)
    if contrast == "step":
        rho, c = np.where(np.arange(8) < 4, 1.0, 1000.0) * np.ones((9, 1)), np.full(shape, SPEED)
    else:
        largest = 30 if contrast == "random" else 1.3
        rho, c = np.exp(draw.uniform(0, np.log(largest), shape)), draw.uniform(1500, 3000, shape)
    dt = Acoustic(grid, 1e-4, 1, order=order).largest_time_step(AcousticMedium(c, rho))
    acoustic = Acoustic(grid, dt, 1, order=order, pml=width)
    tile = acoustic.tile
    cells, memories = np.prod(tile.shape), memory_size(tile)
    n = 2 * cells + memories
    w, u, memory = np.split(np.eye(n), [cells, 2 * cells], axis=1)
    fields = (jnp.asarray(f.reshape(n, *tile.shape)) for f in (w, u))
    state = State(*fields, jnp.asarray(memory))
    survey = Survey(np.full((n, 1, 2), 41.0), np.full((1, 1, 2), 41.0))  # a shot for each value
    run = mpigrad.jit(
        lambda *x: (
            acoustic.propagate(AcousticMedium(*x[:2]), np.zeros((1, 1, 1)), survey, x[2]).state
        )
    )
    matrix = np.concatenate([np.asarray(f).reshape(n, -1) for f in run(c, rho, state)], axis=1)
    assert np.max(np.abs(np.linalg.eigvals(matrix))) < 1


@pytest.mark.full("test_no_wave_grows_in_layers has the eigenvalues of a step")
@pytest.mark.ranks(1)
@pytest.mark.parametrize(("order", "width"), [
    (4, 3), pytest.param(4, 1, marks=_OTHER_LAYERS), pytest.param(8, 4, marks=_OTHER_LAYERS)
])  # fmt: skip
def test_the_largest_step_is_stable_for_long_on_three_axes(comm, order, width):
    shape, steps, draw = (8, 9, 8), 3000, np.random.default_rng(2)
    velocity = draw.uniform(1500, 3000, shape)
    density = np.exp(draw.uniform(0, np.log(1000), shape))
    grid = Grid(shape, (10.0,) * 3, comm)
    dt = Acoustic(grid, 1e-4, 1, order=order).largest_time_step(AcousticMedium(velocity, density))
    pml = ((width, 0), (width, width), (width, width))
    acoustic = Acoustic(grid, dt, steps, order=order, pml=pml)
    survey = Survey(np.full((1, 1, 3), 41.0), np.full((1, 1, 3), 33.0))
    wavelet = ricker(np.arange(steps) * dt, 25.0)[None, None]
    u = np.abs(acoustic.propagate(AcousticMedium(velocity, density), wavelet, survey).gathers[0, 0])
    assert np.max(u[-500:]) < 3e-2 * np.max(u)


@pytest.mark.full(
    "test_a_constant_density has these layers, and test_acoustic_waves their strength"
)
@pytest.mark.ranks(1)
def test_layers_absorb_at_a_step_of_density(comm):
    """Waves at all angles, in a model with an interface that goes into the layers."""
    n, wide, h, steps = 40, 50, 10.0, 180
    found = []
    for more in (0, wide):
        cells = n + 2 * more
        grid = Grid((cells, cells), (h, h), comm)
        acoustic = Acoustic(grid, 2.5e-3, steps)
        place = np.array([[(10.5, 10.5)]]) + more
        receivers = np.array([[(10.5, 5.5), (30.5, 10.5), (10.5, 34.5), (34.5, 34.5)]]) + more
        density = np.where(np.arange(cells) < 22 + more, LIGHT, HEAVY) * np.ones((cells, 1))
        velocity = np.full((cells, cells), SPEED)
        survey = Survey(place * h, receivers * h)
        wavelet = ricker(np.arange(steps) * 2.5e-3, 12.0)[None, None]
        gathers = acoustic.propagate(AcousticMedium(velocity, density), wavelet, survey).gathers
        found.append(np.asarray(gathers)[0])
    near, far = found
    decibel = 20 * np.log10(np.max(np.abs(near - far), axis=1) / np.max(np.abs(far), axis=1))
    assert np.all(decibel < -38), decibel


@pytest.mark.cases("2", reason="the same checks")
@BOTH
def test_bad_densities_are_refused_before_the_first_step(comm, axes):
    acoustic = model(comm, axes)
    c, rho, wavelets, state = point(acoustic)
    run, last = run_of(acoustic), comm.rank == comm.size - 1
    corner = (0,) * axes
    for value, text in (
        (np.nan, "the density is NaN or infinite in some cells"),
        (np.inf, "the density is NaN or infinite in some cells"),
        (0.0, "the density must be positive, and its smallest value is 0"),
        (-3.0, "the density must be positive, and its smallest value is -3"),
    ):
        bad = rho.at[corner].set(value) if last else rho
        with pytest.raises(RuntimeError, match=text):
            jax.block_until_ready(run(c, bad, wavelets, state).gathers)
        with pytest.raises(ValueError, match="densities must be positive and finite"):
            acoustic.largest_time_step(AcousticMedium(c, bad))
    heavy = rho.at[corner].set(1e6) if last else rho
    limit = acoustic.largest_time_step(AcousticMedium(c, heavy))
    assert limit < acoustic.largest_time_step(c)
    fast = 1.05 * limit / acoustic.dt * c
    with pytest.raises(RuntimeError, match=r"stable one is .* for velocities up to .* density"):
        jax.block_until_ready(run(fast, heavy, wavelets, state).gathers)


def test_bad_input_is_refused(comm):
    acoustic = model(comm, 2)
    c, rho, wavelets, state = point(acoustic)
    last = comm.rank == comm.size - 1
    run = run_of(acoustic)
    with pytest.raises(ValueError, match=r"density has shape \(.*, but that rank's tile has"):
        run(c, rho[1:] if last else rho, wavelets, state)
    with pytest.raises(ValueError, match="velocity, density must be float32 or float64, the same"):
        run(c, rho.astype("float32") if last else rho, wavelets, state)
    with pytest.raises(ValueError, match="density has shape"):
        acoustic.largest_time_step(AcousticMedium(c, rho[:, 1:] if last else rho))
    if comm.size > 1:
        for function in (
            lambda d: run(c, d, wavelets, state),
            lambda d: acoustic.largest_time_step(AcousticMedium(c, d)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"density .* must be the same on all ranks, got"):
                function(None if last else rho)
