"""Preconditioners: frozen settings, and for all but multigrid the function that applies them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, final

import jax
import jax.numpy as jnp

from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = [
    "PFMG",
    "BoomerAMG",
    "BoxMG",
    "Jacobi",
    "Preconditioner",
    "sealed",
    "why_not_structured",
]

COARSENINGS = {"HMIS": 10, "PMIS": 8, "Falgout": 6, "CLJP": 0}
INTERPOLATIONS = {"ext+i": 6, "standard": 8, "classical": 0, "multipass": 4}
# Conjugate gradients need a symmetric smoother, which makes a symmetric cycle.
SYMMETRIC_RELAXATIONS = {
    "l1-symmetric-gauss-seidel": 8,
    "l1-jacobi": 18,
    "chebyshev": 16,
    "symmetric-gauss-seidel": 6,
}
RELAXATIONS = SYMMETRIC_RELAXATIONS | {"forward-gauss-seidel": 3, "backward-gauss-seidel": 4}


_Class = TypeVar("_Class", bound=type)


def sealed(cls: _Class) -> _Class:
    """Decorate a class so that subclassing it is an error."""

    def refuse(subclass: type, **_: Any) -> NoReturn:
        raise TypeError(
            f"{subclass.__name__}: {cls.__name__} is final, since native code does its work, and "
            "cannot be subclassed. Subclass Preconditioner or LinearSolver."
        )

    cls.__init_subclass__ = classmethod(refuse)  # type: ignore[assignment]
    return cls


class Preconditioner(abc.ABC):
    """An approximate inverse of the matrix, with which a method takes fewer steps.

    Subclass it to write your own. A subclass is a frozen dataclass of settings and implements
    `inverse`. Equal settings must be equal and hashable objects, since compiled programs are kept
    by them: read arrays from the matrix. Only the number of steps depends on a preconditioner, so
    no derivative is taken with respect to it.

    Attributes
    ----------
    backend
        Who runs the method with this preconditioner: "jax", which calls `LinearSolver.iterate`, or
        the native libraries "hypre" and "boxmg". Yours: "jax".
    needs_diagonal
        True if every row of the pattern must have a diagonal entry.
    symmetric
        True if it is symmetric positive definite for a symmetric positive definite matrix, as PCG
        needs it. Default: True.

    Examples
    --------
    >>> import dataclasses
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import GMRES, Matrix, Pattern, Preconditioner, solve
    >>> @dataclasses.dataclass(frozen=True)
    ... class RowSums(Preconditioner):
    ...     def inverse(self, A):
    ...         sums = A @ jnp.ones(A.pattern.n_local)  # messages are allowed here
    ...         return lambda r: r / sums
    >>> pattern = Pattern.from_coo([0, 0, 1, 1], [0, 1, 0, 1], n_local=2)
    >>> A = Matrix(pattern, jnp.array([2.0, 1.0, 1.0, 2.0]))
    >>> solver = GMRES(rtol=1e-6, preconditioner=RowSums())
    >>> bool(jnp.allclose(solve(A, jnp.ones(2), solver).value, 1 / 3))
    True
    """

    backend: ClassVar[Literal["jax", "hypre", "boxmg"]] = "jax"
    needs_diagonal: ClassVar[bool] = False

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def transposed(self) -> Preconditioner:
        """The preconditioner of the transposed matrix. Default: the same, made of that matrix."""
        return self

    @abc.abstractmethod
    def inverse(self, A: Matrix) -> Callable[[jax.Array], jax.Array]:
        """Return the function r -> z that approximates z = A⁻¹ r (collective, traced).

        Parameters
        ----------
        A
            The matrix. In the adjoint solve of a method for non-symmetric matrices, its transpose.

        Returns
        -------
        A linear function of this rank's part of a vector, shape (n_local,), with a result of the
        same shape and dtype. It may exchange messages.
        """


@dataclasses.dataclass(frozen=True)
class Jacobi(Preconditioner):
    """The inverse of the matrix's diagonal.

    Rows with a zero on the diagonal are left as they are.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import Jacobi, Matrix, Pattern
    >>> A = Matrix(Pattern.from_coo([0, 1], [0, 1], n_local=2), jnp.array([2.0, 4.0]))
    >>> Jacobi().inverse(A)(jnp.ones(2))
    Array([0.5 , 0.25], dtype=float32)
    """

    needs_diagonal: ClassVar[bool] = True

    def inverse(self, A: Matrix) -> Callable[[jax.Array], jax.Array]:
        diagonal = A.diagonal()
        divisor = jnp.where(diagonal == 0, 1, diagonal)
        return lambda r: r / divisor


class _HyprePreconditioner(Preconditioner):
    """A preconditioner of hypre's."""

    backend: ClassVar[Literal["jax", "hypre", "boxmg"]] = "hypre"
    needs_diagonal: ClassVar[bool] = True

    def inverse(self, A: Matrix) -> Callable[[jax.Array], jax.Array]:
        name = type(self).__name__
        raise TypeError(
            f"{name}: it works in hypre's PCG, GMRES, BiCGStab and Multigrid only. Choose Jacobi() "
            "or a Preconditioner of your own."
        )


@final
@sealed
@dataclasses.dataclass(frozen=True)
class BoomerAMG(_HyprePreconditioner):
    """One V-cycle of hypre's algebraic multigrid (Henson, Yang 2002), for any sparse matrix.

    The defaults suit scalar elliptic equations in two dimensions. In three dimensions take
    `strong_threshold=0.5`, and `aggressive_levels=1` if memory or set-up time is short. They
    also suit non-symmetric matrices, such as convection by upwind differences: the smoother sweeps
    forward and backward. If rows are numbered along the flow, "forward-gauss-seidel" does half
    of the work. This class is final: it cannot be subclassed.

    Attributes
    ----------
    strong_threshold
        Connections stronger than this fraction of a row's strongest one guide the coarsening.
    coarsening
        "HMIS", "PMIS", "Falgout" or "CLJP".
    interpolation
        "ext+i", "standard", "classical" or "multipass".
    max_row_elements
        The longest row of an interpolation matrix. 0 sets no limit.
    relaxation
        The smoother. These are symmetric, as PCG needs them: "l1-symmetric-gauss-seidel",
        "l1-jacobi", "chebyshev", "symmetric-gauss-seidel" (without the l1 scaling, which ensures
        convergence on many ranks). For non-symmetric matrices there are also
        "forward-gauss-seidel" and "backward-gauss-seidel". A transposed solve takes the opposite
        direction.
    aggressive_levels
        The number of finest levels on which coarsening is aggressive.
    max_levels
        The largest number of levels of the hierarchy.
    unknowns_per_cell
        The number of equations of a system such as elasticity. Row i is unknown
        i % unknowns_per_cell of its cell, and unknowns of different kinds are coarsened separately.
    near_null
        True if the near-null vectors of the pattern (`Pattern.near_null`) are interpolated exactly
        on all levels, with coarse grids of whole cells: for an elastic body the rotations. It needs
        `unknowns_per_cell` above 1.
    reuse
        When the hierarchy is kept. "equal": while the matrix's values are the same to the bit, on
        every rank. "stale": also for new values, until a solve takes more than 2 n + 5 iterations,
        where n is the largest number that a solve with its own hierarchy took. Then the hierarchy
        is set up again and the solve repeated. This is for values that change little from solve to
        solve, as in time steps and line searches. Solutions then depend, within the tolerance, on
        the solves before.

    Examples
    --------
    >>> from mpigrad.sparse import GMRES, BoomerAMG
    >>> solver = GMRES(preconditioner=BoomerAMG(relaxation="forward-gauss-seidel"))
    >>> solver.transposed.preconditioner.relaxation
    'backward-gauss-seidel'
    """

    strong_threshold: float = 0.25
    coarsening: Literal["HMIS", "PMIS", "Falgout", "CLJP"] = "HMIS"
    interpolation: Literal["ext+i", "standard", "classical", "multipass"] = "ext+i"
    max_row_elements: int = 4
    relaxation: Literal[
        "l1-symmetric-gauss-seidel",
        "l1-jacobi",
        "chebyshev",
        "symmetric-gauss-seidel",
        "forward-gauss-seidel",
        "backward-gauss-seidel",
    ] = "l1-symmetric-gauss-seidel"
    aggressive_levels: int = 0
    max_levels: int = 25
    unknowns_per_cell: int = 1
    near_null: bool = False
    reuse: Literal["equal", "stale"] = "equal"

    def __post_init__(self) -> None:
        for field, choices in (
            ("coarsening", COARSENINGS),
            ("interpolation", INTERPOLATIONS),
            ("relaxation", RELAXATIONS),
            ("reuse", ("equal", "stale")),
        ):
            _check_choice("BoomerAMG", field, getattr(self, field), choices)
        if not 0 <= self.strong_threshold <= 1:
            raise ValueError(
                "BoomerAMG: strong_threshold must lie between 0 and 1, got "
                f"strong_threshold={self.strong_threshold}. Choose 0.25 in two dimensions, 0.5 in "
                "three."
            )
        for field, least in (
            ("max_row_elements", 0),
            ("aggressive_levels", 0),
            ("max_levels", 1),
            ("unknowns_per_cell", 1),
        ):
            _check_least("BoomerAMG", field, getattr(self, field), least)
        if self.near_null and self.unknowns_per_cell < 2:
            raise ValueError(
                "BoomerAMG: near_null=True needs unknowns_per_cell above 1, got "
                f"unknowns_per_cell={self.unknowns_per_cell}. Give the number of components of the "
                "displacement."
            )

    @property
    def symmetric(self) -> bool:
        return self.relaxation in SYMMETRIC_RELAXATIONS

    @property
    def transposed(self) -> BoomerAMG:
        # The transpose of a sweep forward is a sweep backward with the transposed matrix.
        match self.relaxation:
            case "forward-gauss-seidel":
                return dataclasses.replace(self, relaxation="backward-gauss-seidel")
            case "backward-gauss-seidel":
                return dataclasses.replace(self, relaxation="forward-gauss-seidel")
        return self


@final
@sealed
@dataclasses.dataclass(frozen=True)
class PFMG(_HyprePreconditioner):
    """One V-cycle of hypre's multigrid for grid stencils (Ashby, Falgout 1996).

    It takes patterns of `Pattern.from_stencil` that link a cell to itself and to cells at most one
    step away along each axis, on grids in one to three dimensions. On these it is several times
    faster than `BoomerAMG`. It coarsens one axis at a time, the axis of the strongest links, and
    so handles anisotropy along the axes well. If coefficients jump by orders of magnitude within
    a few cells, or the anisotropy is oblique to the grid, `BoomerAMG` may be the better choice.
    This class is final: it cannot be subclassed.

    Attributes
    ----------
    relaxation
        The smoother: "red-black" Gauss-Seidel, for stencils of face neighbours alone (3, 5 or 7
        points), or weighted "jacobi". "automatic" takes the first if the stencil admits it.
    sweeps
        The number of relaxations before, and after, each coarse correction.
    skip_relaxation
        Leave out the relaxation on levels on which an isotropic problem does not need it. This is
        cheaper, and less robust if convection dominates.
    max_levels
        The largest number of levels of the hierarchy. 0 sets no limit.
    reuse
        When the hierarchy is kept, see `BoomerAMG`.

    Examples
    --------
    >>> from mpigrad.sparse import PCG, PFMG
    >>> PCG(preconditioner=PFMG(sweeps=2)).preconditioner.relaxation
    'automatic'
    """

    relaxation: Literal["automatic", "red-black", "jacobi"] = "automatic"
    sweeps: int = 1
    skip_relaxation: bool = True
    max_levels: int = 0
    reuse: Literal["equal", "stale"] = "equal"

    def __post_init__(self) -> None:
        for field, choices in (
            ("relaxation", ("automatic", "red-black", "jacobi")),
            ("reuse", ("equal", "stale")),
        ):
            _check_choice("PFMG", field, getattr(self, field), choices)
        _check_least("PFMG", "sweeps", self.sweeps, 1)
        _check_least("PFMG", "max_levels", self.max_levels, 0)


@final
@sealed
@dataclasses.dataclass(frozen=True)
class BoxMG(Preconditioner):
    """One V-cycle of mpigrad's black-box multigrid for grid stencils (Dendy 1982).

    It takes the patterns that `PFMG` takes, in `PCG` only, and needs no hypre. A cell between
    coarse cells interpolates from them by its own row of the matrix, so that the interpolation
    follows coefficients that jump. Coarse matrices are Pᵀ A P with this interpolation P. All axes
    with strong links are coarsened at once. The smoother is Gauss-Seidel by colours.

    The cycle runs in single precision. `PCG` iterates, and computes its residual, in double
    precision. Levels are distributed while they are large. Smaller ones are gathered, and all ranks
    do the same work on them. This class is final: it cannot be subclassed.

    Attributes
    ----------
    reuse
        When the hierarchy is kept, see `BoomerAMG`.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mpigrad.grid import Grid
    >>> from mpigrad.sparse import PCG, BoxMG, Matrix, Pattern, solve
    >>> pattern = Pattern.from_stencil(Grid((50,), (1.0,)), [(0,), (-1,), (1,)])
    >>> with jax.enable_x64(True):
    ...     A = Matrix.assemble(pattern, [jnp.full(50, v) for v in (2.1, -1.0, -1.0)])
    ...     u = solve(A, A @ jnp.ones(50), PCG(preconditioner=BoxMG())).value
    ...     print(bool(abs(u - 1).max() < 1e-6))
    True
    """

    backend: ClassVar[Literal["jax", "hypre", "boxmg"]] = "boxmg"
    needs_diagonal: ClassVar[bool] = True
    reuse: Literal["equal", "stale"] = "equal"

    def __post_init__(self) -> None:
        _check_choice("BoxMG", "reuse", self.reuse, ("equal", "stale"))

    def inverse(self, A: Matrix) -> Callable[[jax.Array], jax.Array]:
        raise TypeError(
            "BoxMG: it works in PCG(preconditioner=BoxMG()) and for a field of blocks, not in a "
            "method of your own. Choose Jacobi() or a Preconditioner of your own."
        )


def _check_choice(name: str, field: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(
            f"{name}: {field} must be one of {', '.join(choices)}, got {field}={value!r}. Choose "
            "one of them."
        )


def _check_least(name: str, field: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(
            f"{name}: {field} must be at least {least}, got {field}={value}. Raise it."
        )


def why_not_structured(pattern: Pattern) -> str:
    """Return why PFMG cannot take a pattern, or an empty string if it can."""
    if pattern.stencil is None:
        return "it was not made from a grid's stencil. Make it with Pattern.from_stencil"
    far = [offset for offset in pattern.stencil.offsets if any(abs(step) > 1 for step in offset)]
    if far:
        return f"the stencil reaches {far[0]}, but PFMG takes one step along each axis only"
    return ""
