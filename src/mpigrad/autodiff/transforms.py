"""grad, value_and_grad, jvp, vjp, linearize and vmap for programs with messages.

The signatures are JAX's. A program on P ranks is one function on the product space of the ranks'
arrays, and its derivative is the derivative of that one function: every rank seeds its own output,
so that `grad` differentiates the sum over ranks of what the function returns on each rank.
"""

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
from mpigrad.operations.carrier import (
    CARRIER,
    opaque_zero,
    outer_carrier,
    with_carrier,
)
from mpigrad.operations.checks import assert_replicated
from mpigrad.operations.collectives import bcast, reduce
from mpigrad.operations.jit import argument_numbers

__all__ = ["grad", "jvp", "linearize", "value_and_grad", "vjp", "vmap"]

Loss = Literal["share", "replicated"]
_ZERO = np.float32(0)


def _sum_over_ranks(tree: Any, comm: Communicator) -> Any:
    """The sum over ranks, reduced onto rank 0 and broadcast: bit for bit the same everywhere."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    if comm.size == 1:
        return tree
    sums: dict[int, Any] = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):  # one message for each dtype
        members = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        if not jnp.issubdtype(dtype, jnp.inexact):  # float0: no derivative, no message
            sums.update((i, leaves[i]) for i in members)
            continue
        packed = jnp.concatenate([leaves[i].ravel() for i in members])
        packed = bcast(reduce(packed, root=0, comm=comm), 0, comm)
        offset = 0
        for i in members:
            part = packed[offset : offset + leaves[i].size]
            sums[i] = part.reshape(leaves[i].shape)
            offset += leaves[i].size
    return jax.tree.unflatten(structure, [sums[i] for i in range(len(leaves))])


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
    """A function that gives the global value and the gradient of the global value.

    Parameters
    ----------
    f
        Function whose first result is a real scalar. Every rank calls it, with its own arguments.
    argnums, has_aux, holomorphic, allow_int
        As for `jax.value_and_grad`.
    loss
        "share": the value is the sum over ranks of what `f` returns. "replicated": `f` returns
        the same value on every rank (checked), which counts once.
    replicated
        Numbers of arguments, among `argnums`, that are equal on all ranks and count as one: their
        gradient is summed over ranks and is the same, bit for bit, on every rank. With
        MPIGRAD_GUARD=1 it is checked that they are equal.
    comm
        The ranks over which shares and replicated arguments are summed.

    Returns
    -------
    A function like `f` that returns (value, gradient), or ((value, aux), gradient); the value is
    the global one on every rank.

    Notes
    -----
    Messages are active on every rank, whatever is constant there. For a function that is called
    many times, compile the whole: `mpigrad.jit(mpigrad.value_and_grad(f))`.
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
    """A function that gives the gradient of the global value, as `value_and_grad` does.

    Returns
    -------
    A function like `f` that returns the gradient, or (gradient, aux).
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
        raise ValueError(f'loss={loss!r}: it is "share" or "replicated"')
    if not set(equal) <= set(numbers):
        raise ValueError(
            f"replicated={equal}: only arguments that are differentiated can be declared "
            f"replicated (argnums={numbers})"
        )

    def share(*args: Any, **kwargs: Any) -> Any:
        out = f(*args, **kwargs)
        if loss == "share":
            return out
        # Counted once. Not a product with 0 or 1, which would make a NaN of an infinite loss.
        # Whether it is equal everywhere is asked outside, where that sends no adjoint messages.
        value = out[0] if has_aux else out
        mine = jnp.where(resolve(comm).rank == 0, value, jnp.zeros_like(value))
        return mine, out

    # Argument 0 is the carrier; negative numbers count from the end, as before.
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
                assert_replicated(args[n], group, f"argument {n}, declared replicated,")
        out, (_, *gradients) = differentiate(zero, *args, **kwargs)
        value, aux = out if has_aux or loss == "replicated" else (out, None)
        if loss == "replicated":
            whole, aux = cast(Any, aux) if has_aux else (aux, None)
            assert_replicated(whole, group, "the loss that is declared replicated")
        parts = [g for n, g in zip(numbers, gradients, strict=True) if n in equal]
        if reduce_value:  # what is summed travels together
            value, *parts = _sum_over_ranks([value, *parts], group)
        elif parts:
            parts = _sum_over_ranks(parts, group)
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
    """(f(primals), its directional derivative), as `jax.jvp`; tangents are each rank's own."""
    carried = _carried(tangents)
    return jax.jvp(with_carrier(f), (_ZERO, *primals), (carried, *tangents), has_aux=has_aux)


def _carried(tangents: Sequence[Any]) -> Any:
    """The carrier's tangent: zero, and linear in these, for rules that JAX transposes."""
    for t in jax.tree.leaves(tangents):
        if isinstance(t, Tracer) and jnp.issubdtype(t.dtype, jnp.inexact):
            return opaque_zero(t, CARRIER)
    return _ZERO


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """f(primals) and the function that pulls cotangents back, as `jax.vjp`.

    Every rank must call the pull-back, since it carries the adjoint messages. For many cotangents
    at once take the whole: `mpigrad.vmap(lambda ct: mpigrad.vjp(f, x)[1](ct))(cts)`.
    """
    outer = outer_carrier()
    out, back, *aux = jax.vjp(with_carrier(f), _ZERO, *primals, has_aux=has_aux)

    def pull_back(ct: Any) -> Any:
        if compat.is_batched(outer_carrier()) and outer_carrier() is not outer:
            raise ValueError(
                "vmap of a pull-back alone: an adjoint message whose cotangent is not batched on "
                "one rank, but on its partner's, would be of another size there. Put vjp inside: "
                "mpigrad.vmap(lambda ct: mpigrad.vjp(f, x)[1](ct))(cts)"
            )
        return back(jax.tree.map(_active, ct))[1:]

    return out, pull_back, *aux


def _active(ct: Any) -> Any:
    """A cotangent that is differentiated on every rank, where it is on one."""
    a = outer_carrier()
    inexact = isinstance(a, Tracer) and jnp.issubdtype(jnp.result_type(ct), jnp.inexact)
    return ct + opaque_zero(a, jnp.asarray(ct)) if inexact else ct


def linearize(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """f(primals) and its derivative there as a function of tangents, as `jax.linearize`."""
    out, linear, *aux = jax.linearize(with_carrier(f), _ZERO, *primals, has_aux=has_aux)

    def derivative(*tangents: Any) -> Any:
        a = outer_carrier()  # of an enclosing vmap: messages without a tangent are batched, too
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
    """`jax.vmap` in which every message is batched, on every rank alike.

    A message of an operand without the batch axis is sent once for each member of the batch, since
    on its receiver it may meet batched operands.
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
        raise ValueError("vmap: nothing is mapped; give in_axes or axis_size")
    return sizes[0]
