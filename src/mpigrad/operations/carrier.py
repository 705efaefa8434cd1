"""Activity is collective: the hidden carrier that keeps every message active on every rank.

JAX calls no derivative rule where an operand is constant, and whether an operand is constant may
differ from rank to rank. Every message therefore has one more operand, a scalar whose value is
never used. `mpigrad.grad` and its kin make it an argument of the differentiated function, so that
it has a tangent, and with it every message, on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir, visible
from mpigrad.operations._jax_private import available, is_anything_missing, require
from mpigrad.runtime.call_sites import call_site, describe

__all__ = [
    "CARRIER",
    "active",
    "agreed",
    "anchor",
    "before_first_message",
    "carrier",
    "check_allowed",
    "follow",
    "no_messages",
    "opaque_zero",
    "outer_carrier",
    "outside_rules",
    "pending_checks",
    "with_carrier",
    "without_carriers",
]

CARRIER = ShapedArray((), np.dtype("float32"))

# The carriers of the enclosing transformations, as keys: the context is part of JAX's cache keys,
# so that a function traced under one carrier is not reused under another.
_context = jax.make_user_context(())
_carriers: dict[int, Any] = {}
_keys = itertools.count(1)
# Why a message must not stand here, if so (part of the cache keys, too).
_refusal = jax.make_user_context(None)


pending_checks: list[Callable[[], bool]] = []


def before_first_message(check: Callable[[], bool]) -> None:
    """Call `check` before the first message that is traced, until it returns True."""
    pending_checks.append(check)


def _check() -> None:
    checks = pending_checks.copy()
    pending_checks.clear()  # their own messages are not checked
    pending_checks.extend(check for check in checks if not check())


def carrier() -> Any:
    """The carrier of a message that stands here; an error where none may."""
    if _refusal.value is not None:
        raise ValueError(f"{describe(call_site())}: {_refusal.value}")
    if pending_checks and not compat.is_top_level():
        _check()
    if is_anything_missing():
        _refuse_what_nobody_watches()
    return outer_carrier()


def _refuse_what_nobody_watches() -> None:
    """Errors for features that no rule of a primitive refuses."""
    if not available("custom rules") and compat.in_custom_function():
        require("custom rules")
    if not available("jax_debug_nans") and (
        jax.config.jax_debug_nans or jax.config.jax_debug_infs  # type: ignore[attr-defined]
    ):
        require("jax_debug_nans")  # JAX would send the messages again, on one rank alone


def check_allowed(params: dict[str, Any]) -> None:
    """An error if a message that was traced before is evaluated where none may stand.

    That is the rule of jax.custom_gradient. It is traced with the function itself, and evaluated by
    the backward rule of a jax.custom_vjp. (Other libraries do likewise, and are right where the
    operands of all ranks are active, as in equinox's loops.)
    """
    if _refusal.value is _REFUSALS[1] and compat.in_custom_gradient():
        reason = _IN_RULE.format("backward", "custom_gradient", "custom_vjp")
        raise ValueError(f"{describe(abs(params.get('site', 0)))}: {reason}")


def outer_carrier() -> Any:
    """The carrier of the innermost enclosing transformation, or a constant."""
    for key in reversed(_context.value):
        if visible(_carriers[key]):
            return _carriers[key]
    return np.float32(0)


def no_messages(reason: str) -> contextlib.AbstractContextManager[None]:
    """A context in which a message is refused for this reason."""
    return _refusal(reason)


_IN_RULE = (
    "a message in the {} rule of a jax.{} function is refused: JAX leaves the rule out where its "
    "operands are constant or its results are not used, on that rank alone, and the other ranks "
    "would wait for it. Decorate the function with mpigrad.{} in its place (same signature)."
)
_REFUSALS = (
    _IN_RULE.format("jvp", "custom_jvp", "custom_jvp"),
    _IN_RULE.format("backward", "custom_vjp", "custom_vjp"),
)


def outside_rules() -> contextlib.AbstractContextManager[None]:
    """A context in which messages are allowed again that only a custom rule refuses."""
    return _refusal(None if _refusal.value in _REFUSALS else _refusal.value)


repairs.install_repairs()
# The function itself may have messages: it has the same ones with its rule and without.
repairs.surround_custom_rules(
    outside_rules, lambda: _refusal(_REFUSALS[0]), lambda: _refusal(_REFUSALS[1])
)


@contextlib.contextmanager
def active(value: Any) -> Iterator[None]:
    """A context in which messages depend on the carrier `value`."""
    if not isinstance(value, Tracer):
        yield
        return
    key = next(_keys)
    _carriers[key] = value
    try:
        with _context((*_context.value, key)):
            yield
    finally:
        del _carriers[key]


def with_carrier(f: Callable[..., Any]) -> Callable[..., Any]:
    """f(*args) as g(c, *args), in which every message depends on c (with derivative zero)."""

    # No keyword of the program has this name, which JAX would mix up with it all the same.
    def g(_mpigrad_carrier: Any, /, *args: Any, **kwargs: Any) -> Any:
        with active(_mpigrad_carrier + outer_carrier()):
            return f(*args, **kwargs)

    return g


@contextlib.contextmanager
def without_carriers() -> Iterator[None]:
    """A context in which caches do not depend on the enclosing transformations."""
    with _context(()):
        yield


# ---- a linear map that is zero, which JAX cannot see through: it carries activity, not values ----

nought_p = Primitive("mpigrad_nought")


def opaque_zero(x: Any, aval: Any) -> Any:
    """A zero of the shape and dtype of `aval` that depends linearly on `x`."""
    return nought_p.bind(x, shape=tuple(aval.shape), dtype=np.dtype(aval.dtype))


def follow(y: Any, x: Any) -> Any:
    """`y`, which depends on `x` in the eyes of JAX: batched and active wherever `x` is.

    For what is a constant on this rank alone; random keys `y` stay as they are.
    """
    if not isinstance(y.dtype, np.dtype):
        return y
    if not isinstance(x.dtype, np.dtype):
        x = jax.random.key_data(x)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return y + opaque_zero(x, y)
    zero = opaque_zero(jax.lax.stop_gradient(x), jax.ShapeDtypeStruct(y.shape, np.float32))
    return y | (zero != 0) if y.dtype == bool else y + zero.astype(y.dtype)


def _zeros(x: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jnp.zeros(shape, dtype)


def _transpose(ct: Any, x: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> list[Any]:
    return [opaque_zero(ct, x.aval)]


def _batch(args: Any, dims: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    # It stays batched: ranks must agree about batching, too.
    n = args[0].shape[dims[0]]
    return nought_p.bind(args[0], shape=(n, *shape), dtype=dtype), 0


nought_p.def_impl(_zeros)
nought_p.def_abstract_eval(lambda x, *, shape, dtype: ShapedArray(shape, dtype))
mlir.register_lowering(nought_p, mlir.lower_fun(_zeros, multiple_results=False))
ad.deflinear2(nought_p, _transpose)
batching.primitive_batchers[nought_p] = _batch


# ---- an anchor: nothing is sent, but reverse mode comes by, whether or not the rest is used ----

anchor_p = Primitive("mpigrad_anchor")


def anchor(x: Any) -> None:
    """Let reverse mode visit what `x` depends on linearly, with a cotangent of zero at least."""
    anchor_p.bind(x)


def _anchor_jvp(primals: Any, tangents: Any) -> Any:
    if type(tangents[0]) is not ad.Zero:
        anchor_p.bind(tangents[0])
    return anchor_p.bind(*primals), []


def _anchor_linearize(is_vjp: Any, nonzeros: Any, x: Any) -> Any:
    return anchor_p.bind(x), [], [], lambda residuals, tangent: anchor_p.bind(tangent)


def _anchor_batch(args: Any, dims: Any) -> Any:
    return anchor_p.bind(args[0]), []


compat.make_effectful(anchor_p, lambda x: [])
repairs.always_stage(anchor_p)
compat.set_linearization(anchor_p, _anchor_linearize)
anchor_p.def_impl(lambda x: [])
mlir.register_lowering(anchor_p, compat.lower_to_nothing)
ad.primitive_jvps[anchor_p] = _anchor_jvp
ad.primitive_transposes[anchor_p] = lambda cts, x: [jnp.zeros(x.aval.shape, x.aval.dtype)]
batching.primitive_batchers[anchor_p] = _anchor_batch


# ---- a mark in a branch that all ranks take together, whose choice may be batched ----

agreed_p = Primitive("mpigrad_agreed")


def agreed(branch: Callable[..., Any]) -> Callable[..., Any]:
    """`branch` of a cond with messages that is chosen by what all ranks know alike."""

    def marked(*args: Any) -> Any:
        agreed_p.bind()
        return branch(*args)

    return marked


compat.make_effectful(agreed_p, lambda: [])
repairs.always_stage(agreed_p)
repairs.mark_agreement(agreed_p)
agreed_p.def_impl(lambda: [])
mlir.register_lowering(agreed_p, compat.lower_to_nothing)
