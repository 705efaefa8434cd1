"""Null spaces of singular systems: projections, and the checks before a solve.

With orthonormal null vectors Z of A and left null vectors W, the solution of A x = b is x = B b.
Here B is the inverse of (1 - W Wᴴ) A (1 - Z Zᴴ) as a map between the complements of Z and W, so
Bᴴ is the same for Aᴴ with Z and W exchanged. Every derivative of a solve is such a solve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import as_array, noise, two_norms
from mpigrad.operations import allreduce, require
from mpigrad.solution import Result
from mpigrad.sparse.solvers.methods import LinearSolver

__all__ = [
    "NullSpace",
    "as_nullspace",
    "check_nullspace",
    "from_orthonormal",
    "mark_faults",
    "orthonormal",
    "projected",
    "without_nullspace",
]


@dataclasses.dataclass(frozen=True, eq=False)
class NullSpace:
    """The null space of a singular matrix, for `solve`, `newton` and `fem.solve`.

    The solution is then the one that is orthogonal to the null space, and its derivatives are exact
    to any order. The vectors are checked in each solve.

    Attributes
    ----------
    vectors
        "constants", or a vector like b (this rank's part), or a list of such vectors, linearly
        independent. `fem.solve` also takes "rigid motions". For blocks a tuple of fields is one
        vector.
    left
        The left null space, the vectors w with wᴴ A = 0, in the same forms. Default: `vectors`, as
        for symmetric matrices.
    project
        True to remove the part of b along the left null space, so that x solves the system in the
        least-squares sense. Default: such a part is an error if it is above the tolerance.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import PCG, Jacobi, Matrix, NullSpace, Pattern, solve
    >>> pattern = Pattern.from_coo([0, 0, 1, 1], [0, 1, 0, 1], n_local=2)
    >>> A = Matrix(pattern, jnp.array([1.0, -1.0, -1.0, 1.0]))
    >>> solver = PCG(rtol=1e-5, preconditioner=Jacobi())
    >>> solve(A, jnp.array([1.0, -1.0]), solver, nullspace="constants").value
    Array([ 0.5, -0.5], dtype=float32)
    >>> space = NullSpace("constants", project=True)
    >>> x = solve(A, jnp.array([3.0, 1.0]), solver, nullspace=space).value
    >>> bool(jnp.allclose(x, jnp.array([0.5, -0.5]), atol=1e-5))
    True
    """

    vectors: Any
    left: Any = None
    project: bool = False

    def remove_from(self, x: jax.Array, comm: Communicator | None = None) -> jax.Array:
        """Return an array without its part along `vectors` (collective).

        Parameters
        ----------
        x
            This rank's part of a vector, floating-point or complex. The vectors have its shape.
        comm
            The communicator. Default: the communicator of the enclosing `with`, or all ranks.

        Raises
        ------
        TypeError, ValueError
            On this rank: if `x` has another dtype, or a vector another shape.
        """
        comm, x = resolve(comm), as_array(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"NullSpace.remove_from: x must be floating-point or complex, got {x.dtype}. "
                "Convert it."
            )

        def flat(v: Any) -> jax.Array:
            if jnp.shape(v) != x.shape:
                raise ValueError(
                    f"NullSpace.remove_from: a null vector has shape {jnp.shape(v)}, but x has "
                    f"shape {x.shape} on rank {comm.rank}. Give vectors of its shape."
                )
            return as_array(v).reshape(-1)

        vectors = _vectors(self.vectors, flat, x.size, x.dtype)
        basis = _orthonormal(vectors, comm)
        return projected(basis[None], x.reshape(1, -1), comm).reshape(x.shape)


def as_nullspace(given: Any, solver: LinearSolver | None = None) -> NullSpace:
    """Return the argument `nullspace` of a solver as a `NullSpace`."""
    space = given if isinstance(given, NullSpace) else NullSpace(given)
    if space.left is not None and solver is not None and solver.symmetric:
        raise ValueError(
            f"solve: a left null space is for matrices without symmetry, got one for "
            f"{type(solver).__name__}, which solves symmetric systems. Leave out left=, or solve "
            "with GMRES()."
        )
    return space


def orthonormal(
    space: NullSpace, flat: Callable[[Any], jax.Array], size: int, dtype: Any, comm: Communicator
) -> jax.Array:
    """Return orthonormal null vectors, and then left null vectors if they differ.

    Parameters
    ----------
    flat
        Checks a vector of the user, and flattens it.
    size
        The number of this rank's entries.

    Returns
    -------
    The vectors, shape (1 or 2, k, size). They hold NaN if the vectors are linearly dependent. It is
    differentiable in the vectors.
    """
    sides = [_vectors(space.vectors, flat, size, dtype)]
    if space.left is not None:
        sides.append(_vectors(space.left, flat, size, dtype))
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                "NullSpace: a square matrix has as many left null vectors as null vectors, got "
                f"{len(sides[1])} and {len(sides[0])}. Give all of them."
            )
    return jnp.stack([_orthonormal(v, comm) for v in sides])


def without_nullspace(dtype: Any) -> Any:
    """Return no vectors, for solves with regular matrices, in the form of `orthonormal`."""
    return np.zeros((1, 0, 0), dtype)


def from_orthonormal(null: jax.Array) -> NullSpace | None:
    """Return the `NullSpace` of vectors from `orthonormal`, or None if there are none."""
    if null.shape[1] == 0:
        return None
    return NullSpace(list(null[0]), list(null[1]) if len(null) > 1 else None, project=True)


def _vectors(vectors: Any, flat: Callable[[Any], jax.Array], size: int, dtype: Any) -> jax.Array:
    if isinstance(vectors, str):
        if vectors != "constants":
            raise ValueError(
                f"NullSpace: expected 'constants' or vectors, got {vectors!r}. Give one vector, or "
                "a list of vectors."
            )
        return jnp.ones((1, size), dtype)
    several = vectors if isinstance(vectors, list | tuple) else [vectors]
    if not several:
        raise ValueError(
            "NullSpace: expected at least one vector, got an empty list. Leave it out."
        )
    return jnp.stack([flat(v).astype(dtype) for v in several])


def _orthonormal(v: jax.Array, comm: Communicator) -> jax.Array:
    """Orthonormalise rows by Cholesky factors of their inner products, twice.

    (Yamamoto, Nakatsukasa, Yanagisawa & Fukaya, Electron. Trans. Numer. Anal. 44, 2015.)
    """
    v = v / jnp.stack(two_norms(*v, comm=comm))[:, None].astype(v.dtype)
    for _ in range(2 if len(v) > 1 else 0):
        factor = jnp.linalg.cholesky(allreduce(v @ v.conj().T, comm=comm))
        # The squares of two vectors' difference are rounding.
        pivot = jnp.min(jnp.diagonal(factor).real)
        factor = jnp.where(pivot > 10 * jnp.finfo(v.dtype).eps ** 0.5, factor, jnp.nan)
        v = jax.scipy.linalg.solve_triangular(factor, v, lower=True)
    return v


def _parts(vectors: jax.Array, rows: jax.Array, comm: Communicator) -> jax.Array:
    """Return the inner products of vectors (1 or B, k, n) and rows (B, n), shape (B, k)."""
    return allreduce(jnp.sum(vectors.conj() * rows[:, None], axis=-1), comm=comm)


def projected(vectors: jax.Array, rows: jax.Array, comm: Communicator) -> jax.Array:
    """Return rows (B, n) without their parts along orthonormal vectors (1 or B, k, n).

    Twice: a row may lie along the vectors but for rounding.
    """
    for _ in range(2):
        part = _parts(vectors, rows, comm)
        rows = rows - jnp.sum(part[..., None] * vectors, axis=1)
    return rows


def into_range(vectors: jax.Array, rows: jax.Array, comm: Communicator) -> jax.Array:
    """Return `projected`, with zeros for rows of which only rounding is left."""
    rest = projected(vectors, rows, comm)
    sizes = jnp.stack([jnp.max(jnp.abs(v), axis=-1, initial=0) for v in (rest, rows)])
    left, row_sizes = allreduce(sizes, op=MPI.MAX, comm=comm)
    tiny = left <= 16 * jnp.finfo(rows.dtype).eps * row_sizes
    return jnp.where(tiny[:, None], 0, rest)


def check_nullspace(
    null: jax.Array,
    product: Callable[[jax.Array], jax.Array],
    b: jax.Array | None,
    solver: LinearSolver,
    comm: Communicator,
    first: int,
    head: str,
    throw: bool,
) -> jax.Array:
    """Return 0, or the `Result` that says why the null space does not fit the system.

    Parameters
    ----------
    null
        Shape (1 or 2, k, n), from `orthonormal`.
    product
        The function v -> A v.
    b
        The right-hand side, shape (n,), whose part along the left null vectors must be below the
        tolerance. None: it may have one.
    first
        An index of this rank's first entry, which differs between ranks.
    throw
        Raise an error on all ranks, with `head`.
    """
    right, left = null[0], null[-1]
    weights = np.linspace(1, 2, len(right))
    z = jnp.asarray(weights / np.linalg.norm(weights), right.dtype) @ right
    g = noise(first, z.shape[0], z.dtype, 2654435761)
    moved = product(g)
    rhs = jnp.zeros_like(g) if b is None else b
    change, size, length, norm = two_norms(product(z), moved, g, rhs, comm=comm)
    parts = _parts(left[None], jnp.stack([moved, rhs]), comm)
    outside, excess = jnp.max(jnp.abs(parts), axis=1)
    tiny = jnp.finfo(size.dtype).eps ** (2 / 3)
    scale = size / length  # about |A|
    rounding = max(float(solver.rtol), 100 * float(jnp.finfo(size.dtype).eps))
    finite = jnp.isfinite(change + outside)
    is_right, is_left = change <= tiny * scale, outside <= tiny * size
    consistent = ~(excess > rounding * norm)
    if throw:
        require(
            finite,
            f"{head}nullspace: the vectors are linearly dependent, or they or the matrix hold NaN "
            "or infinity. Give independent vectors.",
            comm=comm,
        )
        require(
            is_right,
            f"{head}nullspace: {Result.WRONG_NULLSPACE.message}: |A z| is {{}} for a combination z "
            "of them with |z| = 1, and |A| is about {}. Give vectors with A z = 0.",
            change, scale, comm=comm,
        )  # fmt: skip
        require(
            is_left,
            f"{head}nullspace: {Result.WRONG_NULLSPACE.message} from the left: the part of A g "
            "along them is {} for a vector g with |A g| = {}. Give the left null space, vectors "
            "w with wᴴ A = 0, as NullSpace(vectors, left=...).",
            outside, size, comm=comm,
        )  # fmt: skip
        require(
            consistent,
            f"{head}{Result.INCONSISTENT.message}: its part along the left null space is {{}}, and "
            f"|b| is {{}} (rtol={solver.rtol:.3g}). Remove this part from b, or solve for the rest "
            "with nullspace=NullSpace(..., project=True).",
            excess, norm, comm=comm,
        )  # fmt: skip
    fits = finite & is_right & is_left
    return jnp.where(fits, jnp.where(consistent, 0, Result.INCONSISTENT), Result.WRONG_NULLSPACE)


def mark_faults(x: jax.Array, info: jax.Array, faults: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return NaN and the results of `check_nullspace` where they are not 0."""
    result = jnp.where(faults > 0, faults.astype(info.dtype), info[..., 0])
    return jnp.where(faults[..., None] > 0, jnp.nan, x), info.at[..., 0].set(result)
