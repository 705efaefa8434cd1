"""A distributed sparse matrix: a pattern and its values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.sparse.pattern import Pattern

__all__ = ["Matrix", "apply"]


def apply(pattern: Pattern, values: jax.Array, pool: jax.Array) -> jax.Array:
    """Rows times own and ghost entries: (nnz,), (n_local + n_ghosts, ...) -> (n_local, ...).

    The cotangent of `values` is made of two gathers and a product.
    """
    gathered = pool.at[pattern.ghosts.position].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
    products = values.reshape(values.shape + (1,) * (pool.ndim - 1)) * gathered
    zeros = jnp.zeros((pattern.n_local, *products.shape[1:]), products.dtype)
    return zeros.at[pattern.row_index].add(
        products, mode="promise_in_bounds", wrap_negative_indices=False
    )


class Matrix:
    """A square sparse matrix, striped by rows over the ranks.

    A pytree with one leaf, the values, so that matrices pass through `jit`, `grad` and `vmap`.

    Parameters
    ----------
    pattern
        Where this rank's entries are.
    values
        This rank's entries, shape (nnz,), in the order in which the pattern's were given.
    """

    pattern: Pattern
    values: jax.Array

    def __init__(self, pattern: Pattern, values: Any) -> None:
        if not isinstance(pattern, Pattern):
            raise TypeError(
                f"Matrix: pattern must be a mpigrad.sparse.Pattern, not {type(pattern).__name__}"
            )
        values = jnp.asarray(values)
        if values.shape != (pattern.nnz,):
            raise ValueError(
                f"Matrix: values have shape {values.shape} on rank {pattern.comm.rank}, where the "
                f"pattern has {pattern.nnz} entries: give shape ({pattern.nnz},)"
            )
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            raise TypeError(f"Matrix: values have dtype {values.dtype}; give floating-point values")
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "values", values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Matrix is not changed in place; make a new one")

    @property
    def shape(self) -> tuple[int, int]:
        """Global shape."""
        return (self.pattern.n_rows, self.pattern.n_rows)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def diagonal(self) -> jax.Array:
        """Diagonal entries of this rank's rows, zero where the pattern has none."""
        return diagonal(self.pattern, self.values)

    def __matmul__(self, x: Any) -> jax.Array:
        """A @ x for this rank's part of x, shape (n_local,) or (n_local, k) (collective)."""
        x = jnp.asarray(x)
        if x.ndim not in (1, 2) or x.shape[0] != self.pattern.n_local:
            raise ValueError(
                f"A @ x: x has shape {x.shape} on rank {self.pattern.comm.rank}, which owns "
                f"{self.pattern.n_local} rows; give ({self.pattern.n_local},) or "
                f"({self.pattern.n_local}, k)"
            )
        return apply(self.pattern, self.values, self.pattern.ghosts.pool(x))

    def __repr__(self) -> str:
        return f"Matrix({self.pattern!r}, values={self.values!r})"


def diagonal(pattern: Pattern, values: jax.Array) -> jax.Array:
    found = values.at[pattern.diagonal_index].get(mode="fill", fill_value=0)
    return jnp.where(pattern.diagonal_index >= 0, found, 0)


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
