"""Points of cells and facets, as integrands see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["FieldAtPoint", "Point"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Point:
    """A point of a cell or a facet, as an integrand sees it.

    Attributes
    ----------
    u
        The value of the field: shape () for one component, else (components,).
    grad
        Its gradient: shape (dim,) for one component, else (components, dim): ∂u_c/∂x_i.
    x
        The coordinates, shape (dim,).
    normal
        The outward unit normal of the facet, shape (dim,). None in cells.

    Examples
    --------
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((2, 2), (1.0, 1.0)))
    >>> area = fem.Energy(space, lambda p: p.x[0])
    >>> round(float(area().integral()), 6)
    0.5
    """

    u: Any
    grad: Any
    x: Any
    normal: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FieldAtPoint:
    """A given field at a point, `u` and `grad`, in the shapes of `Point`."""

    u: Any
    grad: Any
