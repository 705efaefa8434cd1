"""A sum through shared memory and an acoustic wave across two ranks, without JAX.

jaxlib needs AVX. On an older processor this program calls the native handlers as XLA would.
"""

# ruff: noqa: E402
import ctypes
import importlib.util
import pathlib
import struct
import sys

import numpy as np

sys.argv[0] = "mpigrad"  # like the command `mpigrad`, which is not a rank and imports no JAX
from mpi4py import MPI

import mpigrad
from mpigrad.runtime.native import SUM, library, native_library
from mpigrad.runtime.processor import has_avx, processor_variant, waves_library

kept = []  # memory that the handlers read


def address(values, dtype=np.int64):
    """Copy numbers to memory that stays, and return its address."""
    kept.append(np.array(values, dtype))
    return kept[-1].ctypes.data


def buffers(*arrays):
    """XLA_FFI_Args or XLA_FFI_Rets: a token and arrays."""
    types = {"float32": 11, "int32": 4}
    items = [address([48, 0, 17, 0, 0, 0])]
    for x in arrays:
        items.append(address([48, 0, types[x.dtype.name], x.ctypes.data, x.ndim, address(x.shape)]))
    return [40, 0, len(items), address([1] * len(items), np.int32), address(items)]


def integers(**values):
    """XLA_FFI_Attrs: 64-bit integers by name."""
    names, numbers = [], []
    for name, value in sorted(values.items()):
        text = name.encode()
        names.append(address([address(list(text), np.uint8), len(text)]))
        numbers.append(address([5, address([value])]))
    types = address([3] * len(names), np.int32)
    return [48, 0, len(names), types, address(names), address(numbers)]


def call(handler, args, rets, attrs):
    """Call a handler with an XLA_FFI_CallFrame (xla/ffi/api/c_api.h)."""
    api = address([192, 0, 24, 0, 2 << 32, *[0] * 19])  # version 0.2
    frame = [168, 0, api, 0, 3, *args, *rets, *attrs, 0]
    handler.restype = ctypes.c_void_p
    assert handler(ctypes.c_void_p(address(frame))) is None


def load_board():
    """Load mpigrad.guard.board without its package, which imports JAX."""
    file = pathlib.Path(mpigrad.__file__).parent / "guard" / "board.py"
    spec = importlib.util.spec_from_file_location("board", file)
    module = sys.modules["board"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lib, board, world = library(), load_board(), MPI.COMM_WORLD
rank = world.rank
assert world.size == 2
assert board.share(lib).lock is not None, "the ranks share no memory"
for slot in (0, 1):
    lib.mpigrad_set_communicator(slot, world.handle, world.handle, rank, 2)
    board.register(lib, slot, rank, world.allgather)

x = np.arange(1000, dtype="float32") + rank
total = np.zeros_like(x)
call(lib.mpigrad_allreduce, buffers(x), buffers(total), integers(comm=0, site=0, op=SUM, root=-1))
np.testing.assert_array_equal(total, 2 * np.arange(1000) + 1)

# Two tiles along x. The source is on rank 0, the receiver on rank 1, two cells further.
waves = native_library(waves_library())
steps, nx, ny = 40, 12, 20
integer, data = ctypes.c_int64, ctypes.c_void_p
sides = [-1, 1, -1, -1, -1, -1] if rank == 0 else [0, -1, -1, -1, -1, -1]
directory = address([0], np.uint8)  # an empty text: no files
description = struct.pack(
    "28q5d4qq2q",
    *(5, 320, 0, 0, nx, ny, 1, *[0] * 6, *sides, 2, steps, 1, 1, -1, 1 << 28, 0, directory, 7),
    *(1e-3, 10.0, 10.0, 1.0, 6.0, 0, 0, 1, 0, 0, -1, 0),
)
run = integer()
waves.mpigrad_waves_create_run.restype = ctypes.c_char_p
assert waves.mpigrad_waves_create_run(description, ctypes.byref(run)) is None
for cells in (nx, ny):
    waves.mpigrad_waves_profile(run, data(address([0] * cells, np.float64)), integer(cells))
for owner, cell in ((0, (nx - 1) * ny + 10), (1, 1 * ny + 10)):
    starts, weights = address([0, int(rank == owner)]), address([1.0], np.float64)
    waves.mpigrad_waves_points(
        run, integer(1), integer(1), data(starts), data(address([cell])), data(weights)
    )
velocity = np.full((nx, ny), 2000, "float32")
amplitudes = np.ones((1, 1, steps), "float32")
gathers, ticket = np.zeros((1, 1, steps), "float32"), np.zeros((), "int32")
pressure, before = (np.zeros((1, nx, ny), "float32") for _ in range(2))
layers = np.zeros((1, 0), "float32")
call(
    waves.mpigrad_waves_forward,
    buffers(velocity, amplitudes),
    buffers(gathers, ticket, pressure, before, layers),
    integers(site=0, setup=run.value, rest=1, save=0),
)
assert "jax" not in sys.modules
print(
    f"rank {rank}: {processor_variant()}, avx={has_avx()}, {waves_library()}, "
    f"receiver {gathers[0, 0, -1]:.5e}, pressure {np.abs(pressure).max():.5e}",
    flush=True,
)
