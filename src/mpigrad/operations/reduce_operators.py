"""Reductions over the ranks' values: MPI's operations, and the user's own.

SUM is linear, and the logical and bitwise operations are not differentiable: MPI computes them. The
other reductions are differentiated here, by the formula in this file. Messages with known adjoints
move the values to the ranks that need them, and `fold` combines them there.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations._jax_compat import Primitive
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import is_arithmetic, is_differentiable
from mpigrad.operations.pytree_packing import (
    LeafError,
    apply_packed,
    bind_packed,
    describe_leaves,
    dtype_of,
)
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import MOVED_FOR, REDUCTIONS, own_reductions

__all__ = [
    "OPS",
    "Messages",
    "Reduction",
    "bind_reduction",
    "check_op",
    "fold",
    "product_of_others",
    "reduction",
]


# In JAX 0.10 second derivatives of a scan are wrong if its function has a rule of its own and
# operands are equal (jnp.logaddexp). A loop in Python takes longer to compile.
_UNROLLED = 64


@dataclass(frozen=True)
class Reduction:
    """A reduction of the user's own, made by `reduction`: an `op` of the operations that reduce.

    Attributes
    ----------
    fn
        The associative function of two arrays.
    derivative
        The function (x, y) -> dy/dx, or None if JAX differentiates `fn`.
    """

    fn: Callable[[Any, Any], Any]
    derivative: Callable[[Any, Any], Any] | None = None

    def __call__(self, rows: Any) -> Any:
        """Combine the rows of an array into one, from first to last."""
        row = jax.eval_shape(lambda r: r[0], rows)
        result = jax.eval_shape(self.fn, row, row)
        if not isinstance(result, jax.ShapeDtypeStruct) or (
            (result.shape, result.dtype) != (row.shape, row.dtype)
        ):
            raise TypeError(
                f"reduction: fn of two arrays {row.dtype}{list(row.shape)} must return one array "
                f"of the same shape and dtype, got {result}. Change fn."
            )
        if self.derivative is None or not is_differentiable(rows.dtype):
            return self._combine(rows)
        derivative = self.derivative

        @jax.custom_jvp
        def combine(rows: Any) -> Any:
            return self._combine(rows)

        @combine.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            (rows,), (changes,) = primals, tangents
            y = combine(rows)
            return y, jnp.sum(jax.vmap(derivative, (0, None))(rows, y) * changes, 0)

        return combine(rows)

    def _combine(self, rows: Any) -> Any:
        if len(rows) <= _UNROLLED:
            return functools.reduce(self.fn, [rows[i] for i in range(len(rows))])

        def step(y: Any, x: Any) -> Any:
            return self.fn(y, x), None

        return jax.lax.scan(step, rows[0], rows[1:])[0]


def reduction(
    fn: Callable[[Any, Any], Any], derivative: Callable[[Any, Any], Any] | None = None
) -> Reduction:
    """Make a reduction for `op=` of reduce, allreduce, reduce_scatter, scan and exscan.

    The values of all ranks that a result depends on are moved to the rank of the result and
    combined there. The adjoint is that of these messages.

    Parameters
    ----------
    fn
        Associative function (a, b) of two arrays of one shape and dtype that returns an array of
        the same shape and dtype. It uses JAX operations without messages. It combines the values of
        the ranks in the order of ranks, one leaf of a pytree at a time. It may be non-commutative.
    derivative
        (x, y) -> dy/dx, elementwise, for the value x of one rank and the result y. Default: JAX
        differentiates `fn`.

    Returns
    -------
    Reduction
        An `op` for the operations that reduce.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> log_sum = mg.reduction(jnp.logaddexp)
    >>> mg.allreduce(jnp.zeros(2), op=log_sum)
    Array([0., 0.], dtype=float32)
    """
    return Reduction(fn, derivative)


# (kinds of NumPy dtypes, their description, an example of a conversion)
_NUMBERS = ("iufc", "integers, float32/64 and complex64/128", "x.astype('float32')")
_ORDERED = ("iuf", "integers and float32/64", "x.astype('float32')")
_TRUTHS = ("biu", "bool and integers", "x != 0")
_BITS = ("iu", "integers", "x.astype('int32')")
_TIES = "1 for the rank that has the value, shared equally between ties"
_PLACE = "the derivative of the value goes to the rank that has it, the lowest rank of ties"
_NONE = "none: integers have tangents of dtype float0"
# (op, name, dtypes, derivative)
OPS: tuple[tuple[MPI.Op, str, tuple[str, str, str], str], ...] = (
    (MPI.SUM, "SUM", _NUMBERS, "linear: the adjoint of the operation"),
    (MPI.PROD, "PROD", _NUMBERS, "the product of the other ranks' values, exact with zeros"),
    (MPI.MAX, "MAX", _ORDERED, _TIES),
    (MPI.MIN, "MIN", _ORDERED, _TIES),
    (MPI.MAXLOC, "MAXLOC", _ORDERED, _PLACE),
    (MPI.MINLOC, "MINLOC", _ORDERED, _PLACE),
    (MPI.LAND, "LAND", _TRUTHS, _NONE),
    (MPI.LOR, "LOR", _TRUTHS, _NONE),
    (MPI.LXOR, "LXOR", _TRUTHS, _NONE),
    (MPI.BAND, "BAND", _BITS, _NONE),
    (MPI.BOR, "BOR", _BITS, _NONE),
    (MPI.BXOR, "BXOR", _BITS, _NONE),
)


def _number(op: MPI.Op | Reduction) -> int:
    """Return the number by which the guard compares the reductions of the ranks."""
    if not isinstance(op, Reduction):
        return (*REDUCTIONS, *MOVED_FOR).index(op)
    fn = inspect.unwrap(op.fn)
    name = getattr(fn, "__qualname__", type(fn).__name__).split(".")[-1]
    line = getattr(getattr(fn, "__code__", None), "co_firstlineno", 0)
    # By name alone: two ranks may define the same function on two lines.
    number = 1000 + (zlib.crc32(name.encode()) >> 1)
    own_reductions[number] = f"{name}, line {line}" if line else name
    return number


_LOGICAL = (MPI.LAND, MPI.LOR, MPI.LXOR)


def check_op(operation: str, x: Any, op: MPI.Op | Reduction) -> None:
    """Raise an error if `op` is not supported, or not for the dtypes of `x`."""
    if isinstance(op, Reduction):
        return
    for supported, name, (kinds, text, example), _ in OPS:
        if op != supported:
            continue
        for leaf in jax.tree.leaves(x):
            try:
                dtype = dtype_of(leaf)
            except LeafError as error:
                raise error.at(operation, x) from None
            if dtype == jax.dtypes.float0:
                raise TypeError(
                    f"{operation}: expected numbers, got an array of dtype float0, which is the "
                    "derivative with respect to integers and is empty. Leave it out."
                )
            if dtype.kind not in kinds or not is_arithmetic(dtype):
                remedy = "jnp.abs(x)" if dtype.kind == "c" else example
                raise TypeError(
                    f"{operation}: MPI.{name} takes {text}, got {dtype.name}. Convert it first, "
                    f"for example {remedy}."
                )
        return
    names = ", ".join(f"MPI.{name}" for _, name, _, _ in OPS)
    raise ValueError(
        f"{operation}: op must be {names} or a reduction of your own, got {op!r}. Write "
        "op=mpigrad.reduction(fn) for another function."
    )


def fold(op: MPI.Op | Reduction, rows: Any) -> Any:
    """Reduce the rows of an array; for MINLOC and MAXLOC return (value, index of its row)."""
    if isinstance(op, Reduction):
        return op(rows)
    if op in (MPI.MINLOC, MPI.MAXLOC):
        find = jnp.argmin if op == MPI.MINLOC else jnp.argmax
        index = find(rows, axis=0).astype("int32")
        return jnp.take_along_axis(rows, index[None], axis=0)[0], index
    combine = jnp.prod if op == MPI.PROD else jnp.max if op == MPI.MAX else jnp.min
    return combine(rows, axis=0)


def product_of_others(rows: Any, own: int) -> Any:
    """Return the product of all rows but `own`: the derivative of the product, exact with zeros."""
    if len(rows) == 1:
        return jnp.ones_like(rows[0])
    return jnp.prod(jnp.concatenate([rows[:own], rows[own + 1 :]]), axis=0)


class Messages(NamedTuple):
    """Messages of one primitive with these parameters; `leading` as for `apply_packed`."""

    primitive: Primitive
    params: dict[str, Any]
    leading: tuple[int, int] = (0, 0)

    def send(self, leaf: Any, carrier: Any, **where: int) -> Any:
        """Send one array, and return the result."""
        return self.primitive.bind(leaf, carrier, **where, **self.params)[0]


def bind_reduction(
    x: Any,
    op: MPI.Op | Reduction,
    comm: Communicator,
    *,
    native: Messages,
    rows: Messages,
    fold_rows: Callable[[Any], Any],
    nonlinear: Callable[..., Any] | None = None,
) -> Any:
    """Reduce a pytree, and return the result in the structure of `x`.

    Parameters
    ----------
    native
        MPI's own reduction, for sums and for operations without a derivative.
    rows
        The message that moves all values to the ranks that need them, along axis 0.
    fold_rows
        Maps these values to the result on this rank.
    nonlinear
        (array, carrier, comm=, site=, op=) -> the result of PROD, MAX or MIN, if that is cheaper
        than moving all values.
    """
    check_op(native.primitive.name.removeprefix("mpigrad_"), x, op)
    if op == MPI.SUM:
        return bind_packed(
            native.primitive, x, comm, native.leading, op=REDUCTIONS.index(op), **native.params
        )
    a = carrier()
    where = {
        "comm": comm.slot,
        "site": call_site(describe_leaves(x, native.leading[0])),
        "op": _number(op),
    }
    if op in REDUCTIONS:

        def message(leaf: Any) -> Any:
            if op in _LOGICAL and leaf.dtype != bool:  # MPI returns a single operand unchanged
                leaf = (leaf != 0).astype(leaf.dtype)
            if not is_differentiable(leaf.dtype):
                return native.send(leaf, a, **where)
            if nonlinear is not None:
                return nonlinear(leaf, a, **where)
            return fold_rows(rows.send(leaf, a, **where))

        return apply_packed(message, x, leading=native.leading)
    # Array by array: the result may be two arrays, and a user's function may not be elementwise.
    moved = apply_packed(lambda leaf: rows.send(leaf, a, **where), x, leading=rows.leading)
    leaves, structure = jax.tree.flatten(moved)
    results = [fold_rows(leaf) for leaf in leaves]
    if isinstance(op, Reduction):
        return jax.tree.unflatten(structure, results)
    values, indices = [value for value, _ in results], [index for _, index in results]
    return jax.tree.unflatten(structure, values), jax.tree.unflatten(structure, indices)
