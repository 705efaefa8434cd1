"""Matrix-free solves: the linear map is a function, with messages inside."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.flatten_util import ravel_pytree

from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import (
    CARRIER,
    Activity,
    call_site,
    carrier,
    constants_as_operands,
    describe,
    noise,
    opaque_zero,
    primitive,
    set_carrier,
    without_carriers,
)
from mpigrad.operations import allreduce
from mpigrad.sparse.solvers.guesses import Guesses, first_guess, next_vectors
from mpigrad.sparse.solvers.jax_backend import (
    largest,
    normalizing,
    refuse_overflow,
    require_success,
    scaled,
    scaled_map,
    solve_system,
)
from mpigrad.sparse.solvers.krylov import LinearSystem
from mpigrad.sparse.solvers.methods import GMRES, INFO, LinearSolver, check_hashable
from mpigrad.sparse.solvers.nullspace import (
    as_nullspace,
    check_nullspace,
    into_range,
    mark_faults,
    orthonormal,
    projected,
    without_nullspace,
)

__all__ = [
    "BlockOperator",
    "Operator",
    "linearized",
    "operator_solve_p",
    "solve_operator",
]

# ---- Matrix-free solves: the linear map is a function, with messages inside ----
#
# A primitive carries the map as a jaxpr (residuals..., link, v) -> A v, made by linearizing the
# user's function. Everything that does not depend on v, messages too, is computed once, outside
# the iteration. `link` is a scalar on which every message of the map depends linearly, so that
# the transpose has the adjoint of each of them, even if a rank's v is constant.


_LINK = np.float32(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """A linear map given as a function, for `solve`.

    Attributes
    ----------
    function
        The function v -> A v on this rank's part of a vector (an array or pytree of any shapes, and
        one dtype). It may exchange messages, and may close over values that are differentiated.
    inverse
        A linear function r -> z that approximates the inverse of A, as a preconditioner: a division
        by the diagonal, for instance, or a solve with a simpler matrix. Symmetric positive definite
        for PCG. Only the number of steps depends on it.
    comm
        The communicator over whose ranks vectors are distributed. None: the default communicator.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import PCG, Operator, solve
    >>> diagonal = jnp.array([2.0, 4.0])
    >>> A = Operator(lambda v: diagonal * v, inverse=lambda r: r / diagonal)
    >>> solution = solve(A, jnp.ones(2), PCG())
    >>> solution.value, int(solution.stats["num_steps"])
    (Array([0.5 , 0.25], dtype=float32), 1)
    """

    function: Callable[[Any], Any]
    inverse: Callable[[Any], Any] | None = None
    comm: Communicator | None = None

    def __call__(self, v: Any) -> Any:
        """Return A v."""
        return self.function(v)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockOperator(Operator):
    """An `Operator` made of blocks.

    Attributes
    ----------
    weights
        For each field 1 / sqrt of the size of each row, or 0 where it is not known. () if the
        method needs none. They are scaled to `LinearSystem.weights`.
    prepares
        True if the inverse sends its messages on all ranks, and not on some of them. Then its
        transpose is prepared before the iterations (`_Map.prepared_transpose`).
    """

    weights: tuple[jax.Array, ...] = ()
    prepares: bool = False


def solve_operator(
    A: Callable[[Any], Any],
    b: Any,
    solver: LinearSolver | None = None,
    *,
    x0: Any = None,
    nullspace: Any = None,
    throw: bool = True,
) -> tuple[Any, jax.Array, Guesses | None]:
    """Solve A x = b for a function A: x like b, the info of shape (INFO,), and the next guesses."""
    operator = A if isinstance(A, Operator) else Operator(A)
    comm = resolve(operator.comm)
    solver = GMRES() if solver is None else solver
    solver = _checked(solver)
    flat, unravel = _ravel(b, "b")
    if isinstance(x0, Guesses):
        x0.check(b, flat.dtype)
        rows = [jnp.reshape(v, (len(v), -1)) for v in jax.tree.leaves(x0)]
        first = jnp.concatenate(rows, axis=1)
    else:
        flat_x0 = jnp.zeros_like(flat) if x0 is None else _like(x0, b, "x0")
        first = jax.lax.stop_gradient(flat_x0)

    def flattened(function: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
        return lambda v: _like(function(unravel(v)), b, f"the result of {what}")

    a = carrier()
    probe = noise(comm.rank << 20, flat.shape[0], flat.dtype, 2654435761)
    forward, residuals, value = linearized(flattened(operator.function, "the operator"), probe, a)
    weights, prepares = (), False
    if isinstance(operator, BlockOperator):  # linear
        weights, prepares = operator.weights, operator.prepares
        size = largest(value)
        defect = jnp.stack([0 * size, 0 * size, size])
    else:
        # Only for the check of linearity: inactive on every rank.
        residuals_now = jax.lax.stop_gradient(residuals)
        product = forward(residuals_now, probe)
        # Also at -v: |v| equals its derivative times v.
        opposite = flattened(operator.function, "the operator")(-probe)
        difference = jnp.stack([value - product, opposite + product])
        size = largest(product)
        difference, product = (
            scaled(jax.lax.stop_gradient(v), -jnp.frexp(size)[1]) for v in (difference, product)
        )
        defect = jnp.stack([*(jnp.vdot(v, v).real for v in (difference, product)), size])
    inverse, inverse_residuals = None, []
    if operator.inverse is not None:
        function = flattened(operator.inverse, "inverse")
        at = 0 * probe if prepares else probe  # a library returns at once for zeros
        inverse, inverse_residuals, _ = linearized(function, at, a)
    space, null, null_check = None, without_nullspace(flat.dtype), ""
    if nullspace is not None:
        space, null_check = as_nullspace(nullspace, solver), "consistent"
        null = orthonormal(
            space, lambda v: _like(v, b, "a null vector"), flat.size, flat.dtype, comm
        )
        if space.project:
            flat, null_check = projected(null[-1:], flat[None], comm)[0], "project"
    real = jnp.finfo(flat.dtype).dtype
    flat_weights = jnp.concatenate([jnp.zeros(0, real), *(w.astype(real) for w in weights)])
    x, info, vectors = operator_solve_p.bind(
        *residuals,
        *inverse_residuals,
        jax.lax.stop_gradient(defect),
        jax.lax.stop_gradient(flat_weights),
        flat,
        first,
        jax.lax.stop_gradient(null),
        a,
        forward=forward,
        inverse=inverse,
        counts=(len(residuals), len(inverse_residuals)),
        solver=solver,
        null_check=null_check,
        prepares=prepares,
        fields=tuple(w.size for w in weights),
        throw=bool(throw),
        site=call_site(),
        comm=comm,
    )
    if space is not None:  # for derivatives in the vectors
        x = projected(null[:1], x[None], comm)[0]
    state = None
    if isinstance(x0, Guesses):
        state = Guesses.tree_unflatten(None, (jax.vmap(unravel)(vectors),))
    return unravel(x), info, state


def _checked(solver: Any) -> LinearSolver:
    """Return the solver for a function, or raise an error."""
    if not isinstance(solver, LinearSolver) or solver.needs_matrix:
        raise TypeError(
            "solve: with a function in place of a matrix, expected PCG, GMRES, BiCGStab or a "
            f"LinearSolver of your own, got {solver!r}. Choose GMRES()."
        )
    solver = solver.for_function
    if solver.preconditioner is not None:
        name = type(solver).__name__
        raise TypeError(
            f"solve: {solver.preconditioner!r} needs a matrix, got a function. Write "
            f"{name}(preconditioner=None), and give the preconditioner as a function: "
            "Operator(f, inverse=lambda r: r / diagonal)."
        )
    check_hashable(solver)
    return solver


def _ravel(tree: Any, what: str) -> tuple[jax.Array, Callable[[Any], Any]]:
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)}
    if len(dtypes) != 1 or not jnp.issubdtype(min(dtypes, key=str), jnp.inexact):
        names = ", ".join(sorted(map(str, dtypes))) or "no arrays"
        raise TypeError(
            f"solve: with a function in place of a matrix, {what} must be an array or a pytree of "
            f"arrays of one dtype, floating-point or complex, got {names}. Convert it."
        )
    return ravel_pytree(jax.tree.map(jnp.asarray, tree))


def _like(tree: Any, b: Any, what: str) -> jax.Array:
    """Return the tree, flattened, if its shapes and dtypes are those of b."""

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)

    if shapes(tree) != shapes(b):
        raise ValueError(
            f"solve: {what} must have the shapes and dtypes of b, {shapes(b)}, got {shapes(tree)}. "
            "Give it the same structure."
        )
    return ravel_pytree(tree)[0]


# ---- linear maps as jaxprs ----


@dataclasses.dataclass(frozen=True, eq=False)
class _Map:
    """The map (residuals, v) -> A v as a jaxpr of (constants..., residuals..., link, v)."""

    jaxpr: Any
    constants: tuple[Any, ...] = ()  # small arrays that JAX made
    backward: _Map | None = None  # the map of which this is the transpose
    skipped: int = 0  # the number of residuals before its own ones, which belong to `backward`

    def __call__(self, residuals: Sequence[Any], v: Any) -> Any:
        own = residuals[self.skipped :]
        return eval_jaxpr(self.jaxpr, (), *self.constants, *own, _LINK, v)[0]

    def transposed(self) -> _Map:
        if self.backward is not None:
            return self.backward
        operands = [var.aval for var in self.jaxpr.invars[len(self.constants) :]]
        *_, link, v = operands

        def back(*operands: Any) -> Any:
            *residuals, _, ct = operands

            def linear(*inputs: Any) -> Any:
                return eval_jaxpr(self.jaxpr, (), *self.constants, *residuals, *inputs)[0]

            return jax.linear_transpose(linear, link, v)(ct)[1]

        # The messages of `back` need no link: its transpose is `jaxpr`.
        jaxpr, constants = constants_as_operands(jax.make_jaxpr(back)(*operands))
        return _Map(jaxpr, tuple(constants), self)

    def prepared_transpose(self, residuals: list[Any], a: Any) -> tuple[_Map, list[Any]]:
        """Return the transpose and its residuals, with all that does not depend on v computed once.

        That is the transpose of a matrix, for instance, and the set-up of its multigrid. A message
        whose result is a constant on this rank would be sent once only, so this is for
        `BlockOperator.prepares`.
        """
        if self.backward is not None:
            return self.backward, residuals[: self.skipped]
        back, v = self.transposed(), self.jaxpr.invars[-1].aval
        zeros = jnp.zeros(v.shape, v.dtype)
        prepared, more, _ = linearized(lambda v: back(residuals, v), zeros, a)
        return dataclasses.replace(prepared, backward=self, skipped=len(residuals)), [
            *residuals,
            *more,
        ]


def linearized(
    function: Callable[[Any], Any], v: jax.Array, a: Any
) -> tuple[_Map, list[Any], jax.Array]:
    """Return the linear map `function`, its residuals, and function(v)."""

    def linked(link: Any, v: Any) -> Any:
        with set_carrier(link):
            return function(v)

    value, tangent = jax.linearize(linked, a, v)
    closed = jax.make_jaxpr(tangent)(_LINK, v)
    jaxpr, residuals = constants_as_operands(closed)
    return _Map(jaxpr), residuals, value


# ---- the primitive: (residuals..., defect, weights, b, x0, null, carrier) -> x, info, vectors. The
# defect has |f(v) - A v|^2 and |A v|^2 for A v scaled to about 1, and the size of A v. The weights
# are those of `BlockOperator`, one field after the other. x0 may also be the vectors of guesses,
# shape (2 k, n). Then `vectors` are those for the next solve. Otherwise k = 0. `null` is one of
# `solve_p`, without its first axis ----


def _parts(operands: Sequence[Any], counts: tuple[int, int]) -> tuple[list[Any], ...]:
    """Return the map's residuals, the inverse's residuals, and the other operands."""
    n, m = counts
    operands = list(operands)
    return operands[:n], operands[n : n + m], operands[n + m :]


def _shapes(*operands: Any, **_: Any) -> list[Any]:
    b, x0 = operands[-4:-2]
    real = jnp.finfo(b.dtype).dtype
    k = x0.shape[0] if x0.ndim == 2 else 0
    return [
        b,
        jax.ShapeDtypeStruct((INFO,), real),
        jax.ShapeDtypeStruct((k, *b.shape), b.dtype),
    ]


def _run(
    *operands: Any,
    forward: _Map,
    inverse: _Map | None,
    counts: tuple[int, int],
    solver: LinearSolver,
    null_check: str,
    prepares: bool,
    fields: tuple[int, ...],
    throw: bool,
    site: int,
    comm: Communicator,
) -> Any:
    del prepares
    residuals, inverse_residuals, (defect, weights, b, x0, null, _) = _parts(operands, counts)
    vectors = x0 if x0.ndim == 2 else jnp.zeros((0, *b.shape), b.dtype)
    head, product = f"solve, {describe(site)}: ", functools.partial(forward, residuals)
    singular, faults = null.shape[1] > 0, None
    with without_carriers():  # differentiation has happened: these messages carry values only
        if null_check:
            rhs = b if null_check == "consistent" else None
            first = comm.rank << 20
            faults = check_nullspace(null, product, rhs, solver, comm, first, head, throw)
        if singular:
            b = into_range(null[-1:], b[None], comm)[0]
        right_hand_side = b
        parts = jnp.split(weights, np.cumsum(fields)[:-1]) if fields else []
        size, up, *steps = normalizing([defect[2], largest(b), *map(largest, parts)], comm)
        # A method of the user may have parameters that fit the operator.
        operator = size if solver.judges_residual else jnp.zeros_like(size)
        down = operator - up
        b = scaled(b, up)
        if x0.ndim == 2:
            solutions, sides = jnp.split(vectors, 2)
            pairs = jnp.concatenate([scaled(solutions, -down), scaled(sides, up)])
            x0 = first_guess(lambda terms: allreduce(terms, comm=comm), pairs, b)
        else:
            x0 = scaled(x0, -down)

        def precondition(v: jax.Array) -> jax.Array:
            if inverse is None:
                return v
            return scaled_map(functools.partial(inverse, inverse_residuals), v, -operator)

        system = LinearSystem(
            product=lambda v: scaled_map(product, v, operator),
            precondition=precondition,
            b=b,
            x0=x0,
            rtol=solver.rtol,
            max_steps=solver.max_steps,
            comm=comm,
            first=comm.rank << 20,
            weights=_relative(parts, steps) if parts else None,
            # This rank has scaled them by itself.
            defect=scaled(defect[:2], 2 * (size + jnp.frexp(defect[2])[1])),
        )
        x, info = solve_system(solver, system)
        if throw:
            require_success(solver, info, comm, head, operator=True)
        info = refuse_overflow(x, down, info, comm, head, throw)
        x = scaled(x, down)
        if singular:
            x = projected(null[:1], x[None], comm)[0]
        if faults is not None:
            x, info = mark_faults(x, info, faults)
    return x, info, next_vectors(vectors, x, right_hand_side, info[0]) if len(vectors) else vectors


def _relative(weights: Sequence[jax.Array], exponents: Sequence[jax.Array]) -> jax.Array:
    """Return the weights of all fields, about 1 for the smallest rows of each field."""
    least = float(jnp.finfo(weights[0].dtype).eps) ** 0.25  # one tiny row is not all that counts
    return jnp.concatenate(
        [
            jnp.where(w > 0, jnp.maximum(scaled(w, e), least), 1)
            for w, e in zip(weights, exponents, strict=True)
        ]
    )


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], tuple[Any, ...], Callable[..., Any]]:
    """Return the primal results, the residuals of the tangent map, and the tangent map.

    dx = A^-1 (db - dA x). Here dA x is the derivative of A x with respect to all residuals, so that
    every rank sends its messages.
    """
    x, info, vectors = operator_solve_p.bind(*operands, **params)
    first_shape = operands[-3].shape
    guessed = len(first_shape) == 2
    counts, forward = params["counts"], params["forward"]
    params = {**params, "null_check": ""}
    residuals, inverse_residuals, (defect, weights, b, _, null, a) = _parts(operands, counts)
    varying = [i for i, r in enumerate(residuals) if jnp.issubdtype(jnp.result_type(r), np.inexact)]
    link = a + opaque_zero(x, CARRIER)  # active on every rank on which x is

    def product(*values: Any) -> Any:
        every = list(residuals)
        for i, value in zip(varying, values, strict=True):
            every[i] = value
        return forward(every, x)

    values = [residuals[i] for i in varying]
    moved, consts = None, []
    if values:
        _, derivative = jax.linearize(product, *values)
        moved, consts = constants_as_operands(jax.make_jaxpr(derivative)(*values))
    nothing, start = defect.at[:2].set(0), jnp.zeros_like(b)

    def tangent(saved: Any, tangents: Sequence[Any]) -> list[Any]:
        consts, residuals, inverse_residuals, nothing, weights, start, null, link = saved
        changes, _, (_, _, tb, tx0, _, ta) = _parts(tangents, counts)
        rhs = start if ta is None else opaque_zero(ta, jax.typeof(start))
        if tb is not None:
            rhs = rhs + tb
        changes = [changes[i] for i in varying]
        if moved is not None and (moved.effects or any(t is not None for t in changes)):
            changes = [
                jnp.zeros_like(residuals[i]) if t is None else t
                for i, t in zip(varying, changes, strict=True)
            ]
            rhs = rhs - eval_jaxpr(moved, (), *consts, *changes)[0]
        # Tangents have guesses of their own, as have cotangents.
        first = start
        if guessed:
            first = jnp.zeros(first_shape, start.dtype) if tx0 is None else tx0
        dx, _, after = operator_solve_p.bind(
            *residuals, *inverse_residuals, nothing, weights, rhs, first, null, link, **params
        )
        return [dx, None, after]

    saved = (consts, residuals, inverse_residuals, nothing, weights, start, null, link)
    return [x, info, vectors], saved, tangent


def _transpose(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    residuals, inverse_residuals, rest = _parts(operands, params["counts"])
    defect, weights, _, _, null, a = rest
    if not params["solver"].symmetric:
        inverse = params["inverse"]
        if inverse is not None and not params["prepares"]:
            inverse = inverse.transposed()
        elif inverse is not None:
            inverse, inverse_residuals = inverse.prepared_transpose(inverse_residuals, a)
        params |= {
            "forward": params["forward"].transposed(),
            "inverse": inverse,
            "counts": (len(residuals), len(inverse_residuals)),
        }
        null = null[::-1].conj()  # of the transpose, not of the adjoint
    # The cotangents of guesses hold guesses for adjoint solves.
    ct, _, vectors = cotangents
    first = vectors if len(vectors) else jnp.zeros_like(ct)
    back, _, before = operator_solve_p.bind(
        *residuals, *inverse_residuals, defect, weights, ct, first, null, a, **params
    )
    return [None] * (len(operands) - 4) + [back, before, None, None]


operator_solve_p = primitive(
    "operator_solve",
    shapes=_shapes,
    run=_run,
    differentiate=_differentiate,
    undifferentiated=(1,),
    transpose=_transpose,
    batch="map",
)
