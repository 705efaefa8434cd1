"""The operations of mpigrad on PyTorch tensors, made from the operations on JAX arrays."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec

import jax
import numpy as np
import torch
from mpi4py import MPI

from mpigrad import operations
from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.extend import Function, call_site, check_counts, in_order_of_posts
from mpigrad.operations import Request
from mpigrad.torch._torch_compat import eagerly, in_transform
from mpigrad.torch.maps import Map, apply, to_array, type_of

__all__ = [
    "Reduction",
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "assert_replicated",
    "barrier",
    "bcast",
    "custom_operation",
    "exscan",
    "gather",
    "gatherv",
    "irecv",
    "isend",
    "neighbor_alltoallv",
    "one_sided",
    "recv",
    "recv_with_status",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "reduced",
    "reduction",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "wait",
    "wait_with_status",
    "waitall",
]

# ---- User-defined reductions of tensors, which gather the ranks' values and fold them in
# PyTorch


# pyright: reportMissingImports=false


Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reduction:
    """A user-defined reduction for the argument `op`, made by `reduction`."""

    fn: Combine
    derivative: Combine | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Combine the rows of a tensor into one, from first to last."""
        if self.derivative is None or not (rows.is_floating_point() or rows.is_complex()):
            return self.combine(rows)
        return _Folded.apply(self, rows)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Combine the rows with the derivative of PyTorch."""
        y, *rest = rows.unbind(0)
        for x in rest:
            combined = self.fn(y, x)
            if (combined.shape, combined.dtype) != (y.shape, y.dtype):
                raise TypeError(
                    f"reduction: fn must return a tensor {y.dtype}{list(y.shape)} like its "
                    f"arguments, got {combined.dtype}{list(combined.shape)}. Correct fn."
                )
            y = combined
        return y.clone() if not rest else y


class _Folded(torch.autograd.Function):
    """A fold with a given elementwise derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Reduction, rows: torch.Tensor) -> torch.Tensor:
        return op.combine(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, rows = inputs
        ctx.save_for_backward(rows)
        ctx.save_for_forward(rows)

    @staticmethod
    def _slopes(ctx: Any) -> torch.Tensor:
        (rows,) = ctx.saved_tensors
        y = ctx.op(rows)
        return torch.stack([ctx.op.derivative(x, y) for x in rows.unbind(0)])

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:  # type: ignore[override]
        return None, _Folded._slopes(ctx).conj() * ct

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (_Folded._slopes(ctx) * tangent).sum(0)


def reduction(fn: Combine, derivative: Combine | None = None) -> Reduction:
    """Make a reduction for `op=` of reduce, allreduce, reduce_scatter, scan and exscan.

    Parameters
    ----------
    fn
        An associative function (a, b) of two tensors that returns a tensor of the same shape and
        dtype. It combines the ranks' values in the order of ranks, and pytrees leaf by leaf. It
        need not be commutative.
    derivative
        An elementwise function (x, y) -> dy/dx of the value x of one rank and the result y.
        Default: PyTorch differentiates `fn`.

    Returns
    -------
    A reduction for `op=`. It sends all values on which a result depends to the rank of the result,
    and combines them there. The adjoint is the adjoint of these messages.

    Examples
    --------
    >>> import torch
    >>> import mpigrad.torch as mg
    >>> product = mg.reduction(torch.mul, lambda x, y: y / x)
    >>> float(mg.allreduce(torch.tensor(3.0), op=product))
    3.0
    """
    return Reduction(fn, derivative)


def reduced(
    name: str,
    operations: dict[str, Callable[..., Any]],
    x: Any,
    op: Reduction,
    comm: Communicator,
    root: int = 0,
    counts: tuple[int, ...] = (),
) -> Any:
    """Run the operation `name` with `op`, by the `operations` that move values."""
    if name == "reduce":
        check_rank(root, comm, "reduce: root")
        rows = operations["gather"](x, root, comm)
    elif name == "reduce_scatter":
        rows = operations["alltoall"](x, comm)
    elif name == "reduce_scatterv":
        n_rows = check_counts("reduce_scatterv: counts", counts, comm)[comm.rank]
        rows = operations["alltoallv"](x, counts, (n_rows,) * comm.size, comm)
        rows = jax.tree.map(lambda r: r.reshape(comm.size, n_rows, *r.shape[1:]), rows)
    else:
        rows = operations["allgather"](x, comm)

    def finish(rows: torch.Tensor) -> torch.Tensor:
        if name == "scan":
            return op(rows[: comm.rank + 1])
        if name == "exscan":
            return op(rows[: comm.rank]) if comm.rank else torch.zeros_like(rows[0])
        if name == "reduce" and comm.rank != root:
            return torch.zeros_like(rows[0])
        return op(rows)

    return jax.tree.map(finish, rows)


# ---- The operations of mpigrad on PyTorch tensors, made from the operations on JAX arrays ----


# pyright: reportMissingImports=false


P = ParamSpec("P")

# The names of arguments with data, in which numbers and NumPy arrays become tensors.
_DATA = ("x", "like", "content", "put", "accumulate", "request", "requests")
_INTEGERS = ("counts", "sendcounts", "recvcounts", "neighbors")
_TENSOR = object()  # stands for a tensor among the arguments that a program is compiled for


def _data(name: str, value: Any) -> Any:
    """Convert numbers and NumPy arrays in an argument with data to tensors."""
    if isinstance(value, Iterator):
        value = list(value)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            raise TypeError(
                f"mpigrad.torch: expected tensors in {name}, got a JAX array. Convert it by "
                "torch.from_dlpack(x), or use mpigrad's operations for JAX."
            )
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(leaf)
        if name in ("x", "like", "content") and isinstance(leaf, (bool, int, float, complex)):
            return torch.as_tensor(leaf)
        return leaf

    return jax.tree.map(one, value)


def _integers(values: Any) -> Any:
    try:
        return tuple(operator.index(n) for n in values)
    except TypeError:
        return values  # the operation raises the error


def _on_tensors(native: Callable[P, Any]) -> Callable[P, Any]:
    """Make an operation on tensors, with the same arguments and errors, from one on arrays."""
    signature = inspect.signature(native)
    names = tuple(signature.parameters)

    def operation(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names) or not signature.parameters.keys() >= kwargs.keys():
            signature.bind(*args, **kwargs)  # raises
        arguments = dict(zip(names, args, strict=False), **kwargs)
        if "comm" in names:
            arguments["comm"] = resolve(arguments.get("comm"))
        for name, value in arguments.items():
            if type(value) is torch.Tensor:
                continue
            if name in _DATA:
                arguments[name] = _data(name, value)
            elif name in _INTEGERS:
                arguments[name] = _integers(value)
        if isinstance(arguments.get("op"), Reduction):
            return reduced(native.__name__, _OPERATIONS, **arguments)
        return _send(native, arguments)

    operation = functools.wraps(native)(eagerly(operation))
    _OPERATIONS[native.__name__] = operation
    return operation


_OPERATIONS: dict[str, Callable[..., Any]] = {}


def _send(native: Callable[..., Any], arguments: dict[str, Any], known: Any = None) -> Any:
    """Run an operation, or record only its derivatives if its results are `known`."""
    map_, tensors, structure = _prepare(native, arguments)
    return jax.tree.unflatten(structure, apply(map_, tensors, known))


def _prepare(
    native: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[Map, list[torch.Tensor], Any]:
    """Return the map of an operation, its operands, and the structure of its results."""
    leaves, structure = jax.tree.flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    fixed = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else _Fixed(leaf) for leaf in leaves)
    types = tuple(type_of(x) for x in tensors)
    map_, results = _map(native, structure, fixed, types, call_site())
    return map_, tensors, results


class _Fixed:
    """A static argument. A program is compiled for each of its values."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        # MPI handles are not hashable in every mpi4py.
        self.key = (MPI.Op, value.handle) if isinstance(value, MPI.Op) else value

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fixed) and self.key == other.key


@functools.lru_cache(maxsize=4096)
def _map(
    native: Callable[..., Any],
    structure: Any,
    fixed: tuple[Any, ...],
    types: tuple[tuple[tuple[int, ...], np.dtype], ...],
    site: int,
) -> tuple[Map, Any]:
    """Return the map of an operation at a line for these types, and its results' structure."""
    results: list[Any] = []

    def function(*arrays: Any) -> tuple[Any, ...]:
        remaining = iter(arrays)
        leaves = [next(remaining) if f is _TENSOR else f.value for f in fixed]
        out, result_structure = jax.tree.flatten(native(**jax.tree.unflatten(structure, leaves)))
        results.append(result_structure)
        return tuple(out)

    arguments = jax.tree.unflatten(structure, [None if f is _TENSOR else f.value for f in fixed])
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    linear = arguments.get("op", MPI.SUM) == MPI.SUM
    return Map(function, structs, linear=linear, site=site), results[0]


allgather = _on_tensors(operations.allgather)
allgatherv = _on_tensors(operations.allgatherv)
allreduce = _on_tensors(operations.allreduce)
alltoall = _on_tensors(operations.alltoall)
alltoallv = _on_tensors(operations.alltoallv)
barrier = _on_tensors(operations.barrier)
bcast = _on_tensors(operations.bcast)
exscan = _on_tensors(operations.exscan)
gather = _on_tensors(operations.gather)
gatherv = _on_tensors(operations.gatherv)
neighbor_alltoallv = _on_tensors(operations.neighbor_alltoallv)
one_sided = _on_tensors(operations.one_sided)
reduce = _on_tensors(operations.reduce)
reduce_scatter = _on_tensors(operations.reduce_scatter)
reduce_scatterv = _on_tensors(operations.reduce_scatterv)
scan = _on_tensors(operations.scan)
scatter = _on_tensors(operations.scatter)
scatterv = _on_tensors(operations.scatterv)
send = _on_tensors(operations.send)
wait = _on_tensors(operations.wait)
wait_with_status = _on_tensors(operations.wait_with_status)


def _posting(native: Callable[P, Request]) -> Callable[P, Request]:
    """Number requests at run time, because a compiled program always returns the same number."""
    operation = _on_tensors(native)

    @functools.wraps(native)
    def post(*args: Any, **kwargs: Any) -> Request:
        return operation(*args, **kwargs).as_last_post()

    return post


_irecv = _posting(operations.irecv)
isend = _posting(operations.isend)


@functools.wraps(operations.irecv)
def irecv(like: Any, source: int, tag: int = 0, comm: Communicator | None = None) -> Request:
    if source == MPI.ANY_SOURCE or tag == MPI.ANY_TAG:
        raise NotImplementedError(
            "irecv: wildcards are not supported in mpigrad.torch, got MPI.ANY_SOURCE or "
            "MPI.ANY_TAG. Use recv, recv_with_status or sendrecv, or pass source and tag."
        )
    return _irecv(like, source, tag, comm)


_waitall = _on_tensors(operations.waitall)


@eagerly
@functools.wraps(operations.waitall)
def waitall(requests: Any) -> list[Any]:
    return in_order_of_posts(_waitall, requests)


def _refuse_in_transform() -> None:
    if in_transform():
        raise NotImplementedError(
            "mpigrad.torch: a receive with MPI.ANY_SOURCE or MPI.ANY_TAG is not supported in a "
            "transformation of torch.func. Pass source and tag."
        )


@eagerly
@functools.wraps(operations.recv_with_status)
def recv_with_status(
    like: Any,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    comm: Communicator | None = None,
) -> tuple[Any, Any, Any]:
    _refuse_in_transform()
    like, comm = _data("like", like), resolve(comm)
    arguments = {"like": like, "source": source, "tag": tag, "comm": comm}
    map_, tensors, structure = _prepare(operations.recv_with_status, arguments)
    received = map_.run(tensors, tensors[0].device if tensors else torch.device("cpu"))
    value, seen, seen_tag = jax.tree.unflatten(structure, received)
    # Derivatives are exchanged with the sender, which is known now.
    arguments |= {"source": int(seen), "tag": max(int(seen_tag), 0)}
    return _send(operations.recv, arguments, known=jax.tree.leaves(value)), seen, seen_tag


_recv = _on_tensors(operations.recv)


@eagerly
@functools.wraps(operations.recv)
def recv(
    like: Any,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    comm: Communicator | None = None,
) -> Any:
    if source == MPI.ANY_SOURCE or tag == MPI.ANY_TAG:
        return recv_with_status(like, source, tag, comm)[0]
    return _recv(like, source, tag, comm)


_sendrecv = _on_tensors(operations.sendrecv)


@eagerly
@functools.wraps(operations.sendrecv)
def sendrecv(
    x: Any,
    dest: int,
    source: int,
    sendtag: int = 0,
    recvtag: int = 0,
    like: Any = None,
    comm: Communicator | None = None,
) -> Any:
    if source != MPI.ANY_SOURCE and recvtag != MPI.ANY_TAG:
        return _sendrecv(x, dest, source, sendtag, recvtag, like, comm)
    _refuse_in_transform()
    request = isend(x, dest, sendtag, comm)
    received = recv(x if like is None else like, source, recvtag, comm)
    wait(request)
    return received


@functools.wraps(operations.custom_operation)
def custom_operation(
    forward: Function,
    transpose: Function,
    shape: Callable[[jax.ShapeDtypeStruct], Any] | None = None,
) -> Callable[..., Any]:
    native = operations.custom_operation(forward, transpose, shape)
    return _on_tensors(native)


@eagerly
@functools.wraps(operations.assert_replicated)
def assert_replicated(x: Any, *args: Any, **kwargs: Any) -> None:
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda leaf: to_array(torch.as_tensor(leaf)), x)
        operations.assert_replicated(arrays, *args, **kwargs)
