"""Python functions that a program calls: operations that a user writes with mpi4py, and others."""

from __future__ import annotations

import abc
import ctypes
import functools
import math
import pathlib
import secrets
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, derivative_slot, resolve, slot_of
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier, forbid_messages
from mpigrad.operations.primitive import is_differentiable, linear_map
from mpigrad.operations.pytree_packing import arrays
from mpigrad.runtime.call_sites import call_site, utf8
from mpigrad.runtime.native import ARITHMETIC_DTYPES, library

__all__ = ["HostCall", "array_at", "custom_operation"]

# ---- Python functions that a compiled program calls ----


class HostCall(abc.ABC):
    """A Python function that a compiled program calls with the addresses of its arrays.

    A subclass implements `run`. It is a parameter of a primitive whose native call has the target
    "mpigrad_custom" and these attributes, and keeps this parameter alive. The function may exchange
    messages by other libraries. If it raises an exception, the operation ends with its text.

    Attributes
    ----------
    shown_as
        The name of the operation in errors, reports and traces.
    """

    shown_as = "custom_operation"

    @abc.abstractmethod
    def run(self, xs: Any, ys: Any) -> None:
        """Read the operands at the addresses `xs`, and write the results to the addresses `ys`."""

    def hint(self, frames: list[traceback.FrameSummary]) -> str:
        """Return a line for the text of an exception that was raised at `frames`, or ""."""
        del frames
        return ""

    @functools.cached_property
    def number(self) -> int:
        """The number by which compiled programs name the call.

        It is random: a program that another process has compiled and written to disk must not find
        another call under the same number.
        """
        _connect()
        number = secrets.randbits(62)
        _calls[number] = self
        return number

    def attributes(self, comm: int, site: int) -> dict[str, Any]:
        """Return the attributes of the native call, on the communicator in this slot."""
        return {"comm": comm, "site": site, "id": self.number, "operation": self.shown_as}


def array_at(address: int | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return the array at one of the addresses that `HostCall.run` gets."""
    bytes_ = math.prod(shape) * dtype.itemsize
    if not bytes_ or address is None:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * bytes_).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


_calls: weakref.WeakValueDictionary[int, HostCall] = weakref.WeakValueDictionary()


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_int64,
)
def _run(number: int, xs: Any, ys: Any, error: Any, length: int) -> int:
    """Run a call, and turn an exception into the text of the operation's error."""
    call = _calls[number]
    try:
        call.run(xs, ys)
    except BaseException as exception:
        frames = traceback.extract_tb(exception.__traceback__)[2:]  # starts in the user's function
        text = f"{type(exception).__name__}: {exception}\n{call.hint(list(frames))}"
        data = utf8(text.rstrip("\n"), length - 1) + b"\0"
        ctypes.memmove(error, data, len(data))
        return 1
    return 0


@functools.cache
def _connect() -> None:
    library().mpigrad_set_custom_callback(_run)


# ---- Operations that a user writes with mpi4py on NumPy arrays ----

Function = Callable[[Any, MPI.Intracomm], Any]
_MPI4PY_ONLY = (
    "custom_operation: expected forward and transpose to send by mpi4py, got an operation of "
    "mpigrad inside one of them. Call the methods of the function's own argument comm."
)


@dataclass(frozen=True, eq=False)
class _Operation:
    forward: Function
    transpose: Function
    name: str


@dataclass(frozen=True)
class _Type:
    """The shapes and dtypes of a pytree of arrays."""

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @staticmethod
    def of(tree: Any) -> _Type:
        leaves, structure = jax.tree.flatten(tree)
        return _Type(structure, tuple((tuple(x.shape), np.dtype(x.dtype)) for x in leaves))

    @property
    def is_differentiable(self) -> bool:
        return any(is_differentiable(dtype) for _, dtype in self.leaves)

    def __str__(self) -> str:
        shown = [f"{dtype}{list(shape)}" for shape, dtype in self.leaves]
        return str(jax.tree.unflatten(self.structure, [_Bare(text) for text in shown]))


class _Bare(str):
    """A text that is shown without quotes."""

    __repr__ = str.__str__


@dataclass(frozen=True)
class _Call(HostCall):
    """One of the two functions for operands of one type. `batch` are the leading axes of vmap."""

    operation: _Operation
    transposed: bool
    slot: int
    batch: tuple[int, ...]
    operand: _Type  # without the batch, as the result
    result: _Type

    def run(self, xs: Any, ys: Any) -> None:
        name = f"{self.operation.name} ({'transpose' if self.transposed else 'forward'})"
        function = self.operation.transpose if self.transposed else self.operation.forward
        operands, results = self._at(xs, self.operand), self._at(ys, self.result)
        for member in range(math.prod(self.batch)):
            # Copies: the function may change its operands, which belong to XLA.
            copies = [x[member].copy() for x in operands]
            with forbid_messages(_MPI4PY_ONLY):
                returned = function(
                    jax.tree.unflatten(self.operand.structure, copies),
                    _communicators[slot_of(self.slot)],
                )
            expected = f"{self.result}, the type " + (
                "of x, which a cotangent of x has"
                if self.transposed
                else "that `shape` returned (default: the type of x)"
            )
            try:
                leaves = self.result.structure.flatten_up_to(returned)
            except ValueError:
                raise TypeError(
                    f"{name}: expected {expected}, got the pytree "
                    f"{jax.tree.structure(returned)}. Return the expected structure."
                ) from None
            leaf_arrays = [np.asarray(leaf) for leaf in leaves]
            type_ = _Type.of(jax.tree.unflatten(self.result.structure, leaf_arrays))
            if type_ != self.result:
                raise TypeError(
                    f"{name}: expected {expected}, got {type_}. Return the expected shapes and "
                    "dtypes."
                )
            for y, values in zip(results, leaf_arrays, strict=True):
                y[member] = values

    def _at(self, addresses: Any, type_: _Type) -> list[np.ndarray]:
        return [
            array_at(addresses[i], (math.prod(self.batch), *shape), dtype)
            for i, (shape, dtype) in enumerate(type_.leaves)
        ]

    def hint(self, frames: list[traceback.FrameSummary]) -> str:
        shown = [*frames[:1], *frames[1:][-4:]]
        lines = [f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in shown]
        moved = (*self.operand.leaves, *self.result.leaves)
        without_type = {dtype.name for _, dtype in moved} - ARITHMETIC_DTYPES
        if without_type and frames and "mpi4py" in pathlib.PurePath(frames[-1].filename).parts:
            lines.append(
                f"  ({' and '.join(sorted(without_type))}: MPI has no such datatype. Convert it "
                "first, for example x.astype('float32'), or move its bytes, x.view('uint8'))"
            )
        return "\n".join(lines)


_known: dict[_Call, _Call] = {}
_communicators: dict[int, MPI.Intracomm] = {}


def _attributes(avals: Any, p: dict[str, Any]) -> dict[str, Any]:
    call = _Call(p["operation"], p["transposed"], p["comm"], p["batch"], p["operand"], p["result"])
    return _known.setdefault(call, call).attributes(p["comm"], p["site"])


def _results(*xs: Any, result: _Type, batch: tuple[int, ...], **_: Any) -> list[ShapedArray]:
    return [ShapedArray((*batch, *shape), dtype) for shape, dtype in result.leaves]


def _transpose(
    cts: Any, xs: Any, a: Any, *, transposed: bool, operand: _Type, result: _Type, **p: Any
) -> Any:
    return custom_p.bind(*cts, a, transposed=not transposed, operand=result, result=operand, **p)


custom_p: Primitive = linear_map(
    "custom",
    result=_results,
    attributes=_attributes,
    batch_params=lambda p, n: {**p, "batch": (n, *p["batch"])},
    transpose=_transpose,
    n_ary=True,
    separate_tags=True,
)


def custom_operation(
    forward: Function, transpose: Function, shape: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """Make a differentiable operation from two functions that call mpi4py.

    Parameters
    ----------
    forward
        (x, comm) -> y, a *linear* map on the product space of the ranks' arrays. x and y are NumPy
        arrays or pytrees of them, and comm is a communicator of mpi4py. The function may call any
        part of mpi4py, and completes its messages before it returns. It may change its operand.
    transpose
        (ct, comm) -> the transposed map of a cotangent of y: the sum over ranks of <forward(x), ct>
        equals the sum over ranks of <x, transpose(ct)>, without complex conjugates. `dot_test`
        checks it.
    shape
        Maps a jax.ShapeDtypeStruct of x to an object with the `shape` and `dtype` of y, or a pytree
        of x to a pytree of y. Default: those of x. If x has floating-point or complex arrays, y
        must have some, too, and the other way round.

    Returns
    -------
    operation
        A function (x, comm=None) -> y of JAX arrays or pytrees of them. It keeps its place among
        the messages under jit, grad, jvp, vmap (one member at a time), scan and checkpoint, and in
        higher derivatives. The adjoint is `transpose`, and the adjoint of that is `forward`. If one
        of the functions raises an exception, the operation ends with its text, the rank and the
        line of the call.

    Notes
    -----
    The communicator is that of mpigrad's own custom operations, with another one for derivatives.
    The messages of the two functions never meet other messages of the program.

    Integers next to floating-point arrays move with them. In derivatives they are zeros, and the
    results for them are not used: the map must be linear in all operands, so integers cannot choose
    it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> total = mg.custom_operation(
    ...     forward=lambda x, comm: comm.allreduce(x),
    ...     transpose=lambda ct, comm: comm.allreduce(ct),
    ... )
    >>> total(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    >>> check = mg.dot_test(total, jnp.arange(3.0))
    """
    if not callable(forward) or not callable(transpose):
        raise TypeError(
            "custom_operation: forward and transpose must be functions (x, comm) -> y, got "
            f"{type(forward).__name__} and {type(transpose).__name__} on rank "
            f"{MPI.COMM_WORLD.rank}. Give two functions."
        )
    name = getattr(forward, "__qualname__", type(forward).__name__)
    description = _Operation(forward, transpose, name)

    def operation(x: Any, comm: Communicator | None = None) -> Any:
        _connect()
        comm = resolve(comm)
        x = arrays(name, x)
        struct = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
        y = struct if shape is None else shape(struct)
        if not all(
            hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(y)
        ):
            raise TypeError(
                f"{name}: `shape` must return an object with `shape` and `dtype`, or a pytree of "
                f"them, got {y!r} on rank {comm.rank}. Return a jax.ShapeDtypeStruct."
            )
        operand, result = _Type.of(struct), _Type.of(y)
        if result.is_differentiable != operand.is_differentiable:
            raise TypeError(
                f"{name}: x and the result must both have floating-point arrays, or neither, got "
                f"x = {operand} and the result {result} on rank {comm.rank}. Convert one of them "
                "outside the operation."
            )
        for slot, mpi in zip(
            (comm.slot, derivative_slot(comm.slot)), comm.custom_comms, strict=True
        ):
            _communicators[slot] = MPI.Intracomm(mpi)
        leaves = custom_p.bind(
            *jax.tree.leaves(x),
            carrier(),
            comm=comm.slot,
            site=call_site(),
            operation=description,
            transposed=False,
            batch=(),
            operand=operand,
            result=result,
        )
        return jax.tree.unflatten(result.structure, leaves)

    operation.__name__, operation.__doc__ = name, forward.__doc__
    return operation
