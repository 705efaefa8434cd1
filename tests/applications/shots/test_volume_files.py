"""Volumes of every kind: only the cells of a window are read, and irregular files are refused."""

import numpy as np
import pytest
import zarr

from mpigrad.collective_errors import call_on_root
from mpigrad_apps.shots.thrust import thrust_velocity
from mpigrad_apps.shots.volumes import ThrustVolume, open_volume

SHAPE = (5, 4, 6)
VP = 1500.0 + np.arange(120.0).reshape(SHAPE)
WINDOW = (slice(1, 4), slice(2, 4), slice(0, 5))
LINES = [(10 + 2 * i, 5 + k) for i in range(5) for k in range(4)]


@pytest.mark.ranks(2)
def test_windows_of_every_format(comm, directory, write_segy):
    if comm.rank == 0:
        np.save(directory / "c.npy", VP)
        np.save(directory / "fortran.npy", np.asfortranarray(VP.astype(np.float32)))
        write_segy(directory / "ordered.sgy", VP.reshape(20, 6), LINES)
        mixed = np.random.default_rng(0).permutation(20)
        write_segy(directory / "mixed.segy", VP.reshape(20, 6)[mixed], [LINES[k] for k in mixed])
        zarr.create_array(directory / "array.zarr", data=VP, chunks=(2, 2, 6))
        group = zarr.create_group(directory / "group.zarr", attributes={"spacing": [5.0, 6.0, 7.0]})
        group.create_array("vp", data=VP, dimension_names=("x", "y", "z"))
        group.create_array("other", data=VP[0])
        centers = zarr.create_group(directory / "centers.zarr")
        for name, field in {"lambda": VP, "mu": VP, "rho": VP, "x": 2.5 + 5 * np.arange(5.0),
                            "y": 6.0 * np.arange(4), "z": 7.0 * np.arange(6)}.items():  # fmt: skip
            centers.create_array(name, data=field)
    comm.mpi.Barrier()
    spacings = {"group.zarr": (5.0, 6.0, 7.0), "centers.zarr": (5.0, 6.0, 7.0)}
    for name in ("c.npy", "fortran.npy", "ordered.sgy", "mixed.segy", "array.zarr", *spacings):
        volume = call_on_root(comm, lambda n=name: open_volume(directory / n))
        assert volume is not None and volume.shape == SHAPE
        assert volume.spacing == spacings.get(name)
        fields = volume.read(WINDOW)
        assert set(fields) == ({"lambda", "mu", "rho"} if name == "centers.zarr" else {"vp"})
        for field in fields.values():
            np.testing.assert_array_equal(field, VP[WINDOW])


@pytest.mark.ranks(1)
def test_only_chunks_of_the_window_are_read(directory):
    """A chunk outside of it is damaged."""
    array = zarr.create_array(directory / "m.zarr", data=VP, chunks=(3, 4, 6))
    assert array.shape == SHAPE
    (directory / "m.zarr" / "c" / "1" / "0" / "0").write_bytes(b"damaged")
    volume = open_volume(directory / "m.zarr")
    assert volume is not None
    first = (slice(0, 3), slice(1, 4), slice(0, 6))
    np.testing.assert_array_equal(volume.read(first)["vp"], VP[first])
    with pytest.raises(ValueError, match=r"m.zarr cannot be read"):
        volume.read((slice(0, 4), slice(1, 4), slice(0, 6)))


@pytest.mark.ranks(1)
def test_models_with_two_axes_are_no_volumes(directory, write_segy):
    np.save(directory / "m.npy", VP[0])
    np.savez(directory / "m.npz", vp=VP[0])
    write_segy(directory / "m.sgy", VP[0])
    zarr.create_array(directory / "m.zarr", data=VP[0])
    for ending in ("npy", "npz", "sgy", "zarr"):
        assert open_volume(directory / f"m.{ending}") is None
    with pytest.raises(FileNotFoundError, match="there is no file"):
        open_volume(directory / "none.npy")


@pytest.mark.ranks(1)
def test_default_volume():
    """It has a channel, layers and a fault, and a window of it is a part of the whole."""
    shape = (40, 36, 30)
    volume = ThrustVolume(None, shape, None)
    whole = volume.read(tuple(slice(0, n) for n in shape))["vp"]
    part = slice(7, 20), slice(30, 36), slice(4, 11)
    np.testing.assert_array_equal(volume.read(part)["vp"], whole[part])
    assert 1990 < whole.min() < 2050 and 4500 < whole.max() < 4700
    slower = np.diff(whole, axis=2) < 0  # across the fault and the top of the channel
    assert 0.1 < slower.any(axis=2).mean() < 1
    np.testing.assert_array_equal(whole, thrust_velocity(shape, (slice(None),) * 3))
