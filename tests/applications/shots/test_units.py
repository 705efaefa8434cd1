"""Numbers that look as if they had another unit are named."""

import dataclasses

import numpy as np
import pytest
import zarr
from image_files import read_image

from mpigrad_apps.shots import acoustic_command, elastic_command
from mpigrad_apps.shots.acoustic_settings import Settings as Acoustic
from mpigrad_apps.shots.elastic_physics import ElasticPhysics
from mpigrad_apps.shots.elastic_settings import Settings as Elastic
from mpigrad_apps.shots.experiment import default_model, experiment_of
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.units import warn_of_units

MODEL = default_model((40, 20))


def warnings_of(capfd, scale=1.0, density=1.0, positions=1.0, **options) -> list[str]:
    fields = ElasticPhysics.complete(MODEL.fields)
    fields = {**fields, "vp": scale * fields["vp"], "vs": scale * fields["vs"]}
    fields["rho"] = density * fields["rho"]
    whole = experiment_of(WaveOptions(**options), MODEL, fields)
    moved = {n: positions * getattr(whole, n) for n in ("sources", "receivers")}
    warn_of_units(dataclasses.replace(whole, **moved))
    return [line.removeprefix("mpigrad: warning: ") for line in capfd.readouterr().err.splitlines()]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"scale": 1e-3}, "the P velocities go up to 3.393 m/s, so a time step is 1250 ms. If the"),
        ({"scale": 1e3}, "the P velocities go up to 3.392e+06 m/s"),
        ({"density": 1e-3}, "the densities go up to 2.366 kg/m3. If the model is in g/cm3"),
        ({"spacing": (0.01, 0.01)}, "a cell is 0.01 m long, and the model 0.4 m."),
        ({"dt": 1e-6, "steps": 9}, "the time step of 1e-06 s is 1250 times smaller"),
        ({"frequency": 0.015, "steps": 9}, "at the peak frequency of 0.015 Hz the shortest wave"),
        ({"frequency": 1e3, "steps": 9}, "at the peak frequency of 1000 Hz the shortest wave"),
        ({"positions": 1e-3}, "all sources and receivers lie within 0.39 m, less than a cell."),
        ({}, ""),
        ({"spacing": (2.0, 2.0), "pml": 0}, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:ricker")
def test_another_unit_is_named(capfd, numbers, text):
    found = warnings_of(capfd, **numbers)
    assert [line[: len(text)] for line in found] == ([text] if text else []), found


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.cases("elastic", reason="test_stopping.py runs acoustic waves with snapshots")
@pytest.mark.parametrize("kind", ["acoustic", "elastic"])
def test_runs_warn_once_and_snapshots_end_in_time(comm, directory, capfd, kind):
    """30 steps in 4 segments, of a model in km/s."""
    settings, run = {
        "acoustic": (Acoustic, acoustic_command.run),
        "elastic": (Elastic, elastic_command.run),
    }[kind]
    if comm.rank == 0:
        np.savez(directory / "km.npz", vp=1e-3 * MODEL.fields["vp"])
    comm.mpi.Barrier()
    options = {"steps": 30, "frames": 4, "shots": 1, "pml": 4, "vtk": True, "out": directory / kind}
    done = run(settings(model=directory / "km.npz", **options), comm)
    warned = capfd.readouterr().err
    assert ("the P velocities go up to 3.393 m/s" in warned) == (comm.rank == 0)
    whole = done.experiment
    if comm.rank == 0:
        assert done.gathers is not None
        assert done.gathers.shape[-1] == 30
        group = zarr.open_group(directory / kind / "snapshots.zarr", mode="r")
        times = np.asarray(group["time"][:])
        assert len(times) == 4
        assert times[-1] == 29 * whole.dt
        assert np.all(np.diff(times) > 6.9 * whole.dt)
        name = next(name for name in group.array_keys() if name not in ("x", "y", "time"))
        assert group[name].metadata.dimension_names == ("time", "x", "y")
        last = read_image(directory / kind / "snapshots-vtk" / "0003.pvti", 2)
        assert np.array_equal(last[name], group[name][3])
        assert np.any(last[name])
