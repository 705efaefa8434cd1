"""Elastic waves with loss: decay and speed of plane waves, ranks, derivatives, bad input."""

import elastic_volume_case as volume
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elastic_case import compare

import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Storage, fit_relaxation
from mpigrad.waves.elastic import AnelasticState, Elastic, ElasticMedium, Survey, lame
from mpigrad.waves.elastic.media import at_rest

VP, VS, RHO = 2500.0, 1400.0, 2100.0
RELAXATION = fit_relaxation(20.0, (3.0, 30.0), mechanisms=2)


def model(comm, dims=None, cells=(13, 11), **settings):
    grid = Grid(cells, (10.0, 12.0), comm, dims=dims)
    defaults = {"pml": ((3, 2), (0, 4)), "relaxation": RELAXATION, "source": "force_y"}
    return Elastic(grid, 1.2e-3, 12, 15.0, **{**defaults, **settings})


SURVEY = Survey(np.array([[[33.0, 20.0]]]), np.array([[[45.0, 35.0], [81.0, 66.0]]]))


def arrays(elastic):
    """This rank's lam, mu, rho, qp, qs and the wavelets, with water in a corner."""
    draw, shape = np.random.default_rng(4), elastic.grid.shape
    lam, mu = draw.uniform(6e9, 9e9, shape), draw.uniform(3e9, 4e9, shape)
    mu[:4, :4] = 0
    qp, qs = draw.uniform(20, 60, shape), draw.uniform(10, 30, shape)
    whole = {"lam": lam, "mu": mu, "rho": draw.uniform(1900, 2200, shape), "qp": qp, "qs": qs}
    tiles = {k: jnp.asarray(x[elastic.grid.slices]) for k, x in whole.items()}
    return {**tiles, "wavelets": jnp.asarray(1e10 * draw.normal(size=(1, 1, elastic.steps)))}


def propagate(elastic, x, state=None, survey=SURVEY):
    wavelets = mpigrad.bcast(x["wavelets"], comm=elastic.grid.comm)
    return elastic.propagate(
        ElasticMedium(x["lam"], x["mu"], x["rho"], x["qp"], x["qs"]), wavelets, survey, state
    )


def started(elastic):
    """A state with memories of strains, the same on any ranks."""
    tile = elastic.tile
    layers = tuple(sum(p) for p in tile.extension)
    at = np.meshgrid(*(o + np.arange(n) for o, n in zip(tile.origin, tile.shape, strict=True)))
    rates, phase = 3 if len(at) == 2 else 6, sum((2 + k) * x.T for k, x in enumerate(at))
    phase = np.moveaxis(phase, 0, -1) if len(at) == 3 else phase
    kinds = np.arange(2 * rates).reshape(2, rates, *(1,) * len(at))
    shots = 2 if len(at) == 3 else 1
    strain = jnp.asarray(np.broadcast_to(np.cos(phase + kinds), (shots, 2, rates, *tile.shape)))
    return AnelasticState(at_rest(shots, tile.shape, layers, np.dtype("float64")), strain)


def gradient(elastic, survey=SURVEY):
    return gradient_program(elastic, survey)()


def gradient_program(elastic, survey=SURVEY):
    comm = elastic.grid.comm

    def objective(x):
        gathers, state = propagate(elastic, x, x["state"], survey)
        last = jnp.sum(state.elastic.vx**2) + 1e-3 * jnp.sum(state.strain**2)
        return jnp.sum(gathers**2) / comm.size + last, (gathers, state)

    run = mpigrad.jit(mpigrad.value_and_grad(objective, has_aux=True, comm=comm))
    start = arrays(elastic) | {"state": started(elastic)}

    def program():
        (_, aux), slope = run(start)
        return aux, slope

    return program


def agree(comm, elastic, other, survey=SURVEY):
    """Compare gathers and gradients on all ranks with those of one rank."""
    (gathers, _), slope = gradient(elastic, survey)
    (gathers_alone, _), slope_alone = gradient(other, survey)
    compare(gathers, gathers_alone)
    for name in ("lam", "mu", "rho", "qp", "qs"):
        assert np.max(np.abs(slope_alone[name])) > 0
        compare(slope[name], slope_alone[name][elastic.grid.slices])
    if comm.rank == 0:
        compare(slope["wavelets"], slope_alone["wavelets"])
    if comm.size == 1:
        compare(slope["state"], slope_alone["state"])


# Short: infinite quality, and the decay of plane waves.
LONG = pytest.mark.long("it compiles the JAX program on each rank")


@LONG
def test_kernels_agree_with_the_reference(comm, alone):
    settings = {"free_surface": "y0", "components": ("vx", "pressure")}
    own = model(comm, (comm.size, 1), storage=Storage(4), **settings)
    agree(comm, own, model(alone, backend="xla", **settings))


@pytest.mark.full("the two-dimensional test has the same code")
@pytest.mark.parametrize("backend", ["native", "xla"])
def test_three_dimensions_agree_with_the_reference(comm, alone, backend):
    settings = {
        "relaxation": RELAXATION, "components": ("vx", "pressure"), "source": "explosive"
    }  # fmt: skip
    own = volume.model(comm, backend=backend, **settings)
    agree(comm, own, volume.model(alone, backend="xla", **settings), volume.SURVEY)


@LONG
def test_dot_test(comm):
    elastic = model(comm)
    at = arrays(elastic)

    def run(x, strain):
        changed = jax.tree.map(lambda a, b: a * (1 + b), at, x)
        shape = elastic.tile.shape
        start = at_rest(1, shape, tuple(sum(p) for p in elastic.tile.extension), at["lam"].dtype)
        gathers, state = propagate(elastic, changed, AnelasticState(start, strain))
        return gathers, state.elastic.vx, state.elastic.syy / 5e6, state.strain

    shape = (1, 2, 3, *elastic.tile.shape)
    strain = jnp.asarray(np.random.default_rng(comm.rank).normal(size=shape))
    zeros = jax.tree.map(jnp.zeros_like, at)
    test = mpigrad.dot_test(mpigrad.jit(run), zeros, strain, comm=comm, rtol=1e-12)
    assert test.error < 1e-12


@pytest.mark.full("the dot test tests the same derivatives")
@pytest.mark.parametrize("name", ["qp", "qs"])
def test_taylor_test(comm, name):
    elastic = model(comm)
    at = arrays(elastic)

    def objective(q):
        gathers = propagate(elastic, {**at, name: at[name] * q}).gathers
        return jnp.sum(gathers**2) / comm.size

    mpigrad.taylor_test(objective, jnp.ones_like(at[name]), comm=comm, step=1e-2)


@pytest.mark.thin(1)
def test_infinite_quality_is_the_elastic_run(comm):
    lossy, elastic = model(comm), model(comm, relaxation=None, backend="native")
    at = arrays(lossy)
    infinite = jnp.full(lossy.grid.local_shape, jnp.inf)
    at = {**at, "qp": infinite, "qs": infinite}
    names = ("lam", "mu", "rho", "wavelets")
    *tiles, wavelets = (at[k] for k in names)
    expected = elastic.propagate(ElasticMedium(*tiles), wavelets, SURVEY)

    def energy(x):
        recording = propagate(lossy, x)
        return jnp.sum(recording.gathers**2), recording

    (_, got), slope = mpigrad.jit(mpigrad.value_and_grad(energy, has_aux=True, comm=comm))(at)
    compare((got.gathers, got.state.elastic), tuple(expected))
    assert all(jnp.all(jnp.isfinite(s)) for s in slope.values())
    # without quality factors
    without = mpigrad.jit(lambda *x: lossy.propagate(ElasticMedium(*x), wavelets, SURVEY).gathers)
    compare(without(*tiles), expected.gathers)


def test_runs_after_one_with_nan_and_with_stored_states_have_the_same_bits(comm):
    elastic = model(comm)
    program = gradient_program(elastic)
    aux, slope = program()
    at = arrays(elastic)
    jax.block_until_ready(propagate(elastic, {**at, "wavelets": jnp.nan * at["wavelets"]}).gathers)
    again, same = program()
    np.testing.assert_array_equal(again[0], aux[0])
    jax.tree.map(np.testing.assert_array_equal, same, slope)
    (_, state), stored = gradient(model(comm, storage=Storage(3)))
    jax.tree.map(np.testing.assert_array_equal, (stored, state), (slope, aux[1]))


def spectra(comm, wave, q):
    """Spectra of a plane pulse at two places of the x-axis, their frequencies, and the distance.

    The pulse starts at 200 m and moves to both sides. No wave of the sides along y comes back.
    """
    h, dt, c = 10.0, 1.5e-3, VS if wave == "S" else VP
    steps = int(800 / c / dt)
    half = int(steps * dt * VP / h) + 8
    grid = Grid((75, 2 * half), (h, h), comm)
    name = "vy" if wave == "S" else "vx"
    shift = 0.0 if wave == "S" else h / 2  # vx lies between the cell centres
    y = (half + 0.5) * h + (h / 2 if wave == "S" else 0.0)
    places = np.array([[355.0 + shift, y], [655.0 + shift, y]])
    elastic = Elastic(
        grid, dt, steps, 10.0, pml=((20, 20), (0, 0)), components=(name,), relaxation=RELAXATION,
        max_velocity=VP,
    )  # fmt: skip
    tile = elastic.tile
    x = (np.arange(tile.shape[0]) + tile.origin[0] + 0.5) * h + shift
    squared = ((x - 200.0) / 50.0) ** 2
    pulse = (1 - 2 * squared) * np.exp(-squared)
    layers = tuple(sum(p) for p in tile.extension)
    start = at_rest(1, tile.shape, layers, np.dtype("float64"))
    field = jnp.broadcast_to(jnp.asarray(pulse)[None, :, None], (1, *tile.shape))
    start = AnelasticState(start._replace(**{name: field}), jnp.zeros((1, 2, 3, *tile.shape)))
    lam, mu = lame(VP, 0.0 if wave == "fluid" else VS, RHO)
    media = [jnp.full(grid.local_shape, v) for v in (lam, mu, RHO)]
    qs = jnp.full(grid.local_shape, q if wave == "S" else 12.0)
    qp = jnp.full(grid.local_shape, 15.0 if wave == "S" else q)
    survey = Survey(np.full((1, 1, 2), 100.0), places[None])
    zero = jnp.zeros((1, 1, steps))
    medium = lambda *m: ElasticMedium(*m, qp, qs)
    run = mpigrad.jit(lambda *m: elastic.propagate(medium(*m), zero, survey, start).gathers)
    traces = np.asarray(run(*media))[0, 0]
    assert np.max(np.abs(traces[:, -1])) < 0.01 * np.max(np.abs(traces))
    frequencies = np.array([9.0, 13.0, 17.0]) * c / VP
    kernel = np.exp(-2j * np.pi * frequencies[:, None] * np.arange(steps) * dt)
    return traces @ kernel.T, frequencies, places[1, 0] - places[0, 0], c


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    "wave", ["P", "S", pytest.param("fluid", marks=pytest.mark.full("P waves with mu = 0"))]
)
def test_plane_waves_decay_and_disperse_as_the_relaxation_says(comm, wave):
    """The decay within 1 %, and phase velocities within 0.2 %, of the exact values."""
    q = 20.0
    (near, far), frequencies, distance, c = spectra(comm, wave, q)
    ratio = far / near
    exact = RELAXATION.phase_velocity(frequencies, q, c)
    travel = 2 * np.pi * frequencies * distance / exact  # the phase, to choose the turn
    phase = -np.angle(ratio * np.exp(1j * travel)) + travel
    velocity = 2 * np.pi * frequencies * distance / phase
    v = RELAXATION.complex_velocity(frequencies, q, c)
    decay = 2 * np.pi * frequencies * distance * (1 / v).imag
    print(wave, velocity / exact - 1, np.log(np.abs(ratio)) / decay - 1)
    np.testing.assert_allclose(np.log(np.abs(ratio)), decay, rtol=0.01)
    np.testing.assert_allclose(velocity, exact, rtol=0.002)


def test_bad_input_is_refused(comm):
    elastic = model(comm)
    at, last = arrays(elastic), comm.rank == comm.size - 1

    def run(on=elastic, **changed):
        return jax.block_until_ready(propagate(on, {**at, **changed}).gathers)

    for name in ("qp", "qs"):
        for value in (np.nan, 0.0, -3.0):
            bad = at[name].at[0, 0].set(value) if last else at[name]
            with pytest.raises(jax.errors.JaxRuntimeError, match="factors must be larger than"):
                run(**{name: bad})
    with pytest.raises(ValueError, match=r"smallest qp is 0.0 and the smallest qs 1"):
        elastic.largest_time_step(
            ElasticMedium(at["lam"], at["mu"], at["rho"], 0 * at["qp"], at["qs"])
        )
    with pytest.raises(ValueError, match="lam, qp, qs must be float32 or float64, the same"):
        run(qp=at["qp"].astype("float32") if last else at["qp"])
    with pytest.raises(ValueError, match="qp and qs need a relaxation"):
        run(model(comm, relaxation=None))
    with pytest.raises(ValueError, match="the state is of type State, expected AnelasticState"):
        layers = tuple(sum(p) for p in elastic.tile.extension)
        propagate(elastic, at, at_rest(1, elastic.tile.shape, layers, np.dtype("float64")))
    with pytest.raises(ValueError, match=r"runs waves backwards, which a relaxation does not"):
        model(comm, storage=Storage("boundary"))
    with pytest.raises(ValueError, match=r"reference=5.0 needs a relaxation"):
        model(comm, relaxation=None, reference=5.0)
    # The largest step is that of the unrelaxed moduli, and one a little larger is refused.
    names = ("lam", "mu", "rho", "qp", "qs")
    limit = elastic.largest_time_step(ElasticMedium(*(at[k] for k in names)))
    assert limit < elastic.largest_time_step(ElasticMedium(*(at[k] for k in names[:3])))
    large = Elastic(elastic.grid, 1.001 * limit, 2, 15.0, pml=2, relaxation=RELAXATION)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is not stable"):
        run(large, wavelets=at["wavelets"][..., :2])


@pytest.mark.ranks(1)
@pytest.mark.full("it runs for long")
def test_the_largest_step_is_stable_for_long(comm):
    elastic = model(comm, free_surface="y0")
    at = arrays(elastic)
    at["mu"] = jnp.maximum(at["mu"], 3e9)  # vortices of a fluid would not decay
    dt = elastic.largest_time_step(
        ElasticMedium(*(at[k] for k in ("lam", "mu", "rho", "qp", "qs")))
    )
    long = Elastic(
        elastic.grid, dt, 4000, 15.0, pml=0, free_surface="y0", relaxation=RELAXATION,
        source="force_y",
    )  # fmt: skip
    wavelets = jnp.zeros((1, 1, 4000)).at[..., :12].set(at["wavelets"])
    gathers = np.asarray(propagate(long, {**at, "wavelets": wavelets}).gathers)
    assert np.max(np.abs(gathers[..., -200:])) < 1e-3 * np.max(np.abs(gathers))
