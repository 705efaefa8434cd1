"""Methods that solve linear systems: frozen settings, by hypre or by mpigrad's own iterations."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers import hypre, krylov
from mpigrad.sparse.solvers.base import LinearSolver, check_diagonal, check_steps
from mpigrad.sparse.solvers.preconditioners import BoomerAMG, Preconditioner

__all__ = ["GMRES", "PCG", "BiCGStab", "Krylov", "Multigrid"]


@dataclasses.dataclass(frozen=True)
class Krylov(LinearSolver):
    """What Krylov methods have in common.

    Attributes
    ----------
    rtol
        Stop when the two-norm of the residual b - A x is below this part of the right-hand side's.
    max_steps
        Most iterations.
    preconditioner
        `BoomerAMG(...)`, by hypre and in double precision: the hierarchy is kept for each pattern
        and preconditioner while the matrix's values stay the same to the bit, on every rank.
        `PFMG(...)`, the same for grid stencils, and faster.
        `Jacobi()`, by mpigrad itself: any floating-point type and no library, but iterations that
        grow with the number of rows along a side of the grid. None: the same without a
        preconditioner.
    """

    rtol: float = 1e-8
    max_steps: int = 500
    preconditioner: Preconditioner | None = BoomerAMG()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        name, preconditioner = type(self).__name__, self.preconditioner
        check_steps(name, self.rtol, self.max_steps)
        if not isinstance(preconditioner, Preconditioner | None):
            raise TypeError(
                f"{name}: the preconditioner must be BoomerAMG(...), PFMG(...), Jacobi() or None, "
                f"not {preconditioner!r}"
            )
        if self.symmetric and preconditioner is not None and not preconditioner.symmetric:
            raise ValueError(
                f"{name}: {preconditioner!r} is not symmetric, as {name} needs it; choose another "
                "relaxation, or GMRES or BiCGStab"
            )

    def check(self, pattern: Pattern, dtype: Any) -> None:
        if self.preconditioner is not None:
            check_diagonal(pattern, type(self.preconditioner).__name__)
        if self._by_hypre:
            hypre.check(self, pattern, dtype)
        else:
            krylov.check(self, dtype)

    def run(
        self,
        pattern: Pattern,
        values: jax.Array,
        b: jax.Array,
        x0: jax.Array,
        known: jax.Array,
        *,
        throw: bool,
        site: int,
    ) -> tuple[jax.Array, jax.Array]:
        by = hypre if self._by_hypre else krylov
        return by.run(self, pattern, values, b, x0, known, throw=throw, site=site)

    @property
    def _by_hypre(self) -> bool:
        return self.preconditioner is not None and self.preconditioner.by_hypre

    @property
    def transposed(self) -> Krylov:
        if self.preconditioner is None:
            return self
        return dataclasses.replace(self, preconditioner=self.preconditioner.transposed)


@dataclasses.dataclass(frozen=True)
class PCG(Krylov):
    """Preconditioned conjugate gradients, for symmetric positive definite matrices.

    (Hestenes, Stiefel 1952.) The adjoint of a solve is a solve with the same matrix, and shares
    its hierarchy.

    Attributes
    ----------
    rtol, max_steps, preconditioner
        See `Krylov`.
    """

    symmetric: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class GMRES(Krylov):
    """Generalised minimal residuals, restarted, preconditioned from the right: for any matrix.

    (Saad, Schultz 1986.) It needs `restart` vectors of memory. All preconditioners of mpigrad are
    fixed linear maps, so that the flexible variant would gain nothing.

    Attributes
    ----------
    rtol, max_steps, preconditioner
        See `Krylov`.
    restart
        Iterations between restarts.
    """

    restart: int = 30
    symmetric: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.restart < 2**31:
            raise ValueError(f"GMRES: restart={self.restart} must be positive and below 2**31")


@dataclasses.dataclass(frozen=True)
class BiCGStab(Krylov):
    """Stabilised bi-conjugate gradients, for any matrix: two products an iteration, little memory.

    (Van der Vorst 1992.) It may break down where GMRES does not.

    Attributes
    ----------
    rtol, max_steps, preconditioner
        See `Krylov`.
    """

    symmetric: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Multigrid(LinearSolver):
    """Multigrid alone: x <- x + M (b - A x), M being one cycle, until the residual is small.

    A Krylov method with the same cycle takes fewer iterations and fails less often; this one needs
    the least memory, and no inner products but the residual's.

    Attributes
    ----------
    cycle
        `BoomerAMG(...)`, or `PFMG(...)` for grid stencils.
    rtol, max_steps
        See `Krylov`.
    """

    cycle: Preconditioner = BoomerAMG()  # noqa: RUF009 (frozen)
    rtol: float = 1e-8
    max_steps: int = 500
    preconditioner: Preconditioner | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    symmetric: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "preconditioner", self.cycle)
        check_steps("Multigrid", self.rtol, self.max_steps)
        if not isinstance(self.cycle, Preconditioner) or not self.cycle.by_hypre:
            raise TypeError(
                f"Multigrid: the cycle must be BoomerAMG(...) or PFMG(...), not {self.cycle!r}"
            )

    def check(self, pattern: Pattern, dtype: Any) -> None:
        check_diagonal(pattern, type(self.cycle).__name__)
        hypre.check(self, pattern, dtype)

    def run(
        self,
        pattern: Pattern,
        values: jax.Array,
        b: jax.Array,
        x0: jax.Array,
        known: jax.Array,
        *,
        throw: bool,
        site: int,
    ) -> tuple[jax.Array, jax.Array]:
        return hypre.run(self, pattern, values, b, x0, known, throw=throw, site=site)

    @property
    def transposed(self) -> Multigrid:
        return dataclasses.replace(self, cycle=self.cycle.transposed)
