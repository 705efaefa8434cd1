"""Arrays that compiled programs read from the native library, in place of large constants."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, batching, mlir
from mpigrad.operations.native_targets import register_target
from mpigrad.sparse.matrix.multilinear import kernels_library

__all__ = ["KeptArray"]

_TARGET = "mpigrad_kernels_kept_array"


@functools.cache
def _library() -> Any:
    lib = kernels_library()
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
