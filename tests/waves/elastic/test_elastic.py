"""Elastic waves: kernels, reference, one rank and many ranks, and their derivatives."""

import functools

import elastic_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launching
import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Storage
from mpigrad.waves import native_run as primitive
from mpigrad.waves.elastic import Elastic, ElasticMedium, Survey, lame, reference
from mpigrad.waves.elastic.media import at_rest, effective_media
from mpigrad.waves.elastic.model import make_scheme

COMPONENTS = ("vx", "vy", "pressure")


@functools.cache
def value_and_gradient(comm, source="explosive", kind="complete", **settings):
    """Gathers, state, and the gradient of a functional of both, global where it is replicated."""
    counted = comm.size if kind == "complete" else 1  # how many ranks have a number of the gathers
    elastic = case.model(comm, source=source, components=COMPONENTS, **settings)
    survey = case.survey()
    part = case.mine(elastic, case.arrays())
    random = np.random.default_rng(3)
    weights = random.normal(size=(case.SHOTS, len(COMPONENTS), 3, case.STEPS))
    weights[:, 2] *= 1e-7  # of the pressure, in Pa
    weights = jnp.asarray(weights)

    def objective(arrays):
        wavelets = mpigrad.bcast(arrays["wavelets"], comm=comm)
        model = (arrays[name] for name in ("lam", "mu", "rho"))
        gathers, state = elastic.propagate(
            ElasticMedium(*model), wavelets, survey, arrays["state"], kind
        )
        last = sum(jnp.sum(x**2) for x in (state.vx, state.vy))
        last += 1e-14 * sum(jnp.sum(x**2) for x in (state.sxx, state.syy, state.sxy))
        for memory in (state.memory_x, state.memory_y):
            last += 1e-12 * jnp.sum(memory[:, :2] ** 2) + jnp.sum(memory[:, 2:] ** 2)
        return jnp.sum(gathers * weights) / counted + last, (gathers, state)

    (_, (gathers, state)), gradient = mpigrad.jit(
        mpigrad.value_and_grad(objective, has_aux=True, comm=comm)
    )(part)
    return elastic, gathers, state, gradient


@pytest.mark.thin(1)
@pytest.mark.parametrize("order", [4, 8])
def test_kernels_agree_with_the_reference(comm, order):
    got = value_and_gradient(comm, backend="native", order=order)
    case.compare(got[1:], value_and_gradient(comm, backend="xla", order=order)[1:])


@pytest.mark.parametrize("order", [4, 8])
def test_kernels_agree_with_one_rank(comm, alone, order):
    settings = {"backend": "native", "order": order}
    elastic, gathers, state, gradient = value_and_gradient(comm, **settings)
    # The one-rank program has the whole arrays; a tile's memories are pieces of its.
    _, gathers_alone, state_alone, gradient_alone = value_and_gradient(alone, **settings)
    case.compare(gathers, gathers_alone)
    case.compare(state, case.mine(elastic, {**case.arrays(), "state": state_alone})["state"])
    case.compare(
        {name: gradient[name] for name in ("lam", "mu", "rho")},
        {name: gradient_alone[name][elastic.grid.slices] for name in ("lam", "mu", "rho")},
    )
    if comm.rank == 0:
        case.compare(gradient["wavelets"], gradient_alone["wavelets"])
    case.compare(
        gradient["state"], case.mine(elastic, {**case.arrays(), **gradient_alone})["state"]
    )


@pytest.mark.full("acoustic waves have the same test")
@pytest.mark.ranks(2)
def test_the_reference_is_batched_on_a_rank_without_points(comm):
    """By JAX's own vmap over wavelets: halos of its fields meet batched ones."""
    xla, native = (case.model(comm, steps=4, backend=backend) for backend in ("xla", "native"))
    near = Survey(np.array([[[21.7, 20.0]]]), np.array([[[25.0, 30.0]]]))  # on rank 0
    assert (len(make_scheme(xla, near).source_table.cells) == 0) == (comm.rank == 1)
    part = case.mine(xla, case.arrays())
    media = [part[name] for name in ("lam", "mu", "rho")]
    w = part["wavelets"][:1, :1, :4]

    def run(ws):
        batched = jax.vmap(lambda w: xla.propagate(ElasticMedium(*media), w, near).gathers)
        one = native.propagate(ElasticMedium(*media), ws[0], near).gathers
        return one, jax.jvp(batched, (ws,), (ws[::-1],))

    one, (batch, tangent) = jax.jit(run)(jnp.stack([w, 2 * w]))
    assert jnp.any(one != 0)
    case.compare((batch, tangent), (jnp.stack([one, 2 * one]), jnp.stack([2 * one, one])))


@pytest.mark.ranks(2, 4)
@pytest.mark.thin(2, 4, reason="4: tiles have edges along both axes, and wait for two neighbours")
@pytest.mark.parametrize("dims", [(2, 1), (1, 2), (2, 2)])
def test_tiles_with_a_middle_are_one_rank(comm, alone, dims):
    """Rows of a tile's middle take both phases at once, beside edges that wait for neighbours."""
    if np.prod(dims) != comm.size:
        pytest.skip(f"a grid of {dims[0]} x {dims[1]} tiles needs {np.prod(dims)} ranks")
    cells = (50, 60)
    random = np.random.default_rng(5)
    # K, mu, mu at the points of shear stresses, 1/rho at those of velocities, layers included. The
    # native run by itself: programs that average the model take long to compile.
    padded = [n + sum(pair) for n, pair in zip(cells, case.PML, strict=True)]
    bounds = ((1e10, 1.5e10), (3e9, 4e9), (3e9, 4e9), (4.5e-4, 5.3e-4), (4.5e-4, 5.3e-4))
    whole = [random.uniform(*pair, padded) for pair in bounds]
    # Waves everywhere within a few steps, in the layers too.
    places = np.meshgrid(np.linspace(5, 495, 9), np.linspace(6, 714, 11))
    sources = np.stack([x.ravel() for x in places], -1)[None]
    survey = Survey(sources, np.array([[[45.0, 30.0], [247.0, 361.2], [470.0, 640.0]]]))
    wavelets = jnp.asarray(1e9 * random.normal(size=(1, sources.shape[1], 12)))

    def gradient(on, dims, **kept):
        grid = Grid(cells, (10.0, 12.0), on, dims=dims)
        common = {"frequency": 15.0, "pml": case.PML, "components": COMPONENTS}
        scheme = make_scheme(Elastic(grid, 1.5e-3, 12, **common, **kept), survey)
        tile = scheme.tile

        def misfit(media):
            gathers, state = primitive.propagate(scheme.native, media, wavelets, None)
            sizes = np.array([1, 1, 1e-7])[:, None, None]
            return jnp.sum(gathers.reshape(3, 3, 12) * sizes) + jnp.sum(state[0] ** 2)

        begins = [o + before for o, (before, _) in zip(tile.origin, case.PML, strict=True)]
        part = tuple(slice(b, b + n) for b, n in zip(begins, tile.shape, strict=True))
        media = [jnp.asarray(x[part]) for x in whole]
        return part, mpigrad.jit(mpigrad.value_and_grad(misfit, comm=on))(media)

    part, (value, found) = gradient(comm, dims)
    _, (value_alone, expected) = gradient(alone, (1, 1))
    assert all(np.all(x[tuple(n // 2 for n in padded)] != 0) for x in expected)
    case.compare(value, value_alone)
    case.compare(found, [x[part] for x in expected])
    case.compare(gradient(comm, dims, storage=Storage("boundary"))[1][1], found)


def test_shares_of_the_gathers(comm):
    _, share, *rest = value_and_gradient(comm, kind="share", backend="native")
    _, complete, *expected = value_and_gradient(comm, backend="native")
    case.compare((comm.mpi.allreduce(np.asarray(share)), *rest), (complete, *expected))


@pytest.mark.full("forces are also sources of the dot test and of the reciprocity test")
@pytest.mark.parametrize("source", ["force_x", "force_y"])
def test_forces(comm, source):
    got = value_and_gradient(comm, source, backend="native")
    case.compare(got[1:], value_and_gradient(comm, source, backend="xla")[1:])


KEPT = [
    {"storage": Storage(5)},
    {"storage": Storage(memory=40_000)},
    {"threads": 2},
    {"storage": Storage("boundary")},
    {"storage": Storage("boundary"), "threads": 2, "source": "force_x"},
]


@pytest.mark.parametrize(
    "settings",
    [
        KEPT[0],
        pytest.param(
            KEPT[1], marks=pytest.mark.full("memory, too, sets the number of stored states")
        ),
        *(pytest.param(k, marks=pytest.mark.full("the last case covers it")) for k in KEPT[2:-1]),
        KEPT[-1],
    ],
)
def test_gradients_do_not_depend_on_checkpoints(comm, settings):
    got = value_and_gradient(comm, backend="native", **settings)
    source = settings.get("source", "explosive")
    tolerance = 1e-12 if settings.get("storage", Storage()).keep == "boundary" else 1e-13
    case.compare(got[1:], value_and_gradient(comm, source, backend="native")[1:], tolerance)


@pytest.mark.full("it tests jax.checkpoint around the scan, which other tests run without")
def test_checkpoints_of_the_reference(comm):
    got = value_and_gradient(comm, backend="xla", storage=Storage(5))
    case.compare(got[1:], value_and_gradient(comm, backend="xla")[1:], 1e-13)


def relative(elastic, survey, part):
    """The run as a function of numbers of order one, which all may change."""

    def run(lam, mu, rho, wavelets, state):
        gathers, state = elastic.propagate(
            ElasticMedium(part["lam"] * (1 + lam), part["mu"] * (1 + mu), part["rho"] * (1 + rho)),
            part["wavelets"] * (1 + mpigrad.bcast(wavelets, comm=elastic.grid.comm)), survey,
            jax.tree.map(lambda x, dx: x * (1 + dx), part["state"], state),
        )  # fmt: skip
        # Velocities, and stresses in units of theirs.
        memory = np.array([5e5, 5e5, 0.1, 0.1])[:, None, None]
        sizes = (1, 1, 5e6, 5e6, 5e6, memory, memory)
        fields = [x / size for x, size in zip(jax.tree.leaves(state), sizes, strict=True)]
        return gathers[:, :2], gathers[:, 2] / 5e6, fields

    return run, tuple(
        jax.tree.map(jnp.zeros_like, part[k]) for k in ("lam", "mu", "rho", "wavelets", "state")
    )


@pytest.mark.ranks(1, 2, 3)
def test_dot_test_of_the_linearised_run(comm):
    elastic = case.model(comm, source="force_x", components=COMPONENTS, backend="native")
    run, zeros = relative(elastic, case.survey(), case.mine(elastic, case.arrays()))
    assert mpigrad.dot_test(run, *zeros, rtol=1e-12).error < 1e-12


@pytest.mark.full("the dot test and the reference test the same derivatives")
def test_taylor_test(comm):
    elastic = case.model(comm, backend="native")
    run, zeros = relative(elastic, case.survey(), case.mine(elastic, case.arrays()))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2, 3, case.STEPS)))

    def objective(arrays):
        velocities, _, fields = run(*arrays)
        return jnp.sum((velocities - weights) ** 2) / comm.size + jnp.sum(fields[2] ** 2)

    mpigrad.taylor_test(objective, zeros, comm=comm, step=1e-3)


@pytest.mark.ranks(1, 3)
@pytest.mark.thin(1)
def test_reciprocity(comm):
    """The positions of a force and of a recorded velocity component can be exchanged."""
    a, b = [43.0, 37.0], [101.0, 88.5]
    arrays = case.arrays()
    wavelet = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 60)))
    traces = []
    for source, component, s, r in (("force_x", "vy", a, b), ("force_y", "vx", b, a)):
        elastic = case.model(comm, pml=0, steps=60, source=source, components=(component,))
        part = [jnp.asarray(arrays[k][elastic.grid.slices]) for k in ("lam", "mu", "rho")]
        survey = Survey(np.array([[s]]), np.array([[r]]))
        traces.append(np.asarray(elastic.propagate(ElasticMedium(*part), wavelet, survey).gathers))
    case.compare(traces[0], traces[1])


@pytest.mark.thin(1)
def test_lame(comm):
    lam, mu = lame(jnp.asarray([3000.0, 1500.0]), jnp.asarray([1500.0, 0.0]), jnp.full(2, 2e3))
    np.testing.assert_allclose(lam, [9e9, 4.5e9])
    np.testing.assert_allclose(mu, [4.5e9, 0])


# ---- errors on all ranks ----


@pytest.mark.ranks(2)
def test_the_fastest_rank_limits_the_time_step(comm):
    """Of 24 h / (28 sqrt(2) vp)."""
    grid = Grid((8, 8), (10.0, 10.0), comm)
    vp = 2000.0 * (1 + comm.rank)
    model = lame(*(jnp.full(grid.local_shape, x) for x in (vp, 1000.0, 2000.0)))
    found = Elastic(grid, 1e-4, 1, 10.0).largest_time_step(
        ElasticMedium(*model, jnp.full(grid.local_shape, 2e3))
    )
    assert found == pytest.approx(240 / (28 * np.sqrt(2) * 4000.0), rel=1e-6)


@pytest.mark.ranks(1, 2, 3)
def test_rejects_invalid_models_on_all_ranks(comm):
    good = case.mine(case.model(comm), case.arrays())
    last = comm.rank == comm.size - 1
    elastic, survey = case.model(comm), case.survey()

    def run(**changed):
        part = {**good, **changed}
        names = ("lam", "mu", "rho", "wavelets")
        *tiles, wavelets = (part[k] for k in names)
        return elastic.propagate(ElasticMedium(*tiles), wavelets, survey).gathers

    def spoilt(name, value):
        return {name: good[name].at[0, 0].set(value) if last else good[name]}

    for name, value in (
        ("rho", np.nan), ("rho", -1.0), ("rho", np.inf), ("mu", -1.0), ("lam", np.inf),
    ):  # fmt: skip
        with pytest.raises(jax.errors.JaxRuntimeError, match="must be positive, mu must not be"):
            jax.block_until_ready(run(**spoilt(name, value)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"largest stable one is \d"):
        jax.block_until_ready(run(**spoilt("rho", 1.0)))
    with pytest.raises(ValueError, match="lam has shape"):
        run(**{k: good[k][1:] if last else good[k] for k in ("lam", "mu", "rho")})
    with pytest.raises(ValueError, match="must be float32 or float64, the same"):
        run(rho=good["rho"].astype("float32"))
    with pytest.raises(ValueError, match="wavelets have shape"):
        run(wavelets=good["wavelets"][:, :, :-1])
    medium = ElasticMedium(good["lam"], good["mu"], good["rho"])
    with pytest.raises(ValueError, match="vx of the state is"):
        elastic.propagate(
            medium, good["wavelets"], survey,
            jax.tree.map(lambda x: x[:1], good["state"]),
        )  # fmt: skip
    with pytest.raises(TypeError, match="ElasticMedium"):
        elastic.propagate(tuple(medium), good["wavelets"], survey)
    outside = Survey(survey.sources, survey.receivers + 100)
    with pytest.raises(ValueError, match="receivers lie outside the model"):
        elastic.propagate(medium, good["wavelets"], outside)


def test_rejects_invalid_settings(comm):
    for settings, message in (
        ({"dt": 0.0}, "dt must be positive"),
        ({"frequency": -1.0}, "frequency must be positive"),
        ({"components": ()}, "components must be some of"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"reflection": 2.0}, "reflection must lie"),
        ({"max_velocity": -2.0}, "max_velocity must be positive"),
        ({"pml": -1}, "widths must not be negative"),
        ({"order": 6}, r"order must be one of \(4, 8\), got 6"),
    ):
        with pytest.raises(ValueError, match=message):
            case.model(comm, **settings)
    if comm.size > 1:
        with pytest.raises(ValueError, match="the stencil reaches 2 cells"):
            Elastic(Grid((comm.size, 9), (1.0, 1.0), comm, dims=(comm.size, 1)), 1e-3, 3, 1.0)


def test_largest_time_step(comm):
    whole = case.arrays()
    stiffness = whole["lam"] + 2 * whole["mu"]
    square = np.max(stiffness / whole["rho"])
    beyond = np.max(stiffness) / np.min(whole["rho"]) - square
    h = np.hypot(*(1 / np.asarray(case.SPACING)))
    for order, norm, far in ((4, 7 / 3, 0.0437), (8, 2.572619047619048, 0.0708)):
        elastic = case.model(comm, order=order)
        part = case.mine(elastic, whole)
        step = elastic.largest_time_step(ElasticMedium(part["lam"], part["mu"], part["rho"]))
        expected = 2 / (norm * h * (square + beyond * far**2) ** 0.5)
        assert step == pytest.approx(expected, rel=1e-12)


class StepsOfOrder:
    """The largest time step over the largest stable one."""

    def __init__(self, comm, order, cells, spacing):
        self.elastic = Elastic(
            Grid(cells, spacing, comm), 1.0, 2, 15.0, order=order, pml=0, max_velocity=3e3
        )
        survey = Survey(np.full((1, 1, 2), 50.0), np.full((1, 1, 2), 60.0))
        scheme = make_scheme(self.elastic, survey)
        self.basis = np.eye(2 * cells[0] * cells[1]).reshape(-1, 2, *cells)

        @jax.jit
        def twice(lam, mu, rho):
            """The change of velocities in a second step of length 1, whose stress is theirs."""
            rest = at_rest(len(self.basis), cells, (0, 0), np.dtype("float64"))
            media = effective_media(lam, mu, rho, scheme.tile)
            vx, vy = (jnp.asarray(self.basis[:, k]) for k in (0, 1))
            state = rest._replace(vx=vx, vy=vy)
            for _ in range(2):
                state = reference.step(scheme, media, state, jnp.zeros(()))
            return jnp.stack([state.vx, state.vy], axis=1) - self.basis

        self.twice = twice

    def ratio(self, vp, vs, rho):
        """Our step over 2 / sqrt(eigenvalue)."""
        model = [jnp.asarray(x) for x in (*lame(vp, vs, rho), rho)]
        matrix = -np.asarray(self.twice(*model)).reshape(len(self.basis), -1)
        largest = 2 / np.sqrt(np.linalg.eigvals(matrix).real.max())
        return self.elastic.largest_time_step(ElasticMedium(*model)) / largest


@pytest.mark.ranks(1)
@pytest.mark.parametrize("order", [4, 8])
def test_the_largest_time_step_is_stable_next_to_air(comm, order):
    """Against the largest eigenvalue of the discrete equations on a small grid."""
    cells = (10, 9)
    steps = StepsOfOrder(comm, order, cells, (10.0, 12.0))

    def ratio(light, velocity):
        """Our step over the largest stable one, with lighter cells above."""
        rho, vp, vs = (np.full(cells, x) for x in (2500.0, 4000.0, 2300.0))
        rho[:, :4], vp[:, :4], vs[:, :4] = light, velocity, 0.0
        return steps.ratio(vp, vs, rho)

    assert (0.95 if order == 4 else 0.9) < ratio(1000.0, 1500.0) < 1
    assert 0.3 < ratio(1.2, 340.0) < 1
    assert (
        (0.26 if order == 4 else 0.28) < ratio(0.01, 340.0) < 1
    )  # the largest velocity alone says more than 1


@pytest.mark.ranks(1)
@pytest.mark.parametrize("order", [4, 8])
def test_the_largest_time_step_is_stable_in_thin_layers(comm, order):
    """Every third layer is heavy, the pattern that needs the smallest step (decision 0119)."""
    cells = (4, 40)
    steps = StepsOfOrder(comm, order, cells, (1e4, 10.0))
    rho = np.full(cells, 1000.0)
    for contrast in (40.0, 60.0):
        rho[:, 1::3] = 1000.0 * contrast
        assert 0.99 < steps.ratio(np.full(cells, 1500.0), np.zeros(cells), rho) < 1


@pytest.mark.launcher
@pytest.mark.full("two to four ranks run the same program")
def test_six_ranks(tmp_path):
    launching.on_six_ranks(
        tmp_path,
        __file__,
        "import test_elastic as t",
        "t.test_kernels_agree_with_the_reference(world, 4)",
        "t.test_kernels_agree_with_one_rank(world, alone, 4)",
    )
