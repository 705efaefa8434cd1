"""Native acoustic waves against the reference and its derivatives, on any number of ranks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launching
import mpigrad
from mpigrad.grid import Grid
from mpigrad.waves import Storage
from mpigrad.waves.acoustic import Acoustic, State, Survey
from mpigrad.waves.acoustic.scheme import pack, unpack

SHAPE, SPACING, LAYERS, STEPS = (19, 16), (10.0, 12.0), ((4, 5), (5, 0)), 24
DT = 1.5e-3
SOURCES = np.array([[[31.0, 77.0], [95.0, 60.0]], [[120.3, 149.0], [6.0, 5.0]]])
RECEIVERS = np.array([[[15.0, 18.0], [99.2, 101.5], [187.0, 190.0]]])


@functools.cache
def survey():
    return Survey(SOURCES, RECEIVERS)


def model(comm, dims=None, **settings):
    settings = {"pml": LAYERS, "max_velocity": 2500.0} | settings
    return Acoustic(Grid(SHAPE, SPACING, comm, dims=dims), DT, STEPS, **settings)


def whole():
    """Velocity, wavelets and first fields of the whole domain, and a cotangent for each result."""
    draw = np.random.default_rng(3)
    padded = (SHAPE[0] + sum(LAYERS[0]), SHAPE[1] + sum(LAYERS[1]))
    fields = draw.standard_normal((4, 2, *padded))
    return (
        draw.uniform(1500, 2500, SHAPE),
        draw.standard_normal((2, 2, STEPS)),
        fields,
        draw.standard_normal((2, 3, STEPS)),
        draw.standard_normal((4, 2, *padded)),
    )


def cut(tile, field):
    """This rank's part of a field with layers."""
    begins = [o + before for o, (before, _) in zip(tile.origin, LAYERS, strict=True)]
    return field[..., *(slice(b, b + n) for b, n in zip(begins, tile.shape, strict=True))]


def state_of(tile, fields):
    w, u, phi, psi = (jnp.asarray(cut(tile, f)) for f in fields)
    return State(w, u, pack(tile, phi, psi))


def fields_of(tile, state):
    return jnp.stack([state.field, state.previous, *unpack(tile, state.memory)])


def everything(acoustic):
    """Results and gradients of this rank, as a dictionary."""
    velocity, wavelets, fields, gather_weights, field_weights = whole()
    tile, comm = acoustic.tile, acoustic.grid.comm
    weights = state_of(tile, field_weights)

    def loss(velocity, wavelets, state):
        recording = acoustic.propagate(velocity, wavelets, survey(), state)
        share = sum(jnp.sum(w * s) for w, s in zip(weights, recording.state, strict=True))
        if comm.rank == 0:
            share += jnp.sum(gather_weights * recording.gathers)
        return share, recording

    run = mpigrad.jit(mpigrad.value_and_grad(loss, (0, 1, 2), has_aux=True, comm=comm))
    arguments = (
        jnp.asarray(velocity[acoustic.grid.slices]),
        jnp.asarray(wavelets),
        state_of(tile, fields),
    )
    (_, recording), (dv, dw, ds) = run(*arguments)
    return {
        "gathers": recording.gathers,
        "state": fields_of(tile, recording.state),
        "velocity": dv,
        "wavelets": comm.mpi.allreduce(np.asarray(dw)),
        "first": fields_of(tile, ds),
    }


def compare(acoustic, mine, other, tile=None):
    """Compare all results, with `tile` this rank's part of those of `other`."""
    for name, value in mine.items():
        expected = np.asarray(other[name])
        if tile is not None and name in ("state", "first"):
            expected = cut(tile, expected)
        elif tile is not None and name == "velocity":
            expected = expected[acoustic.grid.slices]
        scale = np.max(np.abs(other[name]))
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12 * scale, err_msg=name)


# Four tiles form a plane.
@pytest.mark.parametrize("order", [4, pytest.param(8, marks=pytest.mark.thin(4))])
def test_native_agrees_with_one_rank(comm, alone, order):
    native = model(comm, order=order)
    mine = everything(native)
    compare(native, mine, everything(model(alone, order=order)), native.tile)
    if order == 4 and comm.size < 4:
        ways: dict[int, dict[str, Any]] = {
            1: {"storage": Storage("all"), "threads": 2},
            2: {"storage": Storage(7)},
            3: {"storage": Storage(memory=1)},
        }
        compare(native, mine, everything(dataclasses.replace(native, **ways[comm.size])))
    if order == 8 and comm.size in (1, 4):
        compare(native, mine, everything(dataclasses.replace(native, storage=Storage("boundary"))))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("shape", "axis"), [((40, 3000), 0), ((24, 90), 1)])
def test_two_steps_in_a_pass_give_the_bits_of_single_steps(comm, shape, axis):
    """Wide rows, of which few fit into a cache at a time; and faces across the rows."""
    dims = (comm.size, 1) if axis == 0 else (1, comm.size)
    draw = np.random.default_rng(5)
    velocity, wavelets = draw.uniform(1500, 2500, shape), draw.standard_normal((2, 2, 9))
    points = draw.uniform(0, 1, (2, 8, 2)) * np.multiply(shape, SPACING)
    points[:, :, 1 - axis] %= 200.0

    def results(checkpoints):
        grid = Grid(shape, SPACING, comm, dims=dims)
        acoustic = Acoustic(grid, DT, 9, pml=5, max_velocity=2500.0, storage=Storage(checkpoints))

        def loss(velocity, wavelets):
            gathers, state = acoustic.propagate(
                velocity, wavelets, Survey(points[:, :2], points[:, 2:])
            )
            share = jnp.sum(gathers**2) * (comm.rank == 0) + jnp.sum(state.field**2)
            return share, (gathers, *state)

        run = mpigrad.jit(mpigrad.value_and_grad(loss, (0, 1), has_aux=True, comm=comm))
        return run(jnp.asarray(velocity[grid.slices]), jnp.asarray(wavelets))

    (_, found), gradients = results("all")
    (_, expected), expected_gradients = results(1)
    for x, y in zip((*found, *gradients), (*expected, *expected_gradients), strict=True):
        np.testing.assert_array_equal(x, y)
    for x in gradients:  # a rank may be far from all sources
        assert comm.mpi.allreduce(float(np.max(np.abs(x)))) > 0


@pytest.mark.parametrize("pml", [LAYERS, ((0, 0), (0, 0)), ((12, 0), (9, 9))])
def test_waves_run_backwards_from_their_boundary(comm, pml):
    """A part of the tile, all of it, and hardly any; sources inside and among what is kept."""
    velocity, wavelets, *_ = whole()
    acoustic = model(comm, pml=pml, order=8 if pml == LAYERS else 4)
    single = pml == ((0, 0), (0, 0))
    dtype, tolerance = (jnp.float32, 1e-4) if single else (jnp.float64, 1e-12)
    v, wavelets = (jnp.asarray(a, dtype) for a in (velocity[acoustic.grid.slices], wavelets))

    def loss(velocity, wavelets, **kept):
        way = dataclasses.replace(acoustic, **kept)
        gathers, state = way.propagate(velocity, wavelets, survey())
        return jnp.sum(gathers**2) / comm.size + jnp.sum(state.field**2)

    # Another time nothing of all shots fits, and each is computed again.
    boundary = {"storage": Storage("boundary", memory=None if comm.size == 2 else 1)}
    boundary |= {"threads": 2} if comm.size == 2 else {}
    every, found = (
        mpigrad.jit(mpigrad.grad(functools.partial(loss, **kept), (0, 1), comm=comm))(v, wavelets)
        for kept in ({}, boundary)
    )
    for a, b in zip(found, every, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b)))


def test_shares_of_the_gathers(comm):
    acoustic = model(comm)
    velocity, wavelets, *_ = whole()
    centres = (np.array([[1, 3], [9, 8], [18, 15]]) + 0.5) * SPACING
    arguments = velocity[acoustic.grid.slices], wavelets, Survey(SOURCES, centres[None])
    complete = np.asarray(acoustic.propagate(*arguments).gathers)
    share = np.asarray(acoustic.propagate(*arguments, gathers="share").gathers)
    np.testing.assert_array_equal(comm.mpi.allreduce(share), complete)
    # Each receiver's trace is whole on one rank: squares of shares add up, too.
    assert sum(comm.mpi.allgather(np.any(share != 0, axis=(0, 2)))).tolist() == [1, 1, 1]


@pytest.mark.ranks(2)
def test_the_reference_is_batched_on_a_rank_without_points(comm):
    """By JAX's own vmap over wavelets: halos of its fields meet batched ones."""
    acoustic = model(comm, dims=(2, 1), backend="xla")
    velocity, wavelets, *_ = whole()
    near = Survey(SOURCES[:1, :1], RECEIVERS[:, :1])  # on rank 0

    def run(wavelets):
        return acoustic.propagate(velocity[acoustic.grid.slices], wavelets, near).gathers

    w = jnp.asarray(wavelets[:1, :1])
    both = jax.jit(lambda w: (jax.vmap(run)(jnp.stack([w, 2 * w])), jax.jvp(run, (w,), (w,))))
    batch, (one, tangent) = both(w)
    np.testing.assert_allclose(batch, jnp.stack([one, 2 * one]), rtol=1e-12)
    np.testing.assert_allclose(tangent, one, rtol=1e-12)


@pytest.mark.cases("4", reason="order 8 differs in the stencil, and is skipped on several ranks")
@pytest.mark.parametrize("order", [4, 8])
def test_native_agrees_with_the_reference(comm, order):
    if order == 8 and comm.size != 1:
        pytest.skip("order 8 differs from order 4 only in the stencil, which one rank covers")
    native = model(comm, order=order, dims=(1, 2) if comm.size == 2 else None)
    compare(native, everything(native), everything(dataclasses.replace(native, backend="xla")))


def test_linearised_operator_and_its_adjoint(comm):
    acoustic = model(comm)
    velocity, wavelets, fields, *_ = whole()
    f = lambda v, w, s: acoustic.propagate(v, w, survey(), s)
    point = (
        jnp.asarray(velocity[acoustic.grid.slices]),
        jnp.asarray(wavelets),
        state_of(acoustic.tile, fields),
    )
    mpigrad.dot_test(f, *point, comm=comm, rtol=1e-12)


@pytest.mark.thin(1)
def test_taylor_expansion_in_all_operands(comm):
    acoustic = model(comm)
    velocity, wavelets, fields, weights, _ = whole()

    def misfit(x):
        gathers = acoustic.propagate(x["c"] * 100, x["w"], survey(), x["s"]).gathers
        return jnp.sum((gathers - weights) ** 2) / comm.size

    x = {
        "c": jnp.asarray(velocity[acoustic.grid.slices] / 100),
        "w": jnp.asarray(wavelets),
        "s": state_of(acoustic.tile, fields),
    }
    mpigrad.taylor_test(misfit, x, comm=comm, step=1e-3, halvings=3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keep", [None, "boundary"])
def test_a_gradient_recomputes_a_dropped_history(comm, keep):
    """The history of forward runs is limited. It is computed again if it was dropped."""
    velocity, wavelets, *_ = whole()
    small = model(comm, storage=Storage(keep, memory=2 << 20))  # for one run
    v = jnp.asarray(velocity[small.grid.slices])
    f = lambda v: small.propagate(v, wavelets, survey()).gathers
    gathers, back = mpigrad.vjp(f, v)
    once = back(gathers)[0]
    np.testing.assert_array_equal(once, back(gathers)[0])
    first, other = (mpigrad.vjp(f, v)[1] for _ in range(2))
    np.testing.assert_array_equal(once, first(gathers)[0])
    np.testing.assert_array_equal(once, other(gathers)[0])


@pytest.mark.ranks(2)
def test_waves_continue_from_a_state(comm):
    velocity, wavelets, *_ = whole()
    acoustic, half = model(comm), dataclasses.replace(model(comm), steps=STEPS // 2)
    v = jnp.asarray(velocity[acoustic.grid.slices], jnp.float32)
    once = acoustic.propagate(v, wavelets, survey())
    first = half.propagate(v, wavelets[..., : STEPS // 2], survey())
    second = half.propagate(v, wavelets[..., STEPS // 2 :], survey(), first.state)
    both = jnp.concatenate([first.gathers, second.gathers], axis=2)
    assert both.dtype == jnp.float32
    np.testing.assert_array_equal(both, once.gathers)


def _in_two_ways(comm, f):
    """Errors of the native form and of the reference."""
    for backend in ("native", "xla"):
        with pytest.raises(Exception) as error:
            jax.block_until_ready(f(backend))
        # the same on all ranks
        assert len(set(comm.mpi.allgather(type(error.value)))) == 1
        yield str(error.value)


@pytest.mark.ranks(2)
def test_rejects_bad_models_on_every_rank(comm):
    velocity, wavelets, *_ = whole()
    mine = np.array(velocity[model(comm).grid.slices])

    def run(bad, acoustic):
        return lambda backend: mpigrad.jit(
            lambda v: dataclasses.replace(acoustic, backend=backend).propagate(
                v, wavelets, survey()
            )
        )(jnp.asarray(bad))

    last = comm.rank == comm.size - 1
    for value, text in ((np.nan, "NaN or infinite"), (-3.0, "smallest value is -3")):
        bad = mine.copy()
        bad[-1, -1] = value if last else bad[-1, -1]
        for message in _in_two_ways(comm, run(bad, model(comm))):
            assert text in message
    fast = dataclasses.replace(model(comm), dt=4e-3)
    for message in _in_two_ways(comm, run(mine, fast)):
        assert f"largest stable one is {fast.largest_time_step(mine):.6g}"[:-2] in message


@pytest.mark.ranks(1, 2)
def test_rejects_bad_arguments(comm):
    velocity, wavelets, *_ = whole()
    acoustic = model(comm)
    mine = jnp.asarray(velocity[acoustic.grid.slices])
    with pytest.raises(ValueError, match=r"1 of 3 receivers lie outside .* has index 2"):
        acoustic.propagate(mine, wavelets, Survey(SOURCES, RECEIVERS + np.array([0, 3.0])))
    with pytest.raises(ValueError, match="wavelets have shape"):
        acoustic.propagate(mine, wavelets[..., 1:], survey())
    with pytest.raises(ValueError, match="contain NaN or infinity"):
        Survey(SOURCES * np.nan, RECEIVERS)
    with pytest.raises(ValueError, match="velocities must be positive"):
        acoustic.largest_time_step(mine * (-1 if comm.rank == 0 else 1))
    with pytest.raises(ValueError, match=r"order must be one of \(4, 8\), got 3"):
        model(comm, order=3)
    with pytest.raises(ValueError, match="keep must be a positive number of steps"):
        Storage(-1)
    with pytest.raises(TypeError, match="storage"):
        model(comm, storage="all")
    with pytest.raises(ValueError, match="pml: expected a number of cells"):
        model(comm, pml=(1, 2, 3))
    if comm.size == 2:
        with pytest.raises(ValueError, match="the smallest tile has 1"):
            Acoustic(Grid((3, 2), (1.0, 1.0), comm, dims=(2, 1)), DT, STEPS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["native", "xla"])
def test_rejects_runs_that_differ_between_ranks(comm, backend):
    velocity, wavelets, *_ = whole()
    acoustic = dataclasses.replace(model(comm), dt=DT / (1 + comm.rank), backend=backend)
    mine = jnp.asarray(velocity[acoustic.grid.slices])
    expected = rf"Acoustic.propagate: dt must be .* got {DT} on rank 0; {DT / 2} on rank 1"
    with pytest.raises(ValueError, match=expected):
        acoustic.propagate(mine, wavelets, survey())


def record_gathers(acoustic, wavelets, velocity):
    return acoustic.propagate(velocity, wavelets, survey()).gathers


@pytest.mark.ranks(2)
def test_rejects_programs_that_differ_between_ranks(comm):
    """Both were traced on both ranks."""
    velocity, wavelets, *_ = whole()
    mine = jnp.asarray(velocity[model(comm).grid.slices])
    programs = []
    for dt in (DT, DT / 2):
        acoustic = dataclasses.replace(model(comm), dt=dt)
        programs.append(mpigrad.jit(functools.partial(record_gathers, acoustic, wavelets)))
        programs[-1](mine).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1 differs from that of rank 0"):
        programs[comm.rank](mine).block_until_ready()


@pytest.mark.ranks(2)
def test_rejects_dtypes_that_differ_between_ranks(comm):
    velocity, wavelets, *_ = whole()
    acoustic = model(comm)
    mine = jnp.asarray(velocity[acoustic.grid.slices], [jnp.float32, jnp.float64][comm.rank])
    with pytest.raises(Exception, match=r"dtype must be .* got float32 on rank 0"):
        jax.block_until_ready(acoustic.propagate(mine, wavelets, survey()))


@pytest.mark.launcher
@pytest.mark.full("one to four ranks run the same program")
def test_six_ranks(tmp_path):
    launching.on_six_ranks(
        tmp_path,
        __file__,
        "import test_acoustic as t",
        "here = t.model(world)",
        "t.compare(here, t.everything(here), t.everything(t.model(alone)), here.tile)",
    )
