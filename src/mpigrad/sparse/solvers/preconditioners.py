"""Preconditioners: frozen settings, and what they do is the solver's affair."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

__all__ = ["PFMG", "BoomerAMG", "Jacobi", "Preconditioner"]

COARSENINGS = {"HMIS": 10, "PMIS": 8, "Falgout": 6, "CLJP": 0}
INTERPOLATIONS = {"ext+i": 6, "standard": 8, "classical": 0, "multipass": 4}
# What conjugate gradients need: a symmetric smoother makes a symmetric cycle.
SYMMETRIC_RELAXATIONS = {
    "l1-symmetric-gauss-seidel": 8,
    "l1-jacobi": 18,
    "chebyshev": 16,
    "symmetric-gauss-seidel": 6,
}
RELAXATIONS = SYMMETRIC_RELAXATIONS | {"forward-gauss-seidel": 3, "backward-gauss-seidel": 4}


class Preconditioner:
    """What makes a Krylov method converge in fewer steps: an approximate inverse of the matrix.

    Subclasses are frozen dataclasses: equal settings are equal objects.

    Attributes
    ----------
    by_hypre
        Whether it is hypre's, and so are the methods that it preconditions.
    symmetric
        Whether it is symmetric for a symmetric matrix, as conjugate gradients need it.
    """

    by_hypre: ClassVar[bool] = True

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def transposed(self) -> Preconditioner:
        """The one for the transposed matrix."""
        return self


@dataclasses.dataclass(frozen=True)
class Jacobi(Preconditioner):
    """The inverse of the matrix's diagonal."""

    by_hypre: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class BoomerAMG(Preconditioner):
    """One V-cycle of hypre's algebraic multigrid (Henson, Yang 2002), for any sparse matrix.

    The defaults suit scalar elliptic equations in two dimensions. In three dimensions take
    `strong_threshold=0.5`, and `aggressive_levels=1` where memory or set-up time is short. They
    also suit non-symmetric matrices, such as convection by upwind differences: the smoother sweeps
    forward and backward. Where rows are numbered along the flow, "forward-gauss-seidel" does half
    of the work.

    Attributes
    ----------
    strong_threshold
        Connections stronger than this part of a row's strongest one guide the coarsening.
    coarsening
        "HMIS", "PMIS", "Falgout" or "CLJP".
    interpolation
        "ext+i", "standard", "classical" or "multipass".
    max_row_elements
        Longest row of an interpolation matrix; 0 leaves rows as they come.
    relaxation
        Smoother. Symmetric, as PCG needs it: "l1-symmetric-gauss-seidel", "l1-jacobi",
        "chebyshev", "symmetric-gauss-seidel" (without the l1 scaling, which makes sure of
        convergence on many ranks). For non-symmetric matrices also "forward-gauss-seidel" and
        "backward-gauss-seidel"; a transposed solve takes the other one.
    aggressive_levels
        Finest levels on which coarsening is aggressive.
    max_levels
        Most levels of the hierarchy.
    unknowns_per_cell
        Of a system of equations, such as elasticity: row i is unknown i % unknowns_per_cell of its
        cell, and unknowns of different kinds are coarsened apart.
    reuse
        When the hierarchy is kept. "equal": while the matrix's values are the same to the bit, on
        every rank. "stale": also for new values, until a solve takes more than twice the
        iterations (and 5 more) that solves with a hierarchy of their own took; then it is set up
        anew and the solve repeated. For values that change little from solve to solve, as in
        time steps and line searches; solutions then depend, within the tolerance, on what was
        solved before.
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
    reuse: Literal["equal", "stale"] = "equal"

    def __post_init__(self) -> None:
        for field, known in (
            ("coarsening", COARSENINGS),
            ("interpolation", INTERPOLATIONS),
            ("relaxation", RELAXATIONS),
            ("reuse", ("equal", "stale")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"BoomerAMG: {field}={getattr(self, field)!r} is not one of {', '.join(known)}"
                )
        if not 0 <= self.strong_threshold <= 1:
            raise ValueError(
                f"BoomerAMG: strong_threshold={self.strong_threshold} must lie between 0 and 1"
            )
        if min(self.max_row_elements, self.aggressive_levels) < 0:
            raise ValueError(
                "BoomerAMG: max_row_elements and aggressive_levels must not be negative"
            )
        if min(self.max_levels, self.unknowns_per_cell) < 1:
            raise ValueError("BoomerAMG: max_levels and unknowns_per_cell must be at least 1")

    @property
    def symmetric(self) -> bool:
        return self.relaxation in SYMMETRIC_RELAXATIONS

    @property
    def transposed(self) -> BoomerAMG:
        # What a sweep forward does for A, a sweep backward does for its transpose.
        match self.relaxation:
            case "forward-gauss-seidel":
                return dataclasses.replace(self, relaxation="backward-gauss-seidel")
            case "backward-gauss-seidel":
                return dataclasses.replace(self, relaxation="forward-gauss-seidel")
        return self


@dataclasses.dataclass(frozen=True)
class PFMG(Preconditioner):
    """One V-cycle of hypre's multigrid for grid stencils (Ashby, Falgout 1996).

    For patterns of `Pattern.from_stencil` that link a cell to itself and to cells at most one step
    away along each axis, on grids in one to three dimensions; several times faster than
    `BoomerAMG` where both work. It coarsens one axis at a time, that of the strongest links, and
    so takes anisotropy along the axes well. Where coefficients jump by orders of magnitude within
    a few cells, or the anisotropy is oblique to the grid, `BoomerAMG` may be the better choice.

    Attributes
    ----------
    relaxation
        Smoother: "red-black" Gauss-Seidel, which stencils of face neighbours alone admit (3, 5 or
        7 points), or weighted "jacobi". "automatic" takes the first where it can.
    sweeps
        Relaxations before, and after, each coarse correction.
    skip_relaxation
        Leave out the relaxation on levels where an isotropic problem does not need it: cheaper, and
        where convection dominates less robust.
    max_levels
        Most levels of the hierarchy; 0 is as many as there are.
    reuse
        When the hierarchy is kept, see `BoomerAMG`.
    """

    relaxation: Literal["automatic", "red-black", "jacobi"] = "automatic"
    sweeps: int = 1
    skip_relaxation: bool = True
    max_levels: int = 0
    reuse: Literal["equal", "stale"] = "equal"

    def __post_init__(self) -> None:
        for field, known in (
            ("relaxation", ("automatic", "red-black", "jacobi")),
            ("reuse", ("equal", "stale")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"PFMG: {field}={getattr(self, field)!r} is not one of {', '.join(known)}"
                )
        if self.sweeps < 1 or self.max_levels < 0:
            raise ValueError("PFMG: sweeps must be at least 1, max_levels must not be negative")
