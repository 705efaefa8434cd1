"""grad, value_and_grad, jvp, vjp, linearize and vmap for programs with messages."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.communicator import Communicator, resolve
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import concrete_value
from mpigrad.operations.carrier import (
    CARRIER,
    opaque_zero,
    outer_carrier,
    with_carrier,
)
from mpigrad.operations.checks import assert_replicated, require
from mpigrad.operations.collectives import bcast, reduce
from mpigrad.operations.jit import argument_numbers
from mpigrad.operations.local_programs import as_array
from mpigrad.operations.native_targets import rank_value

__all__ = [
    "contribution",
    "grad",
    "jvp",
    "linearize",
    "reject_global_gradients",
    "reject_global_loss",
    "require_replicated",
    "value_and_grad",
    "vjp",
    "vmap",
]

# ---- Errors for derivatives that are global arrays of JAX where a rank's own array is
# expected


def _is_global(x: Any) -> bool:
    value = concrete_value(x)
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def reject_global_loss(value: Any) -> None:
    """Raise an error if the loss is a sharded global array, which every rank would return."""
    if jax.distributed.is_initialized() and any(map(_is_global, jax.tree.leaves(value))):
        raise ValueError(
            "grad, value_and_grad: the function returned a global array of jax.distributed, but "
            "the loss is the sum of what the ranks return. Return this rank's share: the sum of "
            "mpigrad.from_sharded(values). If all ranks have the value, use mpigrad.from_sharded("
            'value) with loss="replicated".'
        )


def reject_global_gradients(function: str, n: int, argument: Any, gradient: Any) -> None:
    """Raise an error if argument n is of this rank and its gradient is a global array.

    JAX takes an array of a rank that meets a sharded array for one that is the same on all ranks,
    and its gradient is then the sum over all ranks.
    """
    if not jax.distributed.is_initialized():
        return
    pairs = zip(jax.tree.leaves(argument), jax.tree.leaves(gradient), strict=True)
    if any(_is_global(g) and not _is_global(x) for x, g in pairs):
        raise ValueError(
            f"{function}: argument {n} is this rank's array, but it was used with a "
            "sharded array without a conversion, and JAX took it for one that all ranks have. Use "
            "mpigrad.to_sharded(x, mesh, PartitionSpec()) there."
        )


# ---- The comparison of replicated arguments, in the message that sums their gradients ----
#
# Rank r contributes c[r] s[r], with s[r] a weighted sum of the entries of its argument, and with
# coefficients c whose sum over ranks is zero. So the total is zero, up to rounding, if all ranks
# have the same argument. The total travels with the gradients and needs no message.


def contribution(argument: Any, comm: Communicator) -> jax.Array:
    """Return this rank's part of the total and of its scale, of shape (2,)."""
    coefficients = [1 + rank / comm.size for rank in range(comm.size)]
    coefficients[0] = -sum(coefficients[1:])
    leaves = [jax.lax.stop_gradient(as_array(leaf)) for leaf in jax.tree.leaves(argument)]
    inexact = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return _sums(inexact, rank_value(coefficients, comm))


# Eager operators would be compiled one by one.
@jax.jit
def _sums(leaves: list[jax.Array], coefficient: jax.Array) -> jax.Array:
    parts = [p for x in leaves for p in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    dtype = jnp.result_type("float32", *(part.dtype for part in parts))
    sums = jnp.zeros(2, dtype)
    for part in parts:
        # Weights between 1 and 2: unweighted, x and -x may have the same sum, zero.
        weights = 1 + jnp.arange(part.size, dtype=dtype) * 0.618034 % 1
        weighted = part.astype(dtype).ravel() * weights
        sums += jnp.stack([jnp.sum(weighted), jnp.sum(jnp.abs(weighted))])
    return sums * jnp.stack([coefficient, jnp.abs(coefficient)]).astype(dtype)


def require_replicated(
    sums: Sequence[jax.Array], numbers: Sequence[int], comm: Communicator
) -> None:
    """Raise an error on all ranks if an argument differs, from the sums of the contributions."""
    for total, n in zip(sums, numbers, strict=True):
        same, difference = _verdict(total)
        require(
            same,
            f"grad, value_and_grad: argument {n}, declared replicated, is not the same on all "
            f"{comm.size} ranks (relative difference {{}}). Make it equal, for instance by bcast, "
            "or do not declare it replicated. MPIGRAD_GUARD=1 names the ranks.",
            difference,
            comm=comm,
        )


@jax.jit
def _verdict(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    difference = jnp.abs(sums[0]) / jnp.where(sums[1] > 0, sums[1], 1)
    return ~(difference > 64 * jnp.finfo(sums.dtype).eps), difference  # NaN is not different


# ---- grad, value_and_grad, jvp, vjp, linearize and vmap for programs with messages ----
#
# The signatures are JAX's. A program on P ranks is one function on the product space of the
# ranks' arrays, and its derivative is the derivative of that one function. Every rank seeds its
# own output, so `grad` differentiates the sum over ranks of the values that the function returns.


Loss = Literal["share", "replicated"]
_ZERO = np.float32(0)


def _sum_over_ranks(tree: Any, comm: Communicator) -> Any:
    """Return the sum over ranks, reduced onto rank 0 and broadcast: the same bits on all ranks."""
    if comm.size == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    # Gradients with respect to integers (float0) are empty and are not sent.
    sent = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    sums = bcast(reduce([leaves[i] for i in sent], root=0, comm=comm), 0, comm)
    for i, total in zip(sent, sums, strict=True):
        leaves[i] = total
    return jax.tree.unflatten(structure, leaves)


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    loss: Loss = "share",
    replicated: int | Sequence[int] = (),
    comm: Communicator | None = None,
) -> Callable[..., Any]:
    """Make a function that returns the global value of `f` and its gradient.

    Messages are active on every rank, also on ranks whose operands are constant. If the function is
    called many times, compile it as a whole: `mpigrad.jit(mpigrad.value_and_grad(f))`.

    Parameters
    ----------
    f
        Function whose first result is a real scalar. Every rank calls it, with its own arguments.
    argnums, has_aux, holomorphic, allow_int
        As for `jax.value_and_grad`.
    loss
        "share": the value is the sum over ranks of the results of `f`. "replicated": `f` returns
        the same value on every rank (which is checked), and the value counts once.
    replicated
        Numbers of arguments, among `argnums`, that are equal on all ranks and count as one
        argument. Their gradient is summed over ranks and has the same bits on every rank. Every
        other argument is a rank's own, and so is its gradient. The sums of the entries of a
        replicated argument are compared in each call, in the message of the gradients. With
        MPIGRAD_GUARD=1 all entries are compared.
    comm
        The communicator over which shares and gradients of replicated arguments are summed.
        Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    A function like `f` that returns (value, gradient), or ((value, aux), gradient). The value is
    the global value on every rank.

    Raises
    ------
    ValueError
        If `loss` is another word, or an argument in `replicated` is not in `argnums`.
    jax.errors.JaxRuntimeError
        On every rank, when the program runs, if a replicated loss or argument is not the same on
        all ranks.

    Examples
    --------
    >>> import mpigrad as mg
    >>> value, gradient = mg.value_and_grad(lambda x: mg.allreduce(x) ** 2)(3.0)
    >>> float(value), float(gradient)
    (9.0, 6.0)
    """
    transformed = _value_and_grad(
        f, argnums, has_aux, holomorphic, allow_int, loss, replicated, comm, reduce_value=True
    )
    return functools.wraps(f)(transformed)


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    loss: Loss = "share",
    replicated: int | Sequence[int] = (),
    comm: Communicator | None = None,
) -> Callable[..., Any]:
    """Make a function that returns the gradient of the global value, as `value_and_grad` does.

    Parameters
    ----------
    f, argnums, has_aux, holomorphic, allow_int, loss, replicated, comm
        As for `value_and_grad`.

    Returns
    -------
    A function like `f` that returns the gradient, or (gradient, aux).

    Examples
    --------
    >>> import mpigrad as mg
    >>> float(mg.grad(lambda x: mg.allreduce(x) ** 2)(3.0))
    6.0
    """
    both = _value_and_grad(
        f, argnums, has_aux, holomorphic, allow_int, loss, replicated, comm, reduce_value=False
    )

    @functools.wraps(f)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, g = both(*args, **kwargs)
        return (g, value[1]) if has_aux else g

    return gradient


def _value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    loss: Loss,
    replicated: int | Sequence[int],
    comm: Communicator | None,
    *,
    reduce_value: bool,
) -> Callable[..., Any]:
    numbers, equal = argument_numbers(argnums), argument_numbers(replicated)
    if loss not in ("share", "replicated"):
        raise ValueError(
            f'grad, value_and_grad: loss must be "share" or "replicated", got {loss!r}. Choose one '
            "of the two."
        )
    if not set(equal) <= set(numbers):
        raise ValueError(
            "grad, value_and_grad: only arguments that are differentiated can be replicated, got "
            f"replicated={equal} and argnums={numbers}. Add the arguments to argnums."
        )

    def share(*args: Any, **kwargs: Any) -> Any:
        out = f(*args, **kwargs)
        reject_global_loss(out[0] if has_aux else out)
        if loss == "share":
            return out
        # Counted on rank 0 only. A product with 0 or 1 would turn an infinite loss into NaN. The
        # caller checks that the loss is replicated, outside of the derivative: the messages of the
        # check need no adjoints.
        value = out[0] if has_aux else out
        group = resolve(comm)
        is_first = rank_value([rank == 0 for rank in range(group.size)], group)
        counted = jnp.where(is_first, value, jnp.zeros_like(value))
        return counted, out

    # Argument 0 is the carrier. Negative numbers still count from the end.
    shifted = tuple(n + 1 if n >= 0 else n for n in numbers)
    differentiate = jax.value_and_grad(
        with_carrier(share),
        (0, *shifted),
        has_aux or loss == "replicated",
        holomorphic,
        allow_int,
    )
    zero = np.complex64(0) if holomorphic else _ZERO

    def transformed(*args: Any, **kwargs: Any) -> Any:
        group = resolve(comm)
        if os.environ.get("MPIGRAD_GUARD") == "1":
            for n in equal:
                assert_replicated(
                    args[n], group, what=f"grad, value_and_grad: argument {n}, declared replicated,"
                )
        out, (_, *gradients) = differentiate(zero, *args, **kwargs)
        for n, g in zip(numbers, gradients, strict=True):
            reject_global_gradients("grad, value_and_grad", n, args[n], g)
        value, aux = out if has_aux or loss == "replicated" else (out, None)
        if loss == "replicated":
            whole, aux = cast(Any, aux) if has_aux else (aux, None)
            assert_replicated(
                whole,
                group,
                what="grad, value_and_grad: the loss that is declared replicated",
                remedy='Return the same value on every rank, or use loss="share".',
            )
        parts = [g for n, g in zip(numbers, gradients, strict=True) if n in equal]
        # All sums of one dtype travel in one message.
        compared = [contribution(args[n], group) for n in equal] if group.size > 1 else []
        if reduce_value:
            value, parts, compared = _sum_over_ranks((value, parts, compared), group)
        elif parts:
            parts, compared = _sum_over_ranks((parts, compared), group)
        require_replicated(compared, equal[: len(compared)], group)
        summed = iter(parts)
        gradients = [
            next(summed) if n in equal else g for n, g in zip(numbers, gradients, strict=True)
        ]
        gradient = tuple(gradients) if isinstance(argnums, Sequence) else gradients[0]
        out = (value, aux) if has_aux else value
        return out, gradient

    return transformed


def jvp(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> Any:
    """Compute f(primals) and its directional derivative, as `jax.jvp` does.

    Parameters
    ----------
    f
        Function of arrays or pytrees, with messages. Every rank calls `jvp`.
    primals, tangents
        The point and the direction, of each rank.
    has_aux
        As for `jax.jvp`.

    Returns
    -------
    (f(primals), derivative), or (f(primals), derivative, aux).

    Examples
    --------
    >>> import mpigrad as mg
    >>> value, derivative = mg.jvp(lambda x: mg.allreduce(x) ** 2, (3.0,), (1.0,))
    >>> float(value), float(derivative)
    (9.0, 6.0)
    """
    carried = _carried(tangents)
    return jax.jvp(with_carrier(f), (_ZERO, *primals), (carried, *tangents), has_aux=has_aux)


def _carried(tangents: Sequence[Any]) -> Any:
    """Return the tangent of the carrier: a zero that is linear in the tangents."""
    for t in jax.tree.leaves(tangents):
        if isinstance(t, Tracer) and jnp.issubdtype(t.dtype, jnp.inexact):
            return opaque_zero(t, CARRIER)
    return _ZERO


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Compute f(primals) and the function that pulls cotangents back, as `jax.vjp` does.

    Parameters
    ----------
    f
        Function of arrays or pytrees, with messages. Every rank calls `vjp`.
    primals
        The point, of each rank.
    has_aux
        As for `jax.vjp`.

    Returns
    -------
    (f(primals), pull_back), or (f(primals), pull_back, aux). Every rank must call `pull_back`,
    because it sends the adjoint messages. For a batch of cotangents apply vmap to the whole:
    `mpigrad.vmap(lambda ct: mpigrad.vjp(f, x)[1](ct))(cts)`.

    Examples
    --------
    >>> import mpigrad as mg
    >>> value, pull_back = mg.vjp(lambda x: mg.allreduce(x) ** 2, 3.0)
    >>> (cotangent,) = pull_back(1.0)
    >>> float(value), float(cotangent)
    (9.0, 6.0)
    """
    outer = outer_carrier()
    out, back, *aux = jax.vjp(with_carrier(f), _ZERO, *primals, has_aux=has_aux)
    point = primals if jax.distributed.is_initialized() else ()  # else they are not kept

    def pull_back(ct: Any) -> Any:
        if compat.is_batched(outer_carrier()) and outer_carrier() is not outer:
            raise ValueError(
                "vjp: the function that vjp returned cannot be batched by vmap alone. If its "
                "cotangent were batched on only one of two communicating ranks, the sizes of their "
                "messages would differ. Put vjp inside vmap: "
                "mpigrad.vmap(lambda ct: mpigrad.vjp(f, x)[1](ct))(cts)."
            )
        gradients = back(jax.tree.map(_active, ct))[1:]
        for n, (x, g) in enumerate(zip(point, gradients, strict=False)):
            reject_global_gradients("vjp", n, x, g)
        return gradients

    return out, pull_back, *aux


def _active(ct: Any) -> Any:
    """Return a cotangent that is active on every rank if it is active on one."""
    a = outer_carrier()
    inexact = isinstance(a, Tracer) and jnp.issubdtype(jnp.result_type(ct), jnp.inexact)
    return ct + opaque_zero(a, jnp.asarray(ct)) if inexact else ct


def linearize(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Compute f(primals) and its derivative as a function of tangents, as `jax.linearize` does.

    Parameters
    ----------
    f
        Function of arrays or pytrees, with messages. Every rank calls `linearize`.
    primals
        The point, of each rank.
    has_aux
        As for `jax.linearize`.

    Returns
    -------
    (f(primals), derivative), or (f(primals), derivative, aux). Every rank must call `derivative`,
    because it sends the messages of tangents.

    Examples
    --------
    >>> import mpigrad as mg
    >>> value, derivative = mg.linearize(lambda x: mg.allreduce(x) ** 2, 3.0)
    >>> float(value), float(derivative(1.0))
    (9.0, 6.0)
    """
    out, linear, *aux = jax.linearize(with_carrier(f), _ZERO, *primals, has_aux=has_aux)

    def derivative(*tangents: Any) -> Any:
        # In an enclosing vmap messages without a tangent must be batched, too.
        a = outer_carrier()
        outer = opaque_zero(a, CARRIER) if isinstance(a, Tracer) else _ZERO
        return linear(outer + _carried(tangents), *tangents)

    return out, derivative, *aux


def vmap(
    f: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
) -> Callable[..., Any]:
    """Batch a function as `jax.vmap` does, with every message batched on every rank.

    A message whose operand does not have a batch axis is sent once for each member of the batch,
    because its receiver may combine it with batched operands.

    Parameters
    ----------
    f
        Function of arrays or pytrees, with messages. Every rank calls the result.
    in_axes, out_axes, axis_name, axis_size, spmd_axis_name
        As for `jax.vmap`.

    Returns
    -------
    The batched function.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.vmap(lambda x: mg.allreduce(x) ** 2)(jnp.arange(3.0))
    Array([0., 1., 4.], dtype=float32)
    """

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        axes = tuple(in_axes) if isinstance(in_axes, (list, tuple)) else (in_axes,) * len(args)
        size = axis_size if axis_size is not None else _axis_size(axes, args, kwargs)
        batched = jax.vmap(with_carrier(f), (0, *axes), out_axes, axis_name, size, spmd_axis_name)
        return batched(jnp.zeros(size, CARRIER.dtype), *args, **kwargs)

    return mapped


def _axis_size(axes: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    sizes: list[int] = []

    def visit(axis: int | None, part: Any) -> None:
        if axis is not None:
            sizes.extend(jnp.shape(leaf)[axis] for leaf in jax.tree.leaves(part))

    jax.tree.map(visit, axes, args, is_leaf=lambda x: x is None)
    visit(0, kwargs)
    if not sizes:
        raise ValueError(
            f"vmap: at least one argument must have a batch axis, got in_axes={axes}. Give in_axes "
            "or axis_size."
        )
    return sizes[0]
