"""Elastic waves on three axes: kernels, reference, ranks, derivatives, exact solutions."""

import functools
import re

import elastic_volume_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elastic_case import compare

import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Storage
from mpigrad.waves import native_run as primitive
from mpigrad.waves.elastic import Elastic, ElasticMedium, State, Survey, lame, reference
from mpigrad.waves.elastic.media import at_rest, effective_media
from mpigrad.waves.elastic.model import make_scheme

VP, VS, RHO = 2500.0, 1400.0, 2100.0
# Short: tangents on one rank, and tiles with a middle on two.
LONG = pytest.mark.long("it compiles the averages of a model on each rank, or the JAX program")


@functools.cache
def on_one_rank(alone, backend="xla", **settings):
    """Gathers, last state and gradient of one rank."""
    return case.value_and_gradient(case.model(alone, backend=backend, **settings))


def agrees_with_one_rank(comm, alone, axis, backend="native", other="xla", common=None):
    """Compare with a program on one rank. `common` are settings of both."""
    dims = None if axis is None else tuple(comm.size if a == axis else 1 for a in range(3))
    elastic = case.model(comm, dims, backend=backend, **(common or {}))
    gathers, state, slope = case.value_and_gradient(elastic)
    gathers_alone, state_alone, slope_alone = on_one_rank(alone, other, **(common or {}))
    compare(gathers, gathers_alone)
    compare(state, case.cut(elastic, state_alone))
    for name in ("lam", "mu", "rho"):
        compare(slope[name], slope_alone[name][elastic.grid.slices])
    compare(slope["state"], case.cut(elastic, slope_alone["state"]))
    if comm.rank == 0:
        compare(slope["wavelets"], slope_alone["wavelets"])


@LONG
@pytest.mark.thin(1)
@pytest.mark.cases("None", reason="dims have no meaning on one rank")
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_kernels_agree_with_the_reference(comm, alone, axis):
    """Tiles cut along each axis, and as `Grid` chooses. Layers can be thicker than tiles."""
    agrees_with_one_rank(comm, alone, axis)


@LONG
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_kernels_agree_with_one_rank(comm, alone, axis):
    agrees_with_one_rank(comm, alone, axis, other="native")


@LONG
@pytest.mark.ranks(2)
def test_order_8(comm, alone):
    """Kernels on the smallest tiles and the JAX program on one rank. Their adjoint."""
    agrees_with_one_rank(comm, alone, 0, common={"order": 8})
    run, zeros = case.relative(case.model(comm, (2, 1, 1), backend="native", order=8))
    assert mpigrad.dot_test(run, zeros, comm=comm, rtol=1e-12).error < 1e-12


@pytest.mark.full("test_fields_that_do_not_vary has the reference on 2 ranks")
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_the_reference_agrees_with_one_rank(comm, alone, axis):
    agrees_with_one_rank(comm, alone, axis, "xla")


@pytest.mark.full("each case compiles the reference")
@pytest.mark.parametrize(
    "common",
    [{"source": "explosive"}, {"source": "force_x"}, *({"pml": pml} for pml in case.PMLS.values())],
    ids=["explosive", "force_x", *case.PMLS],
)
def test_kernels_agree_with_the_reference_in_other_problems(comm, alone, common):
    agrees_with_one_rank(comm, alone, None, common=common)


@pytest.mark.cases("settings[012]", reason="test_wave_history keeps all steps")
@pytest.mark.parametrize(
    "settings",
    [
        {"storage": Storage(4)},
        {"storage": Storage("boundary"), "source": "force_x"},
        {"storage": Storage(memory=1), "threads": 2},
        {"storage": Storage("all"), "source": "explosive", "threads": 2, "pml": case.PMLS["thick"]},
    ],
)
def test_kernels_do_not_depend_on_checkpoints_or_threads(comm, settings):
    common = {k: v for k, v in settings.items() if k in ("source", "pml")}
    got = case.value_and_gradient(case.model(comm, backend="native", **settings))
    tolerance = 1e-12 if settings["storage"].keep == "boundary" else 1e-13
    compare(got, on_one_rank(comm, "native", **common), tolerance)


@pytest.mark.ranks(2, 4)
@pytest.mark.thin(2, 4, reason="4: tiles have edges along two axes, and wait for two neighbours")
@pytest.mark.cases(
    "explosive-dims[0123]", "force_y-dims1", reason="a force differs in the points of its source"
)
@pytest.mark.parametrize("dims", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("source", ["explosive", "force_y"])
def test_tiles_with_a_middle_are_one_rank(comm, alone, dims, source):
    """The middle takes both phases at once, beside edges that wait for neighbours."""
    if np.prod(dims) != comm.size:
        pytest.skip(f"a grid of {dims} tiles needs {np.prod(dims)} ranks")
    cells, pml, steps = (12, 40, 72), ((2, 3), (4, 1), (3, 4)), 5
    draw = np.random.default_rng(5)
    # K, mu, mu at the points of shear stresses, 1/rho at those of velocities, layers included. The
    # native run by itself: programs that average the model take long to compile.
    padded = [n + sum(pair) for n, pair in zip(cells, pml, strict=True)]
    bounds = [(1e10, 1.5e10), *[(3e9, 4e9)] * 4, *[(4.5e-4, 5.3e-4)] * 3]
    whole = [draw.uniform(*pair, padded) for pair in bounds]
    # Waves everywhere within a few steps, in the layers too.
    places = np.meshgrid(*(np.linspace(5, 10 * n - 5, 1 + n // 6) for n in cells))
    sources = np.stack([x.ravel() for x in places], -1)[None]
    survey = Survey(sources, np.array([[[45.0, 30.0, 60.5], [67.0, 361.2, 600.0]]]))
    wavelets = jnp.asarray(1e10 * draw.normal(size=(1, sources.shape[1], steps)))

    def gradient(on, dims):
        grid = Grid(cells, (10.0, 10.0, 10.0), on, dims=dims)
        settings = {"pml": pml, "source": source, "components": case.COMPONENTS}
        scheme = make_scheme(Elastic(grid, 1e-3, steps, 15.0, **settings), survey)
        tile = scheme.tile

        def misfit(media):
            gathers, state = primitive.propagate(scheme.native, media, wavelets, None)
            sizes = np.array([1, 1, 1, 1e-7])[:, None, None]
            seen = jnp.sum(gathers.reshape(4, 2, steps) * sizes) + jnp.sum(state[0] ** 2)
            return seen + 1e-14 * sum(jnp.sum(stress**2) for stress in state[3:9])

        begins = [o + before for o, (before, _) in zip(tile.origin, pml, strict=True)]
        part = tuple(slice(b, b + n) for b, n in zip(begins, tile.shape, strict=True))
        media = [jnp.asarray(x[part]) for x in whole]
        return part, mpigrad.jit(mpigrad.value_and_grad(misfit, comm=on))(media)

    part, (value, found) = gradient(comm, dims)
    _, (value_alone, expected) = gradient(alone, (1, 1, 1))
    assert all(np.all(x[tuple(n // 2 for n in padded)] != 0) for x in expected)
    compare(value, value_alone)
    compare(found, [x[part] for x in expected])


@pytest.mark.ranks(1)
def test_kernels_in_single_precision(comm):
    """Within a few digits of double precision, in a fluid too."""
    elastic = case.model(comm, backend="native", source="explosive")
    single = jax.tree.map(lambda x: x.astype("float32"), case.part(elastic))

    def energy(x):
        model = (x[name] for name in ("lam", "mu", "rho"))
        gathers = elastic.propagate(
            ElasticMedium(*model), x["wavelets"], case.SURVEY, x["state"]
        ).gathers
        return jnp.sum((gathers * np.array([1, 1, 1, 1e-7])[:, None, None]) ** 2)

    run = jax.jit(jax.grad(energy))
    expected = run(jax.tree.map(lambda x: x.astype("float64"), single))
    compare(run(single), expected, 1e-5)


@LONG
def test_dot_test(comm):
    run, zeros = case.relative(case.model(comm, backend="native"))
    assert mpigrad.dot_test(run, zeros, comm=comm, rtol=1e-12).error < 1e-12


@pytest.mark.ranks(1)
def test_tangents_agree_with_the_reference(comm):
    def tangent(backend):
        run, zeros = case.relative(case.model(comm, backend=backend, source="explosive"))
        draw = np.random.default_rng(4)
        direction = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape)), zeros)
        return jax.jvp(run, (zeros,), (direction,))

    compare(tangent("native"), jax.jit(lambda: tangent("xla"))())


@pytest.mark.full("the dot test tests the same derivatives")
def test_taylor_test(comm):
    run, zeros = case.relative(case.model(comm, backend="native", source="explosive"))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(case.SHOTS, 4, 2, case.STEPS)))

    def objective(x):
        gathers, fields = run(x)
        return jnp.sum((gathers - weights) ** 2) / comm.size + jnp.sum(fields[4] ** 2)

    mpigrad.taylor_test(objective, zeros, comm=comm, step=1e-3)


@pytest.mark.full("other runs keep a state every two steps, the root of their number")
def test_gradients_of_the_reference_do_not_depend_on_checkpoints(comm):
    got, *others = (
        case.value_and_gradient(case.model(comm, backend="xla", storage=Storage(k)))
        for k in (4, 2, "all")
    )
    for other in others:
        compare(got, other, 1e-13)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("keep", "stored"), [(None, 3), ("all", 9)])
def test_states_that_a_gradient_of_the_reference_stores(keep, stored, comm):
    """By default those of √9 steps, and then of the steps between two of them."""
    elastic = case.model(comm, backend="xla", steps=9, storage=Storage(keep))
    arrays = case.part(elastic) | {"wavelets": jnp.ones((case.SHOTS, 1, 9))}

    def energy(x):
        model = (x[name] for name in ("lam", "mu", "rho"))
        gathers = elastic.propagate(
            ElasticMedium(*model), x["wavelets"], case.SURVEY, x["state"]
        ).gathers
        return jnp.sum(gathers**2)

    program = str(jax.make_jaxpr(jax.grad(energy))(arrays))
    shape = ",".join(map(str, (case.SHOTS, *elastic.tile.shape)))
    counts = {int(n) for n in re.findall(rf"f64\[(\d+),{shape}\]", program)}
    assert max(counts) == stored, counts


@LONG
@pytest.mark.ranks(2)
@pytest.mark.cases("xla", reason="other tests compare native runs on 2 ranks with one rank")
@pytest.mark.parametrize("backend", ["native", "xla"])
def test_fields_that_do_not_vary_along_an_axis_are_those_of_two_axes(comm, alone, backend):
    """In the middle of that axis, to which nothing comes from the sides within the steps."""
    steps, cells, (hx, hy, hz) = 5, (9, 41, 8), (10.0, 11.0, 12.0)
    draw = np.random.default_rng(6)
    plane = [cells[0] + 5, cells[2] + 3]
    flat = [size * draw.normal(size=(1, *plane)) for size in (1, 1, 5e6, 5e6, 5e6)]
    model = [draw.uniform(*b, (cells[0], cells[2])) for b in ((6e9, 9e9), (3e9, 4e9), (2e3, 2e3))]
    wavelets = jnp.zeros((1, 1, steps))
    points = np.array([[[35.0, 40.0], [72.0, 81.3]]])
    common = {"dt": 1e-3, "steps": steps, "frequency": 15.0, "max_velocity": VP}
    elastic = Elastic(
        Grid((cells[0], cells[2]), (hx, hz), alone), pml=((2, 3), (0, 3)), components=("vx", "vy"),
        backend="native", **common,
    )  # fmt: skip
    layers = [jnp.zeros((1, 4, 5, plane[1])), jnp.zeros((1, 4, plane[0], 3))]
    state = State(*(jnp.asarray(x) for x in flat), *layers)
    expected = elastic.propagate(
        ElasticMedium(*map(jnp.asarray, model)), wavelets, Survey(points[:, :1], points), state
    ).gathers

    grid = Grid(cells, (hx, hy, hz), comm, dims=(comm.size, 1, 1))
    pml = ((2, 3), (0, 0), (0, 3))
    volume = Elastic(grid, pml=pml, components=("vx", "vz"), backend=backend, **common)
    tile = volume.tile
    shape, begin = tile.shape, tile.origin[0] + 2
    own = lambda f: jnp.asarray(f)[:, begin : begin + shape[0], None]
    wide = lambda f: jnp.broadcast_to(own(f), (1, *shape))
    start = at_rest(1, shape, (sum(tile.extension[0]), 0, 3), np.dtype("float64"))
    vx, vz, sxx, szz, sxz = map(wide, flat)
    start = start._replace(vx=vx, vz=vz, sxx=sxx, szz=szz, sxz=sxz)
    points = np.insert(points, 1, 20.5 * hy, axis=2)
    survey = Survey(points[:, :1], points)
    run = mpigrad.jit(
        lambda *media: volume.propagate(ElasticMedium(*media), wavelets, survey, start).gathers
    )
    part = [jnp.asarray(x[grid.slices[0], None]) for x in model]
    compare(run(*(jnp.broadcast_to(x, grid.local_shape) for x in part)), expected)


def green(direction, offset, times, slope):
    """The velocity from a point force along an axis (Aki and Richards 2002, equation 4.23).

    `slope` is the derivative of the force, a function of time.
    """
    r = np.linalg.norm(offset)
    cosines, unit = offset / r, np.eye(3)[direction]
    outward = cosines * cosines[direction]
    lags, weights = np.polynomial.legendre.leggauss(60)
    width = r / VS - r / VP
    lags = r / VP + width * (lags + 1) / 2
    near = sum(
        width / 2 * w * lag * slope(times - lag) for w, lag in zip(weights, lags, strict=True)
    )
    return (
        np.outer(3 * outward - unit, near) / r**3
        + np.outer(outward, slope(times - r / VP)) / (VP**2 * r)
        - np.outer(outward - unit, slope(times - r / VS)) / (VS**2 * r)
    ) / (4 * np.pi * RHO)


@pytest.mark.ranks(2)
def test_a_point_force_in_a_homogeneous_medium(comm):
    """Near and far field, within 2 % of the largest velocity."""
    f, h, dt, steps = 10.0, 10.0, 1.9e-3, 140
    force = lambda t: 1e9 * np.exp(-((np.pi * f * (t - 0.1)) ** 2))
    slope = lambda t: -2 * (np.pi * f) ** 2 * (t - 0.1) * force(t)
    # On the grids of vx, vy and vz in turn, so that nothing is interpolated.
    source = np.array([105.0, 105.0, 110.0])
    points = np.array([[170.0, 145.0, 135.0], [165.0, 150.0, 135.0], [165.0, 145.0, 140.0]])
    grid = Grid((24, 24, 24), (h,) * 3, comm)
    elastic = Elastic(
        grid, dt, steps, f, pml=8, source="force_z", components=("vx", "vy", "vz"), max_velocity=VP
    )
    media = (jnp.full(grid.local_shape, x) for x in (*lame(VP, VS, RHO), RHO))
    wavelet = jnp.asarray(force(np.arange(steps) * dt))[None, None]
    survey = Survey(source[None, None], points[None])
    got = np.asarray(elastic.propagate(ElasticMedium(*media), wavelet, survey).gathers)[0]
    times = (np.arange(steps) - 0.5) * dt
    expected = np.stack([green(2, x - source, times, slope)[k] for k, x in enumerate(points)])
    error = np.abs(np.stack([got[k, k] for k in range(3)]) - expected)
    assert np.max(np.abs(expected[:, -1])) < 0.05 * np.max(np.abs(expected))
    assert np.max(error) < 0.02 * np.max(np.abs(expected))


@pytest.mark.ranks(1, 3)
@pytest.mark.thin(1)
def test_reciprocity(comm):
    """The positions of a force and of a recorded velocity component can be exchanged."""
    a, b = [43.0, 37.0, 51.0], [61.0, 58.5, 22.2]
    arrays, traces = case.arrays(), []
    wavelet = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 40)))
    for source, component, s, r in (("force_x", "vz", a, b), ("force_z", "vx", b, a)):
        elastic = case.model(comm, pml=0, steps=40, source=source, components=(component,))
        part = [jnp.asarray(arrays[k][elastic.grid.slices]) for k in ("lam", "mu", "rho")]
        survey = Survey(np.array([[s]]), np.array([[r]]))
        traces.append(np.asarray(elastic.propagate(ElasticMedium(*part), wavelet, survey).gathers))
    assert np.max(np.abs(traces[0])) > 0
    compare(traces[0], traces[1])


@pytest.mark.full("the same bound is tested on two axes")
@pytest.mark.ranks(1)
def test_the_largest_time_step_is_stable_next_to_air(comm):
    """Against the largest eigenvalue of the discrete equations on a small grid."""
    cells = (6, 5, 7)
    elastic = Elastic(Grid(cells, (10.0, 12.0, 9.0), comm), 1.0, 2, 15.0, pml=0, max_velocity=3e3)
    survey = Survey(np.full((1, 1, 3), 50.0), np.full((1, 1, 3), 50.0))
    scheme = make_scheme(elastic, survey)
    basis = np.eye(3 * np.prod(cells)).reshape(-1, 3, *cells)

    @jax.jit
    def twice(lam, mu, rho):
        """The change of velocities in a second step of length 1, after which stress is theirs."""
        state = at_rest(len(basis), cells, (0, 0, 0), np.dtype("float64"))
        vx, vy, vz = (jnp.asarray(basis[:, k]) for k in range(3))
        state = state._replace(vx=vx, vy=vy, vz=vz)
        media = effective_media(lam, mu, rho, scheme.tile)
        for _ in range(2):
            state = reference.step(scheme, media, state, jnp.zeros(()))
        return jnp.stack(state[:3], axis=1) - basis

    for light, velocity, low in ((2500.0, 4000.0, 0.85), (1000.0, 1500.0, 0.85), (1.2, 340.0, 0.3)):
        rho, vp, vs = (np.full(cells, x) for x in (2500.0, 4000.0, 2300.0))
        rho[..., :3], vp[..., :3] = light, velocity
        vs[..., :3] = 0.0 if velocity < 2000 else 2300.0
        model = [jnp.asarray(x) for x in (*lame(vp, vs, rho), rho)]
        matrix = -np.asarray(twice(*model)).reshape(len(basis), -1)
        largest = 2 / np.sqrt(np.linalg.eigvals(matrix).real.max())
        assert low < elastic.largest_time_step(ElasticMedium(*model)) / largest < 1


@pytest.mark.ranks(2)
def test_a_history_of_16_bits_has_nearly_the_gradient(comm):
    """With a force, which changes the history of the step before for a moment."""
    slopes = []
    for precision in (None, "float16"):
        elastic = case.model(comm, source="force_z", storage=Storage("all", precision=precision))
        at = case.part(elastic)

        def energy(mu, elastic=elastic, at=at):
            run = elastic.propagate(
                ElasticMedium(at["lam"], mu, at["rho"]), at["wavelets"], case.SURVEY
            )
            return jnp.sum(run.gathers**2)

        slopes.append(mpigrad.jit(mpigrad.grad(energy, loss="replicated"))(at["mu"]))
    exact, near = slopes
    error = jnp.linalg.norm((near - exact).ravel()) / jnp.linalg.norm(exact.ravel())
    assert 0 < error < 5e-3


def test_bad_input_is_refused(comm):
    elastic = case.model(comm)
    at, last = case.part(elastic), comm.rank == comm.size - 1

    def run(**changed):
        x = {**at, **changed}
        return elastic.propagate(
            ElasticMedium(x["lam"], x["mu"], x["rho"]), x["wavelets"], case.SURVEY
        ).gathers

    for name, value in (("rho", np.nan), ("mu", -1.0), ("lam", -2e9)):
        bad = at[name].at[0, 0, 0].set(value) if last else at[name]
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"lambda \+ 2/3 mu and the density"):
            jax.block_until_ready(run(**{name: bad}))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"largest stable one is \d"):
        jax.block_until_ready(run(rho=at["rho"] / 100))
    with pytest.raises(ValueError, match="memory_z of the state is"):
        elastic.propagate(
            ElasticMedium(at["lam"], at["mu"], at["rho"]), at["wavelets"], case.SURVEY,
            at["state"]._replace(memory_z=at["state"].memory_z[:, :4]),
        )  # fmt: skip
    with pytest.raises(ValueError, match="z0, z1"):
        case.model(comm, pml=((1, 1), (1, 1)))
    with pytest.raises(ValueError, match=r"components must be some of .* on 2 axes, got \('vz',\)"):
        Elastic(Grid((9, 8), (1.0, 1.0), comm), 1e-3, 2, 15.0, components=("vz",))
    with pytest.raises(ValueError, match=r"source must be one of .* on 2 axes, got 'force_z'"):
        Elastic(Grid((9, 8), (1.0, 1.0), comm), 1e-3, 2, 15.0, source="force_z")
