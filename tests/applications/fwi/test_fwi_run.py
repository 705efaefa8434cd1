"""Whole runs: their files, their misfit, and restarts that are equal bit for bit."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import zarr
from image_files import read_image

from mpigrad_apps import fwi
from mpigrad_apps.fwi import Settings
from mpigrad_apps.shots import acoustic_command
from mpigrad_apps.shots.acoustic_settings import Settings as Shots

SMALL = Settings(
    cells=(30, 20), spacing=(10.0, 10.0), steps=110, shots=2, pml=6, water=20.0, backend=None,
    frequency=15.0, iterations=4, memory=5,
)  # fmt: skip


@pytest.mark.full("whole runs take long; the loss and its gradient are tested in test_inversion.py")
def test_misfit_falls_from_stage_to_stage(comm, directory, capsys, monkeypatch):
    monkeypatch.setattr("mpigrad.profiling.progress_bar.duration", lambda seconds: f"{seconds}")
    settings = dataclasses.replace(SMALL, frequencies=(12.0,), vtk=True, out=directory / "whole")
    whole = fwi.run(settings, comm)
    assert whole.misfits[1] < 0.3 * whole.misfits[0]
    assert whole.errors is not None
    assert whole.errors[1] < whole.errors[0]
    assert [record.stage for record in whole.history] == [0] * 5 + [1] * 5
    ends = [line.split() for line in capsys.readouterr().out.splitlines() if "tion 4/4" in line]
    left = [float(words[-2]) for words in ends if words[-1] == "left"]
    assert len(left) == 2 * (comm.rank == 0)
    assert comm.rank > 0 or left[0] > left[1] == 0.0  # of the whole run, and not of one stage
    comm.mpi.Barrier()
    check_files(settings.out, whole)


def check_files(out, whole):
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    for words in ("times smaller than the start", "error of the result", "Versions"):
        assert words in page
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [record.loss for record in whole.history]
    with np.load(out / "model.npz") as found:
        assert np.allclose(found["vp"], whole.fields["vp"], rtol=1e-12)
    group = zarr.open_group(out / "fields.zarr", mode="r")
    assert np.array_equal(group["vp"][:], whole.fields["vp"])
    assert group["start_vp"].attrs["units"] == "m/s"
    assert np.array_equal(read_image(out / "fields.pvti", 2)["vp"], whole.fields["vp"])


def test_cells_stay_within_a_box(comm, directory):
    """Some cells end exactly at a bound, which the sigmoid function never reaches."""
    settings = dataclasses.replace(
        SMALL, box=True, bounds=("vp=1800:2600",), iterations=4, out=directory / "box"
    )
    result = fwi.run(settings, comm)
    assert result.misfits[1] < 0.5 * result.misfits[0]
    problem = fwi.prepare_inversion(settings, comm).parametrization
    vp = result.fields["vp"][problem.active]
    low, high = problem.unknowns[0].low, problem.unknowns[0].high
    assert vp.min() >= low and vp.max() <= high
    assert np.any((vp - low < 1e-9) | (high - vp < 1e-9)) and np.any((vp > low) & (vp < high))
    with pytest.raises(ValueError, match="--box: expected --unknown cells and --smoothing 0"):
        dataclasses.replace(settings, smoothing=1.0).check()


@pytest.mark.full("whole runs take long; restarts of fitting are tested in test_fitting.py")
def test_a_restarted_run_equals_an_uninterrupted_run(comm, directory, monkeypatch):
    """A stopped run ends after an iteration, and continues from its file bit for bit.

    Masked cells keep the start's values exactly, all others change.
    """
    free = np.ones(SMALL.cells)
    free[8:25, 6:11] = 0
    if comm.rank == 0:
        np.save(directory / "mask.npy", free)
    settings = dataclasses.replace(
        SMALL, iterations=3, mask=directory / "mask.npy", out=directory / "whole"
    )
    whole = fwi.run(settings, comm)
    start = fwi.prepare_inversion(settings, comm).parametrization.start((slice(None), slice(None)))
    free[:, :2] = 0  # water
    assert np.array_equal(whole.fields["vp"] != start["vp"], free != 0)
    stop = directory / "stop"
    if comm.rank == 0:
        stop.touch()
    comm.mpi.Barrier()
    monkeypatch.setenv("MPIGRAD_STOP_FILE", str(stop))
    settings = dataclasses.replace(settings, out=directory / "part")
    part = fwi.run(settings, comm)
    assert part.ending == "stopped at iteration 0"
    monkeypatch.delenv("MPIGRAD_STOP_FILE")
    settings = dataclasses.replace(settings, resume=True)
    rest = fwi.run(settings, comm)
    for a, b in zip(
        jax.tree.leaves(rest.parameters), jax.tree.leaves(whole.parameters), strict=True
    ):
        assert np.array_equal(a, b)
    same = [dataclasses.replace(record, seconds=0.0) for record in whole.history]
    assert [dataclasses.replace(record, seconds=0.0) for record in rest.history] == same
    with pytest.raises(ValueError, match="is of another run: start, bounds and mask"):
        fwi.run(dataclasses.replace(settings, water=40.0), comm)
    with pytest.raises(ValueError, match="is of another run: shots, data and weights"):
        fwi.run(dataclasses.replace(settings, normalize="trace"), comm)


@pytest.mark.full("whole runs take long; data files are tested in test_data.py")
def test_an_inversion_reads_recorded_shots(comm, directory):
    """An inversion reads the gathers of `run acoustic`."""
    options = {
        field.name: getattr(SMALL, field.name)
        for field in dataclasses.fields(Shots)
        if field.name not in ("out", "frames", "vtk")
    }
    groups = min(comm.size, 2)  # there are two shots
    shots = acoustic_command.run(
        Shots(**{**options, "groups": groups}, frames=5, vtk=True, out=directory / "shots"), comm
    )
    comm.mpi.Barrier()
    out = directory / "shots"
    for name in ("report.html", "animation.gif", "gathers.png", "model.png", "snapshots.png"):
        assert (out / name).stat().st_size > 1000
    group = zarr.open_group(out / "snapshots.zarr", mode="r")
    assert group["pressure"].shape == (5, *shots.experiment.shape)
    assert group["pressure"].attrs["units"] == "Pa"
    assert group["x"].attrs["units"] == "m"
    last = read_image(out / "snapshots-vtk" / "0004.pvti", 2)
    assert np.array_equal(last["pressure"], group["pressure"][4])
    assert (out / "snapshots.pvd").read_text().count("<DataSet ") == 5
    with np.load(out / "gathers.npz") as file:
        gathers = file["gathers"]
    if comm.rank == 0:
        assert np.array_equal(gathers, shots.gathers)
        np.savez(out / "true.npz", **shots.experiment.fields, spacing=shots.experiment.spacing)
    comm.mpi.Barrier()
    given = dataclasses.replace(
        SMALL,
        data=out / "gathers.npz",
        initial=out / "true.npz",
        spacing=None,
        dt=shots.experiment.dt,
    )
    problem = fwi.prepare_inversion(given, comm)
    assert problem.inputs.truth is None
    with pytest.raises(ValueError, match="has samples every"):
        fwi.prepare_inversion(dataclasses.replace(given, dt=0.9 * given.dt), comm)
    assert np.allclose(problem.recorded, gathers, rtol=1e-12)
    exact = fwi.prepare_inversion(dataclasses.replace(SMALL, model=out / "true.npz"), comm)
    # segments, and other groups of ranks: the same gathers to the fields' rounding
    assert np.allclose(exact.recorded, gathers, atol=1e-4 * np.max(np.abs(gathers)))
