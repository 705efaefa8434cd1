"""Matrices that consist of blocks: several fields, each with its own rows and columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import as_array
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["Blocks"]


class Blocks:
    """A square matrix of blocks, as [[A, B], [C, D]] for the two fields of Stokes flow.

    A pytree, whose leaves are the values of the blocks. Vectors are tuples, with this rank's part
    of each field. A rank may own different shares of the fields.

    Parameters
    ----------
    blocks
        A list for each row of blocks, of matrices, or None for blocks of zeros. The blocks of a row
        have the same rows, those of a column the same columns, and both the same stripes.
    schur
        A matrix that is close to C A⁻¹ B - D, where D is the block of the last field on the
        diagonal, and A has the blocks of all others. It is for preconditioners: for Stokes flow the
        mass matrix of the pressure, divided by the viscosity. Only the number of steps depends on
        it, and no derivative is taken with respect to it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import Blocks, Matrix, Pattern
    >>> A = Matrix(Pattern.from_coo([0, 1], [0, 1], n_local=2), jnp.array([2.0, 4.0]))
    >>> C = Matrix(Pattern.from_coo([0, 0], [0, 1], 1, n_local_columns=2), jnp.array([1.0, -1.0]))
    >>> K = Blocks([[A, C.T], [C, None]])
    >>> K @ (jnp.array([1.0, 1.0]), jnp.array([3.0]))
    (Array([5., 1.], dtype=float32), Array([0.], dtype=float32))
    >>> K.shape, K.local_sizes
    ((3, 3), (2, 1))
    """

    blocks: tuple[tuple[Matrix | None, ...], ...]
    schur: Matrix | None

    def __init__(
        self, blocks: Sequence[Sequence[Matrix | None]], schur: Matrix | None = None
    ) -> None:
        rows = tuple(tuple(row) for row in blocks)
        n = len(rows)
        if n == 0 or any(len(row) != n for row in rows):
            raise ValueError(
                f"Blocks: expected as many columns as rows of blocks, got {[len(r) for r in rows]} "
                "columns. Give None for a block of zeros."
            )
        for block in (*(b for row in rows for b in row), schur):
            if not isinstance(block, Matrix | None):
                raise TypeError(
                    f"Blocks: expected matrices or None, got {type(block).__name__}. Make a "
                    "Matrix(pattern, values)."
                )
        for k in range(n):
            sides = [(f"row {k}", b.pattern.n_local) for b in rows[k] if b is not None]
            sides += [
                (f"column {k}", row[k].pattern.n_local_columns)  # type: ignore[union-attr]
                for row in rows
                if row[k] is not None
            ]
            if not sides:
                raise ValueError(
                    f"Blocks: row {k} and column {k} have no matrix, so the size of field {k} is "
                    "not known. Give at least one."
                )
            if len({size for _, size in sides}) > 1:
                listed = ", ".join(f"{size} in {name}" for name, size in sides)
                raise ValueError(
                    f"Blocks: field {k} has different sizes on this rank: {listed}. Make the "
                    "patterns with the same stripes (n_local, n_local_columns)."
                )
        object.__setattr__(self, "blocks", rows)
        object.__setattr__(self, "schur", schur)
        if schur is not None and schur.pattern.n_local != self.local_sizes[-1]:
            raise ValueError(
                f"Blocks: schur has {schur.pattern.n_local} rows on this rank, and the last field "
                f"{self.local_sizes[-1]}. Give a matrix of the last field."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"Blocks: cannot set {name}: it is not changed in place. Make a new one."
        )

    @property
    def patterns(self) -> tuple[tuple[Pattern | None, ...], ...]:
        """The pattern of each block, None for zeros."""
        return tuple(tuple(b and b.pattern for b in row) for row in self.blocks)

    @property
    def pattern(self) -> Pattern:
        """The pattern of `merged`."""
        return _layout(self.patterns).pattern

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The number of this rank's rows of each field."""
        return _layout(self.patterns).sizes

    @property
    def shape(self) -> tuple[int, int]:
        """Global shape."""
        n = _layout(self.patterns).pattern.n_rows
        return n, n

    @property
    def T(self) -> Blocks:
        """The transpose (collective)."""
        n = range(len(self.blocks))
        turned = [[self.blocks[j][i] for j in n] for i in n]
        schur = None if self.schur is None else self.schur.T
        return Blocks([[b if b is None else b.T for b in row] for row in turned], schur)

    def __matmul__(self, x: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Return this rank's part of the product with a vector, a tuple of fields (collective)."""
        return self.split(self.merged() @ self.joined(x))

    def merged(self) -> Matrix:
        """Return the same as one matrix: on each rank the rows of all fields, one after the other.

        Differentiable in the values. The blocks of zeros on the diagonal get a stored diagonal. The
        pattern is made once for the patterns of the blocks (collective), and kept.
        """
        layout = _layout(self.patterns)
        present = [b.values for row in self.blocks for b in row if b is not None]
        dtype = jnp.result_type(*present)
        zeros = [jnp.zeros(layout.n_zeros, dtype)]
        return Matrix(
            layout.pattern, jnp.concatenate([*(v.astype(dtype) for v in present), *zeros])
        )

    def at_boundary(
        self, fixed: Sequence[Any], b: Sequence[Any], values: Sequence[Any] | float = 0.0
    ) -> tuple[Blocks, tuple[jax.Array, ...]]:
        """Prescribe the solution in some rows: `Matrix.at_boundary` for fields (collective).

        Parameters
        ----------
        fixed
            True for the prescribed rows of each field, as NumPy arrays of shape (n_local,).
        b, values
            The right-hand side, and the prescribed values: fields, or one number.

        Returns
        -------
        The blocks with rows and columns eliminated, and the right-hand side. `schur` gets rows of
        the identity, too.
        """
        masks = [np.asarray(mask) for mask in fixed]
        comm, n = self.pattern.comm, range(len(self.blocks))
        rest = tuple(as_array(v) for v in b)
        zero = isinstance(values, float | int) and values == 0
        given = values if isinstance(values, tuple | list) else [values] * len(rest)
        known = [
            jnp.where(m, jnp.asarray(g, v.dtype), jnp.zeros_like(v))
            for m, g, v in zip(masks, given, rest, strict=True)
        ]
        if not zero:
            rest = tuple(v - w for v, w in zip(rest, self @ known, strict=True))
        rest = tuple(jnp.where(m, v, w) for m, v, w in zip(masks, known, rest, strict=True))
        used = comm.mpi.allreduce(np.array([m.any() for m in masks], int)) > 0

        def block(i: int, j: int) -> Matrix | None:
            here = self.blocks[i][j]
            if i == j:
                return _with_ones(here, masks[i], self) if used[i] else here
            if here is None:
                return None
            here = here.scale_rows((~masks[i]).astype(here.dtype)) if used[i] else here
            return here.scale_columns((~masks[j]).astype(here.dtype)) if used[j] else here

        schur = self.schur
        if schur is not None and used[-1]:
            schur = _with_ones(schur, masks[-1], self)
        return Blocks([[block(i, j) for j in n] for i in n], schur), rest

    def of_field(self, k: int, matrix: Matrix) -> Matrix:
        """Return a matrix with a pattern of its own for field k, for solvers.

        They keep one set-up for each pattern, and several fields may have the same one.
        """
        patterns = _layout(self.patterns).pattern.derived.setdefault("of fields", {})
        key = (k, matrix.pattern)
        if key not in patterns:
            patterns[key] = matrix.pattern.with_own_solvers()
        return Matrix(patterns[key], matrix.values)

    def joined(self, x: Sequence[Any]) -> jax.Array:
        """Return the fields of a vector one after the other, shape (sum of the local sizes,)."""
        if not isinstance(x, tuple | list):
            raise TypeError(
                f"Blocks: expected a tuple of fields, got {type(x).__name__}. Give this rank's "
                "part of each field."
            )
        fields = [as_array(v) for v in x]
        shapes = tuple(v.shape for v in fields)
        if shapes != tuple((n,) for n in self.local_sizes):
            raise ValueError(
                f"Blocks: expected a vector of fields with the sizes {self.local_sizes}, got the "
                f"shapes {shapes}. Give this rank's part of each field."
            )
        return jnp.concatenate(fields)

    def split(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return the fields of what `joined` returns."""
        return tuple(jnp.split(x, np.cumsum(self.local_sizes)[:-1]))

    def __repr__(self) -> str:
        return f"Blocks({[list(row) for row in self.blocks]!r}, schur={self.schur!r})"


def _with_ones(block: Matrix | None, mask: np.ndarray, of: Blocks) -> Matrix:
    """Return a block on the diagonal with rows and columns of the identity."""
    if block is not None:
        return block.at_boundary(mask, jnp.zeros(len(mask), block.dtype))[0]
    patterns = of.pattern.derived.setdefault("diagonals", {})
    n, comm = len(mask), of.pattern.comm
    counts = tuple(comm.mpi.allgather(n))
    if counts not in patterns:
        own = sum(counts[: comm.rank]) + np.arange(n)
        patterns[counts] = Pattern.from_coo(own, own, n, comm)
        patterns[counts].derived["of zeros"] = True  # preconditioners cannot solve with it
    dtype = next(b.dtype for row in of.blocks for b in row if b is not None)
    return Matrix(patterns[counts], jnp.asarray(mask, dtype))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The pattern of all blocks, the sizes of fields on this rank, and of diagonals of zeros."""

    pattern: Pattern
    sizes: tuple[int, ...]
    n_zeros: int


def _layout(patterns: tuple[tuple[Pattern | None, ...], ...]) -> _Layout:
    """Return the layout of blocks, made once for the same patterns (collective when it is made)."""
    first = next(p for row in patterns for p in row if p is not None)
    layouts = first.derived.setdefault("blocks", {})
    if patterns not in layouts:
        layouts[patterns] = _make_layout(patterns, first)
    return layouts[patterns]


def _make_layout(patterns: tuple[tuple[Pattern | None, ...], ...], first: Pattern) -> _Layout:
    n, comm = len(patterns), first.comm
    sizes = []
    for k in range(n):
        rows = [p.n_local for p in patterns[k] if p is not None]
        sizes.append((rows or [row[k].n_local_columns for row in patterns if row[k]])[0])  # type: ignore[union-attr]
    # Row r: the sizes of the fields on rank r.
    everywhere = np.array(comm.mpi.allgather(sizes), np.int64).reshape(comm.size, n)
    starts = np.cumsum(everywhere, axis=0) - everywhere  # of each field's stripes
    ends = np.cumsum(everywhere.sum(axis=1))
    places = ends[:, None] - everywhere.sum(axis=1)[:, None]
    places = (
        places + np.cumsum(everywhere, axis=1) - everywhere
    )  # of each field, in the new numbers

    def renumbered(columns: np.ndarray, field: int) -> np.ndarray:
        edges = starts[:, field] + everywhere[:, field]
        owner = np.searchsorted(edges, columns, side="right")
        return places[owner, field] + columns - starts[owner, field]

    all_rows, all_columns = [], []
    for i, row in enumerate(patterns):
        for j, pattern in enumerate(row):
            if pattern is not None:
                stored = np.empty((2, pattern.nnz), np.int64)
                stored[:, pattern.order] = pattern.rows, pattern.columns
                all_rows.append(stored[0] + places[comm.rank, i])
                all_columns.append(renumbered(stored[1], j))
    zeros = [places[comm.rank, k] + np.arange(sizes[k]) for k in range(n) if patterns[k][k] is None]
    merged = Pattern.from_coo(
        np.concatenate([*all_rows, *zeros]),
        np.concatenate([*all_columns, *zeros]),
        sum(sizes),
        comm,
    )
    merged.fields = tuple(sizes)
    return _Layout(merged, tuple(sizes), sum(map(len, zeros)))


def _unflatten(_: None, leaves: Any) -> Blocks:
    # JAX passes placeholders through here: nothing is checked.
    made = object.__new__(Blocks)
    object.__setattr__(made, "blocks", leaves[0])
    object.__setattr__(made, "schur", leaves[1])
    return made


jax.tree_util.register_pytree_with_keys(
    Blocks,
    lambda k: (
        (
            (jax.tree_util.GetAttrKey("blocks"), k.blocks),
            (jax.tree_util.GetAttrKey("schur"), k.schur),
        ),
        None,
    ),
    _unflatten,
    lambda k: ((k.blocks, k.schur), None),
)
