"""Recordings in files of every format; data that do not fit the run are errors on every rank."""

import dataclasses

import numpy as np
import pytest
import scipy.io
import zarr

from mpigrad_apps.fwi import Settings, prepare_inversion

SHOTS, RECEIVERS, STEPS, DT = 2, 3, 9, 1e-3
FEW = Settings(
    cells=(12, 10), spacing=(10.0, 10.0), steps=STEPS, shots=SHOTS, receivers=RECEIVERS, dt=DT,
    pml=4, frequency=20.0, groups=2,
)  # fmt: skip
VP = 1600.0 + np.arange(120.0).reshape(12, 10)
SPACED = {"spacing": [10.0, 10.0]}


def recordings(components):
    shape = (SHOTS, components, RECEIVERS, STEPS)
    return np.random.default_rng(components).normal(size=shape)


def traces_of(gathers):
    return gathers.reshape(-1, STEPS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("physics", "components"), [("acoustic", 1), ("elastic", 2)])
def test_every_format_is_read(comm, directory, write_segy, physics, components):
    gathers = recordings(components)
    if comm.rank == 0:
        write_segy(directory / "start.sgy", VP)
        start = zarr.create_group(directory / "start.zarr", attributes=SPACED)
        for name, field in {"vp": VP, "vs": VP / 2, "rho": VP + 400}.items():
            start.create_array(name, data=field)
        np.save(directory / "d.npy", gathers)
        np.savez(directory / "d.npz", gathers=gathers, dt=DT, other=1.0)
        scipy.io.savemat(directory / "d.mat", {"gathers": gathers, "dt": DT})
        # Shot gathers may well number lines in their headers; and 1.0009 ms are 1000 microseconds.
        lines = [(1 + k // RECEIVERS, 1 + k % RECEIVERS) for k in range(gathers.size // STEPS)]
        write_segy(directory / "d.sgy", traces_of(gathers), lines, 1.0009)
        zarr.create_array(directory / "array.zarr", data=gathers, attributes={"dt": DT})
        group = zarr.create_group(directory / "group.zarr", attributes={"dt": DT, **SPACED})
        group.create_array("gathers", data=gathers)
        if components == 1:
            np.save(directory / "plain.npy", gathers[:, 0])
    comm.mpi.Barrier()
    start = directory / ("start.sgy" if physics == "acoustic" else "start.zarr")
    settings = dataclasses.replace(FEW, physics=physics, initial=start)
    plain = ["plain.npy"] * (components == 1)
    for name in ["d.npy", "d.npz", "d.mat", "d.sgy", "array.zarr", "group.zarr", *plain]:
        problem = prepare_inversion(dataclasses.replace(settings, data=directory / name), comm)
        mine = gathers[problem.group.shots]
        assert mine.shape[0] == 1
        np.testing.assert_allclose(problem.recorded, mine, rtol=1e-6 if name == "d.sgy" else 0)
        np.testing.assert_allclose(problem.experiment.fields["vp"], VP, rtol=1e-6)


@pytest.mark.ranks(2)
def test_rejects_unfitting_data_on_every_rank(comm, directory, write_segy):
    """Before the first step: nothing is computed until the recordings are there."""
    one, two = recordings(1), recordings(2)
    holes = np.where(one == one.max(), np.nan, one)
    if comm.rank == 0:
        np.save(directory / "start.npy", VP)
        np.savez(directory / "coarse.npz", vp=VP, spacing=(99.0, 99.0))
        np.save(directory / "turned.npy", one.swapaxes(2, 3))
        np.savez(directory / "short.npz", gathers=one[..., 1:])
        np.savez(directory / "two.npz", a=one, b=one)
        np.savez(directory / "late.npz", gathers=one, dt=1.01 * DT)
        np.savez(directory / "holes.npz", gathers=holes)
        scipy.io.savemat(directory / "shots.mat", {"gathers": one[:1]})
        scipy.io.savemat(directory / "late.mat", {"gathers": one, "dt": 0.99 * DT})
        write_segy(directory / "fewer.sgy", traces_of(one)[1:])
        write_segy(directory / "slow.sgy", traces_of(one), milliseconds=2.0)
        write_segy(directory / "vx.segy", traces_of(two[:, 0]))
        zarr.create_array(directory / "two.zarr", data=two)
        zarr.create_array(directory / "late.zarr", data=one, attributes={"dt": 2 * DT})
        (directory / "broken.sgy").write_bytes(b"nothing")
    comm.mpi.Barrier()
    acoustic = dataclasses.replace(FEW, initial=directory / "start.npy")
    elastic = dataclasses.replace(acoustic, physics="elastic")
    wanted = "expected 2 shots, {} components, 3 receivers and 9 steps, in this order"
    for settings, name, text in [
        (acoustic, "turned.npy", r"shape \(2, 1, 9, 3\), " + wanted.format(1)),
        (acoustic, "short.npz", r"shape \(2, 1, 3, 8\), " + wanted.format(1)),
        (acoustic, "two.npz", "expected one array called gathers, got a, b"),
        (acoustic, "late.npz", r"has samples every 0.00101 s, this run every 0.001 s. Use --dt"),
        (acoustic, "holes.npz", "has values that are not finite"),
        (acoustic, "shots.mat", r"shape \(1, 1, 3, 9\), " + wanted.format(1)),
        (acoustic, "late.mat", "has samples every 0.00099 s"),
        (acoustic, "fewer.sgy", r"shape \(5, 9\), " + wanted.format(1)),
        (acoustic, "slow.sgy", "has samples every 0.002 s, .* Use --dt 0.002"),
        (acoustic, "two.zarr", r"shape \(2, 2, 3, 9\), " + wanted.format(1)),
        (acoustic, "late.zarr", "has samples every 0.002 s"),
        (acoustic, "broken.sgy", "cannot be read as .sgy"),
        (elastic, "late.zarr", r"shape \(2, 1, 3, 9\), " + wanted.format(2)),
        (elastic, "vx.segy", r"shape \(6, 9\), " + wanted.format(2)),
    ]:
        with pytest.raises(ValueError, match=text):
            prepare_inversion(dataclasses.replace(settings, data=directory / name), comm)
    with pytest.raises(ValueError, match=r"coarse.npz has cells of \(99.0, 99.0\) m, the model"):
        prepare_inversion(dataclasses.replace(acoustic, initial=directory / "coarse.npz"), comm)
