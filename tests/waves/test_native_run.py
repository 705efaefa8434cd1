"""The native library of waves: threads, and the description of runs."""

import warnings

import numpy as np
import pytest

from mpigrad.grid import Grid
from mpigrad.runtime.native import native_library
from mpigrad.waves import native_run as native
from mpigrad.waves.acoustic import Acoustic, Survey


@pytest.mark.ranks(2)
@pytest.mark.parametrize("openmp", [True, False])
def test_rank_0_warns_of_threads_without_openmp(comm, monkeypatch, openmp):
    monkeypatch.setattr(native, "has_openmp", lambda _: openmp)
    grid = Grid((9, 8), (10.0, 10.0), comm)
    point = np.full((1, 1, 2), 45.0)
    model = Acoustic(grid, 1e-3, 3, pml=2, threads=3)
    if not openmp and comm.rank == 0:
        outcome = pytest.warns(UserWarning, match="expected 3 threads on each rank")
    else:
        outcome = warnings.catch_warnings(action="error")
    with outcome:
        velocity, wavelets = np.full(grid.local_shape, 2e3), np.ones((1, 1, 3))
        assert np.any(model.propagate(velocity, wavelets, Survey(point, point)).gathers != 0)


@pytest.mark.ranks(1)
def test_has_openmp_is_false_for_a_library_without_it():
    kernels = native_library("mpigrad_kernels")  # links nothing
    assert kernels is not None
    assert not native.has_openmp(kernels)


@pytest.mark.ranks(1)
def test_rejects_a_library_of_another_version(comm, monkeypatch):
    monkeypatch.setattr(native, "_DESCRIPTION_VERSION", 99)
    model = Acoustic(Grid((9, 8), (10.0, 10.0), comm), 1e-3, 3, pml=2)
    point = np.full((1, 1, 2), 45.0)
    with pytest.raises(ImportError, match="Python package version 99"):
        model.propagate(np.full((9, 8), 2e3), np.ones((1, 1, 3)), Survey(point, point))
