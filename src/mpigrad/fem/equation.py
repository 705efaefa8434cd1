"""Sums of forms with their parameters: residuals, Jacobians and integrals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import as_array, jit_local, tie_in
from mpigrad.fem.integrals import cell_values, sum_over_cells
from mpigrad.fem.space import Space
from mpigrad.sparse import Matrix

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
        The space of the field.
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

    def __init__(self, space: Space, terms: tuple[Term, ...], load: Any = None) -> None:
        self.space, self.terms, self.load = space, terms, load

    def __add__(self, other: Any) -> Equation:
        if isinstance(other, int) and other == 0:  # the start of sum([...])
            return self
        if isinstance(other, np.ndarray | jax.Array):
            other = Equation(self.space, (), self._load(other))
        if not isinstance(other, Equation):
            return NotImplemented
        if other.space is not self.space:
            raise ValueError(
                f"Equation: expected forms of the same space, got {self.space} and {other.space}. "
                "Make both forms with one Space object."
            )
        loads = [each for each in (self.load, other.load) if each is not None]
        load = functools.reduce(jnp.add, loads) if loads else None
        return Equation(self.space, self.terms + other.terms, load)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> Equation:
        if jnp.ndim(factor) != 0:
            raise TypeError(
                f"Equation: the factor must be a number, got shape {jnp.shape(factor)}. Give a "
                "coefficient that varies as a parameter of the form."
            )
        terms = tuple(replace(t, factor=t.factor * factor) for t in self.terms)
        return Equation(self.space, terms, None if self.load is None else self.load * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Equation:
        return self * (1 / divisor)

    def __neg__(self) -> Equation:
        return self * -1.0

    def __sub__(self, other: Any) -> Equation:
        known = isinstance(other, Equation | np.ndarray | jax.Array)
        return self + (-other) if known else NotImplemented

    def __rsub__(self, other: Any) -> Equation:
        return -self + other

    @property
    def symmetric(self) -> bool:
        """True if all forms are energies, whose Jacobians are symmetric."""
        return all(term.form.symmetric for term in self.terms)

    @property  # of the present values of what the forms read
    def is_linear(self) -> bool:
        """True if the residual is affine in the field, as far as this can be seen."""
        shape = (*self.space.cell_nodes.shape, self.space.components)

        def ask(u: jax.Array) -> jax.Array:
            answers.extend(t.form.is_linear(u, t.args, t.kwargs) for t in self.terms)
            return u

        answers: list[bool] = []
        dtype = jnp.result_type(float)
        jax.eval_shape(ask, jax.ShapeDtypeStruct(shape, dtype))
        return all(answers)

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
        u = self._field(u)
        here = cell_values(self.space, u)
        parts = [
            self._kept(
                t, jnp.zeros((), here.dtype), lambda t=t: t.form.total(here, t.args, t.kwargs)
            )
            for t in self.terms
        ]
        if self.load is not None:
            parts.append(jnp.vdot(self.load, u).astype(u.dtype))
        return functools.reduce(jnp.add, parts)

    def residual(self, u: Any) -> jax.Array:
        """Return the residual: the derivative of the integral in u for energies (collective).

        Parameters
        ----------
        u
            The field, shape (n_local,) or (n_local, components).

        Returns
        -------
        One value for each own unknown, in the shape of u.
        """
        here = cell_values(self.space, self._field(u))
        total = _zeros(here, here.shape)  # active even if this rank has no facets
        for term in self.terms:
            total = self._add(term, total, lambda t=term: t.form.residual(here, t.args, t.kwargs))
        sums = sum_over_cells(self.space, total)
        return sums if self.load is None else sums + self.load.astype(sums.dtype)

    def jacobian(self, u: Any = None) -> Matrix:
        """Return the derivative of the residual in the field (collective).

        Parameters
        ----------
        u
            The field at which it is taken. Default: zero. Linear equations do not depend on it.

        Returns
        -------
        A matrix on `space.pattern`, whose rows are the unknowns node * components + component.
        """
        here = cell_values(self.space, self._field(u))
        k = here.shape[1] * here.shape[2]
        total = _zeros(here, (len(here), k, k))
        for term in self.terms:
            total = self._add(term, total, lambda t=term: t.form.matrix(here, t.args, t.kwargs))
        return Matrix.assemble(self.space.pattern, total)

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
        here = cell_values(self.space, self._field(u))
        total = _zeros(here, here.shape)
        for term in self.terms:
            total = self._add(term, total, lambda t=term: _lumped(t, here))
        return sum_over_cells(self.space, total)

    def _load(self, load: Any) -> jax.Array:
        load = as_array(load)
        if load.shape != self.space.shape or not jnp.issubdtype(load.dtype, jnp.floating):
            raise TypeError(
                f"Equation: an array that is added must be a field of shape {self.space.shape} on "
                f"rank {self.space.mesh.comm.rank}, got dtype {load.dtype} and shape {load.shape}. "
                "Give one force for each own unknown."
            )
        return load

    def _field(self, u: Any) -> jax.Array:
        if u is None:
            return jnp.zeros(self.space.shape)
        u = as_array(u)
        if not jnp.issubdtype(u.dtype, jnp.floating):
            raise TypeError(
                f"Equation: the field must be real and floating-point, got dtype {u.dtype}. "
                "Convert it, as in u.astype(float)."
            )
        return u

    def _kept(self, term: Term, zero: jax.Array, compute: Callable[[], Any]) -> jax.Array:
        """Return what a term adds, zero if this rank has no cells or facets of it."""
        if term.form.is_empty:
            for leaf in jax.tree.leaves((term.args, term.kwargs, term.factor)):
                if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                    zero = tie_in(zero, as_array(leaf))  # other ranks may have some
            return zero
        value = compute()
        return zero if value is None else value * as_array(term.factor, zero.dtype)

    def _add(self, term: Term, total: jax.Array, compute: Callable[[], Any]) -> jax.Array:
        cells = term.form.cells
        if cells is None or term.form.is_empty:
            if term.form.is_empty:
                return total + self._kept(term, jnp.zeros_like(total), compute)
            cells = None
        value = compute()
        return total if value is None else _sum(total, value, term.factor, cells)


@jit_local(static_argnames=("shape",), inline=True)
def _zeros(here: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return tie_in(jnp.zeros(shape, here.dtype), here)


@jit_local(inline=True)
def _sum(total: jax.Array, value: jax.Array, factor: Any, cells: Any) -> jax.Array:
    scaled = value * jnp.asarray(factor, total.dtype)
    return total + scaled if cells is None else total.at[cells].add(scaled)


def _lumped(term: Term, here: jax.Array) -> jax.Array | None:
    """Return the scaled diagonals of the element matrices of a form, (n, n_basis, components)."""
    matrices = term.form.matrix(here, term.args, term.kwargs)
    if matrices is None:
        return None
    nodes, components = here.shape[1:]
    blocks = matrices.reshape(-1, nodes, components, nodes, components)
    component_blocks = jnp.einsum("eicjc->eicj", blocks)  # between nodes, for each component
    diagonal = jnp.einsum("eici->eic", component_blocks)
    traces = jnp.sum(diagonal, axis=1, keepdims=True)
    scale = jnp.sum(component_blocks, axis=(1, 3))[:, None] / jnp.where(traces == 0, 1, traces)
    return diagonal * scale
