"""Integrals over cells and facets as functions of a field: energies and weak forms."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
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
from mpigrad.fem.mixed import Mixed
from mpigrad.fem.space import Space
from mpigrad.fem.tracing import AtPoints, are_zero, evaluate, is_affine

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


def _point(space: Space | Mixed, at: Sequence[Any], x: Any, normal: Any) -> Any:
    """Return the point with the values and gradients of all fields, one after the other."""
    fields = [
        (_scalar_at_point if each.components == 1 else _at_point)(*at[2 * k : 2 * k + 2])
        for k, each in enumerate(space.fields)
    ]
    if isinstance(space, Mixed):
        return space.point(*fields, x=x, normal=normal)
    return Point(fields[0].u, fields[0].grad, x, normal)


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
        space: Space | Mixed,
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
            FacetIntegral(degree, on)
            if isinstance(on, Facets)
            else CellIntegral(space.mesh, degree, mask)
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
    def _flux(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """Return the function (u, grad, ...) -> (f0, f1) of a point, in turn for each field."""

    def _derivatives(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """Return the function of the derivatives of f0 and f1 in u and grad.

        Four of them (`Blocks`) for each field that is tested and each field that is differentiated.
        """
        flux, fields = self._flux(law), range(len(self.space.fields))
        # One by one, so that derivatives that are zero are seen to be zero.
        along = [jax.jacfwd(flux, argnums=k) for k in range(2 * len(fields))]

        def derivatives(*arguments: Any) -> tuple[Any, ...]:
            of = [derivative(*arguments) for derivative in along]
            return tuple(
                tuple(
                    tuple(of[2 * j + b][2 * i + a] for a in (0, 1) for b in (0, 1)) for j in fields
                )
                for i in fields
            )

        return derivatives

    # --- evaluation, with the values of fields in cells. It has no messages. A call outside of jit
    # compiles a program and does not keep it: the integrand may use variables that change ---

    def _prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the parameters with fields as values in cells (collective)."""

        def values(leaf: Any) -> Any:
            if not isinstance(leaf, Nodal):
                return leaf
            if isinstance(leaf.space, Mixed):
                raise TypeError(
                    f"fem.{type(self).__name__}: a Nodal must be one field, got the fields "
                    f"{', '.join(leaf.space.names)}. Give one for each of them, as in "
                    "fem.Nodal(V, u.velocity)."
                )
            if leaf.space.mesh is not self.space.mesh:
                raise ValueError(
                    f"fem.{type(self).__name__}: a Nodal must be a field on this space's mesh, got "
                    f"one on {leaf.space.mesh}. Make its space on the same mesh."
                )
            return _InCells(leaf.space, cell_values(leaf.space, leaf.values))

        return jax.tree.map(values, (args, kwargs), is_leaf=_is_given)

    @property
    def residual(self) -> Callable[..., tuple[jax.Array | None, ...]]:
        """The contributions of cells or facets: (u, args, kwargs) -> (n, n_basis, c) of fields."""

        def residual(u: Any, args: Any, kwargs: Any) -> tuple[jax.Array | None, ...]:
            law, points = self._at_points(u, args, kwargs)
            flux = evaluate(self._flux(law), points)
            return tuple(
                self._integral.residual(space, *flux[2 * k : 2 * k + 2])
                for k, space in enumerate(self.space.fields)
            )

        return jax.jit(residual, inline=True)

    @property
    def matrix(self) -> Callable[..., tuple[tuple[jax.Array | None, ...], ...]]:
        """The element matrices of the Jacobian: (u, args, kwargs) -> (n, k, l) of two fields."""

        def matrix(u: Any, args: Any, kwargs: Any) -> tuple[tuple[jax.Array | None, ...], ...]:
            law, points = self._at_points(u, args, kwargs)
            derivatives, fields = evaluate(self._derivatives(law), points), self.space.fields

            def of(i: int, j: int) -> jax.Array | None:
                found = self._integral.matrix(fields[i], fields[j], Blocks(*derivatives[i][j]))
                if found is None:
                    return None
                _, n, c, m, others = found.shape
                return found.reshape(-1, n * c, m * others)

            every = range(len(fields))
            return tuple(tuple(of(i, j) for j in every) for i in every)

        return jax.jit(matrix, inline=True)

    def is_linear(self, u: Any, args: Any, kwargs: Any) -> bool:
        """Return True if the residual is seen to be affine in the field."""
        law, points = self._at_points(u, args, kwargs)
        of_fields = set(range(2 * len(self.space.fields)))
        return is_affine(jax.make_jaxpr(self._flux(law))(*_shapes(points)), of_fields)

    def coupled(self, u: Any, args: Any, kwargs: Any) -> NDArray[np.bool_]:
        """Return which of `_derivatives` are not seen to be zero, (fields, fields, 4)."""
        law, points = self._at_points(u, args, kwargs)
        zero = are_zero(jax.make_jaxpr(self._derivatives(law))(*_shapes(points)))
        n = len(self.space.fields)
        return np.logical_not(np.array(zero).reshape(n, n, 4))

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
        self, u: Sequence[jax.Array], args: Any, kwargs: Any
    ) -> tuple[Callable[..., Any], list[AtPoints]]:
        """Return the integrand as a function of arrays, and the arrays.

        They are the value and the gradient of each field, x, the normal of facets, and parameters.
        """
        dtype, integral, fields = u[0].dtype, self._integral, self.space.fields
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_given)
        arrays, builders = [], []
        for leaf in leaves:
            leaf_arrays, build = self._parameter(leaf, dtype)
            builders.append((len(arrays), len(leaf_arrays), build))
            arrays += leaf_arrays
        normals = integral.normals(dtype)
        fixed = [a for s, v in zip(fields, u, strict=True) for a in integral.field(s, v)]
        fixed += [integral.coordinates(dtype)] + ([] if normals is None else [normals])
        n = 2 * len(fields)

        def law(*arguments: Any) -> Any:
            at, x, rest = arguments[:n], arguments[n], arguments[n + 1 :]
            normal, parameters = (None, rest) if normals is None else (rest[0], rest[1:])
            built = [build(*parameters[first : first + count]) for first, count, build in builders]
            args, kwargs = jax.tree.unflatten(structure, built)
            return self.integrand(_point(self.space, at, x, normal), *args, **kwargs)

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

    def _flux(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        return jax.grad(self._scalar(law), argnums=tuple(range(2 * len(self.space.fields))))

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
        def total(u: Any, args: Any, kwargs: Any) -> jax.Array:
            law, points = self._at_points(u, args, kwargs)
            density = evaluate(self._scalar(law), points)
            return jnp.zeros((), u[0].dtype) if density is None else self._integral.total(density)

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

    def _flux(self, law: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        names = self.space.names if isinstance(self.space, Mixed) else ("",)

        def flux(*arguments: Any) -> tuple[Any, ...]:
            result, found = law(*arguments), []
            if isinstance(self.space, Mixed):
                if not isinstance(result, Mapping) or set(result) - set(names):
                    raise TypeError(
                        "fem.WeakForm: for several fields the integrand must return a dictionary "
                        f"of pairs (f0, f1) for the names {', '.join(names)}, got {result!r}. "
                        "Leave out fields without a part."
                    )
                pairs = [result.get(name, (None, None)) for name in names]
            else:
                pairs = [result]
            for k, (name, pair) in enumerate(zip(names, pairs, strict=True)):
                if not isinstance(pair, Sequence) or len(pair) != 2:
                    raise TypeError(
                        "fem.WeakForm: the integrand must return the pair (f0, f1), got "
                        f"{type(pair).__name__}. Return (f0, None) if there is no f1."
                    )
                p = f"p.{name}." if name else "p."
                value, gradient = arguments[2 * k : 2 * k + 2]
                scalar = self.space.fields[k].components == 1
                found.append(_shaped(pair[0], value, "f0", f"{p}u", scalar))
                found.append(_shaped(pair[1], gradient, "f1", f"{p}grad", scalar))
            return tuple(found)

        return flux


def _shaped(entries: Any, like: Any, name: str, other: str, scalar: bool) -> Any:
    """Return a part of a weak form in the shape of the field, or raise an error."""
    if entries is None:
        return jnp.zeros(like.shape, like.dtype)
    expected = like.shape[1:] if scalar else like.shape
    entries = jnp.asarray(entries, like.dtype)
    if entries.shape != expected:
        raise TypeError(
            f"fem.WeakForm: {name} must have the shape of {other}, {expected}, got "
            f"{entries.shape}. Return one value for each entry."
        )
    return entries.reshape(like.shape)


def _shapes(points: list[AtPoints]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.array.shape[2:], a.array.dtype) for a in points]
