"""Sums of forms with their parameters: residuals, Jacobians and integrals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.extend import as_array, jit_local, tie_in
from mpigrad.fem.integrals import cell_values, sum_over_cells
from mpigrad.fem.mixed import Mixed
from mpigrad.fem.space import Space
from mpigrad.sparse import Blocks, Matrix

__all__ = ["Equation", "Term"]


@dataclass(frozen=True, eq=False)
class Term:
    """A form with its parameters, times a factor."""

    form: Any  # a Form
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    factor: Any


class Equation:
    """A sum of forms with their parameters. `Energy` and `WeakForm` make it, and `+` adds them.

    `+` and `-` with a field add forces at nodes to the residual, or subtract them.

    Attributes
    ----------
    space
        The space of the field, or `Mixed` spaces of several fields. A field is then a named tuple.
    terms
        The forms with their parameters.
    load
        What fields have added to the residual, in the shape of a field, or None.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> mesh = fem.box((4, 4), (1.0, 1.0))
    >>> space = fem.Space(mesh)
    >>> stiffness = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad)
    >>> flux = fem.Energy(space, lambda p, q: -q * p.u, on=mesh.facets("xmax"))
    >>> equation = stiffness(2.0) + flux(1.0)
    >>> u = jnp.asarray(space.interpolate(lambda x: x[:, 0]))
    >>> float(equation.integral(u)), equation.residual(u).shape, equation.is_linear
    (0.0, (25,), True)
    """

    __array_ufunc__ = None  # NumPy leaves array + equation to __radd__

    def __init__(self, space: Space | Mixed, terms: tuple[Term, ...], load: Any = None) -> None:
        self.space, self.terms, self.load = space, terms, load

    def __add__(self, other: Any) -> Equation:
        if isinstance(other, int) and other == 0:  # the start of sum([...])
            return self
        if isinstance(other, _FIELDS):
            other = Equation(self.space, (), self._load(other))
        if not isinstance(other, Equation):
            return NotImplemented
        if isinstance(self.space, Mixed) and other.space in self.space.fields:
            raise ValueError(
                f"Equation: expected a form of {self.space}, got one of its field's space. Make it "
                "on the Mixed space, where the field has its name."
            )
        if other.space is not self.space:
            raise ValueError(
                f"Equation: expected forms of the same space, got {self.space} and {other.space}. "
                "Make both forms with one Space object."
            )
        loads = [each for each in (self.load, other.load) if each is not None]
        load = functools.reduce(_added, loads) if loads else None
        return Equation(self.space, self.terms + other.terms, load)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> Equation:
        if jnp.ndim(factor) != 0:
            raise TypeError(
                f"Equation: the factor must be a number, got shape {jnp.shape(factor)}. Give a "
                "coefficient that varies as a parameter of the form."
            )
        terms = tuple(replace(t, factor=t.factor * factor) for t in self.terms)
        load = jax.tree.map(lambda v: v * factor, self.load)
        return Equation(self.space, terms, load)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Equation:
        return self * (1 / divisor)

    def __neg__(self) -> Equation:
        return self * -1.0

    def __sub__(self, other: Any) -> Equation:
        if isinstance(other, Equation):
            return self + (-other)
        if not isinstance(other, _FIELDS):
            return NotImplemented
        return self + jax.tree.map(lambda v: -v, other)

    def __rsub__(self, other: Any) -> Equation:
        return -self + other

    def one_field(self, name: str) -> Space:
        """Return the space, or raise an error that names a function which takes one field only."""
        if isinstance(self.space, Mixed):
            raise TypeError(
                f"{name}: expected an equation of one field, got the fields "
                f"{', '.join(self.space.names)}. Solve each step by fem.solve."
            )
        return self.space

    @property
    def symmetric(self) -> bool:
        """True if all forms are energies, whose Jacobians are symmetric."""
        return all(term.form.symmetric for term in self.terms)

    @property  # of the present values of what the forms read
    def is_linear(self) -> bool:
        """True if the residual is affine in the field, as far as this can be seen."""

        def ask(u: Any) -> Any:
            answers.extend(t.form.is_linear(u, t.args, t.kwargs) for t in self.terms)
            return u

        answers: list[bool] = []
        jax.eval_shape(ask, self._element_shapes())
        return all(answers)

    def couplings(self) -> NDArray[np.bool_]:
        """Return which derivatives of pairs of fields are not seen to be zero, shape (n, n, 4).

        The last axis has those of f0 and f1 in the value and the gradient, as `integrals.Blocks`.
        """
        n = len(self.space.fields)
        found = [np.zeros((n, n, 4), bool)]

        def ask(u: Any) -> Any:
            found.extend(t.form.coupled(u, t.args, t.kwargs) for t in self.terms)
            return u

        jax.eval_shape(ask, self._element_shapes())
        return np.array(np.stack(found).any(axis=0))

    def _element_shapes(self) -> list[jax.ShapeDtypeStruct]:
        shapes = [(*s.cell_nodes.shape, s.components) for s in self.space.fields]
        return [jax.ShapeDtypeStruct(shape, jnp.result_type(float)) for shape in shapes]

    def integral(self, u: Any = None) -> jax.Array:
        """Return this rank's share of the sum of the energies (collective).

        The sum over ranks is the integral. It is a loss that `mg.grad` differentiates.

        Parameters
        ----------
        u
            The field, shape (n_local,) or (n_local, components). Default: zero.

        Raises
        ------
        TypeError
            If a form is not an `Energy`.
        """
        fields = self._fields(u)
        here = self._in_cells(fields)
        parts = [
            self._kept(
                t, jnp.zeros((), here[0].dtype), lambda t=t: t.form.total(here, t.args, t.kwargs)
            )
            for t in self.terms
        ]
        if self.load is not None:
            loads = self.space.unwrapped(self.load)
            parts += [jnp.vdot(f, u).astype(u.dtype) for f, u in zip(loads, fields, strict=True)]
        return functools.reduce(jnp.add, parts)

    def residual(self, u: Any) -> Any:
        """Return the residual: the derivative of the integral in u for energies (collective).

        Parameters
        ----------
        u
            The field, shape (n_local,) or (n_local, components).

        Returns
        -------
        One value for each own unknown, in the shape of u.
        """
        here = self._in_cells(self._fields(u))
        totals: list[Any] = [_zeros(here, v.shape) for v in here]  # active without facets, too
        for term in self.terms:
            totals = self._add(term, totals, lambda t=term: t.form.residual(here, t.args, t.kwargs))
        sums = [sum_over_cells(s, t) for s, t in zip(self.space.fields, totals, strict=True)]
        if self.load is not None:
            loads = self.space.unwrapped(self.load)
            sums = [v + f.astype(v.dtype) for v, f in zip(sums, loads, strict=True)]
        return self.space.wrapped(sums)

    def jacobian(self, u: Any = None) -> Any:
        """Return the derivative of the residual in the field (collective).

        Parameters
        ----------
        u
            The field at which it is taken. Default: zero. Linear equations do not depend on it.

        Returns
        -------
        A matrix on `space.pattern`, whose rows are the unknowns node * components + component. With
        `Mixed` spaces they are `sparse.Blocks` of such matrices, None where no form couples two
        fields.
        """
        here, space = self._in_cells(self._fields(u)), self.space
        n = range(len(here))
        coupled = np.ones((1, 1), bool)
        if isinstance(space, Mixed):
            coupled = np.array(self.couplings().any(axis=2))
        present = [(i, j) for i in n for j in n if coupled[i, j]]
        sizes = [v.shape[1] * v.shape[2] for v in here]
        totals: list[Any] = [_zeros(here, (len(here[i]), sizes[i], sizes[j])) for i, j in present]
        for term in self.terms:

            def matrices(t: Term = term) -> list[Any]:
                found = t.form.matrix(here, t.args, t.kwargs)
                return [found[i][j] for i, j in present]

            totals = self._add(term, totals, matrices)
        if not isinstance(space, Mixed):
            return Matrix.assemble(space.pattern, totals[0])
        blocks: list[list[Matrix | None]] = [[None for _ in n] for _ in n]
        for (i, j), total in zip(present, totals, strict=True):
            elements = total if i == j else total.reshape(-1)
            blocks[i][j] = Matrix.assemble(space.pattern(i, j), elements)
        return Blocks(blocks)

    def lumped(self, u: Any = None) -> jax.Array:
        """Return a diagonal in place of the Jacobian, for masses (collective).

        The diagonal of each element matrix is scaled so that its sum over a component's nodes is
        that of all entries of this component. So it is positive in elements of degree 2, too
        (Hinton, Rock and Zienkiewicz, "A note on mass lumping and related processes in the finite
        element method", Earthquake Engineering & Structural Dynamics 4, 1976).

        Parameters
        ----------
        u
            The field at which it is taken. Default: zero.

        Returns
        -------
        One value for each own unknown, in the shape of a field.

        Examples
        --------
        >>> from mpigrad import fem
        >>> space = fem.Space(fem.box((2, 1), (2.0, 1.0)))
        >>> mass = fem.Energy(space, lambda p: 0.5 * 3.0 * p.u**2)
        >>> float(mass().lumped().sum())
        6.0
        """
        space = self.one_field("Equation.lumped")
        (here,) = self._in_cells(self._fields(u))
        totals: list[Any] = [_zeros([here], here.shape)]
        for term in self.terms:
            totals = self._add(term, totals, lambda t=term: [_lumped(t, here)])
        return sum_over_cells(space, totals[0])

    def _load(self, load: Any) -> Any:
        loads = []
        arrays = map(as_array, self.space.unwrapped(load))
        for space, each in zip(self.space.fields, arrays, strict=True):
            if each.shape != space.shape or not jnp.issubdtype(each.dtype, jnp.floating):
                raise TypeError(
                    f"Equation: an array that is added must be a field of shape {space.shape} on "
                    f"rank {space.mesh.comm.rank}, got dtype {each.dtype} and shape {each.shape}. "
                    "Give one force for each own unknown."
                )
            loads.append(each)
        return self.space.wrapped(loads)

    def _fields(self, u: Any) -> tuple[jax.Array, ...]:
        if u is None:
            return tuple(jnp.zeros(space.shape) for space in self.space.fields)
        fields = tuple(as_array(v) for v in self.space.unwrapped(u))
        for v in fields:
            if not jnp.issubdtype(v.dtype, jnp.floating):
                raise TypeError(
                    f"Equation: the field must be real and floating-point, got dtype {v.dtype}. "
                    "Convert it, as in u.astype(float)."
                )
        return fields

    def _in_cells(self, fields: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Return the fields at the nodes of each cell."""
        return [cell_values(s, v) for s, v in zip(self.space.fields, fields, strict=True)]

    def _kept(self, term: Term, zero: jax.Array, compute: Callable[[], Any]) -> jax.Array:
        """Return what a term adds, zero if this rank has no cells or facets of it."""
        if term.form.is_empty:
            for leaf in jax.tree.leaves((term.args, term.kwargs, term.factor)):
                if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                    zero = tie_in(zero, as_array(leaf))  # other ranks may have some
            return zero
        value = compute()
        return zero if value is None else value * as_array(term.factor, zero.dtype)

    def _add(self, term: Term, totals: list[Any], compute: Callable[[], Any]) -> list[Any]:
        """Add what a term computes for each total, None for nothing."""
        if term.form.is_empty:
            return [t + self._kept(term, jnp.zeros_like(t), compute) for t in totals]
        cells, values = term.form.cells, compute()
        return [
            total if value is None else _sum(total, value, term.factor, cells)
            for total, value in zip(totals, values, strict=True)
        ]


_FIELDS = np.ndarray | jax.Array | tuple


def _added(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


@jit_local(static_argnames=("shape",), inline=True)
def _zeros(here: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Return zeros that are active if any field is, also where this rank has nothing to add."""
    return functools.reduce(tie_in, here, jnp.zeros(shape, here[0].dtype))


@jit_local(inline=True)
def _sum(total: jax.Array, value: jax.Array, factor: Any, cells: Any) -> jax.Array:
    scaled = value * jnp.asarray(factor, total.dtype)
    return total + scaled if cells is None else total.at[cells].add(scaled)


def _lumped(term: Term, here: jax.Array) -> jax.Array | None:
    """Return the scaled diagonals of the element matrices of a form, (n, n_basis, components)."""
    ((matrices,),) = term.form.matrix([here], term.args, term.kwargs)
    if matrices is None:
        return None
    nodes, components = here.shape[1:]
    blocks = matrices.reshape(-1, nodes, components, nodes, components)
    component_blocks = jnp.einsum("eicjc->eicj", blocks)  # between nodes, for each component
    diagonal = jnp.einsum("eici->eic", component_blocks)
    traces = jnp.sum(diagonal, axis=1, keepdims=True)
    scale = jnp.sum(component_blocks, axis=(1, 3))[:, None] / jnp.where(traces == 0, 1, traces)
    return diagonal * scale
