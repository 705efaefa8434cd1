"""A linear solve by a method of your own, differentiated by the implicit function theorem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from mpigrad.operations._jax_compat import constants_as_operands
from mpigrad.operations.carrier import CARRIER, carrier, opaque_zero, set_carrier, without_carriers
from mpigrad.operations.computation import Activity, primitive
from mpigrad.operations.local_programs import as_array
from mpigrad.runtime.call_sites import at_call_site, call_site, describe

__all__ = ["implicit_solve"]


def implicit_solve(
    solve: Callable[[Any, Any], Any],
    product: Callable[[Any, Any], Any],
    operands: Any,
    b: Any,
    *,
    transposed: Callable[[Any], Any] | None = None,
) -> Any:
    """Solve A x = b by a method of your own, with exact derivatives of any order (collective).

    The derivative is dx = A⁻¹ (db - dA x), and the adjoint is one solve with the transposed matrix.
    Nothing is differentiated through the steps of the method, which may be a factorization, an
    iteration, or a call of another library by `mpigrad.custom_operation`.

    Parameters
    ----------
    solve
        (operands, b) -> x like b. It may exchange messages.
    product
        (operands, x) -> A x, a JAX program that is linear in x and differentiable in the operands.
        It may exchange messages.
    operands
        Pytree of arrays: what A is made of on this rank. It has every value that may be
        differentiated, because the functions are called later and must not close over such values.
    b
        This rank's part of the right-hand side: an array, or a pytree of arrays, floating-point or
        complex.
    transposed
        Maps the operands of A to those of its transpose (without a conjugate), so that `solve` and
        `product` take them. It may exchange messages. Default: A is symmetric. A complex Hermitian
        matrix is not. If it is forgotten, gradients are wrong: check them by `mpigrad.taylor_test`.

    Returns
    -------
    This rank's part of x, with the structure, shapes and dtypes of `b`.

    Raises
    ------
    TypeError, ValueError
        If `b` is not floating-point or complex, if `solve` or `product` returns another structure,
        shape or dtype than that of `b`, or `transposed` than that of `operands`.

    Notes
    -----
    The functions may be new in each call, so each call outside of `jit` compiles again. Compile the
    program that calls it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad.extend import implicit_solve
    >>> def x(d):
    ...     return implicit_solve(lambda d, b: b / d, lambda d, x: d * x, d, jnp.ones(2))
    >>> x(jnp.array([2.0, 4.0]))
    Array([0.5 , 0.25], dtype=float32)
    >>> mg.grad(lambda d: jnp.sum(x(d)))(jnp.array([2.0, 4.0]))
    Array([-0.25  , -0.0625], dtype=float32)
    """
    leaves, structure = jax.tree.flatten(operands)
    sides, like = jax.tree.flatten(b)
    site = call_site()
    sides = [as_array(x) for x in sides]
    for x in sides:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"implicit_solve, {describe(site)}: b must be floating-point or complex, got "
                f"{x.dtype}. Convert it."
            )
    if transposed is not None and not callable(transposed):
        raise TypeError(
            f"implicit_solve, {describe(site)}: expected transposed to be a function of the "
            f"operands, got {transposed!r}. Leave it out if the matrix is symmetric."
        )
    method = _Method(solve, product, transposed, structure, like)
    operands = [as_array(x) for x in (*leaves, *sides)]
    x = solve_p.bind(*operands, carrier(), method=method, site=site)
    return jax.tree.unflatten(like, x)


@dataclasses.dataclass(frozen=True, eq=False)
class _Method:
    """The functions of the user, on lists of arrays."""

    user_solve: Callable[[Any, Any], Any]
    user_product: Callable[[Any, Any], Any]
    user_transposed: Callable[[Any], Any] | None
    structure: Any
    like: Any

    @property
    def n_operands(self) -> int:
        return self.structure.num_leaves

    def solve(self, operands: Sequence[Any], b: Sequence[Any], site: int) -> list[Any]:
        return self._call("solve", self.user_solve, operands, b, site)

    def product(self, operands: Sequence[Any], x: Sequence[Any], site: int) -> list[Any]:
        return self._call("product", self.user_product, operands, x, site)

    def transposed(self, operands: Sequence[Any], site: int) -> list[Any]:
        if self.user_transposed is None:
            return list(operands)
        result = self.user_transposed(jax.tree.unflatten(self.structure, operands))
        return _checked("transposed", result, self.structure, operands, "the operands", site)

    def _call(
        self, name: str, f: Any, operands: Sequence[Any], v: Sequence[Any], site: int
    ) -> list[Any]:
        result = f(jax.tree.unflatten(self.structure, operands), jax.tree.unflatten(self.like, v))
        return _checked(name, result, self.like, v, "b", site)


def _checked(
    name: str, result: Any, structure: Any, like: Sequence[Any], what: str, site: int
) -> list[Any]:
    """Return the leaves of what a function of the user has returned, or raise an error."""
    leaves, treedef = jax.tree.flatten(result)
    arrays = [jnp.asarray(x) for x in leaves]
    types = [[f"{x.dtype}{list(x.shape)}" for x in xs] for xs in (like, arrays)]
    if treedef != structure or types[0] != types[1]:
        expected, got = (
            jax.tree.unflatten(structure, types[0]),
            jax.tree.unflatten(treedef, types[1]),
        )
        raise ValueError(
            f"implicit_solve, {describe(site)}: {name} must return a tree like {what}, {expected}, "
            f"got {got}. Return the same structure, shapes and dtypes."
        )
    return arrays


# ---- the primitive: (operands..., b..., carrier) -> x... ----


def _run(*values: Any, method: _Method, site: int) -> list[Any]:
    *arrays, _ = values
    n = method.n_operands
    # Differentiation has happened: these messages carry values only.
    with without_carriers(), at_call_site(site):
        return method.solve(arrays[:n], arrays[n:], site)


def _differentiate(
    values: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., list[Any]]]:
    method, site = params["method"], params["site"]
    n = method.n_operands
    x = solve_p.bind(*values, **params)
    operands, a = list(values[:n]), values[-1]
    varying = [i for i, v in enumerate(operands) if jnp.issubdtype(v.dtype, jnp.inexact)]
    link = a
    for v in x:  # active on every rank on which x is
        link = link + opaque_zero(v, CARRIER)

    def product(link: Any, *moved: Any) -> list[Any]:
        changed = list(operands)
        for i, v in zip(varying, moved, strict=True):
            changed[i] = v
        with set_carrier(link), at_call_site(site):
            return method.product(changed, x, site)

    moved = [operands[i] for i in varying]
    _, derivative = jax.linearize(product, link, *moved)
    jaxpr, constants = constants_as_operands(jax.make_jaxpr(derivative)(link, *moved))

    def tangent(saved: Any, tangents: Sequence[Any]) -> list[Any]:
        constants, operands, link = saved
        *moves, ta = tangents
        ta = jnp.zeros((), jnp.float32) if ta is None else ta
        changes = [jnp.zeros_like(operands[i]) if moves[i] is None else moves[i] for i in varying]
        products = eval_jaxpr(jaxpr, (), *constants, ta, *changes)
        # The right-hand sides are active on every rank.
        rhs = [opaque_zero(ta, jax.typeof(v)) - v for v in products]
        rhs = [v if tb is None else v + tb for v, tb in zip(rhs, moves[n:], strict=True)]
        return list(solve_p.bind(*operands, *rhs, link, **params))

    return x, (constants, operands, link), tangent


def _transpose(
    cotangents: Sequence[Any],
    values: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    method: _Method = params["method"]
    n, a = method.n_operands, values[-1]
    with set_carrier(a), at_call_site(params["site"]):
        operands = method.transposed(values[:n], params["site"])
    back = solve_p.bind(*operands, *cotangents, a, **params)
    return [*[None] * n, *back, None]


solve_p = primitive(
    "implicit_solve",
    shapes=lambda *avals, method, site: avals[method.n_operands : -1],
    run=_run,
    differentiate=_differentiate,
    transpose=_transpose,
    batch="map",
)
