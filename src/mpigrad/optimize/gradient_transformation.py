"""Gradient transformations of optax as methods."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.grid.grid import Grid
from mpigrad.operations import bcast
from mpigrad.optimize.elementwise import REPLICATED, UNIFORM, join_marks, propagate_marks
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
    Each rank applies it to its own part of the sharded leaves, so it must be elementwise there
    (adam, sgd, rmsprop, ...). A transformation that mixes elements of sharded leaves, for example
    by their norm or by sums over rows, is rejected. With `optax.multi_transform` or `optax.masked`
    the rule applies only to the transformations of sharded leaves. To clip the gradient use `clip`
    instead of optax's `clip_by_global_norm`.

    Attributes
    ----------
    transformation
        An `optax.GradientTransformation` with its learning rate, for example `optax.adam(1e-2)`.
        It may take the loss as `value`.
    clip
        Gradients with a larger two-norm, over all unknowns of all ranks, are scaled to this norm.
    elementwise
        True promises that the transformation is elementwise on sharded leaves, and skips the
        check. Use it for a transformation that the check rejects although it is elementwise. If
        the promise is false, the steps are wrong and no error is raised.

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
        comm = unknowns.comm
        checked = bool(unknowns.sharded) and comm.size > 1 and not self.elementwise
        rows = [unknowns.shapes[i].shape[0] for i in unknowns.sharded if unknowns.kinds[i] is True]
        rows = np.sum(comm.mpi.allgather(rows), axis=0, dtype=int).tolist()
        with raise_on_all_ranks(comm):
            try:
                mixed = self._mixed(unknowns, unknowns.shapes)
            except Exception as error:
                raise TypeError(
                    "Optax: the transformation cannot be applied to these unknowns "
                    f"({type(error).__name__}: {error}). Its update gets the gradient, its state, "
                    "the unknowns, value= and grad=, and masks and labels must fit x0. Instead of "
                    "optax.lbfgs use LBFGS(), which has its own line search."
                ) from error
            if checked and not mixed:
                # Check it also with the shapes that one rank would have. That may fail if the
                # transformation contains arrays of this rank's shapes.
                with contextlib.suppress(Exception):
                    mixed = self._mixed(unknowns, _global_shapes(unknowns, rows))
            if checked and mixed:
                raise ValueError(
                    "Optax: the transformation is not elementwise on sharded unknowns, of which "
                    f"each rank has only its own part: {', '.join(mixed)}. Use Optax(..., clip=) "
                    "instead of clip_by_global_norm, LBFGS() instead of optax.lbfgs, a "
                    "transformation such as adam for sharded leaves (with optax.multi_transform "
                    "any transformation for the others), or replicated unknowns. If you know that "
                    "it is elementwise, give elementwise=True."
                )

    def start(self, objective: Objective, x: Vector) -> OptaxState:
        point = objective.evaluate(x)
        inner = self.transformation.init(objective.tree(x))
        # The types that a step returns, so that all steps use one compiled program.
        inner = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), inner)
        return OptaxState(point.x, point.gradient, point.loss, point.norm, 0.0, inner)

    def step(self, objective: Objective, state: OptaxState) -> OptaxState:
        scale = 1.0
        if self.clip is not None and state.gradient_norm > self.clip:
            scale = self.clip / state.gradient_norm
        program = objective.unknowns.compiled(self._update)
        direction, length, inner = program(state.inner, state.x, state.gradient, state.loss, scale)
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

    def _mixed(self, unknowns: Unknowns, shapes: list[Any]) -> list[str]:
        """Return the names of the sharded unknowns whose elements the transformation mixes.

        The transformation is traced with these shapes and not computed. It is traced on one rank,
        too, so that errors in it are found there.
        """
        import optax

        update = optax.with_extra_args_support(self.transformation).update

        def changed(tree: Any, inner: Any, x: Any, value: Any) -> Any:
            return update(tree, inner, x, value=value, grad=tree)

        x = jax.tree.unflatten(unknowns.structure, shapes)
        init, inner = jax.make_jaxpr(self.transformation.init, return_shape=True)(x)
        value = jax.ShapeDtypeStruct((), jnp.result_type(float))
        program, (updates, _) = jax.make_jaxpr(changed, return_shape=True)(x, inner, x, value)
        unknowns.structure.flatten_up_to(updates)
        if not unknowns.sharded or unknowns.comm.size == 1:
            return []
        kinds = jax.tree.leaves(self._kinds(unknowns, inner, shapes))
        marks = [i if i in unknowns.sharded else REPLICATED for i in range(len(shapes))]
        marks = [mark if shape.ndim else UNIFORM for mark, shape in zip(marks, shapes, strict=True)]
        state = propagate_marks(init, marks)
        while True:  # each mark changes at most twice
            found = propagate_marks(program, [*marks, *state, *marks, UNIFORM])
            found, after = found[: len(marks)], found[len(marks) :]
            later = [join_marks(*pair) for pair in zip(state, after, strict=True)]
            if later == state:
                break
            state = later
        mixed = [
            name
            for name, mark, own in zip(unknowns.names, found, marks, strict=True)
            if mark not in (UNIFORM, own)
        ]
        # Parts of the state that depend on sharded unknowns but would count as replicated.
        lost = any(
            isinstance(mark, int) and kind is False for mark, kind in zip(state, kinds, strict=True)
        )
        return mixed + ["its state"] * lost

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


def _global_shapes(unknowns: Unknowns, rows: list[int]) -> list[Any]:
    """Return the shapes of the unknowns of all ranks.

    `rows` are the counts of rows of the leaves that are sharded along axis 0.
    """
    shapes, remaining = list(unknowns.shapes), iter(rows)
    for i in unknowns.sharded:
        kind, shape = unknowns.kinds[i], shapes[i].shape
        if isinstance(kind, Grid):
            whole = (*shape[: len(shape) - kind.ndim], *kind.shape)
        else:
            whole = (next(remaining), *shape[1:])
        shapes[i] = jax.ShapeDtypeStruct(whole, shapes[i].dtype)
    return shapes
