"""Whole runs of the heat problem: what they write, and what they refuse."""

import dataclasses
import json

import numpy as np
import pytest
import zarr
from image_files import read_image

from mpigrad_apps.heat import Settings, run


def small(directory, **changes):
    effective = {"iterations": 5} if "unknown" in changes else {"frames": 4}
    settings = Settings(cells=(11, 10), duration=0.05, out=directory / "out", **effective)
    return dataclasses.replace(settings, **changes)


@pytest.mark.thin(1)
def test_forward_run_is_written(comm, directory, capfd):
    settings = small(directory, vtk=True)
    result = run(settings, comm)
    comm.mpi.Barrier()
    assert result.ending.startswith("all ")
    out = settings.out
    assert json.loads((out / "settings.json").read_text())["cells"] == [11, 10]
    group = zarr.open_group(out / "fields.zarr", mode="r")
    assert np.array_equal(group["kappa"][result.grid.slices], result.kappa)
    assert group["u"].metadata.dimension_names == ("time", "x", "y")
    warm = [float(np.sum(u)) for u in group["u"][:]]
    assert len(warm) == 5
    for k, text in enumerate((out / "fields.pvd").read_text().splitlines()[3:-2]):
        time = float(group["time"][k])
        assert text == f'<DataSet timestep="{time!r}" file="fields-vtk/000{k}.pvti"/>'
        found = read_image(out / "fields-vtk" / f"000{k}.pvti", 2)
        assert np.array_equal(found["u"], group["u"][k])
        assert np.array_equal(found["kappa"], group["kappa"][:])
    assert k == 4
    assert warm[0] == 0
    assert warm[1] > 0
    page = result.report.read_text()
    assert page.count("data:image/png;base64,") == 3
    assert (out / "heat.gif").read_bytes().startswith(b"GIF89a")
    assert ("4/4" in capfd.readouterr().out) == (comm.rank == 0)


@pytest.mark.thin(1)
@pytest.mark.cases("cells-*", reason="a network as the unknown runs in the tests of poisson")
@pytest.mark.parametrize(("unknown", "part"), [("cells", 0.1), ("network", 0.5)])
def test_diffusivity_is_estimated(comm, directory, unknown, part):
    settings = small(
        directory, unknown=unknown, observed=0.5, noise=1e-3, memory=5, budget=30, smoothing=1e-6
    )
    result = run(settings, comm)
    comm.mpi.Barrier()
    assert result.history[-1].loss < part * result.history[0].loss
    group = zarr.open_group(settings.out / "fields.zarr", mode="r")
    assert np.array_equal(group["kappa"][result.grid.slices], result.kappa)
    assert result.report.read_text().count("data:image/png;base64,") == 3
    assert len((settings.out / "history.jsonl").read_text().splitlines()) == 6


def test_rejects_invalid_settings_and_files(comm, directory):
    for changes, message in (
        ({"cells": (1, 10)}, "--cells: expected at least 2 cells"),
        ({"duration": 0.0}, "--duration: expected a positive time"),
        ({"theta": 2.0}, "--theta: expected between 0 and 1"),
        ({"steps": 0}, "--steps: expected at least 1"),
        ({"noise": -1.0}, "--noise: expected zero or positive"),
        ({"observed": 0.0}, "--observed: expected a fraction"),
        ({"budget": 3}, "--budget: expected --unknown cells or --unknown network with it, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            run(small(directory, **changes), comm)
    with pytest.raises(FileNotFoundError, match="--model: there is no file"):
        run(small(directory, model=directory / "none.npy"), comm)
    if comm.rank == 0:
        np.save(directory / "holes.npy", np.where(np.eye(11, 10) > 0, np.nan, 1.0))
    comm.mpi.Barrier()
    with pytest.raises(ValueError, match="kappa must be positive and finite"):
        run(small(directory, model=directory / "holes.npy"), comm)
    for steps, taken in ((1, 4), (8, 8)):  # a simulation rounds up to a multiple of its frames
        with pytest.raises(
            ValueError, match=f"--steps: {taken} time steps of .* unstable"
        ) as raised:
            run(small(directory, steps=steps, overwrite=True), comm)
    needed = int(str(raised.value).partition("Use --steps ")[2].split()[0])
    assert run(small(directory, steps=needed, overwrite=True), comm).ending.startswith("all ")
    with pytest.raises(ValueError, match="at least"):
        run(small(directory, unknown="cells", budget=3), comm)
