"""What the native wave kernels were built with."""

import warnings

import numpy as np
import pytest

from mpigrad.grid import Grid
from mpigrad.runtime.native import native_library
from mpigrad.waves import native_run as native
from mpigrad.waves.acoustic import Acoustic, Survey


@pytest.mark.ranks(2)
@pytest.mark.parametrize("openmp", [True, False])
def test_threads_without_openmp_are_a_warning_of_rank_0(comm, monkeypatch, openmp):
    monkeypatch.setattr(native, "has_openmp", lambda _: openmp)
    grid = Grid((9, 8), (10.0, 10.0), comm)
    point = np.full((1, 1, 2), 45.0)
    model = Acoustic(grid, 1e-3, 3, pml=2, threads=3)
    if not openmp and comm.rank == 0:
        said = pytest.warns(UserWarning, match="on one thread of each rank, not on 3")
    else:
        said = warnings.catch_warnings(action="error")
    with said:
        velocity, wavelets = np.full(grid.local_shape, 2e3), np.ones((1, 1, 3))
        assert np.any(model.propagate(velocity, wavelets, Survey(point, point)).gathers != 0)


@pytest.mark.ranks(1)
def test_a_library_without_openmp_is_known_as_such():
    kernels = native_library("mpigrad_kernels")  # links nothing
    assert kernels is not None
    assert not native.has_openmp(kernels)
