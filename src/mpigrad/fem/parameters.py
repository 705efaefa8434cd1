"""Parameters of integrands that differ from cell to cell or from point to point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from mpigrad.fem.space import Space

__all__ = ["Nodal", "PerCell", "PerPoint"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerCell:
    """A parameter with one value for each cell of this rank, or each facet of a facet integral.

    Attributes
    ----------
    values
        Shape (n_cells, ...). The integrand gets shape (...).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((2, 1), (1.0, 1.0)))
    >>> mass = fem.Energy(space, lambda p, density: density)
    >>> float(mass(fem.PerCell(jnp.array([1.0, 3.0]))).integral())
    2.0
    """

    values: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerPoint:
    """A parameter with one value for each quadrature point of each cell of this rank.

    Attributes
    ----------
    values
        Shape (n_cells, n_points, ...), for instance of the array `Energy.points`. The integrand
        gets shape (...).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((2, 1), (1.0, 1.0)))
    >>> mass = fem.Energy(space, lambda p, density: density)
    >>> x = mass.points[:, :, 0]
    >>> round(float(mass(fem.PerPoint(jnp.asarray(x))).integral()), 6)
    0.5
    """

    values: Any


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Nodal:
    """A parameter that is a field. The integrand gets its value and gradient: `.u` and `.grad`.

    Attributes
    ----------
    space
        A space on the same mesh.
    values
        A field of this space, shape (n_local,) or (n_local, components).

    Examples
    --------
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((4, 4), (1.0, 1.0)))
    >>> distance = fem.Energy(space, lambda p, old: (p.u - old.u) ** 2)
    >>> u, old = space.interpolate(lambda x: x[:, 0]), space.interpolate(lambda x: x[:, 0] - 2)
    >>> round(float(distance(fem.Nodal(space, old)).integral(u)), 5)
    4.0
    """

    space: Space
    values: Any

    def tree_flatten(self) -> tuple[tuple[Any], Space]:
        return (self.values,), self.space

    @classmethod
    def tree_unflatten(cls, space: Space, children: tuple[Any]) -> Nodal:
        return cls(space, *children)
