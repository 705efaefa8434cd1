"""Whole runs: what they write, what loads again, and how they end."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from image_files import read_image

from mpigrad_apps import poisson
from mpigrad_apps.poisson import Settings, load_network, read_data, run


def small(directory, **changes):
    return dataclasses.replace(
        Settings(cells=(11, 10), iterations=4, memory=3, out=directory / "out"), **changes
    )


def test_network_is_trained_and_everything_is_written(comm, directory, capfd):
    settings = small(directory, vtk=True)
    result = run(settings, comm)
    comm.mpi.Barrier()
    out = settings.out
    assert result.ending == "all 4 iterations done"
    assert [record.iteration for record in result.history] == [0, 1, 2, 3, 4]
    assert result.history[-1].loss < 0.5 * result.history[0].loss
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [record.loss for record in result.history]
    assert json.loads((out / "settings.json").read_text())["cells"] == [11, 10]
    # the network loads again and gives the same kappa, the fields are those of all ranks
    x, y = (jnp.asarray(axis) for axis in result.grid.centers())
    loaded_kappa = load_network(out / "network.eqx")(x, y)  # compiled otherwise: to rounding
    assert np.allclose(loaded_kappa, result.kappa, rtol=1e-12)
    group = zarr.open_group(out / "fields.zarr", mode="r")
    for name in ("kappa", "u", "true_kappa"):
        assert np.array_equal(group[name][result.grid.slices], getattr(result, name))
    images = read_image(out / "fields.pvti", 2)
    assert list(images) == ["kappa", "u", "true_kappa"]
    assert all(np.array_equal(image, group[name][:]) for name, image in images.items())
    assert np.allclose(group["x"][:], (np.arange(11) + 0.5) / 11)
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    for words in ("largest error of κ", "in communication", "mpi4py", "Versions"):
        assert words in page
    for picture in ("kappa.png", "u.png", "loss.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out
    assert ("iteration 4/4" in printed) == (comm.rank == 0)
    true = result.true_kappa
    assert true is not None
    errors = comm.mpi.allgather(float(np.max(np.abs(result.kappa - true))))
    assert result.largest_error == pytest.approx(max(errors), rel=1e-12)
    loaded = poisson.inverse_problem(settings, comm).parametrization.load(out / "network.eqx")
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(result.parameters), strict=True):
        assert np.array_equal(a, b)  # what a restart begins with


@pytest.mark.full("a whole run with one value per cell takes long, the other run writes the same")
def test_cells_are_estimated(comm, directory):
    settings = small(directory, kappa="cells", iterations=15, observed=1.0, smoothing=1e-4)
    again = directory / "start.npy"
    if comm.rank == 0:
        np.save(again, np.full((11, 10), 4.0))
    comm.mpi.Barrier()
    result = run(dataclasses.replace(settings, restart=again), comm)
    assert result.history[-1].loss < 0.1 * result.history[0].loss
    comm.mpi.Barrier()
    saved = np.load(settings.out / "cells.npy")
    assert saved.shape == (11, 10)
    assert np.allclose(saved[result.grid.slices], result.kappa, rtol=1e-12)


@pytest.mark.full("a whole run; that of fwi has bounds, too")
def test_cells_stay_within_bounds(comm, directory):
    """The true kappa is between 1 and 3, and the bounds are narrower."""
    settings = small(directory, kappa="cells", bounds=(1.3, 2.0), iterations=8, observed=1.0)
    result = run(settings, comm)
    assert result.history[-1].loss < 0.5 * result.history[0].loss
    kappa = np.concatenate([tile.ravel() for tile in comm.mpi.allgather(result.kappa)])
    for bound in settings.bounds:
        assert np.any(np.abs(kappa - bound) < 1e-12)
    assert kappa.min() >= 1.3 - 1e-12 and kappa.max() <= 2.0 + 1e-12


@pytest.mark.thin(1)
def test_stop_request_ends_the_run_cleanly(comm, directory, monkeypatch):
    stop = directory / "stop"
    if comm.rank == 0:
        stop.touch()
    comm.mpi.Barrier()
    monkeypatch.setenv("MPIGRAD_STOP_FILE", str(stop))
    result = run(small(directory, iterations=1000), comm)
    comm.mpi.Barrier()
    assert result.ending == "stopped at iteration 0"
    assert "stopped at iteration 0" in result.report.read_text()
    assert load_network(result.settings.out / "network.eqx").sizes == (2, 20, 20, 20, 1)
    assert any((result.settings.out / "restart" / "stage0").glob("save-*"))


@pytest.mark.thin(1)
def test_own_data_round_trip(comm, directory):
    """What one problem observes, written as a data file, is fitted by another."""
    truth = poisson.inverse_problem(small(directory, source="one", observed=1.0), comm)
    grid = truth.model.grid
    u = grid.gather(truth.observations.tile())
    path = directory / "mine.npz"
    if u is not None:
        x, y = np.meshgrid(*((np.arange(n) + 0.5) / n for n in grid.shape), indexing="ij")
        points = np.stack([x.ravel(), y.ravel()], 1)
        # in other units: kappa is a thousand times larger for a source that is
        np.savez(path, coordinates=points, values=u.ravel(), source=1000.0)
    comm.mpi.Barrier()
    assert read_data(path, grid).values.shape == (110,)
    settings = small(directory, data=path, iterations=6)
    result = run(dataclasses.replace(settings, out=directory / "data"), comm)
    assert result.true_kappa is None
    assert result.largest_error is None
    assert result.history[-1].loss < 0.5 * result.history[0].loss
    assert np.min(result.kappa) > 500
    assert np.max(result.kappa) < 5000
    wrong_sign_is_named(comm, directory, path)


def wrong_sign_is_named(comm, directory, path):
    fields = dict(np.load(path))
    fields["source"] = -fields["source"]
    wrong = directory / "wrong.npz"
    comm.mpi.Barrier()
    if comm.rank == 0:
        np.savez(wrong, **fields)
    comm.mpi.Barrier()
    with pytest.raises(ValueError, match="Check the sign of the source"):
        run(small(directory, data=wrong), comm)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cells": (1, 10)}, ValueError, "--cells: expected at least 2 cells"),
        ({"iterations": 0}, ValueError, "--iterations: expected at least 1"),
        ({"memory": 0}, ValueError, "--memory"),
        ({"observed": 0.0}, ValueError, "--observed: expected a fraction"),
        ({"observed": float("nan")}, ValueError, "--observed: expected a fraction"),
        ({"noise": -0.1}, ValueError, "--noise"),
        ({"smoothing": float("inf")}, ValueError, "--smoothing"),
        ({"tolerance": 0.0}, ValueError, "--tolerance"),
        ({"bounds": (1.0, 2.0)}, ValueError, "--bounds: expected --kappa cells"),
        ({"kappa": "cells", "bounds": (2.0, 1.0)}, ValueError, "--bounds: expected 0 < low < high"),
    ],
)
def test_rejects_invalid_settings(comm, directory, changes, error, message):
    with pytest.raises(error, match=message):
        run(small(directory, **changes), comm)


@pytest.mark.thin(1)
def test_rejects_invalid_files(comm, directory):
    with pytest.raises(FileNotFoundError, match="--data: there is no file"):
        run(small(directory, data=directory / "none.npz"), comm)
    if comm.rank == 0:
        (directory / "broken.eqx").write_text("{}")
        np.save(directory / "cells.npy", np.ones((3, 3)))
        np.save(directory / "negative.npy", -np.ones((11, 10)))
        (directory / "file").touch()
    comm.mpi.Barrier()
    with pytest.raises(ValueError, match="is not a network written by mpigrad"):
        run(small(directory, restart=directory / "broken.eqx"), comm)
    with pytest.raises(ValueError, match=r"the shape of the grid, \(11, 10\), got \(3, 3\)"):
        run(small(directory, restart=directory / "cells.npy", kappa="cells"), comm)
    with pytest.raises(ValueError, match="must be positive and finite"):
        run(small(directory, restart=directory / "negative.npy", kappa="cells"), comm)
    with pytest.raises(OSError, match=r"--out: .* Choose a directory"):
        run(small(directory, out=directory / "file"), comm)
