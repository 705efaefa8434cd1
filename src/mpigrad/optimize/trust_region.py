"""Newton's and the Gauss-Newton method: conjugate gradients within a trust region."""

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
_ENOUGH = 1e-4  # the part of the predicted decrease that a step must reach
_ATTEMPTS = 25  # radii in one iteration


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrustRegionState:
    """Where a trust-region method is: the radius, and the first gradient's norm."""

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
    """A quadratic model, minimised by truncated conjugate gradients (Steihaug 1983).

    The step of a record is its two-norm. The linear iterations of a step are one compiled program,
    in which the objective is linearized once.

    Attributes
    ----------
    radius
        Two-norm of the longest first step, in the unit of the unknowns; later ones are adapted.
        None: that of x0, or 1 where x0 is zero.
    max_products
        Most products with the Hessian in one step.
    forcing
        Conjugate gradients stop where the residual is below min(forcing, √(|g| / |g0|)) |g|.
    """

    radius: float | None = None
    max_products: int = 100
    forcing: float = 0.5

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"{name}: radius={self.radius} must be positive")
        if self.max_products < 1 or not 0 < self.forcing < 1:
            raise ValueError(
                f"{name}: max_products={self.max_products} must be positive, "
                f"forcing={self.forcing} in (0, 1)"
            )

    @property
    def needs_f(self) -> bool:
        return True

    @staticmethod
    @abc.abstractmethod
    def products(objective: Objective, x: Vector, batch: Any) -> Product:
        """v -> H v of the model at x; to be traced."""

    def start(self, objective: Objective, x: Vector) -> TrustRegionState:
        point = objective.first(x)
        radius = float(self.radius or objective.unknowns.compiled(_norm)(x)) or 1.0
        return TrustRegionState(
            point.x, point.gradient, point.loss, point.norm, 0.0, radius, point.norm, False
        )

    def step(self, objective: Objective, state: TrustRegionState) -> TrustRegionState:
        """One accepted step; shorter ones are tried where the model was too good."""
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
            point = objective.along(state.x, direction, 1.0)
            decrease = state.loss - point.loss
            # Where both are rounding, a gradient that is smaller tells.
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
    """Newton's method with Hessian-vector products, by forward over reverse differentiation."""

    @staticmethod
    def products(objective: Objective, x: Vector, batch: Any) -> Product:
        return objective.hessian_products(x, batch)


@dataclasses.dataclass(frozen=True)
class GaussNewton(_TrustRegion):
    """The Gauss-Newton method: half the sum of squares of the residuals that f returns.

    f(x) -> an array or pytree of real residuals: each rank's own (loss="share"), or the same on all
    ranks (loss="replicated"). Its Hessian is taken for JᵀJ, J their derivative.
    """

    residuals: ClassVar[bool] = True

    @staticmethod
    def products(objective: Objective, x: Vector, batch: Any) -> Product:
        return objective.gauss_newton_products(x, batch)


def _norm(unknowns: Unknowns, x: Vector) -> Any:
    return jnp.sqrt(unknowns.products((x, x))[0])


def _steihaug(
    unknowns: Unknowns,
    product: Product,
    gradient: Vector,
    norm: Any,
    radius: Any,
    forcing: Any,
    max_products: int,
) -> tuple[Vector, Any]:
    """The step p, and (predicted decrease, |p|, products, whether |p| is the radius).

    Conjugate gradients for H p = -g, from p = 0, until the residual is small or p leaves the
    region |p| <= radius, or the curvature is negative; then p goes to its boundary. All scalars are
    rank 0's, in float64 (squares of float32 numbers leave float32).
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
