"""Model files of every kind, read back; unreadable files are errors on every rank."""

import base64

import numpy as np
import pytest
import scipy.io
import zarr

from mpigrad.collective_errors import call_on_root
from mpigrad_apps.shots.model_files import read_array, read_model
from mpigrad_apps.shots.volumes import open_volume

VP = 1500 + 10.0 * np.arange(35).reshape(7, 5)
FIELDS = {"vp": VP, "vs": VP / 2, "rho": VP / 1.5}


def write_mat(path, shots=2, steps=6):
    def cells(structures):
        array = np.empty((1, len(structures)), object)
        array[0, :] = structures
        return array

    sources = [{"ix": 1 + k, "iy": 2, "type": 0, "vec": np.full((1, steps), 1.0 + k)}
               for k in range(shots)]  # fmt: skip
    receivers = [{"ix": np.array([[0, 6]]), "iy": np.array([[2, 4]]), "type": np.array([[1, 1]])}
                 for _ in range(shots)]  # fmt: skip
    scipy.io.savemat(
        path,
        {"vp": VP, "dx": 10.0, "dy": 5.0, "dt": 1e-3, "nt": steps, "source": cells(sources),
         "receiver": cells(receivers)},
    )  # fmt: skip


@pytest.mark.ranks(1, 3)
def test_every_format_is_read_back(comm, directory, write_segy):
    if comm.rank == 0:
        np.save(directory / "m.npy", VP)
        np.savez(directory / "m.npz", **FIELDS, spacing=[10.0, 5.0])
        write_mat(directory / "m.mat")
        write_segy(directory / "m.sgy", VP)
        group = zarr.create_group(directory / "m.zarr", attributes={"spacing": [10.0, 5.0]})
        for name, field in FIELDS.items():
            group.create_array(name, data=field)
    comm.mpi.Barrier()
    for ending in ("npy", "npz", "mat", "sgy", "zarr"):
        model = call_on_root(comm, lambda e=ending: read_model(directory / f"m.{e}", (7, 5)))
        assert np.allclose(model.fields["vp"], VP, rtol=1e-7)
        assert model.spacing == (None if ending in ("npy", "sgy") else (10.0, 5.0))
        if ending in ("npz", "zarr"):
            assert np.array_equal(model.fields["rho"], FIELDS["rho"])
        own = model.acquisition
        assert (own is not None) == (ending == "mat")
        if own is not None:  # indices count cells from 0; positions are their centres
            assert own.sources.tolist() == [[[15.0, 12.5]], [[25.0, 12.5]]]
            assert own.receivers[1].tolist() == [[5.0, 12.5], [65.0, 22.5]]
            assert own.wavelets is not None
            assert own.wavelets[1, 0].tolist() == [2.0] * 6
            assert (own.dt, own.steps) == (1e-3, 6)
    if comm.rank == 0:
        assert np.array_equal(read_array(directory / "m.npy"), VP)


@pytest.mark.ranks(1, 2)
def test_rejects_unreadable_files_on_every_rank(comm, directory, write_segy):
    def bad(name, value):
        field = VP.copy()
        field[2, 3] = value
        np.savez(directory / f"{name}.npz", vp=field)

    if comm.rank == 0:
        bad("nan", np.nan)
        bad("negative", -1.0)
        np.save(directory / "thick.npy", np.ones((2, 3, 4)))
        np.savez(directory / "empty.npz", other=VP)
        np.savez(directory / "uneven.npz", vp=VP, rho=VP[1:])
        np.save(directory / "words.npy", np.array([["a"]]))
        (directory / "broken.mat").write_bytes(b"nothing")
        (directory / "m.hdf").touch()
        write_segy(directory / "other.sgy", VP[:, :4])
        write_segy(directory / "volume.sgy", VP[:6], [(i, x) for i in (1, 2) for x in (1, 2, 3)])
    comm.mpi.Barrier()
    for name, error, text in [
        ("none.npy", FileNotFoundError, "there is no file"),
        ("nan.npz", ValueError, r"vp is nan in cell \(2, 3\)"),
        ("negative.npz", ValueError, r"vp is -1 in cell \(2, 3\), but it must be positive"),
        ("thick.npy", ValueError, r"expected vp of shape \(nx, ny\), got shape \(2, 3, 4\)"),
        ("empty.npz", ValueError, r"expected one of the fields vp, vs, rho, lambda, mu, got"),
        ("uneven.npz", ValueError, "expected 7 x 5 cells, got rho of 6 x 5 cells"),
        ("words.npy", ValueError, "expected real numbers in vp, got"),
        ("broken.mat", ValueError, "cannot be read as .mat"),
        ("m.hdf", ValueError, "the file has an unknown format"),
        ("other.sgy", ValueError, "expected 7 x 5 cells, got vp of 7 x 4 cells"),
        ("volume.sgy", ValueError, "a volume with 2 inlines and 3 crosslines"),
    ]:
        with pytest.raises(error, match=text):
            call_on_root(comm, lambda n=name: read_model(directory / n, (7, 5)))


def zarr_section(path, names=("x", "z"), given=VP, centers=True, group=None, older=False, **about):
    """A section as xarray writes it, with cell centres. `about` has the attributes of arrays."""
    version = 2 if older else 3
    group = zarr.create_group(path, attributes=group or {}, zarr_format=version)
    lengths = {name: {"x": 10.0, "X": 10.0}.get(name, 5.0) for name in names}
    arrays = {"vp": (given, names)}
    if centers:
        for name, n in zip(names, given.shape, strict=True):
            arrays[name] = (lengths[name] * (0.5 + np.arange(n)), (name,))
    for name, (values, axes) in arrays.items():
        attributes = about.get(name, {})
        if older:
            group.create_array(name, data=values, attributes={"_ARRAY_DIMENSIONS": list(axes)})
        else:
            group.create_array(name, data=values, dimension_names=axes, attributes=attributes)


@pytest.mark.ranks(1)
def test_zarr_axes_units_and_scales_are_applied(directory):
    nan = base64.b64encode(np.float64(np.nan).tobytes()).decode()  # as xarray writes it
    packed = {"scale_factor": 10.0, "add_offset": 1500.0, "_FillValue": -1}
    km = {"units": "km"}
    for name, section in {
        "plain": {"vp": {"_FillValue": nan, "units": "m s-1"}},
        "turned": {"names": ("z", "x"), "given": VP.T},
        "depth": {"names": ("Depth", "X"), "given": VP.T},
        "older": {"names": ("z", "x"), "given": VP.T, "older": True},
        "own": {"names": ("x", "y")},
        "other": {"names": ("y", "z"), "spacing": None},
        "units": {"given": VP / 1000, "vp": {"units": "km/s"}},
        "feet": {"given": VP / 0.3048, "vp": {"units": "ft/s"}},
        "packed": {"given": ((VP - 1500) / 10).astype(np.int16), "vp": packed},
        "both": {"group": {"spacing": [10.0, 5.0]}},
        "attribute": {"names": ("z", "x"), "given": VP.T, "centers": False,
                      "group": {"spacing": [10.0, 5.0]}},
    }.items():  # fmt: skip
        spacing = section.pop("spacing", (10.0, 5.0))
        zarr_section(directory / f"{name}.zarr", **section)
        model = read_model(directory / f"{name}.zarr")
        np.testing.assert_allclose(model.fields["vp"], VP, rtol=1e-12, err_msg=name)
        assert model.spacing == (spacing or (5.0, 5.0)), name
    zarr_section(directory / "km.zarr", x=km, z=km)
    assert read_model(directory / "km.zarr").spacing == (10e3, 5e3)
    mask = zarr.create_group(directory / "mask.zarr")
    mask.create_array("mask", data=(VP > 1600).T * 1.0, dimension_names=("z", "x"))
    assert np.array_equal(read_array(directory / "mask.zarr", "mask"), VP > 1600)


@pytest.mark.ranks(1)
def test_rejects_zarr_files_that_say_otherwise(directory):
    for name, section, text in [
        ("time", {"names": ("x", "twt")}, "axes x and depth of vp, got x, twt. Convert the axis"),
        ("both", {"names": ("depth", "z")}, "got depth, z. Rename the horizontal axis"),
        ("unit", {"vp": {"units": "s/m"}}, "expected vp in one of the units m/s, .* got 's/m'"),
        ("ms", {"z": {"units": "ms"}}, "expected z in one of the units m, km, ft, got 'ms'"),
        ("up", {"z": {"scale_factor": -1.0}}, "cell centres z that increase, got -2.5, -7.5"),
        ("holes", {"vp": {"_FillValue": 1500.0}}, r"vp is nan in cell \(0, 0\)"),
        ("other", {"group": {"spacing": 10.0}}, r"one spacing, got \(10.0, 10.0\) in the file and"),
    ]:
        zarr_section(directory / f"{name}.zarr", **section)
        with pytest.raises(ValueError, match=text):
            read_model(directory / f"{name}.zarr")
    group = zarr.create_group(directory / "half.zarr")
    group.create_array("vp", data=VP, dimension_names=("x", "z"))
    group.create_array("x", data=np.arange(7.0))
    with pytest.raises(ValueError, match="expected 5 cell centres z for 7 x 5 cells, got none"):
        read_model(directory / "half.zarr")


@pytest.mark.ranks(1)
def test_spacing_of_mat_and_npz_files(directory):
    centers = {"x": 10 * np.arange(7.0), "z": 5 * np.arange(5.0)}
    for name, arrays, expected in [
        ("dz", {"dx": 10.0, "dz": 5.0}, (10.0, 5.0)),
        ("dy", {"dx": 10.0, "dy": 5.0}, (10.0, 5.0)),
        ("centers", centers, (10.0, 5.0)),
        ("same", centers | {"dx": 10.0, "dz": 5.0}, (10.0, 5.0)),
        ("dx", {"dx": 10.0}, "the spacing as dx and one of dy and dz, got dx. Save these two"),
        ("three", {"dx": 1.0, "dy": 1.0, "dz": 1.0}, "got dx, dy, dz. Save"),
        ("values", {"dx": [1.0, 2.0], "dz": 1.0}, "dx as one number, got 2 of shape"),
        ("differ", centers | {"dx": 9.0, "dz": 5.0}, "got .9.0, 5.0. in the file and .10.0, 5.0."),
        ("spacing", {"spacing": [10.0, 4.0], "dx": 10.0, "dz": 5.0}, "and dx and dz .10.0, 5.0."),
        ("short", {"x": np.arange(7.0), "z": np.arange(4.0)}, "expected 5 cell centres z for"),
    ]:
        scipy.io.savemat(directory / f"{name}.mat", {"vp": VP, **arrays})
        np.savez(directory / f"{name}.npz", vp=VP, **arrays)
        # SciPy reads .mat files in a process of its own, which takes long.
        for ending in ("mat", "npz") if name in ("dz", "values") else ("npz",):
            path = directory / f"{name}.{ending}"
            if isinstance(expected, tuple):
                assert read_model(path).spacing == expected, path
                continue
            with pytest.raises(ValueError, match=expected):
                read_model(path)


@pytest.mark.ranks(1)
def test_segy_headers_are_applied(directory, write_segy):
    write_segy(directory / "feet.sgy", VP / 0.3048, binary={3255: 2})
    write_segy(directory / "meters.sgy", VP, binary={3255: 1})
    write_segy(directory / "diagonal.sgy", VP, [(k, k) for k in range(7)])
    write_segy(directory / "oblique.sgy", VP, [(k // 2, k) for k in range(7)])
    write_segy(directory / "little.sgy", VP, endian="little")
    for name in ("feet", "meters", "diagonal", "oblique", "little"):
        model = read_model(directory / f"{name}.sgy")
        np.testing.assert_allclose(model.fields["vp"], VP, rtol=1e-6, err_msg=name)
        assert open_volume(directory / f"{name}.sgy") is None
    amplitudes = read_array(directory / "feet.sgy")  # no velocities
    np.testing.assert_allclose(amplitudes, VP / 0.3048, rtol=1e-6)


@pytest.mark.ranks(1)
def test_rejects_segy_headers_that_say_otherwise(directory, write_segy):
    write_segy(directory / "system.sgy", VP, binary={3255: 7})
    write_segy(directory / "weights.sgy", VP, words={169: 3})
    write_segy(directory / "late.sgy", VP, words={109: 100})
    with pytest.raises(ValueError, match="measurement system, got 7 in bytes 3255-3256"):
        read_model(directory / "system.sgy")
    with pytest.raises(ValueError, match=r"got 3 in bytes 169-170 .* trace 0, .* by 2\^-3"):
        read_model(directory / "weights.sgy")
    with pytest.raises(ValueError, match=r"traces that start at 0 s, got 0.1 s in bytes 109-110"):
        read_array(directory / "late.sgy")
    assert read_model(directory / "late.sgy").shape == (7, 5)  # a model that starts deeper
