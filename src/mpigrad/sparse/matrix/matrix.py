"""A distributed sparse matrix: a pattern and its values."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.sparse.matrix import scipy_conversion as conversion
from mpigrad.sparse.matrix.addition import add
from mpigrad.sparse.matrix.boundary import eliminate_rows, fix_rows
from mpigrad.sparse.matrix.csr import apply, diagonal, gather_by_column, gather_by_row, multiply
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.product import multiply_matrices
from mpigrad.sparse.matrix.transpose import transpose_values, transposed

__all__ = ["Matrix", "apply", "diagonal"]


class Matrix:
    """A sparse matrix, striped by rows over the ranks.

    A pytree with one leaf, the values, so that matrices pass through `jit`, `grad` and `vmap`.

    Parameters
    ----------
    pattern
        Where this rank's entries are.
    values
        This rank's stored entries, shape (nnz,), in the order of the pattern.

    Examples
    --------
    `A @ x`, `A @ B`, `A + B`, `A - B`, `2 * A`, `A / 2`, `-A`, `A.T`, `A.diagonal()`,
    `A.scale_rows(d)` and `A.scale_columns(d)` are differentiable in values, vectors and factors,
    in both modes and to any order, also inside jit, vmap and scan.
    """

    pattern: Pattern
    values: jax.Array
    __array_ufunc__ = None  # NumPy's scalars leave `a * A` to the matrix

    def __init__(self, pattern: Pattern, values: Any) -> None:
        if not isinstance(pattern, Pattern):
            raise TypeError(
                f"Matrix: pattern must be a mpigrad.sparse.Pattern, not {type(pattern).__name__}"
            )
        values = jnp.asarray(values)
        if values.shape != (pattern.nnz,):
            remedy = f"give shape ({pattern.nnz},)"
            if pattern.assembly is not None:
                remedy += ", or pattern.assemble(contributions)"
            raise ValueError(
                f"Matrix: values have shape {values.shape} on rank {pattern.comm.rank}, where the "
                f"pattern has {pattern.nnz} entries: {remedy}"
            )
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            raise TypeError(f"Matrix: values have dtype {values.dtype}; give floating-point values")
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "values", values)

    @classmethod
    def assemble(cls, pattern: Pattern, contributions: Any) -> Matrix:
        """Add up contributions to the entries of a pattern (collective).

        Parameters
        ----------
        pattern
            Where the entries are.
        contributions
            As `Pattern.assemble` takes them: for stencils one array for each offset.
        """
        return cls(pattern, pattern.assemble(contributions))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Matrix is not changed in place; make a new one")

    @property
    def shape(self) -> tuple[int, int]:
        """Global shape."""
        return (self.pattern.n_rows, self.pattern.n_columns)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def diagonal(self) -> jax.Array:
        """Diagonal entries of this rank's rows, zero where the pattern has none."""
        return diagonal(self.pattern, self.values)

    @classmethod
    def from_scipy(
        cls,
        A: Any,
        comm: Communicator | None = None,
        root: int | None = None,
        n_local: int | None = None,
        n_local_columns: int | None = None,
    ) -> Matrix:
        """A matrix of SciPy's, whole on one rank or each rank's rows (collective).

        Parameters
        ----------
        A
            A two-dimensional sparse array of SciPy, float or complex: with `root` the whole matrix,
            read on the root alone; without it this rank's block of rows, (n_local, n_columns).
            Entries given twice are added up; zeros that are stored stay stored.
        root
            The rank that has the whole matrix.
        n_local, n_local_columns
            How many rows and columns this rank is to own. By default rows are shared evenly where
            the root has them, and columns as rows, or evenly where the matrix is not square.
        """
        return cls(*conversion.distribute(A, comm, root, n_local, n_local_columns))

    def local_scipy(self) -> Any:
        """This rank's rows as a `scipy.sparse.csr_array` of shape (n_local, n_columns)."""
        return conversion.local_block(self.pattern, self.values)

    def to_scipy(self, root: int = 0) -> Any:
        """The whole matrix as a `scipy.sparse.csr_array` on the root, None elsewhere (collective).

        For checking, writing and small systems: the root holds all of it.
        """
        return conversion.gather(self.pattern, self.values, root)

    @overload
    def at_boundary(self, fixed: Any) -> Matrix: ...
    @overload
    def at_boundary(self, fixed: Any, b: Any, values: Any = 0) -> tuple[Matrix, jax.Array]: ...
    def at_boundary(self, fixed: Any, b: Any = None, values: Any = None) -> Any:
        """The system whose solution is prescribed in some rows: a Dirichlet condition.

        The rows become those of the identity. Without b only they change: a right-hand side with
        b[fixed] = values gives the solution. With b the columns are eliminated too, so that a
        symmetric matrix stays symmetric: b changes by -A[:, fixed] @ values, then b[fixed] =
        values. The pattern stays, so solvers keep what they know of it. Differentiable in
        `self.values`, b and values.

        Parameters
        ----------
        fixed
            Which of this rank's rows are prescribed, booleans of shape (n_local,). Their diagonal
            entries must be in the pattern.
        b
            This rank's part of the right-hand side, shape (n_local,) or (n_local, k).
        values
            The prescribed values: a scalar, or an array of the shape of b (read in fixed rows
            alone).

        Returns
        -------
        The matrix; with b the matrix and the right-hand side (collective).
        """
        if b is None:
            if values is not None:
                raise ValueError(
                    "at_boundary: values are given without b; give both, or set b yourself"
                )
            return Matrix(self.pattern, fix_rows(self.pattern, self.values, fixed))
        entries, b = eliminate_rows(self.pattern, self.values, fixed, b, values)
        return Matrix(self.pattern, entries), b

    @property
    def T(self) -> Matrix:
        """The transpose (collective); its stripes of rows are this matrix's stripes of columns."""
        return Matrix(transposed(self.pattern), transpose_values(self.pattern, self.values))

    @overload
    def __matmul__(self, other: Matrix) -> Matrix: ...
    @overload
    def __matmul__(self, other: jax.Array | np.ndarray) -> jax.Array: ...
    def __matmul__(self, other: Any) -> Any:
        """A @ x or A @ B (collective).

        Parameters
        ----------
        other
            This rank's part of x, shape (n_local_columns,) or (n_local_columns, k), or a matrix
            whose stripes of rows are this one's of columns.

        Returns
        -------
        This rank's part of A x, shape (n_local,) or (n_local, k), or the product, stored in row
        order. What it needs of two patterns is made once and kept.
        """
        if isinstance(other, Matrix):
            return Matrix(
                *multiply_matrices(self.pattern, self.values, other.pattern, other.values)
            )
        x = jnp.asarray(other)
        n = self.pattern.n_local_columns
        if x.ndim not in (1, 2) or x.shape[0] != n:
            raise ValueError(
                f"A @ x: x has shape {x.shape} on rank {self.pattern.comm.rank}, which owns "
                f"{n} columns; give ({n},) or ({n}, k)"
            )
        return multiply(self.pattern, self.values, x)

    def __add__(self, other: Any) -> Matrix:
        """A + B: on the union of the patterns (collective where it is not yet known)."""
        if not isinstance(other, Matrix):
            return NotImplemented
        return Matrix(*add(self.pattern, self.values, other.pattern, other.values))

    def __sub__(self, other: Any) -> Matrix:
        if not isinstance(other, Matrix):
            return NotImplemented
        return Matrix(*add(self.pattern, self.values, other.pattern, other.values, -1))

    def __mul__(self, factor: Any) -> Matrix:
        """a A for a scalar a."""
        return Matrix(self.pattern, self.values * _scalar(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Matrix:
        return Matrix(self.pattern, self.values / _scalar(divisor))

    def __neg__(self) -> Matrix:
        return Matrix(self.pattern, -self.values)

    def scale_rows(self, d: Any) -> Matrix:
        """diag(d) A: row i times d[i].

        Parameters
        ----------
        d
            One factor for each of this rank's rows, shape (n_local,).
        """
        d = self._vector(d, "scale_rows", "rows", self.pattern.n_local)
        return Matrix(self.pattern, self.values * gather_by_row(self.pattern, d))

    def scale_columns(self, d: Any) -> Matrix:
        """A diag(d): column j times d[j] (collective).

        Parameters
        ----------
        d
            One factor for each of this rank's columns, shape (n_local_columns,).
        """
        d = self._vector(d, "scale_columns", "columns", self.pattern.n_local_columns)
        return Matrix(self.pattern, self.values * gather_by_column(self.pattern, d))

    def _vector(self, d: Any, name: str, what: str, n: int) -> jax.Array:
        d = jnp.asarray(d)
        if d.shape != (n,):
            raise ValueError(
                f"{name}: the factors have shape {d.shape} on rank {self.pattern.comm.rank}, which "
                f"owns {n} {what}; give shape ({n},)"
            )
        return d

    def __repr__(self) -> str:
        return f"Matrix({self.pattern!r}, values={self.values!r})"


def _scalar(factor: Any) -> Any:
    if isinstance(factor, Matrix) or jnp.ndim(factor) != 0:
        kind = (
            "a matrix" if isinstance(factor, Matrix) else f"an array of shape {jnp.shape(factor)}"
        )
        raise TypeError(
            f"a Matrix is multiplied or divided by a scalar, not {kind}; for products with vectors "
            "and matrices write A @ x, for factors of rows A.scale_rows(d), and of columns "
            "A.scale_columns(d)"
        )
    return factor


def _unflatten(pattern: Pattern, leaves: Any) -> Matrix:
    # JAX passes placeholders and batched arrays through here: nothing is checked.
    matrix = object.__new__(Matrix)
    object.__setattr__(matrix, "pattern", pattern)
    object.__setattr__(matrix, "values", leaves[0])
    return matrix


jax.tree_util.register_pytree_with_keys(
    Matrix,
    lambda m: (((jax.tree_util.GetAttrKey("values"), m.values),), m.pattern),
    _unflatten,
    lambda m: ((m.values,), m.pattern),
)
