"""Integrals over cells and facets as functions of a field: energies and weak forms."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.fem.equation import Equation, Term
from mpigrad.fem.integrals import Blocks, CellIntegral, FacetIntegral, Integral, cell_values
from mpigrad.fem.mesh import Facets
from mpigrad.fem.space import Space
from mpigrad.fem.tracing import AtPoints, evaluate, is_affine

__all__ = [
    "Energy",
    "FieldAtPoint",
    "Form",
    "Nodal",
    "PerCell",
    "PerPoint",
    "Point",
    "WeakForm",
]

# ---- Points of cells and facets, as integrands see them ----


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


# ---- Parameters of integrands that differ from cell to cell or from point to point ----


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


# ---- Integrals over cells and facets as functions of a field: energies and weak forms ----


@jax.tree_util.register_pytree_node_class
class _InCells(Nodal):
    """A field with its values in cells, shape (n_cells, n_basis, components)."""


def _is_given(leaf: Any) -> bool:
    return isinstance(leaf, PerCell | PerPoint | Nodal)


def _same(array: Any) -> Any:
    return array


def _at_point(u: Any, gradient: Any) -> FieldAtPoint:
    return FieldAtPoint(u, gradient)


def _scalar_at_point(u: Any, gradient: Any) -> FieldAtPoint:
    return FieldAtPoint(u[0], gradient[0])


def _inside(values: AtPoints, mask: NDArray[np.bool_]) -> AtPoints:
    """Return values in which cells outside of a mask have those of a cell in it.

    There an integrand may not be defined.
    """
    array = values.array
    if len(array) == 1 or mask.all():
        return values
    chosen = jnp.asarray(mask).reshape(-1, *[1] * (array.ndim - 1))
    return AtPoints(jnp.where(chosen, array, array[int(np.argmax(mask))]))


class Form(abc.ABC):
    """An integral of a function of the field at each point. `Energy` and `WeakForm` are forms."""

    def __init__(
        self,
        space: Space,
        integrand: Callable[..., Any],
        on: Facets | ArrayLike | None = None,
        degree: int | None = None,
    ) -> None:
        name, comm = f"fem.{type(self).__name__}", space.mesh.comm
        degree = 2 * space.degree if degree is None else degree
        mask: NDArray[np.bool_] | None = None
        with raise_on_all_ranks(comm):
            if not callable(integrand):
                raise TypeError(
                    f"{name}: integrand must be a function of a point, got "
                    f"{type(integrand).__name__} on rank {comm.rank}. Write lambda p: ..."
                )
            if isinstance(degree, bool) or not isinstance(degree, int) or not 0 <= degree <= 30:
                raise ValueError(
                    f"{name}: degree must be an integer from 0 to 30, got {degree!r} on rank "
                    f"{comm.rank}. Leave it out for twice the degree of the space."
                )
            if isinstance(on, Facets):
                if on.mesh is not space.mesh:
                    raise ValueError(
                        f"{name}: on must be facets of this space's mesh, got facets of another "
                        f"one on rank {comm.rank}. Choose them by space.mesh.facets(...)."
                    )
            elif on is not None:
                mask = np.asarray(on)
                if mask.dtype != bool or mask.shape != (space.mesh.n_cells,):
                    raise TypeError(
                        f"{name}: on must be facets, or one bool for each of the "
                        f"{space.mesh.n_cells} cells of rank {comm.rank}, got dtype {mask.dtype} "
                        f"and shape {mask.shape}. Take mesh.facets(...) or mesh.cells_with(...)."
                    )
        self.space, self.integrand = space, integrand
        self._integral: Integral = (
            FacetIntegral(space, degree, on)
            if isinstance(on, Facets)
            else CellIntegral(space, degree, mask)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Equation:
        """Return the equation with these parameters of the integrand (collective).

        Parameters
        ----------
        args, kwargs
            What the integrand takes after the point: arrays and pytrees of arrays, the same at all
            points. `PerCell`, `PerPoint` and `Nodal` inside of them differ from cell to cell or
            from point to point.
        """
        return Equation(self.space, (Term(self, *self._prepare(args, kwargs), 1.0),))

    @property
    def points(self) -> NDArray[np.float64]:
        """The coordinates of the quadrature points, shape (n_cells, n_points, dim)."""
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            return np.asarray(self._integral.coordinates(np.float64).array)

    @property
    @abc.abstractmethod
    def symmetric(self) -> bool:
        """True if the Jacobian is symmetric whatever the integrand is."""

    @property
    def total(self) -> Callable[..., jax.Array]:
        """This rank's share of the integral, of energies only: (u, args, kwargs) -> scalar."""
        raise TypeError(
            "Equation.integral: expected energies, got a WeakForm. Write the integrand as an "
            "Energy."
        )

    @abc.abstractmethod
    def _flux(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """Return the function (u, grad, ...) -> (f0, f1) of a point."""

    def _derivatives(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """Return the function of the derivatives of f0 and f1 in u and grad (`Blocks`)."""
        flux = self._flux(law)
        # One by one, so that derivatives that are zero are seen to be zero.
        in_value, in_gradient = jax.jacfwd(flux, argnums=0), jax.jacfwd(flux, argnums=1)

        def derivatives(*arguments: Any) -> tuple[Any, ...]:
            (vv, gv), (vg, gg) = in_value(*arguments), in_gradient(*arguments)
            return vv, vg, gv, gg

        return derivatives

    # --- evaluation, with the values of fields in cells. It has no messages. A call outside of jit
    # compiles a program and does not keep it: the integrand may use variables that change ---

    def _prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the parameters with fields as values in cells (collective)."""

        def values(leaf: Any) -> Any:
            if not isinstance(leaf, Nodal):
                return leaf
            if leaf.space.mesh is not self.space.mesh:
                raise ValueError(
                    f"fem.{type(self).__name__}: a Nodal must be a field on this space's mesh, got "
                    f"one on {leaf.space.mesh}. Make its space on the same mesh."
                )
            return _InCells(leaf.space, cell_values(leaf.space, leaf.values))

        return jax.tree.map(values, (args, kwargs), is_leaf=_is_given)

    @property
    def residual(self) -> Callable[..., jax.Array | None]:
        """The contributions of cells or facets: (u, args, kwargs) -> (n, n_basis, c)."""

        def residual(u: jax.Array, args: Any, kwargs: Any) -> jax.Array | None:
            law, points = self._at_points(u, args, kwargs)
            return self._integral.residual(*evaluate(self._flux(law), points))

        return jax.jit(residual, inline=True)

    @property
    def matrix(self) -> Callable[..., jax.Array | None]:
        """The element matrices of the Jacobian: (u, args, kwargs) -> (n, k, k)."""

        def matrix(u: jax.Array, args: Any, kwargs: Any) -> jax.Array | None:
            law, points = self._at_points(u, args, kwargs)
            matrices = self._integral.matrix(Blocks(*evaluate(self._derivatives(law), points)))
            if matrices is None:
                return None
            k = matrices.shape[1] * matrices.shape[2]
            return matrices.reshape(-1, k, k)

        return jax.jit(matrix, inline=True)

    def is_linear(self, u: jax.Array, args: Any, kwargs: Any) -> bool:
        """Return True if the residual is seen to be affine in the field."""
        law, points = self._at_points(u, args, kwargs)
        shapes = [jax.ShapeDtypeStruct(a.array.shape[2:], a.array.dtype) for a in points]
        return is_affine(jax.make_jaxpr(self._flux(law))(*shapes), {0, 1})

    @property
    def cells(self) -> jax.Array | None:
        """The cell of each facet, or None for an integral over cells."""
        return self._integral.cells if isinstance(self._integral, FacetIntegral) else None

    @property
    def is_empty(self) -> bool:
        """True if this rank has no cells or facets of it."""
        mask = self._mask
        return (
            not mask.any() if mask is not None else self.cells is not None and not len(self.cells)
        )

    @property
    def _mask(self) -> NDArray[np.bool_] | None:
        return self._integral.mask if isinstance(self._integral, CellIntegral) else None

    def _at_points(
        self, u: jax.Array, args: Any, kwargs: Any
    ) -> tuple[Callable[..., Any], list[AtPoints]]:
        """Return the integrand as a function of arrays, and the arrays: u, gradient, x, ..."""
        dtype, integral = u.dtype, self._integral
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_given)
        arrays, builders = [], []
        for leaf in leaves:
            leaf_arrays, build = self._parameter(leaf, dtype)
            builders.append((len(arrays), len(leaf_arrays), build))
            arrays += leaf_arrays
        normals = integral.normals(dtype)
        fixed = [*integral.field(self.space, u), integral.coordinates(dtype)]
        fixed += [] if normals is None else [normals]
        scalar = self.space.components == 1

        def law(value: Any, gradient: Any, x: Any, *rest: Any) -> Any:
            normal, parameters = (None, rest) if normals is None else (rest[0], rest[1:])
            if scalar:
                value, gradient = value[0], gradient[0]
            built = [build(*parameters[first : first + count]) for first, count, build in builders]
            args, kwargs = jax.tree.unflatten(structure, built)
            return self.integrand(Point(value, gradient, x, normal), *args, **kwargs)

        inputs = fixed + arrays
        if self._mask is not None and self._mask.any():
            inputs = [_inside(each, self._mask) for each in inputs]
        return law, inputs

    def _parameter(self, leaf: Any, dtype: Any) -> tuple[list[AtPoints], Callable[..., Any]]:
        n = self._integral.n
        if isinstance(leaf, _InCells):
            values = leaf.values.astype(dtype)
            build = _scalar_at_point if leaf.space.components == 1 else _at_point
            return list(self._integral.field(leaf.space, values)), build
        if isinstance(leaf, PerCell | PerPoint):
            array = jnp.asarray(leaf.values)
            array = array[:, None] if isinstance(leaf, PerCell) and array.ndim else array
            q = 1 if isinstance(leaf, PerCell) else len(self._integral.weights)
            if array.ndim < 2 or array.shape[:2] != (n, q):
                first = f"({n}, ...)" if isinstance(leaf, PerCell) else f"({n}, {q}, ...)"
                raise ValueError(
                    f"fem.{type(self).__name__}: a {type(leaf).__name__} must have the shape "
                    f"{first} on rank {self.space.mesh.comm.rank}, got "
                    f"{jnp.shape(leaf.values)}. Give one value for each of this rank's cells or "
                    "facets."
                )
            return [AtPoints(array)], _same
        array = jnp.asarray(leaf)
        return [AtPoints(array[None, None])], _same


class Energy(Form):
    """An integral ∫ W over the domain or a part of its boundary, for example a stored energy.

    Its derivative in the field is the residual of an equation, whose Jacobian is symmetric. JAX
    differentiates W at each point.

    Parameters
    ----------
    space
        The space of the field.
    integrand
        W: a function integrand(p, ...) of a `Point` and of parameters. It returns a scalar. It must
        have no messages.
    on
        Facets, for an integral over them. A mask of this rank's cells, shape (n_cells,), for a part
        of the domain. Default: all cells.
    degree
        The rule is exact for polynomials of this degree on the reference cell. Default: twice the
        degree of the space.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument is not valid.

    Examples
    --------
    -Δu = 1 in a square, and u = 0 at x = 0:

    >>> from mpigrad import fem
    >>> mesh = fem.box((8, 8), (1.0, 1.0))
    >>> space = fem.Space(mesh)
    >>> energy = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad - p.u)
    >>> u = fem.solve(energy(1.0), space.fixed("xmin"), rtol=1e-5).value
    >>> round(float(u.max()), 3)
    0.5
    """

    @property
    def symmetric(self) -> bool:
        return True

    def _flux(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        return jax.grad(self._scalar(law), argnums=(0, 1))

    def _scalar(self, law: Callable[..., Any]) -> Callable[..., Any]:
        def scalar(*arguments: Any) -> Any:
            value = jnp.asarray(law(*arguments), arguments[0].dtype)
            if value.shape != ():
                raise TypeError(
                    f"fem.Energy: the integrand must return a scalar, got shape {value.shape}. "
                    "Add up its entries, as in p.grad @ p.grad or jnp.sum(p.grad**2)."
                )
            return value

        return scalar

    @property
    def total(self) -> Callable[..., jax.Array]:
        def total(u: jax.Array, args: Any, kwargs: Any) -> jax.Array:
            law, points = self._at_points(u, args, kwargs)
            density = evaluate(self._scalar(law), points)
            return jnp.zeros((), u.dtype) if density is None else self._integral.total(density)

        return jax.jit(total, inline=True)


class WeakForm(Form):
    """A weak form: find u with ∫ f0 v + f1 · ∇v = 0 for all test functions v.

    Parameters
    ----------
    space
        The space of the field and of the test functions.
    integrand
        A function integrand(p, ...) of a `Point` and of parameters. It returns the pair (f0, f1) in
        the shapes of p.u and p.grad. One of them may be None.
    on, degree
        As in `Energy`.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument is not valid.

    Examples
    --------
    -Δu + w · ∇u = 1:

    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((8, 8), (1.0, 1.0)))
    >>> w = jnp.array([1.0, 0.0])
    >>> form = fem.WeakForm(space, lambda p: (w @ p.grad - 1.0, p.grad))
    >>> form().is_linear
    True
    """

    @property
    def symmetric(self) -> bool:
        return False

    def _flux(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        def flux(value: Any, gradient: Any, *rest: Any) -> tuple[Any, Any]:
            result = law(value, gradient, *rest)
            if not isinstance(result, Sequence) or len(result) != 2:
                raise TypeError(
                    "fem.WeakForm: the integrand must return the pair (f0, f1), got "
                    f"{type(result).__name__}. Return (f0, None) if there is no f1."
                )
            return _shaped(result[0], value, "f0", "p.u"), _shaped(
                result[1], gradient, "f1", "p.grad"
            )

        def _shaped(entries: Any, like: Any, name: str, other: str) -> Any:
            expected = like.shape[1:] if self.space.components == 1 else like.shape
            if entries is None:
                return jnp.zeros(like.shape, like.dtype)
            entries = jnp.asarray(entries, like.dtype)
            if entries.shape != expected:
                raise TypeError(
                    f"fem.WeakForm: {name} must have the shape of {other}, {expected}, got "
                    f"{entries.shape}. Return one value for each entry."
                )
            return entries.reshape(like.shape)

        return flux
