"""What a reduction does with the ranks' values: MPI's operations, and the user's own.

SUM is linear, and the logical and bitwise operations have no derivative: they are MPI's own. The
others are differentiated here, by the formula that is written here: the values are moved to where
they are needed, by messages whose adjoints are known, and `fold` is the rest.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations._jax_compat import Primitive
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import is_differentiable
from mpigrad.operations.pytree_packing import dtype_of, in_words, over_packed
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import ARITHMETIC_DTYPES, MOVED_FOR, REDUCTIONS, own_reductions

__all__ = ["OPS", "Reduction", "check_op", "fold", "product_of_others", "reduced", "reduction"]


# Second derivatives of a scan of functions with a rule of their own are wrong in JAX 0.10 where
# operands are equal (jnp.logaddexp); a loop in Python is longer to compile.
_UNROLLED = 64


@dataclass(frozen=True)
class Reduction:
    """A user's reduction, made by `reduction`; an `op` of the operations that reduce."""

    fn: Callable[[Any, Any], Any]
    derivative: Callable[[Any, Any], Any] | None = None

    def __call__(self, rows: Any) -> Any:
        """The rows of an array, from first to last, combined into one."""
        row = jax.eval_shape(lambda r: r[0], rows)
        result = jax.eval_shape(self.fn, row, row)
        if not isinstance(result, jax.ShapeDtypeStruct) or (
            (result.shape, result.dtype) != (row.shape, row.dtype)
        ):
            raise TypeError(
                f"reduction: fn of two arrays {row.dtype}{list(row.shape)} returns {result}; it "
                "must return one array of the same shape and dtype"
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
    """A reduction of your own, for `op=` of reduce, allreduce, reduce_scatter, scan and exscan.

    Parameters
    ----------
    fn
        Associative function (a, b) of two arrays of one shape and dtype that returns a third, made
        of JAX operations without messages. It combines the ranks' values in the order of their
        ranks, array by array where they are pytrees; it need not be commutative.
    derivative
        (x, y) -> dy/dx, elementwise, of the value x of one rank, where y is the result. Default:
        JAX differentiates `fn`.

    Returns
    -------
    An `op`. The values of all ranks that the result depends on are moved to the rank of the
    result, and are combined there; the adjoint is that of these messages.
    """
    return Reduction(fn, derivative)


# (kinds of NumPy dtypes, what they are called, an example of a conversion)
_NUMBERS = ("iufc", "integers, float32/64 and complex64/128", "x.astype('float32')")
_ORDERED = ("iuf", "integers and float32/64", "x.astype('float32')")
_TRUTHS = ("biu", "bool and integers", "x != 0")
_BITS = ("iu", "integers", "x.astype('int32')")
_TIES = "1 for the rank that has it, shared equally between ties"
_PLACE = "that of the value goes to the rank that has it, the lowest one of ties"
_NONE = "none: integers have tangents of dtype float0"
# (op, name, dtypes, what its derivative is)
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


def _slot(op: MPI.Op | Reduction) -> int:
    """The number by which the guard compares it with the other ranks'."""
    if not isinstance(op, Reduction):
        known = (*REDUCTIONS, *MOVED_FOR)
        return known.index(op)
    fn = inspect.unwrap(op.fn)
    name = getattr(fn, "__qualname__", type(fn).__name__).split(".")[-1]
    line = getattr(getattr(fn, "__code__", None), "co_firstlineno", 0)
    slot = 1000 + (zlib.crc32(name.encode()) >> 1)  # two ranks may have written it in two places
    own_reductions[slot] = f"{name}, line {line}" if line else name
    return slot


_LOGICAL = (MPI.LAND, MPI.LOR, MPI.LXOR)


def check_op(operation: str, x: Any, op: MPI.Op | Reduction) -> None:
    """Refuse reductions that are not known, and dtypes that they do not know."""
    if isinstance(op, Reduction):
        return
    for known, name, (kinds, text, example), _ in OPS:
        if op != known:
            continue
        for leaf in jax.tree.leaves(x):
            dtype = dtype_of(leaf)
            if dtype == jax.dtypes.float0:
                raise TypeError(
                    f"{operation}: an array of dtype float0, the derivative by integers, has no "
                    "values; leave it out"
                )
            if dtype.kind not in kinds or dtype.name not in ARITHMETIC_DTYPES:
                remedy = "jnp.abs(x)" if dtype.kind == "c" else example
                raise TypeError(
                    f"{operation}: MPI.{name} is for {text}, not for {dtype.name}; convert it "
                    f"first, for instance {remedy}"
                )
        return
    names = ", ".join(f"MPI.{name}" for _, name, _, _ in OPS)
    raise ValueError(
        f"{operation}: op={op!r} is not supported; {names} are, and your own: "
        "op=mpigrad.reduction(fn)"
    )


def fold(op: MPI.Op | Reduction, rows: Any) -> Any:
    """The reduction of the rows of an array; for MINLOC and MAXLOC (value, index of its row)."""
    if isinstance(op, Reduction):
        return op(rows)
    if op in (MPI.MINLOC, MPI.MAXLOC):
        find = jnp.argmin if op == MPI.MINLOC else jnp.argmax
        index = find(rows, axis=0).astype("int32")
        return jnp.take_along_axis(rows, index[None], axis=0)[0], index
    combine = jnp.prod if op == MPI.PROD else jnp.max if op == MPI.MAX else jnp.min
    return combine(rows, axis=0)


def product_of_others(rows: Any, own: int) -> Any:
    """The product of all rows but one: a derivative of the product, whatever is zero."""
    if len(rows) == 1:
        return jnp.ones_like(rows[0])
    return jnp.prod(jnp.concatenate([rows[:own], rows[own + 1 :]]), axis=0)


def reduced(
    primitive: Primitive,
    x: Any,
    op: MPI.Op | Reduction,
    comm: Communicator,
    move: Callable[..., Any],
    finish: Callable[[Any], Any],
    *,
    leading: tuple[int, int] = (0, 0),
    moved: tuple[int, int] = (0, 1),
    nonlinear: Callable[..., Any] | None = None,
    **params: Any,
) -> Any:
    """The messages of a reduction, and its result in the structure of `x`.

    Parameters
    ----------
    primitive
        MPI's own, for sums and for what has no derivative; `leading` are its leading axes (see
        `over_packed`), `params` its parameters.
    move
        (array, carrier, comm=, site=, op=) -> all values, along axis 0; `moved` are its leading
        axes.
    finish
        These values -> the result on this rank.
    nonlinear
        (array, carrier, comm=, site=, op=) -> the result by itself, where this is cheaper.
    """
    a, where = carrier(), {"comm": comm.slot, "site": call_site(in_words(x, leading[0]))}
    if op in REDUCTIONS:
        slot = REDUCTIONS.index(op)

        def message(leaf: Any) -> Any:
            if op in _LOGICAL and leaf.dtype != bool:  # MPI returns a single operand as it is
                leaf = (leaf != 0).astype(leaf.dtype)
            if op == MPI.SUM or not is_differentiable(leaf.dtype):
                return primitive.bind(leaf, a, op=slot, **where, **params)[0]
            if nonlinear is not None:
                return nonlinear(leaf, a, op=slot, **where)
            return finish(move(leaf, a, op=slot, **where))

        return over_packed(message, x, leading=leading)
    # Array by array: the result may be two arrays, and a user's function need not be elementwise.
    slot = _slot(op)
    rows = over_packed(lambda leaf: move(leaf, a, op=slot, **where), x, leading=moved)
    leaves, structure = jax.tree.flatten(rows)
    results = [finish(leaf) for leaf in leaves]
    if isinstance(op, Reduction):
        return jax.tree.unflatten(structure, results)
    values, indices = [value for value, _ in results], [index for _, index in results]
    return jax.tree.unflatten(structure, values), jax.tree.unflatten(structure, indices)
