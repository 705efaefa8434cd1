"""Native handlers, and arrays of the native library, in compiled programs."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, batching, mlir
from mpigrad.runtime.native import library, native_library

__all__ = [
    "KeptArray",
    "kernels",
    "rank_value",
    "register_target",
]

# ---- Native handlers as targets that compiled programs call ----


@functools.cache
def register_target(name: str, lib: Any = None) -> str:
    """Register the native handler `name` with XLA, for CPUs and, with copied arrays, for GPUs."""
    handler = getattr(library() if lib is None else lib, name)

    def staged(platform: str) -> Any:
        address = ctypes.cast(handler, ctypes.c_void_p)
        entry = library().mpigrad_staged(address, name.encode(), platform == "ROCM")
        if not entry:
            raise RuntimeError(
                f"mpigrad: cannot register the handler {name}: the table in native/gpu/staging.cc "
                "is full. Raise kTargets there."
            )
        return entry

    compat.register_target(name, handler, staged)
    return name


# ---- Arrays that compiled programs read from the native library, in place of large constants


_TARGET = "mpigrad_kernels_kept_array"


@functools.cache
def kernels() -> Any:
    """Return the native library mpigrad_kernels."""
    lib: Any = native_library("mpigrad_kernels")
    if lib is None:
        raise ImportError(
            "mpigrad: the native library mpigrad_kernels is missing from this installation. Build "
            "it with `make setup`, or `pip install .`."
        )
    return lib


@functools.cache
def _library() -> Any:
    lib = kernels()
    lib.mpigrad_kernels_keep.restype = ctypes.c_int64
    lib.mpigrad_kernels_keep.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    lib.mpigrad_kernels_forget.argtypes = [ctypes.c_int64]
    register_target(_TARGET, lib)
    return lib


class _Handle:
    """An array in the native library, which forgets it with this object."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.number = _library().mpigrad_kernels_keep(array.ctypes.data, array.nbytes)
        weakref.finalize(self, _library().mpigrad_kernels_forget, self.number).atexit = False


class KeptArray:
    """An array of NumPy that no compiled program stores, and with which XLA computes nothing early.

    Small arrays are constants of programs, which is faster. A program that is called copies a large
    one. No derivative is taken with respect to it.

    Parameters
    ----------
    array
        A real array. It must not be changed. It is stored in the dtype of each call, too.
    """

    def __init__(self, array: Any) -> None:
        self.array = np.ascontiguousarray(array)
        self._handles: dict[np.dtype, _Handle] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    def __call__(self, dtype: Any) -> jax.Array:
        """Return the array in a dtype, inside and outside programs."""
        dtype = np.dtype(dtype)
        if self.array.size < 4096:
            return jnp.asarray(self.array, dtype)
        if dtype not in self._handles:
            self._handles[dtype] = _Handle(np.ascontiguousarray(self.array, dtype))
        return kept_p.bind(handle=self._handles[dtype])


_of_ranks: weakref.WeakKeyDictionary[Communicator, dict[tuple[float, ...], _Handle]]
_of_ranks = weakref.WeakKeyDictionary()


def rank_value(values: Sequence[float], comm: Communicator) -> jax.Array:
    """Return the entry of `values` that belongs to this rank, as a scalar of 64 bits if enabled.

    A program reads it when it runs. So the programs of all ranks have the same text, and one rank
    can compile them for all ranks of its host. If it were a constant, they would differ.

    Parameters
    ----------
    values
        A number for each rank of `comm`, the same on all ranks.
    comm
        The communicator.
    """
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(values).dtype)
    if comm.size == 1:
        return jnp.asarray(values[0], dtype)
    handles, key = _of_ranks.setdefault(comm, {}), (dtype.num, *values)
    if key not in handles:
        handles[key] = _Handle(np.asarray(values[comm.rank], dtype))
    return kept_p.bind(handle=handles[key])


kept_p = Primitive("mpigrad_kept_array")


def _shape(*, handle: _Handle) -> ShapedArray:
    return ShapedArray(handle.array.shape, handle.array.dtype)


def _lower(ctx: Any, *, handle: _Handle) -> Any:
    ctx.module_context.add_keepalive(handle)  # the program may outlive the owner
    return jax.ffi.ffi_lowering(_TARGET)(ctx, number=np.int64(handle.number))


def _constant(*, handle: _Handle) -> jax.Array:
    return jnp.asarray(handle.array)


compat.hold_weakly(_Handle)
kept_p.def_impl(_constant)
kept_p.def_abstract_eval(_shape)
mlir.register_lowering(kept_p, mlir.lower_fun(_constant, multiple_results=False))
mlir.register_lowering(kept_p, _lower, platform="cpu")
batching.primitive_batchers[kept_p] = lambda args, dims, **params: (kept_p.bind(**params), None)
