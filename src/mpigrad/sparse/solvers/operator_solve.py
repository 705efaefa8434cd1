"""Matrix-free solves: the linear map is a function, with messages inside.

A primitive carries the map as a jaxpr (residuals..., link, v) -> A v, made by linearizing the
user's function: what does not depend on v, messages too, is computed once, outside the iteration.
`link` is a scalar on which every message of the map depends linearly, so that its transpose has
the adjoint of each of them, whatever a rank's own v does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.flatten_util import ravel_pytree

from mpigrad.communicator import Communicator, resolve
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import ShapedArray, ad
from mpigrad.operations.carrier import CARRIER, carrier, opaque_zero, set_carrier, without_carriers
from mpigrad.runtime.call_sites import call_site, describe
from mpigrad.sparse.solvers.base import INFO, LinearSolver
from mpigrad.sparse.solvers.implicit import implicit_primitive
from mpigrad.sparse.solvers.krylov import ITERATIONS, System, iterate, noise, require_success
from mpigrad.sparse.solvers.methods import GMRES

__all__ = ["Operator", "linearized", "operator_solve_p", "solve_operator"]

_LINK = np.float32(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """A linear map given as a function, for `solve`.

    Attributes
    ----------
    function
        v -> A v on this rank's part of a vector (an array or pytree of any shapes, and one
        dtype); messages may stand inside. It may close over what is differentiated.
    inverse
        r -> z, a linear map that approximates the inverse of A, as a preconditioner: dividing by
        the diagonal, say, or a solve with a simpler matrix. Symmetric positive definite for PCG.
        Only the number of iterations depends on it.
    comm
        The ranks among which vectors are distributed.
    """

    function: Callable[[Any], Any]
    inverse: Callable[[Any], Any] | None = None
    comm: Communicator | None = None

    def __call__(self, v: Any) -> Any:
        """A v."""
        return self.function(v)


def solve_operator(
    A: Callable[[Any], Any],
    b: Any,
    solver: LinearSolver | None = None,
    *,
    x0: Any = None,
    throw: bool = True,
) -> tuple[Any, jax.Array]:
    """(x like b, info of shape (INFO,)) for A x = b, as `LinearSolver.run` gives them."""
    operator = A if isinstance(A, Operator) else Operator(A)
    comm = resolve(operator.comm)
    solver = GMRES(preconditioner=None) if solver is None else solver
    _check(solver)
    flat, unravel = _ravel(b, "b")
    flat_x0 = jnp.zeros_like(flat) if x0 is None else _like(x0, b, "x0")

    def flattened(function: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
        return lambda v: _like(function(unravel(v)), b, f"the result of {what}")

    a = carrier()
    probe = noise(comm.rank << 20, flat.shape[0], flat.dtype, 2654435761)
    forward, residuals, value = linearized(flattened(operator.function, "the operator"), probe, a)
    # For checking alone: inactive on every rank.
    residuals_now = jax.lax.stop_gradient(residuals)
    product = forward(residuals_now, probe)
    # At -v, too: |v| is its own derivative times v.
    opposite = flattened(operator.function, "the operator")(-probe)
    unlike = jnp.stack([value - product, opposite + product])
    defect = jnp.stack([jnp.vdot(v, v).real for v in (jax.lax.stop_gradient(unlike), product)])
    inverse, inverse_residuals = None, []
    if operator.inverse is not None:
        function = flattened(operator.inverse, "inverse")
        inverse, inverse_residuals, _ = linearized(function, probe, a)
    x, info = operator_solve_p.bind(
        *residuals,
        *inverse_residuals,
        defect,
        flat,
        jax.lax.stop_gradient(flat_x0),
        a,
        forward=forward,
        inverse=inverse,
        counts=(len(residuals), len(inverse_residuals)),
        solver=solver,
        throw=bool(throw),
        site=call_site(),
        comm=comm,
    )
    return unravel(x), info


def _check(solver: Any) -> None:
    if not isinstance(solver, LinearSolver) or type(solver).__name__ not in ITERATIONS:
        raise TypeError(f"solve: an operator is solved by {', '.join(ITERATIONS)}, not {solver!r}")
    if solver.preconditioner is not None:
        name = type(solver).__name__
        raise TypeError(
            f"solve: {solver.preconditioner!r} needs a matrix; for an operator write "
            f"{name}(preconditioner=None), and give a preconditioner as a function: "
            "Operator(f, inverse=lambda r: r / diagonal)"
        )


def _ravel(tree: Any, what: str) -> tuple[jax.Array, Callable[[Any], Any]]:
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)}
    if len(dtypes) != 1 or not jnp.issubdtype(min(dtypes, key=str), jnp.inexact):
        names = ", ".join(sorted(map(str, dtypes))) or "no arrays"
        raise TypeError(
            f"solve: {what} holds {names}; with an operator it is an array, or a pytree of arrays "
            "of one dtype, floating-point or complex"
        )
    return ravel_pytree(jax.tree.map(jnp.asarray, tree))


def _like(tree: Any, b: Any, what: str) -> jax.Array:
    """`tree`, flattened; it must be like b."""

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)

    if shapes(tree) != shapes(b):
        raise ValueError(
            f"solve: {what} is {shapes(tree)} where b is {shapes(b)}; they must be alike"
        )
    return ravel_pytree(tree)[0]


# ---- linear maps as jaxprs ----


@dataclasses.dataclass(frozen=True, eq=False)
class _Map:
    """(residuals, v) -> A v as a jaxpr of (residuals..., link, v), and that of the transpose."""

    jaxpr: Any
    backward: Any = None  # made when it is needed

    def __call__(self, residuals: Sequence[Any], v: Any) -> Any:
        return eval_jaxpr(self.jaxpr, (), *residuals, _LINK, v)[0]

    def transposed(self) -> _Map:
        if self.backward is not None:
            return _Map(self.backward, self.jaxpr)
        *_, link, v = (var.aval for var in self.jaxpr.invars)

        def back(*operands: Any) -> Any:
            *residuals, _, ct = operands

            def linear(*inputs: Any) -> Any:
                return eval_jaxpr(self.jaxpr, (), *residuals, *inputs)[0]

            return jax.linear_transpose(linear, link, v)(ct)[1]

        # The messages of `back` need no link: what it is transposed to is `jaxpr`.
        closed = jax.make_jaxpr(back)(*(var.aval for var in self.jaxpr.invars))
        jaxpr, constants = compat.constants_as_operands(closed)
        assert not constants
        return _Map(jaxpr, self.jaxpr)


def linearized(
    function: Callable[[Any], Any], v: jax.Array, a: Any
) -> tuple[_Map, list[Any], jax.Array]:
    """The linear map `function`, its residuals, and function(v)."""

    def linked(link: Any, v: Any) -> Any:
        with set_carrier(link):
            return function(v)

    value, tangent = jax.linearize(linked, a, v)
    closed = jax.make_jaxpr(tangent)(_LINK, v)
    jaxpr, residuals = compat.constants_as_operands(closed)
    return _Map(jaxpr), residuals, value


# ---- the primitive: (residuals..., defect, b, x0, carrier) -> x, info ----

_Zero: Any = ad.Zero  # pyright: ignore[reportPrivateImportUsage]


def _parts(operands: Sequence[Any], counts: tuple[int, int]) -> tuple[list[Any], ...]:
    """Residuals of the map, residuals of the inverse, (defect, b, x0, carrier)."""
    n, m = counts
    operands = list(operands)
    return operands[:n], operands[n : n + m], operands[n + m :]


def _shapes(*operands: Any, **_: Any) -> list[ShapedArray]:
    b = operands[-3]
    real = jnp.finfo(b.dtype).dtype
    return [ShapedArray(b.shape, b.dtype), ShapedArray((INFO,), real)]


def _run(
    *operands: Any,
    forward: _Map,
    inverse: _Map | None,
    counts: tuple[int, int],
    solver: LinearSolver,
    throw: bool,
    site: int,
    comm: Communicator,
) -> Any:
    residuals, inverse_residuals, (defect, b, x0, _) = _parts(operands, counts)
    with without_carriers():  # differentiation has happened: these messages carry values only
        system = System(
            product=lambda v: forward(residuals, v),
            precondition=lambda v: v if inverse is None else inverse(inverse_residuals, v),
            b=b,
            x0=x0,
            rtol=solver.rtol,
            max_steps=solver.max_steps,
            comm=comm,
            first=comm.rank << 20,
            defect=defect,
        )
        x, info = iterate(solver, system)
        if throw:
            require_success(solver, info, comm, f"solve, {describe(site)}: ", operator=True)
    return x, info


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], tuple[Any, ...], Callable[..., Any]]:
    """The primal results, what the tangent map needs of them, and the tangent map.

    dx = A^-1 (db - dA x), where dA x is the derivative of A x with respect to the residuals: with
    all of them, so that every rank has its messages.
    """
    x, info = operator_solve_p.bind(*operands, **params)
    counts, forward = params["counts"], params["forward"]
    residuals, inverse_residuals, (defect, b, _, a) = _parts(operands, counts)
    varying = [i for i, r in enumerate(residuals) if jnp.issubdtype(jnp.result_type(r), np.inexact)]
    link = a + opaque_zero(x, CARRIER)  # active wherever x is

    def product(*values: Any) -> Any:
        every = list(residuals)
        for i, value in zip(varying, values, strict=True):
            every[i] = value
        return forward(every, x)

    values = [residuals[i] for i in varying]
    moved, consts = None, []
    if values:
        _, derivative = jax.linearize(product, *values)
        moved, consts = compat.constants_as_operands(jax.make_jaxpr(derivative)(*values))
    nothing, start = jnp.zeros_like(defect), jnp.zeros_like(b)

    def tangent(kept: Any, tangents: Sequence[Any]) -> list[Any]:
        consts, residuals, inverse_residuals, nothing, start, link = kept
        changes, _, (_, tb, _, ta) = _parts(tangents, counts)
        rhs = start if type(ta) is _Zero else opaque_zero(ta, jax.typeof(start))
        if type(tb) is not _Zero:
            rhs = rhs + tb
        changes = [changes[i] for i in varying]
        if moved is not None and (moved.effects or any(type(t) is not _Zero for t in changes)):
            changes = [ad.instantiate_zeros(t) for t in changes]
            rhs = rhs - eval_jaxpr(moved, (), *consts, *changes)[0]
        dx, _ = operator_solve_p.bind(
            *residuals, *inverse_residuals, nothing, rhs, start, link, **params
        )
        return [dx, _Zero(compat.tangent_aval(info))]

    kept = (consts, residuals, inverse_residuals, nothing, start, link)
    return [x, info], kept, tangent


def _transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
    residuals, inverse_residuals, (defect, _, x0, a) = _parts(operands, params["counts"])
    params = {**params, "site": -abs(params["site"])}
    if not params["solver"].symmetric:
        inverse = params["inverse"]
        params["forward"] = params["forward"].transposed()
        params["inverse"] = None if inverse is None else inverse.transposed()
    ct = ad.instantiate_zeros(cotangents[0])
    back, _ = operator_solve_p.bind(*residuals, *inverse_residuals, defect, ct, x0, a, **params)
    return [None] * (len(operands) - 3) + [back, None, None]


operator_solve_p = implicit_primitive(
    "operator_solve", shapes=_shapes, run=_run, differentiate=_differentiate
)
ad.primitive_transposes[operator_solve_p] = _transpose
