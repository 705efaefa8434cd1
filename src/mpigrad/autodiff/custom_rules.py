"""custom_vjp and custom_jvp for functions whose rules carry messages.

JAX leaves out a rule where the operands are constant or, in reverse mode, the results are not
used. Which operands are constant may differ from rank to rank; so the rules here take the carrier
along, as one operand and one result more, and run on every rank or on none.
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
            "symbolic_zeros: rules with messages run alike on all ranks, and get plain zeros where "
            "an operand is constant on this one; leave it out"
        )


class _WithCarrier(abc.ABC):
    """What both have in common: f(*args) as a function of (carrier, *args)."""

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
            raise ValueError(f"nondiff_argnames: the function has no {', '.join(unknown)}")
        if min((*nondiff_argnums, 0)) < 0:
            raise ValueError("nondiff_argnums count from the front")
        numbers = {*nondiff_argnums, *(positions[name] for name in nondiff_argnames)}
        self._static = tuple(n + 1 for n in sorted(numbers))
        self._call = self._with_rule(fun, self._static)

    @abc.abstractmethod
    def _with_rule(self, fun: Callable[..., Any], static: tuple[int, ...]) -> Any:
        """JAX's function with a rule, of (carrier, *args)."""

    def _arguments(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        require("custom rules")
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            name = getattr(self.fun, "__name__", "the function")
            raise TypeError(f"{name} has keyword-only arguments; custom rules are by position")
        return bound.args


class custom_vjp(_WithCarrier):
    """`jax.custom_vjp` for functions with messages in their rules.

    Parameters
    ----------
    fun
        The function. It and its forward rule have the same messages.
    nondiff_argnums, nondiff_argnames
        As for `jax.custom_vjp`.

    Notes
    -----
    The backward rule runs on every rank, also where the result is not used (with cotangents that
    are zero) and where the operands are constant; so its messages find their partners. Like
    JAX's, the function can't be differentiated in forward mode.
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

        Arguments that are not differentiated come first in `bwd`, as in JAX. There are no symbolic
        zeros: what is constant on one rank need not be on others.
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
    """`jax.custom_jvp` for functions with messages in their rules.

    Parameters
    ----------
    fun
        The function.
    nondiff_argnums, nondiff_argnames
        As for `jax.custom_jvp`.

    Notes
    -----
    The rule runs on every rank, with tangents that are zero where the operands are constant.
    Messages of the tangents depend on a tangent each (a receive through its `like`); for the value
    the rule best calls the function itself, whose messages it may also send anew.
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

        Arguments that are not differentiated come first, as in JAX. There are no symbolic zeros:
        what is constant on one rank need not be on others.
        """
        _refuse_symbolic(symbolic_zeros)

        def with_carrier(*args: Any) -> Any:
            *static, (a, *primals), (ta, *tangents) = args
            linked = jax.tree.map(lambda x, t: _linked(x, t, ta), primals, tangents)
            with allow_messages_in_rules(), set_carrier(a):
                return rule(*static, tuple(primals), tuple(linked))

        self._call.defjvp(with_carrier)
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Define a rule for each argument: rule(tangent, out, *primals) -> its part of the tangent.

        The parts are added up; None stands for zero.
        """
        if self._static:
            raise TypeError("defjvps is for functions all of whose arguments are differentiated")

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


def _linked(x: Any, tangent: Any, ta: Any) -> Any:
    """The tangent of `x`, active on every rank."""
    aval = tangent_aval(x)
    return tangent + opaque_zero(ta, aval) if jnp.issubdtype(aval.dtype, jnp.inexact) else tangent
