"""Any gradient transformation of optax as a method."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations import bcast
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["Optax", "OptaxState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptaxState:
    """Where optax is; `inner` is its own state, for trees as the user's."""

    stuck: ClassVar[bool] = False

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    inner: Any


@dataclasses.dataclass(frozen=True)
class Optax(Method):
    """A gradient transformation of optax; the step of a record is the step's two-norm.

    It sees trees such as x0, replicated leaves whole. On sharded leaves it must work number by
    number (adam, sgd, rmsprop, ...), as each rank applies it to its own part: one that is seen to
    mix numbers (by their norm, say) is refused there. For a clipped gradient give `clip` instead
    of optax's `clip_by_global_norm`.

    Attributes
    ----------
    transformation
        An `optax.GradientTransformation`, its learning rate included: optax.adam(1e-2). It may take
        the loss as `value`.
    clip
        Gradients of a larger two-norm, over all unknowns of all ranks, are made shorter.
    """

    stochastic: ClassVar[bool] = True

    transformation: Any
    clip: float | None = None

    def __post_init__(self) -> None:
        if not all(
            callable(getattr(self.transformation, name, None)) for name in ("init", "update")
        ):
            raise TypeError(
                f"Optax: transformation={self.transformation!r} must be optax's, such as "
                "optax.adam(1e-2)"
            )
        if not (self.clip is None or self.clip > 0):
            raise ValueError(f"Optax: clip={self.clip} must be positive")

    def check(self, unknowns: Unknowns) -> None:
        if unknowns.own and unknowns.comm.size > 1 and _mixes(self.transformation):
            raise ValueError(
                "Optax: this transformation does not work number by number, and some unknowns are "
                "sharded, of which each rank would see its own part only. Use clip= for the "
                "global norm, another transformation, or replicated unknowns"
            )

    def start(self, objective: Objective, x: Vector) -> OptaxState:
        point = objective.first(x)
        inner = self.transformation.init(objective.tree(x))
        # Types as a step leaves them, so that the first step is compiled for all the others.
        inner = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), inner)
        return OptaxState(point.x, point.gradient, point.loss, point.norm, 0.0, inner)

    def step(self, objective: Objective, state: OptaxState) -> OptaxState:
        scale = 1.0
        if self.clip is not None and state.gradient_norm > self.clip:
            scale = self.clip / state.gradient_norm
        program = objective.unknowns.compiled(self._update)
        direction, length, inner = program(state.inner, state.x, state.gradient, state.loss, scale)
        point = objective.along(state.x, direction, 1.0)
        return OptaxState(point.x, point.gradient, point.loss, point.norm, float(length), inner)

    def layout(self, unknowns: Unknowns) -> Any:
        vector: Any = unknowns.layout()
        no: Any = False
        shapes = jax.tree.unflatten(unknowns.structure, unknowns.shapes)
        inner = jax.eval_shape(self.transformation.init, shapes)
        return OptaxState(vector, vector, no, no, no, self._kinds(unknowns, inner))

    def _kinds(self, unknowns: Unknowns, inner: Any) -> Any:
        """How the arrays of optax's state are shared out: as the unknowns that they belong to."""
        import optax

        return optax.tree_utils.tree_map_params(
            self.transformation,
            lambda _, kind: kind,
            inner,
            jax.tree.unflatten(unknowns.structure, unknowns.kinds),
            transform_non_params=lambda _: False,
        )

    def _update(
        self, unknowns: Unknowns, inner: Any, x: Vector, gradient: Vector, loss: Any, scale: Any
    ) -> tuple[Vector, Any, Any]:
        import optax

        scaled = tuple(jnp.asarray(scale, g.dtype) * g for g in gradient)
        tree = unknowns.tree(scaled)
        update = optax.with_extra_args_support(self.transformation).update
        updates, inner = update(tree, inner, unknowns.tree(x), value=loss, grad=tree)
        if unknowns.own and unknowns.comm.size > 1:
            # Ranks whose parts differ compile different programs, and may round differently.
            leaves, structure = jax.tree.flatten(inner)
            kinds = jax.tree.leaves(self._kinds(unknowns, inner))
            common = [i for i, kind in enumerate(kinds) if kind is False]
            if common:
                first = bcast([leaves[i] for i in common], 0, unknowns.comm)
                for i, leaf in zip(common, first, strict=True):
                    leaves[i] = leaf
            inner = jax.tree.unflatten(structure, leaves)
        direction = unknowns.vector(updates)
        squares = sum(jnp.vdot(d, d) for d in direction)
        return direction, jnp.sqrt(unknowns.sum(squares)), inner


def _mixes(transformation: Any) -> bool:
    """Whether halves of an array, each by itself, become something else than the whole's halves."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4, 4))
    gradients = [10.0**k * generator.standard_normal((4, 4)) for k in (-3, 0, 3, 6)]

    def run(rows: slice) -> list[Any]:
        import optax

        update = optax.with_extra_args_support(transformation).update
        x_now, found = jnp.asarray(x[rows]), []
        inner = transformation.init(x_now)
        for g in gradients:
            change, inner = update(jnp.asarray(g[rows]), inner, x_now, value=1.0, grad=g[rows])
            x_now = x_now + jnp.asarray(change)
            found.append(x_now)
        return found

    whole, upper, lower = run(slice(4)), run(slice(2)), run(slice(2, 4))
    tolerance = 100 * float(jnp.finfo(whole[0].dtype).eps)
    return not all(
        np.allclose(a, np.concatenate(halves), rtol=tolerance, atol=0)
        for a, *halves in zip(whole, upper, lower, strict=True)
    )
