"""Inversions of volumes: equal gradients and models on any groups and tiles, and bad input."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import zarr

import mpigrad
from mpigrad_apps import fwi
from mpigrad_apps.fwi import Settings, memory, prepare_inversion
from mpigrad_apps.fwi.model_pictures import gather_plane
from mpigrad_apps.shots.acoustic_settings import Settings as Shots
from mpigrad_apps.shots.volumes import Volume

SMALL = Settings(
    cells=(14, 12, 10), spacing=(10.0, 10.0, 10.0), steps=60, shots=4, receivers=12, pml=4,
    frequency=30.0, water=20.0, precision="float64",
)  # fmt: skip
CASES = {
    "cells": dataclasses.replace(SMALL, smoothing=1.0, tikhonov=3.0, total_variation=0.5),
    "box": dataclasses.replace(SMALL, box=True, order=8),
    "network": dataclasses.replace(SMALL, unknown="network", normalize="shot"),
    "filtered": dataclasses.replace(SMALL, frequencies=(20.0,)),
}
full = pytest.mark.full("the case cells covers most of the code")
VP = 1800.0 + np.arange(14 * 12 * 10.0).reshape(14, 12, 10)


def moved(problem):
    """Away from the start, where corrections vanish. The same whole parameters on any ranks."""
    generator, grid = np.random.default_rng(3), problem.parametrization.sharded
    if grid is not None:
        whole = 0.3 * generator.standard_normal((1, *grid.shape))
        return jax.numpy.asarray(whole[:, *grid.slices])
    weights = problem.parametrization.initial(0)
    return jax.tree.map(lambda leaf: leaf + 0.3 * generator.standard_normal(leaf.shape), weights)


def whole_parameters(problem, parameters):
    """The parameters on all ranks: those of cells are gathered."""
    grid = problem.parametrization.sharded
    if grid is None:
        return jax.tree.leaves(parameters)
    return [grid.comm.mpi.bcast(grid.gather(np.asarray(parameters[0])))]


@functools.cache
def evaluated(case, comm, groups):
    problem = prepare_inversion(dataclasses.replace(CASES[case], groups=groups), comm)
    parameters = moved(problem)
    measure = problem.misfit(CASES[case].frequencies[0] if CASES[case].frequencies else None)
    value_and_grad = mpigrad.jit(functools.partial(problem.value_and_grad, measure))
    value, gradient = value_and_grad(parameters)
    return problem, measure, parameters, float(value), whole_parameters(problem, gradient)


def layouts(comm):
    """Shots over groups, and on 4 ranks groups of two tiles."""
    return {1: (1,), 2: (1, 2), 3: (2,), 4: (2,)}[comm.size]


@pytest.mark.parametrize(
    "case", [case if case == "cells" else pytest.param(case, marks=full) for case in CASES]
)
def test_loss_and_gradient_do_not_depend_on_groups_and_tiles(comm, alone, case):
    *_, expected, expected_gradient = evaluated(case, alone, 1)
    assert 0 < expected < 10
    for groups in layouts(comm):
        *_, value, gradient = evaluated(case, comm, groups)
        assert value == pytest.approx(expected, rel=1e-11)
        for a, b in zip(gradient, expected_gradient, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11 * np.abs(b).max())


@pytest.mark.parametrize(
    "case", [case if case == "cells" else pytest.param(case, marks=full) for case in CASES]
)
def test_gradients_pass_the_taylor_test(comm, case):
    problem, measure, parameters, *_ = evaluated(case, comm, layouts(comm)[-1])
    share = mpigrad.jit(functools.partial(problem.loss_share, measure))
    replicated = problem.parametrization.sharded is None
    mpigrad.taylor_test(share, parameters, replicated=replicated, step=1e-2, comm=comm)


@pytest.mark.ranks(2, 4)
@pytest.mark.thin(4)  # the tiles of waves and of parameters differ
def test_no_rank_holds_the_volume(comm, directory, monkeypatch):
    """Each rank reads the cells of its tile and the next ones, and its parameters are on it only.

    Values of held cells come to the ranks of their parameters (`collect`).
    """
    if comm.rank == 0:
        np.save(directory / "m.npy", VP)
    comm.mpi.Barrier()
    sizes, read = [], Volume.read
    monkeypatch.setattr(
        Volume, "read", lambda v, w: sizes.append([p.stop - p.start for p in w]) or read(v, w)
    )
    groups = 2 if comm.size == 4 else 1
    file = directory / "m.npy"
    settings = dataclasses.replace(SMALL, model=file, initial=file, groups=groups, box=True)
    problem = prepare_inversion(settings, comm)
    tiles, grid = problem.grid, problem.parametrization.sharded
    assert grid is not None and tiles.comm.size == 2 and grid.comm.size == comm.size
    assert len(sizes) == 2
    for size in sizes:
        assert all(n <= m + 1 for n, m in zip(size, tiles.local_shape, strict=True))
        assert np.prod(size) < 0.6 * VP.size
    assert problem.inputs.start["vp"].shape == tuple(sizes[0])
    assert problem.parametrization.initial(0).shape == (1, *grid.local_shape)
    assert problem.n_unknowns == VP.size
    np.testing.assert_array_equal(problem.tile(problem.inputs.start["vp"]), VP[tiles.slices])
    held = VP[None, *problem.layout.held]
    np.testing.assert_array_equal(problem.layout.collect(held)[0], VP[grid.slices])
    read_back = problem.layout.read(jax.numpy.asarray(VP[None, *grid.slices]))
    np.testing.assert_array_equal(read_back[0], VP[problem.layout.read_cells])
    for axis, place in enumerate([(3,), (slice(None), 5), (Ellipsis, 7)]):
        plane = gather_plane(tiles, VP[tiles.slices], axis, (3, 5, 7)[axis])
        assert tiles.comm.rank > 0 or np.array_equal(plane, VP[place])


@pytest.mark.ranks(2)
def test_a_run_is_written_and_read_again(comm, directory):
    settings = dataclasses.replace(SMALL, steps=40, iterations=1, groups=2, vtk=True)
    result = fwi.run(dataclasses.replace(settings, out=directory / "two"), comm)
    assert result.misfits[1] < result.misfits[0]
    comm.mpi.Barrier()
    check_files(directory / "two", comm)


def check_files(out, comm):
    """Return the fields of a run, whose model is a start of another one."""
    fields = zarr.open_group(out / "fields.zarr", mode="r")
    vp = np.asarray(fields["vp"][:])
    assert vp.shape == SMALL.cells and fields["z"].attrs["units"] == "m"
    model = zarr.open_group(out / "model.zarr", mode="r")
    assert np.array_equal(model["vp"][:], vp) and model.attrs["spacing"] == [10.0, 10.0, 10.0]
    assert (out / "fields.pvti").exists()
    assert (out / "report.html").read_text().count("data:image/png;base64,") == 3
    again = prepare_inversion(dataclasses.replace(SMALL, initial=out / "model.zarr"), comm)
    np.testing.assert_array_equal(again.tile(again.inputs.start["vp"]), vp[again.grid.slices])
    return fields


@pytest.mark.full("a shorter run is written; loss and gradient do not depend on the groups")
@pytest.mark.ranks(2)
def test_a_run_on_two_ranks_equals_one_on_one_rank(comm, alone, directory):
    """The files of both runs: the shots over two groups, a mask, and two stages."""
    free = np.ones(SMALL.cells)
    free[5:9, 4:8, 4:8] = 0
    if comm.rank == 0:
        np.save(directory / "mask.npy", free)
    comm.mpi.Barrier()
    settings = dataclasses.replace(
        SMALL, iterations=2, frequencies=(25.0,), mask=directory / "mask.npy", vtk=True
    )
    own = dataclasses.replace(settings, out=directory / f"one{comm.rank}")
    one = fwi.run(own, alone)
    two = fwi.run(dataclasses.replace(settings, groups=2, out=directory / "two"), comm)
    assert two.misfits[1] < 0.8 * two.misfits[0]
    assert two.misfits == pytest.approx(one.misfits, rel=1e-8)
    assert two.errors == pytest.approx(one.errors, rel=1e-8)
    comm.mpi.Barrier()
    fields = [
        zarr.open_group(own.out / "fields.zarr", mode="r"),
        check_files(two.report.parent, comm),
    ]
    a, b = (np.asarray(group["vp"][:]) for group in fields)
    np.testing.assert_allclose(b, a, rtol=1e-8)
    changed = a != np.asarray(fields[0]["start_vp"][:])
    free[..., :2] = 0  # water
    np.testing.assert_array_equal(changed, free != 0)


@pytest.mark.full("whole runs take long; sampling and saves are tested with two axes")
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("sampling", [{"subset": 2}, {"encode": True}])
def test_sampled_rounds_continue_from_their_saves(comm, directory, sampling):
    """A run that was stopped in its first round ends as one that was not."""
    settings = dataclasses.replace(
        SMALL, iterations=2, rounds=2, groups=2, smoothing=1.0, out=directory / "whole", **sampling
    )
    whole = fwi.run(settings, comm)
    assert whole.misfits[1] < whole.misfits[0]
    part = dataclasses.replace(settings, iterations=1, rounds=1, out=directory / "part")
    fwi.run(part, comm)
    rest = fwi.run(dataclasses.replace(part, iterations=2, resume=True), comm)
    first = fwi.run(dataclasses.replace(part, iterations=2, out=directory / "first"), comm)
    assert np.array_equal(rest.fields["vp"], first.fields["vp"])
    with pytest.raises(ValueError, match="is of another run: start, bounds and mask"):
        fwi.run(dataclasses.replace(part, water=40.0, resume=True), comm)


@pytest.mark.ranks(2)
def test_rejects_invalid_volumes_on_every_rank(comm, directory, write_segy):
    """Before the first step. The faults are in the tile of the last rank."""
    if comm.rank == 0:
        for name, value in {"nan": np.nan, "zero": 0.0}.items():
            field = VP.copy()
            field[13, 11, 9] = value
            np.save(directory / f"{name}.npy", field)
        np.save(directory / "m.npy", VP)
        np.save(directory / "flat.npy", VP[0])
        np.save(directory / "turned.npy", VP.T)
        np.savez(directory / "m.npz", vp=VP)
        np.save(directory / "zeros.npy", 0 * VP)
        group = zarr.create_group(directory / "coarse.zarr", attributes={"spacing": [9.0] * 3})
        group.create_array("vp", data=VP)
        np.savez(directory / "s.npz", sources=np.ones((4, 2)), receivers=np.ones((3, 2)))
        write_segy(directory / "cut.sgy", VP.reshape(-1, 10)[1:],
                   [(i, k) for i in range(14) for k in range(12)][1:])  # fmt: skip
    comm.mpi.Barrier()
    model = dataclasses.replace(SMALL, model=directory / "m.npy")
    for changes, error, text in [
        ({"model": directory / "nan.npy"}, ValueError, r"vp is nan in cell \(13, 11, 9\)"),
        ({"model": directory / "zero.npy"}, ValueError, r"vp is 0 in cell .* must be positive"),
        ({"model": directory / "none.npy"}, FileNotFoundError, "there is no file"),
        ({"model": directory / "m.npz"}, ValueError, "Save a volume for mpigrad run fwi as .npy"),
        ({"model": directory / "cut.sgy"}, ValueError, "inline 0, crossline 0 has none"),
        ({"initial": directory / "turned.npy"}, ValueError, "14 x 12 x 10 .* transpose the array"),
        ({"initial": directory / "flat.npy"}, ValueError, "expected two volumes, got one volume"),
        ({"initial": directory / "coarse.zarr"}, ValueError, "Interpolate one of them"),
        ({"initial": directory / "nan.npy"}, ValueError, r"nan in cell \(13, 11, 9\)"),
        ({"mask": directory / "flat.npy"}, ValueError, r"--mask: expected a volume .* \(12, 10\)"),
        ({"mask": directory / "turned.npy"}, ValueError, "--mask: expected 14 x 12 x 10 cells"),
        ({"mask": directory / "zeros.npy"}, ValueError, "no cell is left that may change"),
        ({"survey": directory / "s.npz"}, ValueError, r"sources \(shots, 3\) .* shape \(4, 1, 2\)"),
        ({"spacing": (10.0, 10.0)}, ValueError, "--spacing: expected 3 numbers, .* got 2"),
        ({"cells": (14, 12, 10, 9)}, ValueError, "--cells: expected two or three numbers.* got 4"),
        ({"cells": (14, 12, 7)}, ValueError, "at least 8 along each axis, got 14 x 12 x 7"),
        ({"physics": "elastic"}, ValueError, "--physics: expected acoustic waves .* three axes"),
        ({"bounds": ("vp=10:20",)}, ValueError, "no cell of the start has vp between"),
        ({"dt": 0.01}, ValueError, "a time step of 0.01 s is not stable"),
        ({"groups": 3}, ValueError, "each group needs a rank and a shot"),
    ]:
        base = SMALL if {"cells", "model"} & changes.keys() else model
        with pytest.raises(error, match=text):
            prepare_inversion(dataclasses.replace(base, **changes), comm)
    with pytest.raises(ValueError, match=r"--cells: expected two numbers, .* mpigrad run fwi"):
        Shots(cells=(14, 12, 10)).check()


@pytest.mark.ranks(2)
def test_a_volume_that_does_not_fit_is_refused_before_it_is_read(comm, monkeypatch):
    huge = dataclasses.replace(SMALL, cells=(4000, 4000, 4000))
    with pytest.raises(ValueError, match=r"4000 x 4000 x 4000 cells need at least .* TB \(fields"):
        prepare_inversion(huge, comm)
    monkeypatch.setattr(memory, "default_memory", lambda: 1_000_000 if comm.rank else 1 << 40)
    with pytest.raises(ValueError, match=r"2 MB .* cells need .* history .*Use more ranks"):
        prepare_inversion(SMALL, comm)
