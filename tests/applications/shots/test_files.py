"""Model files of every kind, read back; unreadable files are errors on every rank."""

import numpy as np
import pytest
import scipy.io
import zarr

from mpigrad.collective_errors import call_on_root
from mpigrad_apps.shots.model_files import read_array, read_model

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
    """What files say of their numbers is in test_file_table.py."""
    if comm.rank == 0:
        np.savez(directory / "nan.npz", vp=np.where(VP[2, 3] == VP, np.nan, VP))
        (directory / "broken.mat").write_bytes(b"nothing")
        write_segy(directory / "other.sgy", VP[:, :4])
    comm.mpi.Barrier()
    for name, error, text in [
        ("none.npy", FileNotFoundError, "there is no file"),
        ("nan.npz", ValueError, r"vp is nan in cell \(2, 3\)"),
        ("broken.mat", ValueError, "cannot be read as .mat"),
        ("other.sgy", ValueError, "expected 7 x 5 cells, got vp of 7 x 4 cells"),
    ]:
        with pytest.raises(error, match=text):
            call_on_root(comm, lambda n=name: read_model(directory / n, (7, 5)))
