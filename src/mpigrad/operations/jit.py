"""Compile programs with messages by `jax.jit`, with JAX's fast dispatch."""

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
    """Return argument numbers as a tuple of Python integers."""
    if argnums is None:
        return ()
    if isinstance(argnums, Sequence):
        return tuple(operator.index(n) for n in argnums)
    return (operator.index(argnums),)


# To JAX, a compiled program is a pure function of an array of one byte, the *turn*, which every
# program takes and returns. So JAX's fast path dispatches it, and programs keep their order.
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
# Only JAX calls this rule, to find a NaN without compiling (jax_debug_nans).
_region_p.def_impl(lambda turn, *xs, jaxpr: [turn, *repairs.run_piecewise(jaxpr, *xs)])
_first_turn = np.zeros(_TURN.shape, _TURN.dtype)  # not a JAX array: this runs at import
_turn: Any = _first_turn


def _run_to_end(program: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a program to its end on a device on which a call only queues it.

    Queued programs would not keep an order with those of `jax.jit` and direct calls of mpi4py.
    """
    jax.effects_barrier()
    turn, out = program(_first_turn, *args, **kwargs)
    jax.block_until_ready(turn)
    return out


def _region(f: Callable[..., Any], turn: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the next turn and f(*args, **kwargs), with the messages of f between the turns."""
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
            "jit: the only ordered effects of the function must be messages of mpigrad, got "
            f"{', '.join(others)}, from callbacks with ordered=True for example. Give them "
            "ordered=False, or compile the function by jax.jit."
        )
    jaxpr, constants = compat.constants_as_operands(closed)
    turn, *results = _region_p.bind(turn, *constants, *operands, jaxpr=jaxpr)
    return turn, jax.tree.unflatten(jax.tree.structure(shapes), results)


def _refuse_devices(arrays: Any, cause: Exception) -> None:
    """Raise an error of mpigrad if a program failed because its arrays are on several devices."""
    if not any(words in str(cause) for words in ("incompatible devices", "must have sharding")):
        return
    live = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array) and not x.is_deleted()]
    devices = {d for x in live for d in x.devices()}
    if len(devices) > 1:
        raise ValueError(
            "jit: all arrays of a rank must be on one device, got arrays on "
            f"{', '.join(sorted(map(str, devices)))}. Start a rank for each device, or move the "
            "arrays to one device by jax.device_put."
        ) from cause


def _arguments(
    f: Callable[..., Any], numbers: int | Sequence[int] | None, names: str | Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers and the names of the same arguments, completed as JAX does."""
    positions = list(argument_numbers(numbers))
    keywords = [names] if isinstance(names, str) else list(names or ())
    if min((*positions, 0)) < 0:
        raise ValueError(
            "jit: static_argnums and donate_argnums must not be negative, got "
            f"{tuple(positions)}. Count arguments from the front."
        )
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some compiled functions do not have a signature
        return tuple(positions), tuple(keywords)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_number = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    pairs = list(enumerate(parameters))
    keywords += [p.name for i, p in pairs if i in positions and p.kind in by_name]
    positions += [i for i, p in pairs if p.name in keywords and p.kind in by_number]
    return tuple(sorted({*positions})), tuple(dict.fromkeys(keywords))


def jit(
    f: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Compile a function with messages, with faster dispatch than `jax.jit`.

    JAX dispatches a program with messages by its slow path. `mpigrad.jit`, called outside any
    transformation, takes the fast path, and keeps its order among all operations of mpigrad. Inside
    a transformation it is `jax.jit`, and traces the function once for all transformations.

    Parameters
    ----------
    f
        The function. If it is left out, the result is a decorator.
    static_argnums, static_argnames, donate_argnums, donate_argnames
        As for `jax.jit`.

    Returns
    -------
    A function like `f`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> @mg.jit
    ... def mean(x):
    ...     return mg.allreduce(x) / mg.default_communicator().size
    >>> mean(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """
    if f is None:
        return functools.partial(
            jit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
        )
    static_numbers, static_names = _arguments(f, static_argnums, static_argnames)
    donate_numbers, donate_names = _arguments(f, donate_argnums, donate_argnames)
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
                    return _run_to_end(program, args, kwargs)
                _turn, out = program(_turn, *args, **kwargs)
            except (ValueError, RuntimeError) as error:
                # JAX's fast path raises a ValueError for a failed handler, the slow path does not.
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
