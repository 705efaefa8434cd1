"""Operations that a user writes with mpi4py on NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import secrets
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, derivative_slot, resolve
from mpigrad.native import ARITHMETIC_DTYPES, library
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.activity import carrier
from mpigrad.operations.factory import is_differentiable, linear_map
from mpigrad.operations.packing import array
from mpigrad.operations.sites import call_site

__all__ = ["custom_operation"]

Function = Callable[[np.ndarray, MPI.Intracomm], np.ndarray]


@dataclass(frozen=True, eq=False)
class _Operation:
    forward: Function
    transpose: Function
    name: str


@dataclass(frozen=True)
class _Call:
    """One of the two functions, for operands of one type; `batch` are the axes of vmap in front."""

    operation: _Operation
    transposed: bool
    slot: int
    batch: tuple[int, ...]
    shape: tuple[int, ...]  # of x, without the batch
    dtype: np.dtype
    result_shape: tuple[int, ...]
    result_dtype: np.dtype

    def __call__(self, x: int, y: int) -> None:
        """Read the operand at the address `x`, write the result to the address `y`."""
        name = f"{self.operation.name} ({'transpose' if self.transposed else 'forward'})"
        function = self.operation.transpose if self.transposed else self.operation.forward
        operands = _at(x, (*self.batch, *self.shape), self.dtype).reshape(-1, *self.shape)
        results = _at(y, (*self.batch, *self.result_shape), self.result_dtype)
        results = results.reshape(-1, *self.result_shape)
        for operand, result in zip(operands, results, strict=True):
            # A copy: the function may change its operand, which belongs to XLA.
            got = np.asarray(function(operand.copy(), _communicators[self.slot]))
            if (got.shape, got.dtype) != (result.shape, result.dtype):
                raise TypeError(
                    f"{name} returned {got.dtype}{list(got.shape)} where "
                    f"{result.dtype}{list(result.shape)} was promised by `shape`"
                )
            result[...] = got


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    bytes_ = int(np.prod(shape)) * dtype.itemsize
    memory: Any = (ctypes.c_char * bytes_).from_address(address) if bytes_ else b""
    return np.frombuffer(memory, dtype).reshape(shape)


# Compiled programs name a call by its number. It is random: a program that was compiled by
# another process, and kept on disk, must not find another call under it.
_numbers: dict[_Call, int] = {}
_calls: dict[int, _Call] = {}
_communicators: dict[int, MPI.Intracomm] = {}


def _number(call: _Call) -> int:
    if call not in _numbers:
        number = _numbers[call] = secrets.randbits(62)
        _calls[number] = call
    return _numbers[call]


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_int64,
)
def _run(number: int, x: int, y: int, error: Any, length: int) -> int:
    """Run a call; an exception becomes the text of the operation's error."""
    try:
        _calls[number](x or 0, y or 0)
    except BaseException as exception:
        frames = traceback.extract_tb(exception.__traceback__)[2:]  # from the user's function on
        shown = [*frames[:1], *frames[1:][-4:]]
        lines = [f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in shown]
        call = _calls[number]
        unknown = {call.dtype.name, call.result_dtype.name} - ARITHMETIC_DTYPES
        if unknown and frames and "mpi4py" in pathlib.PurePath(frames[-1].filename).parts:
            lines.append(
                f"  ({' and '.join(sorted(unknown))}: MPI has no such datatype. Convert it first, "
                "for instance x.astype('float32'), or move its bytes, x.view('uint8'))"
            )
        text = "\n".join([f"{type(exception).__name__}: {exception}", *lines])
        data = text.encode()[: length - 1] + b"\0"
        ctypes.memmove(error, data, len(data))
        return 1
    return 0


@functools.cache
def _connect() -> None:
    library().mpigrad_set_custom_callback(_run)


def _attributes(avals: Any, p: dict[str, Any]) -> dict[str, Any]:
    x, batch = avals[0], p["batch"]
    call = _Call(
        p["operation"],
        p["transposed"],
        p["comm"],
        batch,
        tuple(x.shape[len(batch) :]),
        np.dtype(x.dtype),
        p["shape"],
        p["dtype"],
    )
    return {"comm": p["comm"], "site": p["site"], "id": _number(call)}


def _transpose(ct: Any, x: Any, a: Any, *, transposed: bool, batch: Any, **p: Any) -> Any:
    p.update(shape=tuple(x.shape[len(batch) :]), dtype=np.dtype(x.dtype))
    return custom_p.bind(ct, a, transposed=not transposed, batch=batch, **p)[0]


custom_p: Primitive = linear_map(
    "custom",
    result=lambda x, *, shape, dtype, batch, **_: ShapedArray((*batch, *shape), dtype),
    attributes=_attributes,
    batch_params=lambda p, n: {**p, "batch": (n, *p["batch"])},
    transpose=_transpose,
    own_space=True,
)


def custom_operation(
    forward: Function,
    transpose: Function,
    shape: Callable[[jax.ShapeDtypeStruct], Any] | None = None,
) -> Callable[..., Any]:
    """A differentiable operation made of two functions with calls of mpi4py.

    Parameters
    ----------
    forward
        (x, comm) -> y, a *linear* map on the product space of the ranks' arrays: x and y are
        NumPy arrays, comm is a communicator of mpi4py. It may call anything of mpi4py, and
        completes what it begins before it returns. It may change its operand.
    transpose
        (ct, comm) -> the transposed map of a cotangent of y: sum over ranks of <forward(x), ct>
        = sum over ranks of <x, transpose(ct)>, without complex conjugates. `dot_test` checks it.
    shape
        jax.ShapeDtypeStruct of x -> something with the `shape` and `dtype` of y; default: those
        of x. Both are floating-point or complex, or both are not.

    Returns
    -------
    operation(x, comm=None) -> y for jax arrays, at its place among the messages: under jit, grad,
    jvp, vmap (member by member), scan and checkpoint, and for higher derivatives. The adjoint is
    `transpose`, and the adjoint of that is `forward`. An exception that one of the functions
    raises ends the operation, with its text, the rank and the line of the call.

    Notes
    -----
    The communicator is the one that mpigrad's own messages use, or, in derivatives, the one that
    theirs use: wait for the requests of `isend` and `irecv` before, or use other tags.
    """
    name = getattr(forward, "__qualname__", type(forward).__name__)
    description = _Operation(forward, transpose, name)

    def operation(x: Any, comm: Communicator | None = None) -> Any:
        _connect()
        comm = resolve(comm)
        x = array(x)
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = struct if shape is None else shape(struct)
        if is_differentiable(y.dtype) != is_differentiable(x.dtype):
            raise TypeError(
                f"{name}: x is {x.dtype} and the result {np.dtype(y.dtype)}: one has a "
                "derivative, the other none; convert one of them outside the operation"
            )
        for slot, mpi in ((comm.slot, comm.mpi), (derivative_slot(comm.slot), comm.derivatives)):
            _communicators[slot] = MPI.Intracomm(mpi)
        return custom_p.bind(
            x,
            carrier(),
            comm=comm.slot,
            site=call_site(),
            operation=description,
            transposed=False,
            batch=(),
            shape=tuple(y.shape),
            dtype=np.dtype(y.dtype),
        )[0]

    operation.__name__, operation.__doc__ = name, forward.__doc__
    return operation
