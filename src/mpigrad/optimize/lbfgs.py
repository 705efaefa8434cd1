"""Limited-memory BFGS with vectors that are distributed over the ranks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.optimize.line_search import StrongWolfe
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.unknowns import Unknowns, Vector, product

__all__ = [
    "LBFGS",
    "LBFGSState",
    "combine",
    "empty",
    "remember",
    "remember_pair",
]

# ---- The memory of L-BFGS: rows of vectors, which are overwritten in place ----


def empty(x: Vector, rows: int) -> Vector:
    """Return rows of zeros."""
    return tuple(jnp.zeros((rows, *part.shape), part.dtype) for part in x)


@jax.jit
def _combine(rows: Vector, coefficients: Any, g: Vector, of_g: Any) -> Vector:
    def one(a: Any, b: Any) -> Any:
        c = jnp.asarray(coefficients, b.dtype)
        return jnp.tensordot(c, a, 1) + jnp.asarray(of_g, b.dtype) * b

    return tuple(one(a, b) for a, b in zip(rows, g, strict=True))


def combine(rows: Vector, coefficients: NDArray[np.float64], g: Vector, of_g: float) -> Vector:
    """Return the combination of the rows and g with these coefficients, without messages."""
    return _combine(rows, coefficients, g, of_g)


def _remember(
    unknowns: Unknowns, rows: Vector, slot: Any, direction: Vector, t: Any, old: Vector, new: Vector
) -> Any:
    products, changed = [], []
    for part, d, g_old, g in zip(rows, direction, old, new, strict=True):
        y = g - g_old
        with_s = part.at[slot].set(jnp.asarray(t, d.dtype) * d)
        with_both = with_s.at[part.shape[0] // 2 + slot].set(y)
        flat = with_both.reshape(part.shape[0], -1)
        products.append(_products(flat, y.ravel(), g.ravel(), slot))
        changed.append(with_both)
    with jax.enable_x64(True):
        return tuple(changed), unknowns.sum(functools.reduce(jnp.add, products))


def _remember_pair(
    unknowns: Unknowns, rows: Vector, slot: Any, direction: Vector, t: Any, old: Vector, new: Vector
) -> Any:
    products, changed = [], []
    for part, d, g_old, g in zip(rows, direction, old, new, strict=True):
        s, y = jnp.asarray(t, d.dtype) * d, g - g_old
        with_both = part.at[slot].set(s).at[part.shape[0] // 2 + slot].set(y)
        flat = with_both.reshape(part.shape[0], -1)
        products.append(_products(flat, s.ravel(), y.ravel(), slot))
        changed.append(with_both)
    with jax.enable_x64(True):
        return tuple(changed), unknowns.sum(functools.reduce(jnp.add, products))


def _products(rows: Any, y: Any, g: Any, slot: Any) -> Any:
    """Return the inner products of the rows with y and g, in float64 (as `unknowns.dot`)."""
    with jax.enable_x64(True):
        plain = jnp.stack([rows @ y, rows @ g]).astype("float64")
        if rows.dtype == np.dtype("float64"):
            return plain
        # Rows that are not in use yet are zero, so only the newest rows are tested.
        newest = plain[:, jnp.stack([slot, rows.shape[0] // 2 + slot])]
        safe = jnp.all(jnp.abs(newest) > 1e-20) & jnp.all(jnp.isfinite(plain))

        def exactly() -> Any:
            # Row by row: all rows in float64 would need twice the memory of the rows.
            def one(row: Any) -> Any:
                return jnp.stack([product(row, y), product(row, g)])

            return jax.lax.map(one, rows).T

        return jax.lax.cond(safe, lambda: plain, exactly)


def remember(
    unknowns: Unknowns,
    rows: Vector,
    slot: int,
    direction: Vector,
    t: float,
    old: Vector,
    new: Vector,
) -> tuple[Vector, NDArray[np.float64]]:
    """Store s = t · direction and y = new - old in their rows (collective).

    The arrays of `rows` are reused and invalid afterwards.

    Returns
    -------
    The rows, and their inner products with y and with `new`, of shape (2, count of rows).
    """
    program = unknowns.compiled(_remember, donate_argnums=0)
    rows, products = program(rows, slot, direction, t, old, new)
    return rows, np.asarray(products, np.float64)


def remember_pair(
    unknowns: Unknowns,
    rows: Vector,
    slot: int,
    direction: Vector,
    t: float,
    old: Vector,
    new: Vector,
) -> tuple[Vector, NDArray[np.float64]]:
    """Store s and y as `remember` does. Return the rows, and their products with s and with y."""
    program = unknowns.compiled(_remember_pair, donate_argnums=0)
    rows, products = program(rows, slot, direction, t, old, new)
    return rows, np.asarray(products, np.float64)


# ---- Limited-memory BFGS with vectors that are distributed over the ranks ----


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LBFGSState:
    """The state of L-BFGS.

    Attributes
    ----------
    pairs
        A vector whose arrays have shape (2 memory, ...): first the steps s, then the changes y of
        the gradient. Each half is a ring of rows.
    gram
        sᵢ·yⱼ and yᵢ·yⱼ, of shape (2 memory, memory).
    products
        Inner products of all rows with the gradient, of shape (2 memory,).
    count
        Count of pairs stored so far, including those that were overwritten.
    """

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    pairs: Vector
    gram: NDArray[np.float64]
    products: NDArray[np.float64]
    count: int
    stuck: bool = False


@dataclasses.dataclass(frozen=True)
class LBFGS(Method):
    """Limited-memory BFGS (Liu and Nocedal 1989). Steps satisfy the strong Wolfe conditions.

    The direction is a combination of the gradient and the 2·memory stored vectors. Its
    coefficients depend only on inner products of these vectors, in the compact form (Byrd, Nocedal
    and Schnabel, Mathematical Programming 63 (1994), equation 3.1). So an iteration, outside the
    objective, reads the memory twice: for the inner products with the new gradient and with its
    change, which one message sums over the ranks, and for the combination.

    Attributes
    ----------
    memory
        Count of stored pairs. They take 2·memory vectors, which are distributed over the ranks.
    line_search
        `StrongWolfe(...)`.
    first_step
        Two-norm of the first trial step, in the unit of the unknowns, and of the first trial step
        after a search that found no smaller loss. It is longer where rounding would hide it. Other
        steps are quasi-Newton steps.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import LBFGS, minimize
    >>> def valley(x):
    ...     return 10 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
    >>> method = LBFGS(memory=5)
    >>> solution = minimize(valley, jnp.zeros(2), method, loss="replicated", replicated=True)
    >>> print(solution.value.round(3))
    [1. 1.]
    """

    memory: int = 10
    line_search: StrongWolfe = StrongWolfe()  # noqa: RUF009 (frozen)
    first_step: float = 1.0

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"LBFGS: memory must be positive, got {self.memory}")
        if not self.first_step > 0:
            raise ValueError(f"LBFGS: first_step must be positive, got {self.first_step}")

    def start(self, objective: Objective, x: Vector) -> LBFGSState:
        return self._without_memory(objective.evaluate(x), 0.0, None)

    def step(self, objective: Objective, state: LBFGSState) -> LBFGSState:
        """Do a line search, and a second one along the gradient if the first finds nothing."""
        now = Point(state.x, state.gradient, state.loss, state.gradient_norm, 0.0)
        coefficients, slope = _quasi_newton(state)
        if not slope < 0:  # because of rounding errors in the memory
            state = self._without_memory(now, state.step, state.pairs)
            coefficients, slope = _quasi_newton(state)
        while True:
            fresh = state.count == 0
            first = 1.0
            if fresh:
                first = objective.unknowns.visible_step(now.x, self.first_step) / now.norm
            direction = combine(state.pairs, coefficients[:-1], now.gradient, coefficients[-1])
            t, point = self.line_search.search(
                lambda t: objective.evaluate_along(now.x, direction, t),  # noqa: B023
                now,
                slope,
                first,
            )
            if t > 0 or fresh:
                break
            state = self._without_memory(now, state.step, state.pairs)
            coefficients, slope = _quasi_newton(state)
        if t == 0:
            return dataclasses.replace(state, step=0.0, stuck=True)
        slot = state.count % self.memory
        pairs, numbers = remember(
            objective.unknowns, state.pairs, slot, direction, t, now.gradient, point.gradient
        )
        gram, m = state.gram.copy(), self.memory
        if not numbers[0, slot] > objective.unknowns.epsilon * t * -slope:  # no curvature s·y
            return self._without_memory(point, t, pairs)
        gram[:, slot] = numbers[0]
        gram[m + slot, :] = numbers[0, m:]
        return LBFGSState(
            point.x, point.gradient, point.loss, point.norm, t, pairs, gram, numbers[1],
            state.count + 1,
        )  # fmt: skip

    def layout(self, unknowns: Unknowns) -> Any:
        vector, pairs = unknowns.layout(), unknowns.layout(leading=1)
        return LBFGSState(vector, vector, False, False, False, pairs, False, False, False, False)  # type: ignore[arg-type]

    def _without_memory(self, point: Point, step: float, pairs: Vector | None) -> LBFGSState:
        """Return a state with empty memory, so that the next direction is minus the gradient."""
        m = self.memory
        if pairs is None:
            pairs = empty(point.x, 2 * m)
        nothing = np.zeros((2 * m, m)), np.zeros(2 * m)
        return LBFGSState(
            point.x, point.gradient, point.loss, point.norm, step, pairs, *nothing, count=0
        )


def _quasi_newton(state: LBFGSState) -> tuple[NDArray[np.float64], float]:
    """Return the coefficients of (s..., y..., gradient) in -H g, and its inner product with g."""
    m = state.gram.shape[1]
    pairs = min(state.count, m)
    coefficients = np.zeros(2 * m + 1)
    if pairs == 0:
        coefficients[-1] = -1.0
        return coefficients, -(state.gradient_norm**2)
    ring = (np.arange(pairs) + (state.count - pairs)) % m  # from the oldest to the newest
    SY, YY = state.gram[ring][:, ring], state.gram[m + ring][:, ring]
    Sg, Yg = state.products[ring], state.products[m + ring]
    scale = SY[-1, -1] / YY[-1, -1]
    inverse = np.linalg.inv(np.triu(SY))
    u = inverse @ Sg
    p = inverse.T @ (np.diag(SY) * u + scale * (YY @ u - Yg))
    coefficients[ring], coefficients[m + ring], coefficients[-1] = -p, scale * u, -scale
    slope = float(
        coefficients[ring] @ Sg + coefficients[m + ring] @ Yg - scale * state.gradient_norm**2
    )
    return coefficients, slope
