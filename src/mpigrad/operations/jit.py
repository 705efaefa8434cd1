"""jit: `jax.jit` for programs with messages, with JAX's fast dispatch."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from mpigrad.communicator import check_process
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations.carrier import outer_carrier, with_carrier, without_carriers
from mpigrad.operations.native_targets import register_target

__all__ = ["argument_numbers", "jit"]


def argument_numbers(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    if argnums is None:
        return ()
    if isinstance(argnums, Sequence):
        return tuple(operator.index(n) for n in argnums)
    return (operator.index(argnums),)


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
    found = list(argument_numbers(numbers))
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
