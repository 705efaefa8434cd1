"""Newton's and the Gauss-Newton method: conjugate gradients in a trust region."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.unknowns import Unknowns, Vector, dot

__all__ = ["GaussNewton", "NewtonCG", "TrustRegionState"]

Product = Callable[[Vector], Vector]
_ENOUGH = 1e-4  # the fraction of the predicted decrease that a step must reach
_ATTEMPTS = 25  # radii in one iteration


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrustRegionState:
    """The state of a trust-region method, with the radius and the norm of the first gradient."""

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    radius: float
    first_norm: float
    stuck: bool


@dataclasses.dataclass(frozen=True)
class _TrustRegion(Method):
    """Minimise a quadratic model by truncated conjugate gradients (Steihaug 1983).

    A record's `step` is the two-norm of the step. The linear iterations of a step are one compiled
    program, which linearizes the objective once.

    Attributes
    ----------
    radius
        Largest two-norm of the first step, in the unit of the unknowns. Later radii are adapted.
        None: the norm of x0, or 1 if x0 is zero.
    max_products
        Largest count of products with the Hessian in one step.
    forcing
        Conjugate gradients stop if the residual is below min(forcing, √(|g| / |g0|)) |g|.
    """

    radius: float | None = None
    max_products: int = 100
    forcing: float = 0.5

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"{name}: radius must be positive, got {self.radius}")
        if self.max_products < 1 or not 0 < self.forcing < 1:
            raise ValueError(
                f"{name}: max_products must be positive and forcing in (0, 1), got "
                f"max_products={self.max_products}, forcing={self.forcing}"
            )

    @property
    def needs_f(self) -> bool:
        return True

    @staticmethod
    @abc.abstractmethod
    def products(objective: Objective, x: Vector, batch: Any) -> Product:
        """Return v -> H v of the model at x, to be traced."""

    def start(self, objective: Objective, x: Vector) -> TrustRegionState:
        point = objective.evaluate(x)
        radius = self.radius or objective.unknowns.norm(x) or 1.0
        return TrustRegionState(
            point.x, point.gradient, point.loss, point.norm, 0.0, radius, point.norm, False
        )

    def step(self, objective: Objective, state: TrustRegionState) -> TrustRegionState:
        """Take one step. If the decrease is much smaller than predicted, try a shorter step."""
        radius = state.radius
        relative = math.sqrt(state.gradient_norm / state.first_norm)
        program = objective.compiled(self._solve)
        for _ in range(_ATTEMPTS):
            direction, numbers = program(
                state.x, state.gradient, state.gradient_norm, radius,
                min(self.forcing, relative), objective.batch,
            )  # fmt: skip
            predicted, length, products, bounded = (float(number) for number in numbers)
            objective.products += int(products)
            if not predicted > 0 or length == 0:
                break
            point = objective.evaluate_along(state.x, direction, 1.0)
            decrease = state.loss - point.loss
            # If both are within rounding errors, accept a step that reduces the gradient.
            rounding = 10 * objective.unknowns.epsilon * abs(state.loss)
            if predicted <= rounding and abs(decrease) <= rounding:
                ratio = 1.0 if point.norm < state.gradient_norm else 0.0
            else:
                ratio = decrease / predicted if point.finite else -1.0
            if ratio < 0.25:
                radius = 0.25 * length
            elif ratio > 0.75 and bounded:
                radius = 2 * radius
            if ratio > _ENOUGH:
                return TrustRegionState(
                    point.x, point.gradient, point.loss, point.norm, length, radius,
                    state.first_norm, False,
                )  # fmt: skip
        return dataclasses.replace(state, step=0.0, radius=radius, stuck=True)

    def layout(self, unknowns: Unknowns) -> Any:
        vector: Any = unknowns.layout()
        no: Any = False
        return TrustRegionState(vector, vector, no, no, no, no, no, no)

    def _solve(
        self,
        objective: Objective,
        x: Vector,
        gradient: Vector,
        norm: Any,
        radius: Any,
        forcing: Any,
        batch: Any,
    ) -> Any:
        product = self.products(objective, x, batch)
        as_given = jnp.result_type(float) == jnp.dtype("float64")

        def among_float64(v: Vector) -> Vector:
            with jax.enable_x64(as_given):
                return product(v)

        with jax.enable_x64(True):
            return _steihaug(
                objective.unknowns, among_float64, gradient, norm, radius, forcing,
                self.max_products,
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class NewtonCG(_TrustRegion):
    """Newton's method with Hessian-vector products, by forward over reverse differentiation.

    Each step minimises a quadratic model in a trust region by conjugate gradients (Steihaug 1983).

    Attributes
    ----------
    radius
        Largest two-norm of the first step, in the unit of the unknowns. Later radii are adapted.
        None: the norm of x0, or 1 if x0 is zero.
    max_products
        Largest count of products with the Hessian in one step.
    forcing
        Conjugate gradients stop if the residual is below min(forcing, √(|g| / |g0|)) |g|.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import NewtonCG, minimize
    >>> def valley(x):
    ...     return 10 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
    >>> solution = minimize(valley, jnp.zeros(2), NewtonCG(), loss="replicated", replicated=True)
    >>> print(solution.value.round(3))
    [1. 1.]
    """

    @staticmethod
    def products(objective: Objective, x: Vector, batch: Any) -> Product:
        return objective.hessian_products(x, batch)


@dataclasses.dataclass(frozen=True)
class GaussNewton(_TrustRegion):
    """The Gauss-Newton method for least squares: half the sum of squares of residuals.

    f(x) returns an array or pytree of real residuals: each rank's own with loss="share", or the
    same on all ranks with loss="replicated". JᵀJ replaces the Hessian, with J the derivative of the
    residuals.

    Attributes
    ----------
    radius, max_products, forcing
        As in `NewtonCG`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import GaussNewton, minimize
    >>> t = jnp.linspace(0.0, 1.0, 5)
    >>> data = 3 * jnp.exp(-t)
    >>> def residuals(x):
    ...     return x[0] * jnp.exp(-x[1] * t) - data
    >>> start, method = jnp.array([1.0, 0.0]), GaussNewton()
    >>> solution = minimize(residuals, start, method, loss="replicated", replicated=True)
    >>> [round(float(value), 3) for value in solution.value]
    [3.0, 1.0]
    """

    residuals: ClassVar[bool] = True

    @staticmethod
    def products(objective: Objective, x: Vector, batch: Any) -> Product:
        return objective.gauss_newton_products(x, batch)


def _steihaug(
    unknowns: Unknowns,
    product: Product,
    gradient: Vector,
    norm: Any,
    radius: Any,
    forcing: Any,
    max_products: int,
) -> tuple[Vector, Any]:
    """Return the step p, and (predicted decrease, |p|, count of products, |p| is the radius).

    Conjugate gradients for H p = -g start from p = 0 and end if the residual is small. If p leaves
    the region |p| <= radius, or the curvature is negative, p ends on the boundary of the region.
    All scalars are computed on rank 0 in float64, because squares of float32 may overflow.
    """
    dtype = jnp.dtype("float64")
    norm, radius, forcing = (jnp.asarray(number, dtype) for number in (norm, radius, forcing))

    def along(p: Vector, t: Any, d: Vector) -> Vector:
        return tuple(a + t.astype(a.dtype) * b for a, b in zip(p, d, strict=True))

    def body(carry: Any) -> Any:
        p, r, d, numbers, k = carry
        Hd = product(d)

        def forward(sums: Any) -> Any:
            rr, pp, pd, dd, decrease, *_ = numbers
            curvature = sums[0]
            t = rr / curvature
            beyond = pp + t * (2 * pd + t * dd) >= radius**2
            bounded = ~(curvature > 0) | beyond
            to_boundary = (jnp.sqrt(pd**2 + dd * (radius**2 - pp)) - pd) / dd
            t = jnp.where(bounded, to_boundary, t)
            t = jnp.where(jnp.isfinite(t), t, 0.0)  # no curvature, and no boundary
            decrease += t * (rr - 0.5 * t * curvature)
            return jnp.stack([
                t, rr, pp + t * (2 * pd + t * dd), pd + t * dd, dd, decrease, bounded.astype(dtype)
            ])  # fmt: skip

        t, rr, pp, pd, dd, decrease, bounded = unknowns.decide(forward, dot(d, Hd)[None])
        p, r = along(p, t, d), along(r, t, Hd)

        def onward(sums: Any) -> Any:
            beta = sums[0] / rr
            small = ~(sums[0] > (forcing * norm) ** 2)
            done = jnp.maximum(bounded, small.astype(dtype))
            return jnp.stack(
                [sums[0], pp, beta * pd, sums[0] + beta**2 * dd, decrease, bounded, done, beta]
            )

        *kept, beta = unknowns.decide(onward, dot(r, r)[None])
        d = tuple(beta.astype(a.dtype) * a - b for a, b in zip(d, r, strict=True))
        return p, r, d, jnp.stack(kept), k + 1

    def unfinished(carry: Any) -> Any:
        *_, numbers, k = carry
        return (numbers[6] == 0) & (k < max_products)

    zero = jnp.zeros((), dtype)
    square = norm**2
    start = (
        jax.tree.map(jnp.zeros_like, gradient),
        gradient,
        tuple(-g for g in gradient),
        jnp.stack([square, zero, zero, square, zero, zero, zero]),
        jnp.zeros((), "int32"),
    )
    p, _, _, numbers, k = jax.lax.while_loop(unfinished, body, start)
    _, pp, _, _, decrease, bounded, _ = numbers
    return p, (decrease, jnp.sqrt(pp), k, bounded)
