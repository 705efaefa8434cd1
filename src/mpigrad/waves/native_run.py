"""Runs of waves, described to the native library."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.runtime.native import library
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.interpolation import PointTable

__all__ = ["Run", "default_memory", "has_openmp"]

ACOUSTIC, ELASTIC = 0, 1  # numbers of the physics (native/waves/waves.cc)


class Run:
    """All that the native time loop takes beside its arrays; a static parameter of programs.

    Parameters
    ----------
    physics
        Its number.
    reach
        Cells that its stencil reaches.
    settings
        steps, shots, threads, checkpoints (`checkpoints.native_number`) and memory, in this order.
    fingerprint
        A number of at most 48 bits that is equal on ranks which do the same.
    reals
        dt, and the physics's own numbers.
    profiles
        Of the physics, along x or y.
    tables
        Of sources and receivers: (shots, points of a shot, table).
    shapes
        The arrays of a state: their shapes after the axis of shots.
    gathers
        Shape of the gathers.
    """

    def __init__(
        self,
        physics: int,
        tile: WaveTile,
        *,
        reach: int,
        settings: tuple[int, int, int, int, int],
        fingerprint: int,
        reals: Sequence[float],
        profiles: Sequence[np.ndarray],
        tables: Sequence[tuple[int, int, PointTable]],
        shapes: Sequence[tuple[int, ...]],
        gathers: tuple[int, ...],
    ) -> None:
        self.comm: Communicator = tile.grid.comm
        self.shapes = tuple((settings[1], *shape) for shape in shapes)
        self.gathers = gathers
        self.programs: dict = {}  # eager ones go with their run
        ranks = {(face.axis, face.step): face.rank for face in tile.faces}
        numbers = [
            physics,
            self.comm.slot,
            *tile.grid.local_shape,
            *tile.extension[0],
            *tile.extension[1],
            *(ranks.get((axis, step), -1) for axis in range(2) for step in (-1, 1)),
            reach,
            *settings,
            fingerprint,
        ]
        dt, *own = reals
        lib = _library()
        threads = settings[2]
        if threads > 1 and self.comm.rank == 0 and not has_openmp(lib):
            warnings.warn(
                f"mpigrad: waves run on one thread of each rank, not on {threads}: the native "
                "library was built without OpenMP. Build mpigrad with a compiler that has it.",
                stacklevel=2,
            )
        self.number: int = lib.mpigrad_waves_create(
            *_array(numbers, np.int64), *_array([dt, *tile.grid.spacing, *own], np.float64)
        )
        assert self.number, "the native library takes other numbers"
        for profile in profiles:
            lib.mpigrad_waves_profile(self.number, *_array(profile, np.float64))
        for shots, points, table in tables:
            starts, cells = (np.ascontiguousarray(a, np.int64) for a in (table.starts, table.cells))
            weights = np.ascontiguousarray(table.weights, np.float64)
            lib.mpigrad_waves_points(
                self.number, shots, points, *(_pointer(a) for a in (starts, cells, weights))
            )
        weakref.finalize(self, lib.mpigrad_waves_free, self.number)


def has_openmp(lib: ctypes.CDLL) -> bool:
    """Whether a native library was built with OpenMP: with its run-time library come its names."""
    return hasattr(lib, "omp_get_num_threads")


def _pointer(a: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(a.ctypes.data)


def _array(values: Any, dtype: type) -> tuple[np.ndarray, int]:
    a = np.ascontiguousarray(values, dtype)
    return a, a.size


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library()
    integers = np.ctypeslib.ndpointer(np.int64, flags="C")
    reals = np.ctypeslib.ndpointer(np.float64, flags="C")
    size, data = ctypes.c_int64, ctypes.c_void_p
    lib.mpigrad_waves_create.argtypes = [integers, size, reals, size]
    lib.mpigrad_waves_create.restype = size
    lib.mpigrad_waves_profile.argtypes = [size, reals, size]
    lib.mpigrad_waves_points.argtypes = [size, size, size, data, data, data]
    lib.mpigrad_waves_free.argtypes = [size]
    return lib


@functools.cache
def default_memory() -> int:
    """Half of what this host can spare for each of its ranks, in bytes."""
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":") for line in lines)
        spare = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        spare = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as text:
                spare = min(spare, int(text.read()))
        except (OSError, ValueError):
            pass  # no limit
    return spare // 2 // _ranks_of_this_host()


def _ranks_of_this_host() -> int:
    """From the launcher, so that no message is needed; all ranks where it does not say."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return MPI.COMM_WORLD.size
