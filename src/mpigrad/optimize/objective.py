"""The function that a method minimises, with its derivatives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.autodiff import Loss, grad, linearize, vjp
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.operations import max_norm
from mpigrad.optimize.bounds import clip
from mpigrad.optimize.root_worker import shared_evaluation
from mpigrad.optimize.unknowns import ProgramCache, Unknowns, Vector
from mpigrad.sparse import pass_guesses

__all__ = ["Objective", "Point"]


@dataclasses.dataclass(frozen=True)
class Point:
    """A point with its loss and gradient.

    Attributes
    ----------
    x, gradient
        This rank's parts of the vectors.
    loss
        The global loss.
    norm
        The two-norm of the gradient.
    slope
        The inner product of the gradient with the direction that led to the point.
    """

    x: Vector
    gradient: Vector
    loss: float
    norm: float
    slope: float

    @property
    def finite(self) -> bool:
        """True if the loss, the norm and the slope are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm) and math.isfinite(self.slope)


class Objective(ProgramCache):
    """A function of the unknowns with its derivatives, compiled once for several runs.

    One compiled program computes a step, the value and gradient at the new point, and the inner
    products for a line search. `minimize` makes an objective, or takes one, so that several starts,
    methods and stages share its programs. All methods of this class are collective.

    Parameters
    ----------
    f, loss, value_and_grad, sharded, replicated, comm
        As in `minimize`.
    x0
        A tree with the structure, shapes and dtypes of the unknowns.
    residuals
        True if f returns residuals. The loss is half the sum of their squares. `GaussNewton`
        needs it.
    guesses
        As in `minimize`.

    Attributes
    ----------
    f
        The function, or None.
    unknowns
        The `Unknowns`.
    evaluations, products
        Counts of values with gradients, and of Hessian-vector (or Gauss-Newton) products.
    batch
        Further arguments of the function: (), or a tuple of one batch.
    guesses
        The guesses for the next evaluation: those for the solves of f and those for their adjoint
        solves. None without guesses.
    method_data
        Data that a method keeps during a run and that is not in its states.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import LBFGS, NonlinearCG, Objective, minimize
    >>> def loss(x):
    ...     return jnp.sum((x - 2.0) ** 2)
    >>> objective = Objective(loss, jnp.zeros(3), loss="replicated", replicated=True)
    >>> for method in LBFGS(), NonlinearCG():
    ...     print(minimize(objective, jnp.zeros(3), method).value.round(3))
    [2. 2. 2.]
    [2. 2. 2.]
    """

    def __init__(
        self,
        f: Callable[..., Any] | None,
        x0: Any,
        *,
        sharded: Any = None,
        replicated: Any = None,
        loss: Loss = "share",
        value_and_grad: Callable[..., Any] | None = None,
        residuals: bool = False,
        guesses: Any = None,
        comm: Communicator | None = None,
    ) -> None:
        comm = resolve(comm)
        with raise_on_all_ranks(comm):
            if value_and_grad is None and not callable(f):
                raise TypeError(f"minimize: f must be a function, got {f!r}")
            if value_and_grad is not None and residuals:
                raise ValueError(
                    "minimize: got value_and_grad with GaussNewton, which differentiates the "
                    "residuals that f returns. Give f only."
                )
            if value_and_grad is not None and guesses is not None:
                raise ValueError(
                    "minimize: got guesses with value_and_grad, which calls f itself. Give f only, "
                    "or keep the guesses in value_and_grad."
                )
        agreed = loss, residuals, value_and_grad is None, guesses is None
        assert_same_on_all_ranks(
            comm, agreed, "minimize: loss, and whether value_and_grad and guesses are given,"
        )
        unknowns = Unknowns(x0, sharded, comm, replicated=replicated)
        self.unknowns = unknowns
        self.evaluations = self.products = 0
        self.batch: tuple[Any, ...] = ()
        self.method_data: Any = None
        self.loss: Loss = loss
        self.residuals = residuals
        self.f: Any = f
        self._given = value_and_grad
        self._first_guesses = guesses if guesses is None else jax.tree.map(jnp.asarray, guesses)
        self.restart_guesses()

        def share(replicated: Any, local: Any, guesses: Any, batch: Any, adjoint: Any) -> Any:
            out, after = self._call(unknowns.unite(replicated, local), batch, guesses)
            value = _half_squares(out) if residuals else out
            if guesses is None:
                return value, (value, None)
            return pass_guesses(value, after, adjoint), (value, after)

        # The value is summed over ranks together with the inner products, in one message. The
        # gradient with respect to the guesses has those for the next adjoint solves.
        numbers = (0, 1) if guesses is None else (0, 1, 2)
        self._gradient = grad(share, numbers, has_aux=True, loss=loss, replicated=0, comm=comm)

    def _call(self, x: Any, batch: tuple[Any, ...], guesses: Any) -> tuple[Any, Any]:
        """Return what f returns at x, and its guesses for the next evaluation."""
        if guesses is None:
            return self.f(x, *batch), None
        out = self.f(x, *batch, guesses)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"minimize: with guesses, f must return (loss, guesses), got {type(out).__name__}. "
                "Return solution.state of its last solve as the second value."
            )
        before, after = (jax.tree.map(jax.typeof, tree) for tree in (guesses, out[1]))
        if jax.tree.flatten(before) != jax.tree.flatten(after):
            raise TypeError(
                f"minimize: f must return guesses like its argument, {before}, got {after}. Return "
                "solution.state of its last solve."
            )
        return out

    # ---- on the host ----

    def restart_guesses(self) -> None:
        """Forget the solutions of earlier evaluations."""
        first = self._first_guesses
        self.guesses = None if first is None else (first, self._no_guesses())

    def _no_guesses(self) -> Any:
        return jax.tree.map(jnp.zeros_like, self._first_guesses)

    def evaluate(self, x: Vector) -> Point:
        """Evaluate at x: one evaluation."""
        zeros = jax.tree.map(lambda leaf: np.zeros(jnp.shape(leaf), jnp.result_type(leaf)), x)
        return self.evaluate_along(x, zeros, 0.0)

    def evaluate_along(
        self, x: Vector, direction: Vector, step: float, limits: tuple[Vector, Vector] | None = None
    ) -> Point:
        """Evaluate at x + step · direction, moved into the limits if given: one evaluation."""
        self.evaluations += 1
        if self._given is None:
            program = self.compiled(Objective._program_along)
            moved, gradient, numbers, self.guesses = program(
                x, direction, step, limits, self.batch, self.guesses
            )
        else:
            moved = _moved(x, direction, step, limits)
            x = self.tree(moved)
            with shared_evaluation(self.unknowns.comm):
                value, tree = self._given(x, *self.batch)
                self.unknowns.check_like(tree, "the gradient that value_and_grad returns")
                if jnp.shape(value) != ():
                    raise ValueError(
                        "minimize: value_and_grad returned a value of shape "
                        f"{jnp.shape(value)}, expected (). Return the global loss."
                    )
            gradient, numbers = self.compiled(Objective._measured)(value, tree, direction)
        slope, square, loss = np.asarray(numbers).tolist()
        return Point(moved, gradient, loss, math.sqrt(square), slope)

    def check_scale(self, first: Any, atol: float) -> None:
        """Raise an error if squares at the first point, of gradient or residuals, are lost."""
        loss, norm = first.loss, first.gradient_norm
        if norm <= atol and atol > 0:
            return
        if self.residuals and (loss == 0 or not math.isfinite(loss)):
            largest = float(self.compiled(Objective._largest_residual)(first.x, self.batch))
            _require_scale(largest, "residual", "their dtype cannot hold half the sum", "them")
        if not 1e-150 < norm < 1e150:
            largest = self.unknowns.largest(first.gradient)
            _require_scale(largest, "entry of the gradient", "float64 cannot hold the sum", "f")

    def _largest_residual(self, x: Vector, batch: tuple[Any, ...]) -> Any:
        out = self._call(self.unknowns.tree(x), batch, self._no_guesses())[0]
        return max_norm(out, self.unknowns.comm)

    def tree(self, x: Vector) -> Any:
        """Return the unknowns as a tree of the structure of x0."""
        return self.unknowns.compiled(Unknowns.tree)(x)

    # ---- in compiled programs ----

    def hessian_products(self, x: Vector, batch: tuple[Any, ...]) -> Callable[[Vector], Vector]:
        """Return v → H v at x, by forward over reverse differentiation, to be traced."""
        unknowns = self.unknowns

        none = self._no_guesses()

        def gradient(replicated: Any, local: Any) -> Any:
            return self._gradient(replicated, local, none, batch, none)[0][:2]

        _, derivative = linearize(gradient, *unknowns.split(x))
        return lambda v: unknowns.join(*derivative(*unknowns.split(v)))

    def gauss_newton_products(
        self, x: Vector, batch: tuple[Any, ...]
    ) -> Callable[[Vector], Vector]:
        """Return v → Jᵀ J v at x, to be traced. J is the derivative of the residuals."""
        unknowns = self.unknowns
        once = self.loss == "share" or unknowns.comm.rank == 0

        def residual(replicated: Any, local: Any) -> Any:
            return self._call(unknowns.unite(replicated, local), batch, self._no_guesses())[0]

        at = unknowns.split(x)
        _, forward = linearize(residual, *at)
        _, backward = vjp(residual, *at)

        def product(v: Vector) -> Vector:
            moved = forward(*unknowns.split(v))
            if not once:  # replicated residuals count on rank 0 only
                moved = jax.tree.map(jnp.zeros_like, moved)
            replicated, local = backward(moved)
            return unknowns.join(unknowns.sum(replicated) if replicated else [], local)

        return product

    def _program_along(
        self, x: Vector, direction: Vector, step: Any, limits: Any, batch: Any, guesses: Any
    ) -> Any:
        x = _moved(x, direction, step, limits)
        first, adjoint = (None, None) if guesses is None else guesses
        gradients, (value, after) = self._gradient(*self.unknowns.split(x), first, batch, adjoint)
        gradient = self.unknowns.join(*gradients[:2])
        numbers = self._numbers(value, self.loss == "share", gradient, direction)
        return x, gradient, numbers, None if guesses is None else (after, gradients[2])

    def _measured(self, value: Any, tree: Any, direction: Vector) -> Any:
        gradient = self.unknowns.vector(tree)
        return gradient, self._numbers(value, False, gradient, direction)

    def _numbers(self, value: Any, shared: bool, gradient: Vector, direction: Vector) -> Any:
        """Return slope, squared gradient norm and loss. A global value is taken from rank 0."""
        if not shared and self.unknowns.comm.rank > 0:
            value = jnp.zeros_like(value)
        return self.unknowns.products((gradient, direction), (gradient, gradient), also=[value])


@jax.jit
def _moved(x: Vector, direction: Vector, step: Any, limits: Any) -> Vector:
    moved = tuple(a + jnp.asarray(step, a.dtype) * d for a, d in zip(x, direction, strict=True))
    return moved if limits is None else clip(moved, limits)


def _require_scale(largest: float, what: str, cannot: str, factor: str) -> None:
    """Raise an error if the largest of some numbers is finite and not zero."""
    if 0 < largest < math.inf:
        scale = -math.floor(math.log10(largest))
        raise ValueError(
            f"minimize: at x0 the largest {what} is {largest:.0e}, and {cannot} of squares. "
            f"Multiply {factor} by a number near 1e{scale:+d}."
        )


def _half_squares(residuals: Any) -> Any:
    """Return ½ Σ r² of a tree of residuals."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(residuals)]
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"minimize: GaussNewton needs real floating-point residuals, but f returned dtype "
                f"{leaf.dtype}. Return the real and imaginary parts, or convert to floats."
            )
    return sum(0.5 * jnp.vdot(leaf, leaf) for leaf in leaves)
