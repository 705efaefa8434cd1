"""Activity is collective: the carrier keeps every message active on every rank.

JAX calls the derivative rule of an operation only if one of its operands depends on the variables
of the derivative (is *active*). An operand may be active on one rank and constant on another. Then
only some ranks would take part in the backward pass, and these would wait forever.

The *carrier* mends this. It is one more operand of every message, a float32 scalar whose value is
never used. `mpigrad.grad` and the other transformations of mpigrad make it an argument of the
differentiated function, with a tangent. So every message has an active operand, on every rank.
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
from mpigrad.operations import _jax_staging as custom_rules
from mpigrad.operations import _jax_staging as staging
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir, visible
from mpigrad.operations._jax_private import available, is_anything_missing, require
from mpigrad.runtime.call_sites import call_site, describe

__all__ = [
    "CARRIER",
    "allow_messages_in_rules",
    "before_first_message",
    "carrier",
    "check_allowed",
    "forbid_messages",
    "keep_in_backward",
    "mark_common_branch",
    "opaque_zero",
    "outer_carrier",
    "pending_checks",
    "set_carrier",
    "tie",
    "tie_in",
    "with_carrier",
    "without_carriers",
]

CARRIER = ShapedArray((), np.dtype("float32"))

# The carriers of the enclosing transformations, as keys: the context is part of JAX's cache keys,
# so that a function traced under one carrier is not reused under another.
_context = jax.make_user_context(())
_carriers: dict[int, Any] = {}
_keys = itertools.count(1)
# The reason why messages are forbidden here, or None (part of JAX's cache keys, too).
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
    """Return the carrier of a message, or raise an error if messages are forbidden here."""
    if _refusal.value is not None:
        raise ValueError(f"{describe(call_site())}: {_refusal.value}")
    if pending_checks and not compat.is_top_level():
        _check()
    if is_anything_missing():
        _refuse_missing_features()
    return outer_carrier()


def _refuse_missing_features() -> None:
    """Raise errors for missing features that no rule of a primitive refuses."""
    if not available("custom rules") and compat.in_custom_function():
        require("custom rules")
    if not available("jax_debug_nans") and (
        jax.config.jax_debug_nans or jax.config.jax_debug_infs  # type: ignore[attr-defined]
    ):
        require("jax_debug_nans")  # JAX would send the messages a second time, on one rank alone


def check_allowed(params: dict[str, Any]) -> None:
    """Raise an error if a traced message is evaluated in the rule of a jax.custom_gradient.

    This rule is traced with the function itself, and evaluated by the backward rule of a
    jax.custom_vjp. (Other libraries do the same, for example equinox in its loops. That is right if
    the operands of all ranks are active.)
    """
    if _refusal.value is _REFUSALS[1] and compat.in_custom_gradient():
        reason = _IN_RULE.format("backward", "custom_gradient", "custom_vjp")
        raise ValueError(f"{describe(abs(params.get('site', 0)))}: {reason}")


def outer_carrier() -> Any:
    """Return the carrier of the innermost enclosing transformation, or a constant."""
    for key in reversed(_context.value):
        if visible(_carriers[key]):
            return _carriers[key]
    return np.float32(0)


def forbid_messages(reason: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a message is an error with this reason."""
    return _refusal(reason)


_IN_RULE = (
    "expected no message in the {} rule of a jax.{} function, got one. JAX skips this rule on a "
    "rank whose operands are constant or whose results are not used, and the other ranks would "
    "wait for its messages. Decorate the function with mpigrad.{} instead (same signature)."
)
_REFUSALS = (
    _IN_RULE.format("jvp", "custom_jvp", "custom_jvp"),
    _IN_RULE.format("backward", "custom_vjp", "custom_vjp"),
)


def allow_messages_in_rules() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the rules of custom functions may send messages."""
    return _refusal(None if _refusal.value in _REFUSALS else _refusal.value)


repairs.install_repairs()
# The function itself may send messages: it sends the same messages with its rule and without.
custom_rules.surround_custom_rules(
    allow_messages_in_rules, lambda: _refusal(_REFUSALS[0]), lambda: _refusal(_REFUSALS[1])
)


@contextlib.contextmanager
def set_carrier(value: Any) -> Iterator[None]:
    """Let messages in this context depend on the carrier `value`."""
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
    """Return g(c, *args) = f(*args), in which every message depends on c with derivative zero."""

    # JAX would confuse this argument with a keyword of the program that has the same name.
    def g(_mpigrad_carrier: Any, /, *args: Any, **kwargs: Any) -> Any:
        with set_carrier(_mpigrad_carrier + outer_carrier()):
            return f(*args, **kwargs)

    return g


@contextlib.contextmanager
def without_carriers() -> Iterator[None]:
    """Let caches in this context not depend on the enclosing transformations."""
    with _context(()):
        yield


# ---- a zero map that JAX cannot simplify: it transports activity, not values ----

opaque_zero_p = Primitive("mpigrad_opaque_zero")


def opaque_zero(x: Any, aval: Any) -> Any:
    """Return a zero of the shape and dtype of `aval` that depends linearly on `x`."""
    return opaque_zero_p.bind(x, shape=tuple(aval.shape), dtype=np.dtype(aval.dtype))


def tie_in(y: Any, x: Any) -> Any:
    """Return `y` such that JAX takes it to depend on `x`: it is batched and active if `x` is.

    Use it for a value that is a constant on this rank alone. Random keys `y` are returned
    unchanged.
    """
    if not isinstance(y.dtype, np.dtype):
        return y
    if not isinstance(x.dtype, np.dtype):
        x = jax.random.key_data(x)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return tie(y, x)
    zero = opaque_zero(jax.lax.stop_gradient(x), jax.ShapeDtypeStruct(y.shape, np.float32))
    return y | (zero != 0) if y.dtype == bool else y + zero.astype(y.dtype)


def _zeros(x: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jnp.zeros(shape, dtype)


def _transpose(ct: Any, x: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> list[Any]:
    return [opaque_zero(ct, x.aval)]


def _batch(args: Any, dims: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    # The result stays batched: ranks must agree on batching, too.
    n = args[0].shape[dims[0]]
    return opaque_zero_p.bind(args[0], shape=(n, *shape), dtype=dtype), 0


opaque_zero_p.def_impl(_zeros)
opaque_zero_p.def_abstract_eval(lambda x, *, shape, dtype: ShapedArray(shape, dtype))
mlir.register_lowering(opaque_zero_p, mlir.lower_fun(_zeros, multiple_results=False))
ad.deflinear2(opaque_zero_p, _transpose)
batching.primitive_batchers[opaque_zero_p] = _batch


# ---- y + opaque_zero(x, y), in one equation ----

tie_p = Primitive("mpigrad_tie")


def tie(y: Any, x: Any) -> Any:
    """Return `y`, and add a zero to its derivative that depends linearly on `x`."""
    return tie_p.bind(y, x)


def _tie_transpose(ct: Any, y: Any, x: Any) -> list[Any]:
    return [
        ct if ad.is_undefined_primal(y) else None,
        opaque_zero(ct, x.aval) if ad.is_undefined_primal(x) else None,
    ]


def _tie_batch(args: Any, dims: Any) -> Any:
    (y, x), (dy, dx) = args, dims
    if dy is None:  # the result is batched if one of the two is
        y, dy = jnp.broadcast_to(y, (x.shape[dx], *y.shape)), 0
    return tie_p.bind(y, x), dy


tie_p.def_impl(lambda y, x: y)
tie_p.def_abstract_eval(lambda y, x: ShapedArray(y.shape, y.dtype))
mlir.register_lowering(tie_p, lambda ctx, y, x: [y])
ad.deflinear2(tie_p, _tie_transpose)
batching.primitive_batchers[tie_p] = _tie_batch


# ---- no message, but reverse mode visits it even if nothing else is used ----

keep_in_backward_p = Primitive("mpigrad_keep_in_backward")


def keep_in_backward(x: Any) -> None:
    """Let reverse mode visit the operations that produced `x`, with a zero cotangent at least."""
    keep_in_backward_p.bind(x)


def _keep_jvp(primals: Any, tangents: Any) -> Any:
    if type(tangents[0]) is not ad.Zero:
        keep_in_backward_p.bind(tangents[0])
    return keep_in_backward_p.bind(*primals), []


def _keep_linearize(is_vjp: Any, nonzeros: Any, x: Any) -> Any:
    return (
        keep_in_backward_p.bind(x),
        [],
        [],
        lambda residuals, tangent: keep_in_backward_p.bind(tangent),
    )


def _keep_transpose(cts: Any, x: Any) -> list[Any]:
    return [jnp.zeros(x.aval.shape, x.aval.dtype)]


def _keep_batch(args: Any, dims: Any) -> Any:
    return keep_in_backward_p.bind(args[0]), []


compat.make_effectful(keep_in_backward_p, lambda x: [])
staging.always_stage(keep_in_backward_p)
compat.set_linearization(keep_in_backward_p, _keep_linearize)
keep_in_backward_p.def_impl(lambda x: [])
mlir.register_lowering(keep_in_backward_p, compat.lower_to_nothing)
ad.primitive_jvps[keep_in_backward_p] = _keep_jvp
ad.primitive_transposes[keep_in_backward_p] = _keep_transpose
batching.primitive_batchers[keep_in_backward_p] = _keep_batch


# ---- a mark in a branch that all ranks take at the same time: its predicate may be batched ----

common_branch_p = Primitive("mpigrad_common_branch")


def mark_common_branch(branch: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the branch of a cond with messages whose predicate is the same on all ranks."""

    def marked(*args: Any) -> Any:
        common_branch_p.bind()
        return branch(*args)

    return marked


compat.make_effectful(common_branch_p, lambda: [])
staging.always_stage(common_branch_p)
repairs.register_branch_mark(common_branch_p)
common_branch_p.def_impl(lambda: [])
mlir.register_lowering(common_branch_p, compat.lower_to_nothing)
