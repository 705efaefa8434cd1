"""Gradients of the loss with every unknown and regularization, on any groups and tiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad_apps.fwi import Settings, prepare_inversion

SMALL = Settings(
    cells=(24, 18),
    spacing=(10.0, 10.0),
    steps=70,
    shots=3,
    receivers=8,
    pml=5,
    frequency=20.0,
    water=20.0,
    precision="float64",
)
ROUGH = dataclasses.replace(SMALL, tikhonov=3.0, total_variation=0.5)
full = pytest.mark.full("the other cases cover most of the code")
CASES = {
    "cells": dataclasses.replace(ROUGH, smoothing=1.5, normalize="trace"),
    "box": dataclasses.replace(SMALL, box=True),
    "network": dataclasses.replace(SMALL, unknown="network", normalize="shot"),
    "filtered": dataclasses.replace(SMALL, frequencies=(15.0,)),
    "elastic": dataclasses.replace(
        SMALL, physics="elastic", order=8, invert=("lambda", "mu", "rho")
    ),
    "surface": dataclasses.replace(SMALL, free_surface=True, storage="boundary"),
    "attenuation": dataclasses.replace(
        SMALL, physics="elastic", free_surface=True, quality=(40.0, 20.0), storage=9
    ),
}


def moved(parameters):
    """Away from the start, where corrections vanish; every rank draws the same."""
    generator = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: leaf + 0.3 * generator.standard_normal(leaf.shape), parameters)


@functools.cache
def evaluated(case, comm, groups):
    problem = prepare_inversion(dataclasses.replace(CASES[case], groups=groups), comm)
    corner = CASES[case].frequencies[0] if CASES[case].frequencies else None
    parameters = moved(problem.parametrization.initial(0))
    measure = problem.misfit(corner)
    value_and_grad = mpigrad.jit(functools.partial(problem.value_and_grad, measure))
    value, gradient = value_and_grad(parameters)
    return problem, measure, parameters, float(value), gradient


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("case", "groups"),
    [
        pytest.param("network", 1, marks=pytest.mark.full("on one rank it passes the Taylor test")),
        pytest.param("cells", 1, marks=pytest.mark.full("two groups have tiles, too")),
        pytest.param("cells", 2, marks=pytest.mark.thin(3)),  # one rank, and two tiles
        pytest.param("cells", 3, marks=pytest.mark.full("two groups take the same path")),
    ],
)
def test_the_loss_does_not_depend_on_groups_and_tiles(comm, alone, case, groups):
    if groups > comm.size:
        pytest.skip("more groups than ranks")
    *_, expected, expected_gradient = evaluated(case, alone, 1)
    *_, value, gradient = evaluated(case, comm, groups)
    assert value == pytest.approx(expected, rel=1e-12)
    scale = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected_gradient))
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=full if case in ("box", "filtered", "attenuation") else pytest.mark.thin(1)
        )
        for case in CASES
    ],
)
def test_gradients_pass_the_taylor_test(comm, case):
    problem, measure, parameters, value, _ = evaluated(case, comm, 1)
    assert 0 < value < 10
    share = mpigrad.jit(functools.partial(problem.loss_share, measure))
    mpigrad.taylor_test(share, parameters, replicated=True, step=1e-2, comm=comm)


@pytest.mark.ranks(1)
def test_bounds_masks_and_smoothing(comm):
    problem = prepare_inversion(CASES["cells"], comm)
    values, everywhere = problem.parametrization, (slice(None), slice(None))
    (unknown,) = values.unknowns
    start = values.fields(values.initial(0), everywhere)["vp"]
    inside = (unknown.start > 1.01 * unknown.low) & (unknown.start < 0.99 * unknown.high)
    assert np.allclose(np.asarray(start)[inside], unknown.start[inside], rtol=1e-12)
    far = values.fields(values.initial(0) + 1e3, everywhere)["vp"]
    assert np.array_equal(far[:, :2], unknown.start[:, :2])  # water keeps the start's
    assert np.allclose(far[:, 2:], unknown.high)
    assert unknown.high <= problem.group.physics.max_stable_velocity
    point = values.initial(0).at[0, 12, 9].set(1.0)
    blurred = np.asarray(values.corrections(point, everywhere))[0]
    assert 0.02 < blurred[12, 9] < 0.2
    assert blurred[12, 11] == pytest.approx(blurred[12, 9] * np.exp(-0.5 * (2 / 1.5) ** 2), rel=0.1)
    assert np.allclose(values.corrections(values.initial(0) + 1.0, everywhere), 1.0)


INVALID = {
    "acoustic": (("vp",), ("vp=0:4500",), (-400.0,)),
    "elastic": (("vp", "vs"), ("vp=1200:4000", "vs=100:1200"), (-30.0, 30.0)),
    "light": (("vp", "vs", "rho"), ("rho=0:5000",), (0.0, 0.0, -14.0)),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.cases("acoustic", "light", reason="a check of each kind of waves")
@pytest.mark.parametrize("case", INVALID)
def test_the_loss_of_invalid_materials_is_nan(comm, case):
    """Also if one cell is invalid only in the precision of the waves."""
    names, bounds, change = INVALID[case]
    few = dataclasses.replace(SMALL, steps=4, water=0.0, precision="float32")
    elastic = {"physics": "elastic"}
    waves = {"groups": comm.size} if case == "acoustic" else elastic
    settings = dataclasses.replace(few, invert=names, bounds=bounds, **waves)
    problem = prepare_inversion(settings, comm)
    start = problem.parametrization.initial(0)
    evaluate = mpigrad.jit(functools.partial(problem.value_and_grad, problem.misfit(None)))
    assert np.isnan(evaluate(start.at[:, 20, 15].set(jnp.asarray(change)))[0])
    assert np.isfinite(evaluate(start)[0])


@pytest.mark.ranks(2)
def test_rejects_invalid_settings_and_files(comm, directory):
    if comm.rank == 0:
        np.save(directory / "small.npy", np.ones((3, 3)))
        np.save(directory / "zeros.npy", np.zeros((3, 8, 70)))
        np.save(directory / "nan.npy", np.full((24, 18), np.nan))
    comm.mpi.Barrier()
    for changes, text in [
        ({"invert": ("rho",)}, "--invert: for acoustic waves expected some of vp"),
        ({"physics": "elastic", "invert": ("vp", "mu")}, "lambda mu rho or of vp vs rho"),
        ({"iterations": 0}, "--iterations"),
        ({"smoothing": -1.0}, "--smoothing: expected 0 or more"),
        ({"frequencies": (5.0, 3.0)}, "--frequencies: expected positive and increasing"),
        ({"frequencies": (1e4,)}, "Hz at most"),
        ({"bounds": ("vp",)}, "expected a text like vp=1400:5000, got vp"),
        ({"bounds": ("vs=1:2",)}, "vs is not among the unknown fields"),
        ({"bounds": ("vp=1000:9000",)}, "the time step is stable up to"),
        ({"bounds": ("vp=10:20",)}, "no cell of the start has vp between"),
        ({"dt": 0.01}, "a time step of 0.01 s is not stable .* the largest stable one is"),
        ({"storage": 0}, "keep must be a positive number of steps"),
        ({"storage": "boundary", "storage_precision": "float16"}, "precision='float16' has no eff"),
        ({"backend": "xla", "storage": 5}, "is not an option of a JAX program on 2 axes"),
        ({"quality": (30.0,)}, "--quality: expected --physics elastic with it"),
        ({"quality": (30.0, 1.0)}, "--quality: expected one or two finite numbers larger than 1"),
        ({"water": 1e4}, "no cell is left that may change"),
        ({"mask": directory / "small.npy"}, r"shape \(3, 3\), the model \(24, 18\)"),
        ({"data": directory / "small.npy"}, "--data: expected --model or --initial with it"),
        ({"initial": directory / "nan.npy"}, r"vp is nan in cell \(0, 0\)"),
        ({"initial": directory / "small.npy"}, "expected 24 x 18 cells, got vp of 3 x 3 cells"),
    ]:
        with pytest.raises(ValueError, match=text):
            prepare_inversion(dataclasses.replace(SMALL, **changes), comm)
    surface = prepare_inversion(dataclasses.replace(SMALL, free_surface=True), comm)
    assert surface.digest != prepare_inversion(SMALL, comm).digest
    with pytest.raises(ValueError, match="all recorded gathers are zero"):
        model = prepare_inversion(SMALL, comm)
        dataclasses.replace(model, recorded=0 * model.recorded).misfit(None)


@pytest.mark.ranks(3)
def test_rejects_tiles_with_too_few_cells_on_every_rank(comm, directory):
    """Two ranks of a group divide the model, and one has it whole."""
    if comm.rank == 0:
        np.save(directory / "tiny.npy", np.full((3, 3), 1500.0))
    comm.mpi.Barrier()
    tiny = dataclasses.replace(SMALL, model=directory / "tiny.npy", depth=10.0, groups=2)
    with pytest.raises(ValueError, match=r"--cells: got \(24, 18\), but .* has \(3, 3\) cells"):
        prepare_inversion(tiny, comm)
    tiny = dataclasses.replace(tiny, cells=Settings.cells)
    with pytest.raises(ValueError, match="the stencil reaches 2 cells into the next tile"):
        prepare_inversion(tiny, comm)
