"""Elastic waves at a free surface: exact solutions of Lamb's problem, symmetries, bad input."""

import elastic_volume_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elastic_case import compare

import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Storage
from mpigrad.waves.elastic import Elastic, ElasticMedium, Survey, lame, reference
from mpigrad.waves.elastic.media import at_rest, effective_media
from mpigrad.waves.elastic.model import make_scheme

VP, VS, RHO = 2500.0, 1400.0, 2100.0
# Short: the exact solution, reciprocity, and the eigenvalues of a step.
LONG = pytest.mark.long("it compiles the JAX program on each rank")


def homogeneous(grid, vp=VP, vs=VS, rho=RHO):
    return [jnp.full(grid.local_shape, x) for x in (*lame(vp, vs, rho), rho)]


def garvin(x, depth, times, rate):
    """Velocity of the surface (along it, and into the medium) from a buried line of explosions.

    Garvin's problem ("Exact transient solution of the buried line source problem", 1956), by the
    method of Cagniard and de Hoop. `rate` is the derivative of the wavelet, a function of time.
    """
    a, b, r = 1 / VP, 1 / VS, np.hypot(x, depth)
    nodes, weights = np.polynomial.legendre.leggauss(300)
    velocity = np.zeros((2, len(times)))
    for i, t in enumerate(times):
        if t <= r * a:
            continue
        top = np.arccosh(t / (r * a))
        angle, weight = top * (nodes + 1) / 2, weights * top / 2
        q = a / r * (x * np.cosh(angle) + 1j * depth * np.sinh(angle))
        slope = a / r * (x * np.sinh(angle) + 1j * depth * np.cosh(angle))
        p, s, g = np.sqrt(a * a - q * q), np.sqrt(b * b - q * q), b * b - 2 * q * q
        rayleigh = g * g + 4 * q * q * p * s
        for k, factor in enumerate((-2 * q * s, g)):
            terms = rate(t - r * a * np.cosh(angle)) * (factor / rayleigh * slope).imag
            velocity[k, i] = np.sum(weight * terms) / (np.pi * RHO * (VP * VS) ** 2)
    return velocity


def garvin_error(comm, refinement, order=4):
    """The largest error of vx and vy at two places of the surface, each relative to its largest."""
    f, h, dt, steps = 8.0, 10.0 / refinement, 2e-3 / refinement, 200 * refinement
    w = lambda t: 1e6 * np.exp(-((np.pi * f * (t - 0.15)) ** 2))
    rate = lambda t: -2 * (np.pi * f) ** 2 * (t - 0.15) * w(t)
    grid = Grid((50 * refinement, 24 * refinement), (h, h), comm)
    elastic = Elastic(
        grid, dt, steps, f, order=order, pml=15 * refinement, free_surface="y0", max_velocity=VP
    )
    source = np.array([100.0 + h / 2, 40.0 + h / 2])
    offsets, times = (100.0, 250.0), (np.arange(steps) - 0.5) * dt
    receivers = np.array([[source[0] + x, 0.0] for x in offsets])
    wavelet = jnp.asarray(w((np.arange(steps) + 0.5) * dt))[None, None]
    survey = Survey(source[None, None], receivers[None])
    run = mpigrad.jit(
        lambda *media: elastic.propagate(ElasticMedium(*media), wavelet, survey).gathers
    )
    got = np.asarray(run(*homogeneous(grid)))[0]
    expected = np.stack([garvin(x, source[1], times, rate) for x in offsets], 1)
    return np.max(np.max(np.abs(got - expected), 2) / np.max(np.abs(expected), 2))


@pytest.mark.thin(1)
@pytest.mark.parametrize("order", [4, 8])
def test_the_surface_above_a_line_of_explosions(comm, order):
    """Garvin's problem with P, S and Rayleigh waves, within 1 %."""
    assert garvin_error(comm, 1, order) < 0.01


@pytest.mark.full("it refines the grid and takes long")
@pytest.mark.ranks(2)
def test_the_error_at_the_surface_falls_with_smaller_cells(comm):
    coarse, fine = (garvin_error(comm, n) for n in (1, 2))
    assert coarse / fine > 6


def lamb(r, times, curvature, vs, rho):
    """Vertical velocity of the surface from a vertical force on it, if vp^2 = 3 vs^2.

    Pekeris, "The seismic surface pulse", 1955. `curvature` is the second derivative of the force.
    """
    s, root = 3**0.5, 0.75 + 3**0.5 / 4
    nodes, weights = np.polynomial.legendre.leggauss(200)
    x, w = (nodes + 1) / 2, weights / 2
    late = times[-1] * vs / r - root**0.5
    start, middle, end = 1 / s, 1.0, root**0.5
    early = start + (middle - start) * x
    before = end - (end - middle) * x**2  # closer to the singularity of the Rayleigh wave
    pole = lambda t: np.sqrt(3 * s + 5) / np.sqrt(root - t**2)
    head = np.sqrt(3 * s - 5) / np.sqrt(early**2 + s / 4 - 0.75)
    parts = (
        (early, w * (middle - start), (6 - s / np.sqrt(early**2 - 0.25) - pole(early) + head) / 32),
        (before, w * 2 * x * (end - middle), (6 - pole(before)) / 16),
        (end + late * x, w * late, np.full(len(x), 6 / 16)),
    )
    total = sum(
        np.sum(weight * value * curvature(times[:, None] - t * r / vs), axis=1)
        for t, weight, value in parts
    )
    return total * r / vs / (np.pi * rho * vs**2 * r)


@pytest.mark.full("Garvin's problem tests the same surface, and this volume takes long")
@pytest.mark.ranks(2)
def test_a_force_on_the_surface_of_a_half_space(comm):
    """Lamb's problem in three dimensions, within 2 %."""
    f, h, dt, steps, vs, rho, r = 8.0, 10.0, 1.9e-3, 130, 1500.0, 2000.0, 150.0
    squared, start = (np.pi * f) ** 2, 1 / f
    force = lambda t: 1e9 * np.exp(-squared * (t - start) ** 2)
    curvature = lambda t: force(t) * (4 * squared**2 * (t - start) ** 2 - 2 * squared)
    grid = Grid((30, 20, 16), (h, h, h), comm, dims=(comm.size, 1, 1))
    elastic = Elastic(
        grid, dt, steps, f, pml=10, free_surface="z0", source="force_z", components=("vz",)
    )
    source = np.array([75.0, 105.0, 0.0])
    survey = Survey(source[None, None], (source + np.array([r, 0, 0]))[None, None])
    wavelet = jnp.asarray(force(np.arange(steps) * dt))[None, None]
    run = mpigrad.jit(
        lambda *media: elastic.propagate(ElasticMedium(*media), wavelet, survey).gathers
    )
    got = np.asarray(run(*homogeneous(grid, 3**0.5 * vs, vs, rho)))[0, 0, 0]
    expected = lamb(r, (np.arange(steps) - 0.5) * dt, curvature, vs, rho)
    assert np.max(np.abs(got - expected)) < 0.02 * np.max(np.abs(expected))


def random_model(shape, seed=5):
    """lam, mu and rho, with water in a corner at the surface."""
    draw = np.random.default_rng(seed)
    lam, mu = draw.uniform(6e9, 9e9, shape), draw.uniform(3e9, 4e9, shape)
    mu[:4, :4] = 0
    return lam, mu, draw.uniform(1900, 2200, shape)


@LONG
@pytest.mark.cases("[14]-[48]-gathers", reason="the dot test has gradients on 2 ranks")
@pytest.mark.parametrize("gradients", [False, True], ids=["gathers", "gradients"])
@pytest.mark.parametrize(("axis", "order"), [(1, 4), (0, 8)])
def test_opposite_sides_are_mirror_images(comm, alone, gradients, axis, order):
    """On tiles divided across the surface, as one rank and as the JAX program have them."""
    turn = 1 if axis else -1  # of what is written for a surface along the last axis
    cells, h, steps = (9, 33)[::turn], (10.0, 12.0)[::turn], 30
    height = cells[axis] * h[axis]
    source, points = np.array([[51.7, 3.0]]), np.array([[20.0, 0.0], [83.2, 8.0], [44.0, 150.0]])
    source, points = source[:, ::turn], points[:, ::turn]
    wavelet = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, steps)))
    mirror = lambda x: np.where(np.arange(2) == axis, height - x, x)
    first, last = (f"{'xy'[axis]}{end}" for end in (0, 1))

    def run(on, side, backend="native"):
        grid = Grid(cells, h, on, dims=(1, on.size)[::turn])
        pair = (0, 3) if side == first else (3, 0)
        elastic = Elastic(
            grid, 1.4e-3, steps, 15.0, order=order, pml=((2, 3), pair)[::turn], free_surface=side,
            source=f"force_{side[0]}", backend=backend,
        )  # fmt: skip
        place = (lambda x: x) if side == first else mirror
        survey = Survey(place(source)[None], place(points)[None])
        whole = random_model(cells)
        whole = whole if side == first else [np.flip(x, axis) for x in whole]

        def misfit(media):
            gathers = elastic.propagate(ElasticMedium(*media), wavelet, survey).gathers
            return 1e18 * jnp.sum(gathers**2) / on.size, gathers

        media = [jnp.asarray(x[grid.slices]) for x in whole]
        if not gradients:
            return grid, mpigrad.jit(misfit)(media)[1], []
        (_, gathers), slopes = mpigrad.jit(mpigrad.value_and_grad(misfit, has_aux=True, comm=on))(
            media
        )
        return grid, gathers, slopes

    grid, gathers, slopes = run(comm, first)
    _, expected, whole = run(alone, first)
    compare(gathers, expected)
    compare(slopes, [x[grid.slices] for x in whole])
    # A force along the axis turns with it, and so does that velocity.
    _, mirrored, turned = run(alone, last)
    compare(mirrored * np.array([-1, 1])[::turn, None, None], expected)
    compare([jnp.flip(x, axis) for x in turned], whole)
    _, *expected = run(alone, first, "xla")
    compare([gathers, *slopes], [expected[0], *(x[grid.slices] for x in expected[1])])


@LONG
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.cases("x0", reason="along rows, both phases in one pass are further apart")
@pytest.mark.parametrize("side", ["x0", "y1", "z0"])
def test_kernels_agree_with_the_reference_in_three_dimensions(comm, alone, side):
    """Fields and all gradients, whose layers and memories lie on other sides. Boundary saving."""
    axis, end = "xyz".index(side[0]), int(side[1])
    pml = [pair if a != axis else ((0, 2), (2, 0))[end] for a, pair in enumerate(case.LAYERS)]
    settings = {"free_surface": side, "pml": tuple(pml)}
    dims = tuple(comm.size if a == (axis + 1) % 3 else 1 for a in range(3))
    elastic = case.model(comm, dims, backend="native", **settings)
    gathers, state, slope = case.value_and_gradient(elastic)
    reference = case.value_and_gradient(case.model(alone, backend="xla", **settings))
    gathers_alone, state_alone, slope_alone = reference
    compare(gathers, gathers_alone)
    compare(state, case.cut(elastic, state_alone))
    for name in ("lam", "mu", "rho"):
        compare(slope[name], slope_alone[name][elastic.grid.slices])
    compare(slope["state"], case.cut(elastic, slope_alone["state"]))
    kept = case.model(comm, dims, storage=Storage("boundary"), **settings)
    compare(case.value_and_gradient(kept)[2], slope)
    run, zeros = case.relative(elastic)
    assert mpigrad.dot_test(run, zeros, comm=comm, rtol=1e-12).error < 1e-12


@pytest.mark.ranks(1, 3)
@pytest.mark.thin(1)
def test_reciprocity_at_the_surface(comm):
    """A force and a recorded velocity on the surface and next to it can be exchanged."""
    cells, a, b = (16, 11), [43.0, 0.0], [101.0, 17.3]
    wavelet = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 60)))
    for names in (("x", "y", a, b), ("y", "x", a, b), ("y", "y", a, b)):
        traces = []
        for source, component, s, r in (names, (names[1], names[0], b, a)):
            grid = Grid(cells, (10.0, 12.0), comm, dims=(comm.size, 1))
            elastic = Elastic(
                grid, 1.5e-3, 60, 15.0, pml=0, free_surface="y0", source=f"force_{source}",
                components=(f"v{component}",),
            )  # fmt: skip
            media = [jnp.asarray(x[grid.slices]) for x in random_model(cells)]
            survey = Survey(np.array([[s]]), np.array([[r]]))
            traces.append(
                np.asarray(elastic.propagate(ElasticMedium(*media), wavelet, survey).gathers)
            )
        assert np.max(np.abs(traces[0])) > 0
        compare(traces[0], traces[1])


@LONG
def test_dot_test(comm):
    cells = (12, 8)
    grid = Grid(cells, (10.0, 12.0), comm, dims=(comm.size, 1))
    elastic = Elastic(grid, 1.5e-3, 10, 15.0, pml=2, free_surface="y0", source="force_x")
    survey = Survey(np.array([[[33.0, 0.0]]]), np.array([[[45.0, 5.0], [81.0, 0.0]]]))
    media = [jnp.asarray(x[grid.slices]) for x in random_model(cells)]
    wavelet = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 10)))

    def run(lam, mu, rho, w):
        model = (m * (1 + x) for m, x in zip(media, (lam, mu, rho), strict=True))
        w = wavelet * (1 + mpigrad.bcast(w, comm=comm))
        gathers, state = elastic.propagate(ElasticMedium(*model), w, survey)
        return 1e9 * gathers, [1e9 * state.vx, 1e9 * state.vy, 1e2 * state.sxx, 1e2 * state.sxy]

    zeros = [jnp.zeros_like(x) for x in (*media, wavelet)]
    assert mpigrad.dot_test(mpigrad.jit(run), *zeros, comm=comm, rtol=1e-12).error < 1e-12


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("side", "order"), [("y0", 4), ("y1", 4), ("y1", 8)])
def test_the_largest_time_step_is_stable(comm, side, order):
    """Against the eigenvalues of the discrete equations, which are real and not negative."""
    cells = (9, 10 if order == 4 else 13)
    elastic = Elastic(
        Grid(cells, (10.0, 9.0), comm), 1.0, 2, 15.0, order=order, pml=0, free_surface=side
    )
    scheme = make_scheme(elastic, Survey(np.full((1, 1, 2), 50.0), np.full((1, 1, 2), 50.0)))
    basis = np.eye(2 * np.prod(cells)).reshape(-1, 2, *cells)

    @jax.jit
    def twice(lam, mu, rho):
        """The change of velocities in a second step of length 1, after which stress is theirs."""
        state = at_rest(len(basis), cells, (0, 0), np.dtype("float64"))
        state = state._replace(vx=jnp.asarray(basis[:, 0]), vy=jnp.asarray(basis[:, 1]))
        media = effective_media(lam, mu, rho, scheme.tile, scheme.surface)
        for _ in range(2):
            state = reference.step(scheme, media, state, jnp.zeros(()))
        return jnp.stack([state.vx, state.vy], axis=1) - basis

    water = [x.copy() for x in random_model(cells)]
    water[1][:, :3], water[0][:, :3], water[2][:, :3] = 0, 2.2e9, 1000.0
    depth = np.arange(cells[1])[:: 1 if side == "y0" else -1]
    rho = np.where((depth == 1) | (depth == 4), 1000.0, 100.0) * np.ones(cells)
    stripes = [rho * 1500.0**2, 0 * rho, rho]
    for model in (homogeneous(elastic.grid), water, stripes):
        media = [jnp.asarray(x) for x in model]
        matrix = -np.asarray(twice(*media)).reshape(len(basis), -1)
        eigenvalues = np.linalg.eigvals(matrix)
        top = eigenvalues.real.max()
        assert np.max(np.abs(eigenvalues.imag)) < 1e-6 * top
        assert eigenvalues.real.min() > -1e-9 * top
        assert 0.8 < elastic.largest_time_step(ElasticMedium(*media)) / (2 / np.sqrt(top)) < 1


def test_bad_settings_are_refused(comm):
    grid = Grid((24, 24), (10.0, 10.0), comm, dims=(1, comm.size))
    for settings, message in (
        ({"free_surface": "z0"}, r"must be one of \('x0', 'x1', 'y0', 'y1'\) or None on 2 axes"),
        ({"free_surface": "x0", "pml": ((3, 4), (4, 4))}, "a layer of 3 cells. Make it 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Elastic(grid, 1e-3, 2, 15.0, **settings)
    small = Grid((24, 3 * comm.size), (10.0, 10.0), comm, dims=(1, comm.size))
    with pytest.raises(ValueError, match="the smallest tile has 3 cells along the axis of the"):
        Elastic(small, 1e-3, 2, 15.0, free_surface="y1")
    with pytest.raises(
        ValueError, match=r"has 8 cells along .* free surface, 1, and needs 11. Use"
    ):
        small = Grid((24, 8 * comm.size), (10.0, 10.0), comm, dims=(1, comm.size))
        Elastic(small, 1e-3, 2, 15.0, order=8, free_surface="y1")
    assert Elastic(grid, 1e-3, 2, 15.0, pml=4, free_surface="x1").pml == ((4, 0), (4, 4))
