"""grad, value_and_grad, jvp, vjp, linearize, vmap and jit for programs with messages.

The signatures are JAX's. A program on P ranks is one function on the product space of the ranks'
arrays, and its derivative is the derivative of that one function: every rank seeds its own output,
so that `grad` differentiates the sum over ranks of what the function returns on each rank.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.communicator import Communicator, check_process, resolve
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations.activity import (
    CARRIER,
    nought,
    outer_carrier,
    with_carrier,
    without_carriers,
)
from mpigrad.operations.checks import assert_replicated
from mpigrad.operations.collectives import bcast, reduce
from mpigrad.operations.factory import register_target, set_jit

__all__ = ["grad", "jit", "jvp", "linearize", "value_and_grad", "vjp", "vmap"]

Loss = Literal["share", "replicated"]
_ZERO = np.float32(0)


def _numbers(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    if argnums is None:
        return ()
    if isinstance(argnums, Sequence):
        return tuple(operator.index(n) for n in argnums)
    return (operator.index(argnums),)


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
    numbers, equal = _numbers(argnums), _numbers(replicated)
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
            return nought(t, CARRIER)
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
    return ct + nought(a, jnp.asarray(ct)) if inexact else ct


def linearize(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """f(primals) and its derivative there as a function of tangents, as `jax.linearize`."""
    out, linear, *aux = jax.linearize(with_carrier(f), _ZERO, *primals, has_aux=has_aux)

    def derivative(*tangents: Any) -> Any:
        a = outer_carrier()  # of an enclosing vmap: messages without a tangent are batched, too
        outer = nought(a, CARRIER) if isinstance(a, Tracer) else _ZERO
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


# ---- jit ----

# To JAX, a compiled program is a pure function of an array of one byte, which every program takes
# and returns; so it is dispatched by JAX's fast path, and programs keep their order.
_TURN = compat.ShapedArray((1,), np.dtype("uint8"))
_region_p = compat.Primitive("mpigrad_region")
_region_p.multiple_results = True
_region_p.def_abstract_eval(lambda turn, *xs, jaxpr: [_TURN, *(v.aval for v in jaxpr.outvars)])
compat.register_lowering(
    _region_p,
    compat.lower_in_token_region(
        register_target("mpigrad_enter"), register_target("mpigrad_leave"), _TURN
    ),
)
compat.lower_high_level(_region_p)
# JAX alone calls it without compiling: to find a NaN (jax_debug_nans).
_region_p.def_impl(lambda turn, *xs, jaxpr: [turn, *repairs.run_piecewise(jaxpr, *xs)])
_first_turn = np.zeros(_TURN.shape, _TURN.dtype)  # no array of JAX's at import
_turn: Any = _first_turn


def _completed(program: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The results of a program, run to its end where a call only queues it.

    Queued programs would have no order with those of `jax.jit`, nor with direct calls of mpi4py.
    """
    jax.effects_barrier()
    turn, out = program(_first_turn, *args, **kwargs)
    jax.block_until_ready(turn)
    return out


def _region(f: Callable[..., Any], turn: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """(next turn, f(*args, **kwargs)), the messages of f between `turn` and the next."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]

    def flat(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(dynamic, values, strict=True):
            filled[i] = value
        inner_args, inner_kwargs = jax.tree.unflatten(structure, filled)
        return f(*inner_args, **inner_kwargs)

    operands = [leaves[i] for i in dynamic]
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*operands)
    if others := compat.other_orders(closed.effects):
        raise NotImplementedError(
            "mpigrad.jit: the function has other operations that keep an order of their own "
            f"({', '.join(others)}), callbacks with ordered=True for example; give them "
            "ordered=False, or compile the function by jax.jit"
        )
    jaxpr, constants = compat.constants_as_operands(closed)
    turn, *results = _region_p.bind(turn, *constants, *operands, jaxpr=jaxpr)
    return turn, jax.tree.unflatten(jax.tree.structure(shapes), results)


def _refuse_devices(arrays: Any, cause: Exception) -> None:
    """Say in words of mpigrad that a program failed because its arrays are on several devices."""
    if not any(words in str(cause) for words in ("incompatible devices", "must have sharding")):
        return
    there = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array) and not x.is_deleted()]
    found = {d for x in there for d in x.devices()}
    if len(found) > 1:
        raise ValueError(
            f"mpigrad.jit: arrays of this rank are on {', '.join(sorted(map(str, found)))}: all "
            "programs with messages of a rank run on one device. Start a rank for each device, or "
            "move the arrays to one (jax.device_put)"
        ) from cause


def _both(
    f: Callable[..., Any], numbers: int | Sequence[int] | None, names: str | Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Numbers and names of the same arguments, each completed by the other, as JAX does."""
    found = list(_numbers(numbers))
    called = [names] if isinstance(names, str) else list(names or ())
    if min((*found, 0)) < 0:
        raise ValueError("mpigrad.jit: static_argnums and donate_argnums count from the front")
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # no signature, as of some compiled functions
        return tuple(found), tuple(called)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_number = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    pairs = list(enumerate(parameters))
    called += [p.name for i, p in pairs if i in found and p.kind in by_name]
    found += [i for i, p in pairs if p.name in called and p.kind in by_number]
    return tuple(sorted({*found})), tuple(dict.fromkeys(called))


def jit(
    f: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`jax.jit` for programs with messages, with cheap dispatch.

    `jax.jit` of a program with messages takes JAX's slow dispatch path; this one, called outside
    any transformation, takes the fast one, and keeps its order among all operations of mpigrad.
    Inside a transformation it is `jax.jit`, traced once whatever the transformation.

    Parameters
    ----------
    static_argnums, static_argnames, donate_argnums, donate_argnames
        As for `jax.jit`.
    """
    if f is None:
        return functools.partial(
            jit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
        )
    static_numbers, static_names = _both(f, static_argnums, static_argnames)
    donate_numbers, donate_names = _both(f, donate_argnums, donate_argnames)
    options: dict[str, Any] = {
        "static_argnums": tuple(n + 1 for n in static_numbers),
        "static_argnames": static_names,
        "donate_argnums": tuple(n + 1 for n in donate_numbers),
        "donate_argnames": donate_names,
    }

    # The first argument is the turn at top level, and the carrier inside a transformation.
    @functools.partial(jax.jit, **options)
    def program(_mpigrad_turn: Any, /, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return _mpigrad_turn, f(*args, **kwargs)
        return _region(f, _mpigrad_turn, args, kwargs)

    inside = functools.partial(jax.jit, **options)(with_carrier(f))
    at_top_level = compat.is_top_level

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _turn
        if at_top_level():
            check_process()
            try:
                if _turn is _first_turn and compat.queues():
                    return _completed(program, args, kwargs)
                _turn, out = program(_turn, *args, **kwargs)
            except (ValueError, RuntimeError) as error:
                # JAX's fast path raises a failed handler as a ValueError, its slow one does not.
                text = str(error).partition("mpigrad: ")[2]
                if not text or isinstance(error.__cause__, jax.errors.JaxRuntimeError):
                    _refuse_devices((_turn, args, kwargs), error)
                    raise
                raise jax.errors.JaxRuntimeError(f"mpigrad: {text}") from None
            return out
        a = outer_carrier()
        with without_carriers():
            return inside(a, *args, **kwargs)

    return call


set_jit(jit)
