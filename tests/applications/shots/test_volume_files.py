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


@pytest.mark.ranks(1)
def test_rejects_files_that_are_not_regular(directory, write_segy):
    def group(name, labels=None, **arrays):
        group = zarr.create_group(directory / name)
        for key, values in arrays.items():
            group.create_array(key, data=values, dimension_names=labels if key == "vp" else None)

    traces = VP.reshape(20, 6)
    write_segy(directory / "uneven.sgy", traces, [(10 + i * i, k) for i, k in LINES])
    write_segy(directory / "missing.sgy", traces[1:], LINES[1:])
    write_segy(directory / "twice.sgy", traces[:-1], LINES[:-2] + LINES[:1])
    group("turned.zarr", ("z", "y", "x"), vp=VP)
    group("swapped.zarr", ("y", "x", "depth"), vp=VP)
    group("shapes.zarr", vp=VP, rho=VP[1:])
    group("bent.zarr", vp=VP, x=np.arange(5.0) ** 2, y=np.arange(4.0), z=np.arange(6.0))
    zarr.create_group(directory / "flat.zarr", attributes={"spacing": [1.0, 0.0, 1.0]})
    zarr.open_group(directory / "flat.zarr").create_array("vp", data=VP)
    np.save(directory / "empty.npy", VP[:0])
    (directory / "broken.npy").write_bytes(b"\x93NUMPY nothing")
    (directory / "broken.sgy").write_bytes(b"nothing")
    np.save(directory / "cut.npy", VP)
    (directory / "cut.npy").write_bytes((directory / "cut.npy").read_bytes()[:-8])
    for name, text in [
        ("uneven.sgy", "expected inline numbers at one distance, .* got 110, 154, ..., 154, 206"),
        (
            "missing.sgy",
            "one trace for each pair .* got 19 traces: inline 10, crossline 5 has none",
        ),
        ("twice.sgy", "got 19 traces: inline 18, crossline 7 has none. Check the trace headers"),
        ("turned.zarr", "expected the axes x, y, z of vp, got z, y, x. Transpose"),
        ("swapped.zarr", "expected the axes x, y, z of vp, got y, x, depth"),
        ("shapes.zarr", "expected the same .* cells in all fields, got"),
        ("bent.zarr", "expected cell centres x at one distance, got 0, 1, ..., 16"),
        ("flat.zarr", "expected a positive spacing of three axes"),
        ("empty.npy", r"expected vp of shape \(nx, ny, nz\), got shape \(0, 4, 6\)"),
        ("broken.npy", "cannot be read as .npy"),
        ("broken.sgy", "cannot be read as .sgy"),
        ("cut.npy", "cannot be read as .npy"),
    ]:
        with pytest.raises(ValueError, match=text):
            open_volume(directory / name)
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


@pytest.mark.ranks(1)
def test_what_files_say_of_volumes_is_applied(directory, write_segy):
    whole = tuple(slice(0, n) for n in SHAPE)
    write_segy(directory / "feet.sgy", VP.reshape(20, 6) / 0.3048, LINES, binary={3255: 2})
    group = zarr.create_group(directory / "m.zarr")
    packed = {"scale_factor": 0.001, "add_offset": 1.0, "units": "km/s"}
    names = ("x", "y", "depth")
    group.create_array("vp", data=VP - 1000, dimension_names=names, attributes=packed)
    for name, n, unit in (("x", 5, "m"), ("y", 4, "m"), ("depth", 6, "km")):
        group.create_array(name, data=0.5 + np.arange(n), attributes={"units": unit})
    for name, spacing in (("feet.sgy", None), ("m.zarr", (1.0, 1.0, 1000.0))):
        volume = open_volume(directory / name)
        assert volume is not None and volume.spacing == spacing
        np.testing.assert_allclose(volume.read(whole)["vp"], VP, rtol=1e-6)
    mask = open_volume(directory / "feet.sgy", "mask")  # no velocities
    assert mask is not None
    np.testing.assert_allclose(mask.read_arrays(whole)["vp"], VP / 0.3048, rtol=1e-6)


@pytest.mark.ranks(1)
def test_rejects_volumes_that_say_otherwise(directory):
    def volume(name, attributes=None, vp=None, **centers):
        group = zarr.create_group(directory / name, attributes=attributes or {})
        group.create_array("vp", data=VP, attributes=vp or {})
        for axis, values in centers.items():
            group.create_array(axis, data=values)

    x, y, z = (np.arange(float(n)) for n in SHAPE)
    volume("half.zarr", x=x, y=y)
    volume("up.zarr", x=x, y=y, z=-z)
    volume("two.zarr", {"spacing": [1.0, 1.0, 2.0]}, x=x, y=y, z=z)
    volume("unit.zarr", vp={"units": "s/km"})
    for name, text in [
        ("half.zarr", "expected 6 cell centres z for 5 x 4 x 6 cells, got none"),
        ("up.zarr", "cell centres z that increase, got -0, -1, ..., -5. Reverse"),
        ("two.zarr", r"got \[1.0, 1.0, 2.0\] as an attribute and \[1.0, 1.0, 1.0\] from"),
        ("unit.zarr", "expected vp in one of the units m/s, km/s, ft/s, got 's/km'"),
    ]:
        with pytest.raises(ValueError, match=text):
            open_volume(directory / name)
