"""A distributed sparse matrix: a pattern and its values, and Dirichlet conditions."""

from __future__ import annotations

import math
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.extend import as_array, jit_local
from mpigrad.operations import allreduce, require
from mpigrad.sparse.matrix import scipy_conversion as conversion
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.products import (
    add,
    apply,
    diagonal,
    gather_by_column,
    gather_by_row,
    multiply,
    multiply_matrices,
    outer_product,
    transpose_values,
    transposed,
)

__all__ = [
    "Matrix",
    "apply",
    "diagonal",
    "eliminate_rows",
    "fix_rows",
]

# ---- Dirichlet conditions: rows of a linear system are replaced by prescribed values ----


def fix_rows(pattern: Pattern, values: jax.Array, fixed: Any) -> jax.Array:
    """Return the values with fixed rows of the identity (`Matrix.at_boundary`)."""
    fixed = _check_fixed(pattern, fixed)
    free = gather_by_row(pattern, _free(fixed))
    return _with_ones(values, free, fixed, *_diagonal(pattern))


def eliminate_rows(
    pattern: Pattern, values: jax.Array, fixed: Any, b: Any, solution: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return values and right-hand side without fixed rows and columns (`Matrix.at_boundary`)."""
    fixed = _check_fixed(pattern, fixed)
    n, rank = pattern.n_local, pattern.comm.rank
    b = as_array(b)
    if b.ndim not in (1, 2) or b.shape[0] != n:
        raise ValueError(
            f"at_boundary: b has shape {b.shape} on rank {rank}, which owns {n} rows. Give shape "
            f"({n},) or ({n}, k)."
        )
    dtype = jnp.result_type(values, b, 0.0 if solution is None else solution)
    prescribed = as_array(0 if solution is None else solution, dtype)
    if prescribed.ndim not in (0, b.ndim) or prescribed.shape not in ((), b.shape):
        raise ValueError(
            f"at_boundary: values have shape {prescribed.shape} on rank {rank}, and b has "
            f"{b.shape}. Give a scalar or one value for each entry of b (read in fixed rows only)."
        )
    # One message has the fixed columns and their values.
    conditions = _fixed_and_prescribed(fixed, prescribed, shape=b.shape)
    free_columns, known = _divided(pattern.ghosts.local_and_ghost(conditions))
    eliminated = apply(pattern, values.astype(dtype), known)
    free = outer_product(pattern, _free(fixed), free_columns)
    entries = _with_ones(values, free, fixed, *_diagonal(pattern))
    return entries, _without_fixed(fixed, conditions, b, eliminated)


@jit_local(static_argnames=("shape",))
def _fixed_and_prescribed(
    fixed: jax.Array, prescribed: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Return 1 in fixed rows, and the prescribed values, as columns that are 0 in other rows."""
    rows = fixed.reshape(shape[0], *[1] * (len(shape) - 1))
    known = jnp.where(rows, prescribed, jnp.zeros(shape, prescribed.dtype))
    known = known.reshape(shape[0], math.prod(shape[1:]))
    return jnp.concatenate([fixed[:, None].astype(prescribed.dtype), known], axis=1)


@jit_local
def _divided(columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return 1 in columns that are free, and the prescribed values."""
    return _free(columns[:, 0] != 0), columns[:, 1:]


@jit_local
def _without_fixed(
    fixed: jax.Array, conditions: jax.Array, b: jax.Array, eliminated: jax.Array
) -> jax.Array:
    rows = fixed.reshape(len(b), *[1] * (b.ndim - 1))
    return jnp.where(rows, conditions[:, 1:].reshape(b.shape), b - eliminated.reshape(b.shape))


def _free(fixed: jax.Array) -> jax.Array:
    """Return 1 in rows or columns that are not fixed, for the native library.

    XLA would compute a gather of a mask that is a constant when it compiles, for seconds.
    """
    return (~fixed).astype(jnp.float32)


def _check_fixed(pattern: Pattern, fixed: Any) -> jax.Array:
    n, rank = pattern.n_local, pattern.comm.rank
    fixed = as_array(fixed)
    if not pattern.is_square:
        shape = (pattern.n_rows, pattern.n_columns)
        raise ValueError(
            f"at_boundary: the matrix must be square, got shape {shape}. Make it without "
            "n_local_columns."
        )
    if fixed.shape != (n,) or fixed.dtype != bool:
        raise ValueError(
            f"at_boundary: fixed has shape {fixed.shape} and dtype {fixed.dtype} on rank {rank}. "
            f"Give a boolean for each of its {n} rows: shape ({n},)."
        )
    _require_diagonal(pattern, fixed)
    return fixed


def _diagonal(pattern: Pattern) -> tuple[jax.Array, int]:
    return pattern.diagonal_index, pattern.nnz


@jit_local(static_argnames=("nnz",))
def _with_ones(
    values: jax.Array,
    free: jax.Array,
    fixed: jax.Array,
    diagonal: jax.Array,
    nnz: int,
) -> jax.Array:
    """Return zeros for entries that are not free, and ones on the diagonal of fixed rows."""
    # A fixed row without a stored diagonal is an error before: -1 is for rows that are not fixed.
    # Indices are unique, also those that are dropped. If JAX did not know, the derivative would
    # need an array of integers for all entries.
    places = jnp.where(fixed, diagonal, nnz + jnp.arange(len(diagonal)))
    return jnp.where(free == 0, 0, values).at[places].set(1, mode="drop", unique_indices=True)


def _require_diagonal(pattern: Pattern, fixed: jax.Array) -> None:
    """Raise an error on all ranks if a fixed row lacks the diagonal entry."""
    if pattern.row_without_diagonal < 0:
        return
    bare = allreduce(jnp.sum(fixed & (pattern.diagonal_index < 0)), comm=pattern.comm)
    require(
        bare == 0,
        "at_boundary: {} of the fixed rows have no diagonal entry in the pattern. Add the entry "
        "(i, i) for every fixed row i.",
        bare,
        comm=pattern.comm,
    )


# ---- A distributed sparse matrix: a pattern and its values ----


class Matrix:
    """A sparse matrix, striped by rows over the ranks.

    A pytree with one leaf, the values, so that matrices pass through `jit`, `grad` and `vmap`.

    Parameters
    ----------
    pattern
        The positions of the entries.
    values
        This rank's stored entries, shape (nnz,), in the order of the pattern.

    Notes
    -----
    `A @ x`, `A @ B`, `A + B`, `A - B`, `2 * A`, `A / 2`, `-A`, `A.T`, `A.diagonal()`,
    `A.scale_rows(d)` and `A.scale_columns(d)` are differentiable in values, vectors and factors,
    in both modes and to any order, also inside jit, vmap and scan.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import Matrix, Pattern
    >>> A = Matrix(Pattern.from_coo([0, 0, 1], [0, 1, 1], n_local=2), jnp.array([1.0, 2.0, 3.0]))
    >>> A @ jnp.array([1.0, 10.0])
    Array([21., 30.], dtype=float32)
    >>> (A.T + 2 * A).to_scipy().toarray()
    array([[3., 4.],
           [2., 9.]], dtype=float32)
    """

    pattern: Pattern
    values: jax.Array
    __array_ufunc__ = None  # so that NumPy's scalars call Matrix.__rmul__ for `a * A`

    def __init__(self, pattern: Pattern, values: Any) -> None:
        if not isinstance(pattern, Pattern):
            raise TypeError(
                f"Matrix: pattern must be a mpigrad.sparse.Pattern, got {type(pattern).__name__}. "
                "Make one with Pattern.from_coo(rows, columns, n_local)."
            )
        values = as_array(values)
        if values.shape != (pattern.nnz,):
            remedy = f"Give shape ({pattern.nnz},)"
            if pattern.assembly is not None:
                remedy += ", or pattern.assemble(contributions)"
            raise ValueError(
                f"Matrix: values have shape {values.shape} on rank {pattern.comm.rank}, but the "
                f"pattern has {pattern.nnz} entries there. {remedy}."
            )
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            raise TypeError(
                f"Matrix: values must be floating-point, got dtype {values.dtype}. Convert them "
                "with values.astype(float)."
            )
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "values", values)

    @classmethod
    def assemble(cls, pattern: Pattern, contributions: Any) -> Matrix:
        """Add up contributions to the entries of a pattern (collective).

        Parameters
        ----------
        pattern
            The positions of the entries.
        contributions
            The argument of `Pattern.assemble`. For stencils one array for each offset.
        """
        return cls(pattern, pattern.assemble(contributions))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"Matrix: cannot set {name}: it is not changed in place. Make a new one."
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Global shape."""
        return (self.pattern.n_rows, self.pattern.n_columns)

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    def diagonal(self) -> jax.Array:
        """Return the diagonal entries of this rank's rows, zero in rows without one."""
        return diagonal(self.pattern, self.values)

    @classmethod
    def from_scipy(
        cls,
        A: Any,
        comm: Communicator | None = None,
        *,
        root: int | None = None,
        n_local: int | None = None,
        n_local_columns: int | None = None,
    ) -> Matrix:
        """Distribute a SciPy matrix, whole on one rank or by rows on each rank (collective).

        Parameters
        ----------
        A
            A two-dimensional sparse array of SciPy, float or complex. With `root` it is the whole
            matrix, read on the root only. Without, it is this rank's block of rows, of shape
            (n_local, n_columns). Entries given twice are added up, and stored zeros stay stored.
        comm
            The communicator over whose ranks the rows are distributed. None: the default
            communicator.
        root
            The rank that has the whole matrix. None: each rank has its rows.
        n_local, n_local_columns
            The number of rows and columns that this rank is to own. By default the root's rows are
            shared evenly, and columns are divided as rows are, or evenly if the matrix is not
            square.
        """
        return cls(*conversion.distribute(A, comm, root, n_local, n_local_columns))

    def local_scipy(self) -> Any:
        """Return this rank's rows as a `scipy.sparse.csr_array` of shape (n_local, n_columns)."""
        return conversion.local_block(self.pattern, self.values)

    def to_scipy(self, root: int = 0) -> Any:
        """Return the matrix as a `scipy.sparse.csr_array` on the root, None elsewhere (collective).

        For checking, writing and small systems: the root holds the whole matrix.
        """
        return conversion.gather(self.pattern, self.values, root)

    @overload
    def at_boundary(self, fixed: Any) -> Matrix: ...
    @overload
    def at_boundary(self, fixed: Any, b: Any, values: Any = 0) -> tuple[Matrix, jax.Array]: ...
    def at_boundary(self, fixed: Any, b: Any = None, values: Any = None) -> Any:
        """Prescribe the solution in some rows: a Dirichlet condition.

        The fixed rows become rows of the identity. Without b nothing else changes: a right-hand
        side with b[fixed] = values gives the solution. With b the columns are eliminated too, so
        that a symmetric matrix stays symmetric: b changes by -A[:, fixed] @ values, then b[fixed] =
        values. The pattern stays the same, so solvers keep its data. Differentiable in
        `self.values`, b and values.

        Parameters
        ----------
        fixed
            True for the prescribed rows, booleans of shape (n_local,). Their diagonal
            entries must be in the pattern.
        b
            This rank's part of the right-hand side, shape (n_local,) or (n_local, k).
        values
            The prescribed values: a scalar, or an array of the shape of b (read in fixed rows
            only).

        Returns
        -------
        The matrix, or with b the pair of the matrix and the right-hand side (collective).
        """
        if b is None:
            if values is not None:
                raise ValueError(
                    "at_boundary: values are given without b. Give both, or set b[fixed] yourself."
                )
            return Matrix(self.pattern, fix_rows(self.pattern, self.values, fixed))
        entries, b = eliminate_rows(self.pattern, self.values, fixed, b, values)
        return Matrix(self.pattern, entries), b

    @property
    def T(self) -> Matrix:
        """The transpose (collective). Its rows have the stripes of this matrix's columns."""
        return Matrix(transposed(self.pattern), transpose_values(self.pattern, self.values))

    @overload
    def __matmul__(self, other: Matrix) -> Matrix: ...
    @overload
    def __matmul__(self, other: jax.Array | np.ndarray) -> jax.Array: ...
    def __matmul__(self, other: Any) -> Any:
        """Return A @ x or A @ B (collective).

        Parameters
        ----------
        other
            This rank's part of x, shape (n_local_columns,) or (n_local_columns, k), or a matrix
            whose rows have the stripes of this matrix's columns.

        Returns
        -------
        This rank's part of A x, shape (n_local,) or (n_local, k), or the product, stored in row
        order. The plan of two patterns is made once and kept.
        """
        if isinstance(other, Matrix):
            return Matrix(
                *multiply_matrices(self.pattern, self.values, other.pattern, other.values)
            )
        x = as_array(other)
        n = self.pattern.n_local_columns
        if x.ndim not in (1, 2) or x.shape[0] != n:
            raise ValueError(
                f"A @ x: x has shape {x.shape} on rank {self.pattern.comm.rank}, which owns "
                f"{n} columns. Give shape ({n},) or ({n}, k)."
            )
        return multiply(self.pattern, self.values, x)

    def __add__(self, other: Any) -> Matrix:
        """Return A + B, on the union of the patterns (collective at the first call)."""
        if not isinstance(other, Matrix):
            return NotImplemented
        return Matrix(*add(self.pattern, self.values, other.pattern, other.values))

    def __sub__(self, other: Any) -> Matrix:
        if not isinstance(other, Matrix):
            return NotImplemented
        return Matrix(*add(self.pattern, self.values, other.pattern, other.values, -1))

    def __mul__(self, factor: Any) -> Matrix:
        """Return a A for a scalar a."""
        return Matrix(self.pattern, self.values * _scalar(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Matrix:
        return Matrix(self.pattern, self.values / _scalar(divisor))

    def __neg__(self) -> Matrix:
        return Matrix(self.pattern, -self.values)

    def scale_rows(self, d: Any) -> Matrix:
        """Return diag(d) A: row i times d[i].

        Parameters
        ----------
        d
            One factor for each of this rank's rows, shape (n_local,).
        """
        d = self._vector(d, "scale_rows", "rows", self.pattern.n_local)
        return Matrix(self.pattern, self.values * gather_by_row(self.pattern, d))

    def scale_columns(self, d: Any) -> Matrix:
        """Return A diag(d): column j times d[j] (collective).

        Parameters
        ----------
        d
            One factor for each of this rank's columns, shape (n_local_columns,).
        """
        d = self._vector(d, "scale_columns", "columns", self.pattern.n_local_columns)
        return Matrix(self.pattern, self.values * gather_by_column(self.pattern, d))

    def _vector(self, d: Any, name: str, what: str, n: int) -> jax.Array:
        d = as_array(d)
        if d.shape != (n,):
            raise ValueError(
                f"{name}: the factors have shape {d.shape} on rank {self.pattern.comm.rank}, which "
                f"owns {n} {what}. Give shape ({n},)."
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
            f"a * A, A / a: expected a scalar, got {kind}. For products with vectors and matrices "
            "write A @ x, for factors of rows A.scale_rows(d), and of columns A.scale_columns(d)."
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
