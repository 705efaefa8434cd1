"""Gradient transformations of optax as methods."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.operations import bcast
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["Optax", "OptaxState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptaxState:
    """The state of `Optax`. `inner` is optax's own state, for trees of the structure of x0."""

    stuck: ClassVar[bool] = False

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    inner: Any


@dataclasses.dataclass(frozen=True)
class Optax(Method):
    """A gradient transformation of optax. A record's `step` is the two-norm of the step.

    The transformation is applied to trees of the structure of x0, with replicated leaves whole.
    Each rank applies it to its own part of the sharded leaves, so it must be elementwise there, as
    adam, adamw, sgd, rmsprop and lion are. With `optax.multi_transform` or `optax.masked` the rule
    applies only to the transformations of sharded leaves.

    Attributes
    ----------
    transformation
        An `optax.GradientTransformation` with its learning rate, for example `optax.adam(1e-2)`.
        It may take the loss as `value`.
    clip
        Gradients with a larger two-norm, over all unknowns of all ranks, are scaled to this norm.
        Optax's `clip_by_global_norm` has another norm on each rank for sharded leaves.
    elementwise
        True promises that the transformation is elementwise on sharded leaves. Without the
        promise, sharded unknowns are an error. If it is false, the steps are wrong and no error is
        raised.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from mpigrad.optimize import Optax, minimize
    >>> def loss(x):
    ...     return jnp.sum((x - 2.0) ** 2)
    >>> method = Optax(optax.adam(0.1), clip=1.0)
    >>> settings = {"max_steps": 500, "loss": "replicated", "replicated": True}
    >>> solution = minimize(loss, jnp.zeros(2), method, **settings)
    >>> print(solution.value.round(2))
    [2. 2.]
    """

    stochastic: ClassVar[bool] = True

    transformation: Any
    clip: float | None = None
    elementwise: bool = False

    def __post_init__(self) -> None:
        if not all(
            callable(getattr(self.transformation, name, None)) for name in ("init", "update")
        ):
            raise TypeError(
                "Optax: expected an optax.GradientTransformation, got "
                f"{self.transformation!r}. Give for example optax.adam(1e-2)."
            )
        if not (self.clip is None or self.clip > 0):
            raise ValueError(f"Optax: clip must be positive, got {self.clip}")

    def check(self, unknowns: Unknowns) -> None:
        if unknowns.sharded and not self.elementwise:
            raise ValueError(
                "Optax: each rank has only its own part of sharded unknowns, so the transformation "
                "must be elementwise there. If it is, as adam, adamw, sgd, rmsprop and lion are, "
                "give elementwise=True. Instead of clip_by_global_norm use Optax(..., clip=), and "
                "optax.multi_transform for transformations that need a norm of replicated leaves."
            )
        with raise_on_all_ranks(unknowns.comm):
            try:
                self._try(unknowns)
            except Exception as error:
                raise TypeError(
                    "Optax: the transformation cannot be applied to these unknowns "
                    f"({type(error).__name__}: {error}). Its update gets the gradient, its state, "
                    "the unknowns, value= and grad=, and masks and labels must fit x0. Instead of "
                    "optax.lbfgs use LBFGS(), which has its own line search."
                ) from error

    def _try(self, unknowns: Unknowns) -> None:
        """Trace the transformation, without computing it."""
        import optax

        update = optax.with_extra_args_support(self.transformation).update

        def first_update(x: Any, value: Any) -> Any:
            return update(x, self.transformation.init(x), x, value=value, grad=x)[0]

        x = jax.tree.unflatten(unknowns.structure, unknowns.shapes)
        value = jax.ShapeDtypeStruct((), jnp.result_type(float))
        unknowns.structure.flatten_up_to(jax.eval_shape(first_update, x, value))

    def start(self, objective: Objective, x: Vector) -> OptaxState:
        point = objective.evaluate(x)
        # Compiled: one program, and arrays of the types that a step returns.
        inner = jax.jit(self.transformation.init)(objective.tree(x))
        return OptaxState(point.x, point.gradient, point.loss, point.norm, 0.0, inner)

    def step(self, objective: Objective, state: OptaxState) -> OptaxState:
        scale = 1.0
        if self.clip is not None and state.gradient_norm > self.clip:
            scale = self.clip / state.gradient_norm
        program = objective.unknowns.compiled(self._update)
        direction, length, inner = program(state.inner, state.x, state.gradient, state.loss, scale)
        norm = scale * state.gradient_norm
        largest = min((float(jnp.finfo(part.dtype).max) for part in state.x), default=math.inf)
        if float(length) == 0 and norm > math.sqrt(largest):
            raise ValueError(
                "Optax: the step is zero, because squares of the gradient, whose norm is "
                f"{norm:.0e}, overflow, or because the learning rate is zero. Divide f by a number "
                f"near {norm:.0e}, or give clip."
            )
        point = objective.evaluate_along(state.x, direction, 1.0)
        return OptaxState(point.x, point.gradient, point.loss, point.norm, float(length), inner)

    def layout(self, unknowns: Unknowns) -> Any:
        vector: Any = unknowns.layout()
        no: Any = False
        shapes = jax.tree.unflatten(unknowns.structure, unknowns.shapes)
        inner = jax.eval_shape(self.transformation.init, shapes)
        return OptaxState(vector, vector, no, no, no, self._kinds(unknowns, inner, unknowns.shapes))

    def _kinds(self, unknowns: Unknowns, inner: Any, shapes: list[Any]) -> Any:
        """Return how the arrays of optax's state are distributed: as unknowns of these shapes."""
        import optax

        if not unknowns.sharded:
            return jax.tree.map(lambda _: False, inner)

        def masked(node: Any) -> bool:
            return isinstance(node, optax.MaskedNode)

        def kind_of(leaf: Any, kind: Any, shape: Any) -> Any:
            if masked(leaf):
                return leaf
            return kind if jnp.shape(leaf) == shape.shape else False

        return optax.tree_utils.tree_map_params(
            self.transformation,
            kind_of,
            inner,
            jax.tree.unflatten(unknowns.structure, unknowns.kinds),
            jax.tree.unflatten(unknowns.structure, shapes),
            transform_non_params=lambda _: False,
            is_leaf=masked,
        )

    def _update(
        self, unknowns: Unknowns, inner: Any, x: Vector, gradient: Vector, loss: Any, scale: Any
    ) -> tuple[Vector, Any, Any]:
        import optax

        scaled = tuple(jnp.asarray(scale, g.dtype) * g for g in gradient)
        tree = unknowns.tree(scaled)
        update = optax.with_extra_args_support(self.transformation).update
        updates, inner = update(tree, inner, unknowns.tree(x), value=loss, grad=tree)
        if unknowns.sharded and unknowns.comm.size > 1:
            # Ranks with parts of other shapes compile other programs, which may round differently.
            leaves, structure = jax.tree.flatten(inner)
            kinds = jax.tree.leaves(self._kinds(unknowns, inner, unknowns.shapes))
            common = [i for i, kind in enumerate(kinds) if kind is False]
            if common:
                first = bcast([leaves[i] for i in common], 0, unknowns.comm)
                for i, leaf in zip(common, first, strict=True):
                    leaves[i] = leaf
            inner = jax.tree.unflatten(structure, leaves)
        direction = unknowns.vector(updates)
        return direction, jnp.sqrt(unknowns.products((direction, direction))[0]), inner
