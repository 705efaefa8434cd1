"""Solves with blocks: preconditioners that are made of solves with the blocks, and the solve."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from mpigrad.solution import Solution
from mpigrad.sparse.matrix.blocks import Blocks
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.solvers.guesses import Guesses
from mpigrad.sparse.solvers.methods import GMRES, Cycle, Krylov, LinearSolver
from mpigrad.sparse.solvers.nullspace import NullSpace
from mpigrad.sparse.solvers.operator_solve import BlockOperator
from mpigrad.sparse.solvers.preconditioners import Jacobi, Preconditioner

__all__ = ["LSC", "BlockDiagonal", "BlockTriangular", "solve_blocks"]

Function = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LSC:
    """The least-squares commutator, in place of a matrix that is close to the Schur complement.

    (Elman, Howle, Shadid, Shuttleworth & Tuminaro, SIAM J. Sci. Comput. 27, 2006, with the diagonal
    D of A as scaling.) With L = C D⁻¹ B its inverse is L⁻¹ (C D⁻¹ A D⁻¹ B) L⁻¹. It needs no other
    matrix than the blocks, and follows a viscosity that varies as well as convection.

    Attributes
    ----------
    solver
        How L is solved with, as in `BlockDiagonal`.

    Examples
    --------
    >>> from mpigrad.sparse import GMRES, LSC, BlockTriangular, BoomerAMG
    >>> solver = GMRES(preconditioner=BlockTriangular(BoomerAMG(), LSC(BoomerAMG())))
    """

    solver: Any = Jacobi()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Preconditioner | LinearSolver):
            raise TypeError(
                f"LSC: expected a preconditioner or a solver, got {self.solver!r}. Give "
                "BoomerAMG(), Jacobi() or PCG(rtol=1e-8)."
            )


class _OfBlocks(Preconditioner):
    """The part that both preconditioners share. `solvers` has one entry for each field."""

    solvers: tuple[Any, ...]

    def __init__(self, *solvers: Any) -> None:
        name = type(self).__name__
        for k, solver in enumerate(solvers):
            if not isinstance(solver, Preconditioner | LinearSolver | LSC):
                raise TypeError(
                    f"{name}: expected a preconditioner, a solver or LSC for each field, got "
                    f"{solver!r} for field {k}. Give BoomerAMG(), Jacobi(), PCG(rtol=1e-8) or "
                    "others."
                )
            if getattr(solver, "reuse", "equal") != "equal":
                raise ValueError(
                    f"{name}: one cycle has no residual that shows when a hierarchy of earlier "
                    f"values is too old, got {solver!r} for field {k}. Leave out reuse=, or give "
                    "PCG(preconditioner=...) for this field."
                )
            if isinstance(solver, LSC) and k != len(solvers) - 1:
                raise ValueError(f"{name}: LSC is for the last field, got it for field {k}.")
            if isinstance(solver, _OfBlocks):
                raise TypeError(f"{name}: {solver!r} is for blocks, and field {k} is one block.")
        if len(solvers) < 2:
            raise ValueError(f"{name}: expected one solver for each field, got {len(solvers)}.")
        object.__setattr__(self, "solvers", solvers)

    def inverse(self, A: Matrix) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: it is for blocks, got a Matrix. Solve with Blocks([[A, B], "
            "[C, D]])."
        )

    @abc.abstractmethod
    def of(self, A: Blocks, solve: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return the function (r of each field) -> (z of each field)."""

    def check(self, A: Blocks, solver: Krylov) -> None:
        """Raise an error if the preconditioner does not fit the blocks or the method."""
        name, fields = type(self).__name__, len(A.blocks)
        if len(self.solvers) != fields:
            raise ValueError(
                f"{name}: {fields} fields need as many solvers, got {len(self.solvers)}. Give one "
                "for each field."
            )
        for k, inner in enumerate(self.solvers):
            stands_in = k == fields - 1 and (A.schur is not None or isinstance(inner, LSC))
            block = A.blocks[k][k]
            is_zero = block is None or "of zeros" in block.pattern.derived
            if is_zero and not stands_in:
                raise ValueError(
                    f"{name}: the block of field {k} on the diagonal is zero. Give a matrix that "
                    "is close to C A⁻¹ B as Blocks(..., schur=...), or LSC(...) as its solver."
                )
            flexible = isinstance(solver, GMRES) and solver.flexible
            used = inner.solver if isinstance(inner, LSC) else inner
            if isinstance(used, LinearSolver) and used.rtol > 1e-6 and not flexible:
                raise ValueError(
                    f"{name}: {type(used).__name__}(rtol={used.rtol:g}) for field {k} is not a "
                    f"linear map to more digits than that, as {type(solver).__name__} needs it. "
                    "Take GMRES(flexible=True), an rtol of 1e-6 or less, or one cycle of multigrid "
                    "(BoomerAMG())."
                )

    def inverses(self, A: Blocks, solve: Callable[..., Any]) -> list[Function]:
        """Return for each field the function r -> z. That of a Schur complement is positive."""
        made = []
        for k, inner in enumerate(self.solvers):
            if isinstance(inner, LSC):
                made.append(_commutator(A, inner, solve))
            elif k == len(self.solvers) - 1 and A.schur is not None:
                made.append(_inverse(inner, A.of_field(k, A.schur), solve))
            else:
                block = A.blocks[k][k]
                assert block is not None
                made.append(_inverse(inner, A.of_field(k, block), solve))
        return made


@dataclasses.dataclass(frozen=True, init=False)
class BlockDiagonal(_OfBlocks):
    """Solve with the blocks on the diagonal, each by itself. For `MINRES` and others.

    (Silvester & Wathen, SIAM J. Numer. Anal. 31, 1994.) It is positive definite if its parts are.
    In place of the last block it takes S of `Blocks(..., schur=S)`, with a positive sign.

    Parameters
    ----------
    *solvers
        One for each field. One cycle of multigrid: `BoomerAMG(...)`, `PFMG(...)`, or for symmetric
        positive definite blocks `BoxMG(...)`. `Jacobi()` or a `Preconditioner` of your own is
        applied once. A `LinearSolver` solves to its own tolerance: 1e-6 or less, or any in
        `GMRES(flexible=True)`. `LSC(...)` is for the last field.

    Examples
    --------
    >>> from mpigrad.sparse import MINRES, BlockDiagonal, BoomerAMG, Jacobi
    >>> solver = MINRES(preconditioner=BlockDiagonal(BoomerAMG(unknowns_per_cell=2), Jacobi()))
    """

    solvers: tuple[Any, ...]
    __init__ = _OfBlocks.__init__

    def of(self, A: Blocks, solve: Callable[..., Any]) -> Callable[[Any], Any]:
        inverses = self.inverses(A, solve)
        return lambda r: tuple(f(v) for f, v in zip(inverses, r, strict=True))


@dataclasses.dataclass(frozen=True, init=False)
class BlockTriangular(_OfBlocks):
    """Solve with the upper triangle of the blocks, from the last field to the first. For `GMRES`.

    (Murphy, Golub & Wathen, SIAM J. Sci. Comput. 21, 2000.) With exact solves and the exact Schur
    complement GMRES takes two steps. It costs one product with each block above the diagonal more
    than `BlockDiagonal`, and takes about half as many steps.

    Parameters
    ----------
    *solvers
        As for `BlockDiagonal`.

    Examples
    --------
    >>> from mpigrad.sparse import GMRES, BlockTriangular, BoomerAMG, Jacobi
    >>> solver = GMRES(preconditioner=BlockTriangular(BoomerAMG(unknowns_per_cell=2), Jacobi()))
    """

    solvers: tuple[Any, ...]
    __init__ = _OfBlocks.__init__

    @property
    def symmetric(self) -> bool:
        return False

    def of(self, A: Blocks, solve: Callable[..., Any]) -> Callable[[Any], Any]:
        inverses = self.inverses(A, solve)
        last = len(inverses) - 1
        is_schur = A.schur is not None or isinstance(self.solvers[-1], LSC)

        def apply(r: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            z: list[Any] = [None] * len(inverses)
            for k in range(last, -1, -1):
                rest = r[k]
                for j in range(k + 1, last + 1):
                    block = A.blocks[k][j]
                    if block is not None:
                        rest = rest - block @ z[j]
                z[k] = inverses[k](rest)
                if k == last and is_schur:
                    z[k] = -z[k]  # the complement is D - C A⁻¹ B
            return tuple(z)

        return apply


def _sends_everywhere(inner: Any) -> bool:
    """Return False for a preconditioner of the user, whose messages are not known."""
    if isinstance(inner, LSC):
        inner = inner.solver
    return isinstance(inner, LinearSolver | Jacobi) or inner.backend != "jax"


def _inverse(inner: Any, matrix: Matrix, solve: Callable[..., Any]) -> Function:
    """Return the function r -> z of a preconditioner or solver of one block."""
    if isinstance(inner, Preconditioner) and inner.backend == "jax":
        return inner.inverse(matrix)
    solver = inner if isinstance(inner, LinearSolver) else Cycle(inner)
    return lambda r: solve(matrix, r, solver, throw=False).value


def _commutator(A: Blocks, lsc: LSC, solve: Callable[..., Any]) -> Function:
    if len(A.blocks) != 2:
        raise ValueError(f"LSC: it is for two fields, got {len(A.blocks)}. Give Blocks(schur=...).")
    (a, b), (c, _) = A.blocks
    if a is None or b is None or c is None:
        raise ValueError(
            "LSC: the blocks A, B and C must be matrices, got None for one of them. Give "
            "Blocks(schur=...)."
        )
    diagonal = a.diagonal()
    scale = 1 / jnp.where(diagonal == 0, 1, diagonal)
    product = c @ b.scale_rows(scale)
    # Unknowns that are fixed have no entries in C and B, and rows of the identity in A.
    empty = jnp.zeros(product.pattern.n_local, bool)
    if product.pattern.row_without_diagonal < 0:
        empty = product.diagonal() == 0
        index, ones = product.pattern.diagonal_index, empty.astype(product.dtype)
        values = product.values.at[index].add(ones, unique_indices=True)
        product = Matrix(product.pattern, values)
    inverse = _inverse(lsc.solver, product, solve)

    def apply(r: jax.Array) -> jax.Array:
        y = scale * (b @ inverse(jnp.where(empty, 0, r)))
        return jnp.where(empty, r, inverse(c @ (scale * (a @ y))))

    return apply


def solve_blocks(
    A: Blocks,
    b: Any,
    solver: LinearSolver | None,
    x0: Any,
    nullspace: Any,
    throw: bool,
    solve: Callable[..., Solution],
) -> Solution:
    """Solve A x = b for fields, by the verb `solve` for a matrix or a function."""
    if solver is None or not isinstance(solver, LinearSolver):
        raise TypeError(
            "solve: blocks have no default solver. Give MINRES(preconditioner=BlockDiagonal(...)), "
            "GMRES(preconditioner=BlockTriangular(...)) or PETSc(...)."
        )
    flat = A.joined(b)
    fields = tuple(b)
    if solver.needs_matrix:
        if isinstance(x0, Guesses):
            raise TypeError(
                f"solve: {type(solver).__name__} takes no Guesses with blocks. Give x0 as fields."
            )
        space = nullspace and _mapped(nullspace, A.joined)
        first = None if x0 is None else A.joined(x0)
        end = solve(A.merged(), flat, solver, first, nullspace=space, throw=throw)
        return dataclasses.replace(end, value=A.split(end.value))
    matrix, inverse, weights, prepares = A.merged(), None, (), True
    preconditioner = solver.preconditioner
    if isinstance(preconditioner, _OfBlocks):
        assert isinstance(solver, Krylov)
        preconditioner.check(A, solver)
        inverse = preconditioner.of(jax.lax.stop_gradient(A), solve)
        prepares = all(_sends_everywhere(inner) for inner in preconditioner.solvers)
        weights = _weights(jax.lax.stop_gradient(A)) if isinstance(solver, GMRES) else ()
        solver = dataclasses.replace(solver, preconditioner=None)
    elif isinstance(preconditioner, Preconditioner):
        raise TypeError(
            f"solve: {preconditioner!r} is for one matrix, got blocks. Write BlockDiagonal(...) or "
            "BlockTriangular(...) with one solver for each field."
        )
    comm = matrix.pattern.comm
    operator = BlockOperator(
        lambda x: A.split(matrix @ A.joined(x)), inverse, comm, weights, prepares
    )
    space = nullspace and _mapped(nullspace, lambda v: A.split(A.joined(v)))
    return solve(operator, fields, solver, x0, nullspace=space, throw=throw)


def _weights(A: Blocks) -> tuple[jax.Array, ...]:
    """Return 1 / sqrt of each entry of the diagonal, with that of the Schur complement, or 0."""
    weights = []
    for k, (row, n) in enumerate(zip(A.blocks, A.local_sizes, strict=True)):
        block = A.schur if k == len(A.blocks) - 1 and A.schur is not None else row[k]
        d = jnp.zeros(n) if block is None else jnp.abs(block.diagonal())
        weights.append(jnp.where(d > 0, jax.lax.rsqrt(jnp.where(d > 0, d, 1)), 0))
    return tuple(weights)


def _mapped(space: Any, function: Callable[[Any], Any]) -> NullSpace:
    """Return a null space, whose vectors are tuples of fields, with a function of each of them."""

    def mapped(vectors: Any) -> Any:
        if vectors is None or isinstance(vectors, str):
            return vectors
        return [function(v) for v in (vectors if isinstance(vectors, list) else [vectors])]

    given = space if isinstance(space, NullSpace) else NullSpace(space)
    return dataclasses.replace(given, vectors=mapped(given.vectors), left=mapped(given.left))
