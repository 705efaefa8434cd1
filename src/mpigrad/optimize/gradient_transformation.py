"""Any gradient transformation of optax as a method."""

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
from mpigrad.optimize.elementwise import COMMON, UNIFORM, follow, join
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
    number (adam, sgd, rmsprop, ...), as each rank applies it to its own part: one whose program
    mixes numbers (by their norm, say, or by sums over rows) is refused there. With
    `optax.multi_transform` or `optax.masked` the rule holds for what is done to sharded leaves. For
    a clipped gradient give `clip` instead of optax's `clip_by_global_norm`.

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
        comm = unknowns.comm
        several = bool(unknowns.own) and comm.size > 1
        rows = [unknowns.shapes[i].shape[0] for i in unknowns.own if unknowns.kinds[i] is True]
        rows = np.sum(comm.mpi.allgather(rows), axis=0, dtype=int).tolist()
        with raise_on_all_ranks(comm):
            try:
                mixed = self._mixed(unknowns, unknowns.shapes)
            except Exception as error:
                raise TypeError(
                    "Optax: this transformation can't be applied to such unknowns "
                    f"({type(error).__name__}: {error}). Its update gets the gradient, its state, "
                    "the unknowns, value= and grad=; masks and labels must fit x0. Instead of "
                    "optax.lbfgs use LBFGS(), with its own line search"
                ) from error
            if several and not mixed:
                # Also as one rank would apply it; not where it holds arrays of a rank's own shapes.
                with contextlib.suppress(Exception):
                    mixed = self._mixed(unknowns, _whole(unknowns, rows))
            if mixed:
                raise ValueError(
                    "Optax: this transformation does not work number by number on sharded "
                    f"unknowns, of which each rank sees its own part only: {', '.join(mixed)}. Use "
                    "Optax(..., clip=) instead of clip_by_global_norm, LBFGS() instead of "
                    "optax.lbfgs, a transformation such as adam for sharded leaves (with "
                    "optax.multi_transform any for the others), or replicated unknowns"
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
        return OptaxState(vector, vector, no, no, no, self._kinds(unknowns, inner, unknowns.shapes))

    def _kinds(self, unknowns: Unknowns, inner: Any, shapes: list[Any]) -> Any:
        """How the arrays of optax's state are shared out: as the unknowns of such shapes."""
        import optax

        if not unknowns.own:
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
        """Sharded unknowns of such shapes whose numbers the transformation mixes; their names.

        It is traced, with or without ranks to share unknowns, and not computed.
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
        if not unknowns.own or unknowns.comm.size == 1:
            return []
        kinds = jax.tree.leaves(self._kinds(unknowns, inner, shapes))
        marks = [i if i in unknowns.own else COMMON for i in range(len(shapes))]
        marks = [mark if shape.ndim else UNIFORM for mark, shape in zip(marks, shapes, strict=True)]
        state = follow(init, marks)
        while True:  # each mark changes twice at most
            found = follow(program, [*marks, *state, *marks, UNIFORM])
            found, after = found[: len(marks)], found[len(marks) :]
            later = [join(*pair) for pair in zip(state, after, strict=True)]
            if later == state:
                break
            state = later
        mixed = [
            name
            for name, mark, own in zip(unknowns.names, found, marks, strict=True)
            if mark not in (UNIFORM, own)
        ]
        # Parts of a rank's own that would be taken for everybody's.
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
        if unknowns.own and unknowns.comm.size > 1:
            # Ranks whose parts differ compile different programs, and may round differently.
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


def _whole(unknowns: Unknowns, rows: list[int]) -> list[Any]:
    """The shapes that one rank would have; `rows` of the leaves that are sharded along axis 0."""
    shapes, remaining = list(unknowns.shapes), iter(rows)
    for i in unknowns.own:
        kind, shape = unknowns.kinds[i], shapes[i].shape
        if isinstance(kind, Grid):
            whole = (*shape[: len(shape) - kind.ndim], *kind.shape)
        else:
            whole = (next(remaining), *shape[1:])
        shapes[i] = jax.ShapeDtypeStruct(whole, shapes[i].dtype)
    return shapes
