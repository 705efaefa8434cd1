"""custom_vjp and custom_jvp for functions whose rules carry messages.

JAX skips a rule if the operands are constant or, in reverse mode, the results are not used.
Operands may be constant on some ranks only. So these rules take the carrier as one more operand and
result, and run on every rank or on no rank.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations._jax_compat import tangent_aval
from mpigrad.operations._jax_private import require
from mpigrad.operations.carrier import (
    allow_messages_in_rules,
    keep_in_backward,
    opaque_zero,
    outer_carrier,
    set_carrier,
)

__all__ = ["custom_jvp", "custom_vjp"]


def _refuse_symbolic(symbolic_zeros: bool) -> None:
    if symbolic_zeros:
        raise NotImplementedError(
            "custom_jvp, custom_vjp: symbolic_zeros must be False. Rules with messages run on all "
            "ranks, and get plain zeros for operands that are constant on this rank. Leave "
            "symbolic_zeros out."
        )


class _WithCarrier(abc.ABC):
    """The common part of both: f(*args) as a function of (carrier, *args)."""

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: Sequence[int] = (),
        nondiff_argnames: Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(cast(Any, self), fun)
        self.fun = fun
        self._signature = inspect.signature(fun)
        positions = {name: n for n, name in enumerate(self._signature.parameters)}
        if isinstance(nondiff_argnames, str):
            nondiff_argnames = (nondiff_argnames,)
        if unknown := [name for name in nondiff_argnames if name not in positions]:
            raise ValueError(
                f"{type(self).__name__}: nondiff_argnames must be parameters of the function "
                f"({', '.join(positions)}), got {', '.join(unknown)}. Correct the names."
            )
        if min((*nondiff_argnums, 0)) < 0:
            raise ValueError(
                f"{type(self).__name__}: nondiff_argnums must not be negative, got "
                f"{tuple(nondiff_argnums)}. Count arguments from the front."
            )
        numbers = {*nondiff_argnums, *(positions[name] for name in nondiff_argnames)}
        self._static = tuple(n + 1 for n in sorted(numbers))
        self._call = self._with_rule(fun, self._static)

    @abc.abstractmethod
    def _with_rule(self, fun: Callable[..., Any], static: tuple[int, ...]) -> Any:
        """Return JAX's function with a rule, of (carrier, *args)."""

    def _arguments(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        require("custom rules")
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            name = getattr(self.fun, "__name__", "the function")
            raise TypeError(
                f"{type(self).__name__}: arguments must be positional, because custom rules take "
                f"them by position, got keyword-only {', '.join(bound.kwargs)} of {name}. Make "
                "them positional."
            )
        return bound.args


class custom_vjp(_WithCarrier):
    """Give a function with messages its own rule for reverse mode, as `jax.custom_vjp` does.

    The backward rule may send messages. It runs on every rank, also if the result is not used (then
    the cotangents are zero) or the operands are constant. So its messages find their partners. As
    with JAX's, the function can't be differentiated in forward mode.

    Parameters
    ----------
    fun
        The function. It and its forward rule send the same messages.
    nondiff_argnums, nondiff_argnames
        As for `jax.custom_vjp`.

    Examples
    --------
    >>> import mpigrad as mg
    >>> @mg.custom_vjp
    ... def total(x):
    ...     return mg.allreduce(x)
    >>> total.defvjp(lambda x: (mg.allreduce(x), None), lambda _, ct: (mg.allreduce(ct),))
    >>> float(mg.grad(total)(3.0))
    1.0
    """

    def _with_rule(self, fun: Callable[..., Any], static: tuple[int, ...]) -> Any:
        def with_carrier(a: Any, *args: Any) -> Any:
            with set_carrier(a):
                return fun(*args), a

        return jax.custom_vjp(with_carrier, nondiff_argnums=static)

    def defvjp(
        self, fwd: Callable[..., Any], bwd: Callable[..., Any], *, symbolic_zeros: bool = False
    ) -> None:
        """Define the rules: fwd(*args) -> (out, residuals), bwd(residuals, ct) -> cotangents.

        Arguments that are not differentiated come first in `bwd`, as in JAX. Zeros are never
        symbolic zeros: an operand that is constant on one rank may be active on another.
        """
        _refuse_symbolic(symbolic_zeros)

        def forward(a: Any, *args: Any) -> Any:
            with set_carrier(a):
                out, residuals = fwd(*args)
            return (out, a), (a, residuals)

        def backward(*args: Any) -> Any:
            *static, (a, residuals), (ct, _) = args
            with allow_messages_in_rules(), set_carrier(a):
                return (None, *bwd(*static, residuals, ct))

        self._call.defvjp(forward, backward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, link = self._call(outer_carrier(), *self._arguments(args, kwargs))
        keep_in_backward(link)
        return out


class custom_jvp(_WithCarrier):
    """Give a function with messages its own rule for forward mode, as `jax.custom_jvp` does.

    The rule may send messages. It runs on every rank. The tangents of constant operands are zero.
    Each message of a tangent must depend on a tangent (a receive through its `like`). To compute
    the value, the rule best calls the function itself. It may also send the messages of the
    function again.

    Parameters
    ----------
    fun
        The function.
    nondiff_argnums, nondiff_argnames
        As for `jax.custom_jvp`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> @mg.custom_jvp
    ... def total(x):
    ...     return mg.allreduce(jnp.sin(x))
    >>> @total.defjvp
    ... def rule(primals, tangents):
    ...     (x,), (t,) = primals, tangents
    ...     return total(x), mg.allreduce(jnp.cos(x) * t)
    >>> float(mg.grad(total)(0.0))
    1.0
    """

    def _with_rule(self, fun: Callable[..., Any], static: tuple[int, ...]) -> Any:
        def with_carrier(a: Any, *args: Any) -> Any:
            with set_carrier(a):
                return fun(*args)

        return jax.custom_jvp(with_carrier, nondiff_argnums=static)

    def defjvp(
        self, rule: Callable[..., Any], *, symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Define the rule: rule(primals, tangents) -> (out, tangent of out).

        Arguments that are not differentiated come first, as in JAX. Zeros are never symbolic:
        an operand that is constant on one rank may be active on another.
        """
        _refuse_symbolic(symbolic_zeros)

        def with_carrier(*args: Any) -> Any:
            *static, (a, *primals), (ta, *tangents) = args
            active = jax.tree.map(lambda x, t: _activate(x, t, ta), primals, tangents)
            with allow_messages_in_rules(), set_carrier(a):
                return rule(*static, tuple(primals), tuple(active))

        self._call.defjvp(with_carrier)
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Define a rule for each argument: rule(tangent, out, *primals) -> its part of the tangent.

        The parts are added. None stands for zero.
        """
        if self._static:
            raise TypeError(
                "custom_jvp.defjvps: all arguments of the function must be differentiated, got "
                "nondiff_argnums or nondiff_argnames. Use defjvp."
            )

        def sum_of_parts(primals: Any, tangents: Any) -> Any:
            out = self(*primals)
            zero = jax.tree.map(lambda x: np.zeros(jnp.shape(x), tangent_aval(x).dtype), out)
            parts = [
                rule(t, out, *primals)
                for t, rule in zip(tangents, rules, strict=True)
                if rule is not None
            ]
            return out, jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *(parts or [zero]))

        self.defjvp(sum_of_parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(outer_carrier(), *self._arguments(args, kwargs))


def _activate(x: Any, tangent: Any, ta: Any) -> Any:
    """Return the tangent of `x`, active on every rank."""
    aval = tangent_aval(x)
    return tangent + opaque_zero(ta, aval) if jnp.issubdtype(aval.dtype, jnp.inexact) else tangent
