"""Methods that solve linear systems: frozen settings, run by hypre or by mpigrad's iterations."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, final

import jax

from mpigrad.sparse.solvers.base import LinearSolver, check_steps
from mpigrad.sparse.solvers.krylov.bicgstab import bicgstab
from mpigrad.sparse.solvers.krylov.conjugate_gradients import pcg
from mpigrad.sparse.solvers.krylov.gmres import gmres
from mpigrad.sparse.solvers.krylov.system import LinearSystem, Outcome
from mpigrad.sparse.solvers.preconditioners import BoomerAMG, Preconditioner, sealed

__all__ = ["GMRES", "PCG", "BiCGStab", "Krylov", "Multigrid"]


@dataclasses.dataclass(frozen=True)
class Krylov(LinearSolver):
    """The settings that all Krylov methods have.

    Attributes
    ----------
    rtol
        The tolerance: stop when |b - A x| <= rtol |b|, in the two-norm over all ranks.
    max_steps
        The largest number of iterations.
    preconditioner
        `BoomerAMG(...)`, by hypre and in double precision: the hierarchy is kept for each pattern
        and preconditioner while the matrix's values stay the same to the bit, on every rank.
        `PFMG(...)`, the same for grid stencils, and faster. `BoxMG(...)`, for grid stencils in PCG,
        by mpigrad itself, and faster than PFMG. `Jacobi()`, by mpigrad itself: it takes any
        floating-point type and needs no library, but the number of iterations grows with the number
        of rows along a side of the grid. A `Preconditioner` of your own. None: no preconditioner.
    """

    rtol: float = 1e-8
    max_steps: int = 500
    preconditioner: Preconditioner | None = BoomerAMG()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        name, preconditioner = type(self).__name__, self.preconditioner
        check_steps(name, self.rtol, self.max_steps)
        if not isinstance(preconditioner, Preconditioner | None):
            raise TypeError(
                f"{name}: the preconditioner must be BoomerAMG(...), PFMG(...), BoxMG(...), "
                "Jacobi(), a Preconditioner of your own or None, got "
                f"{preconditioner!r}. Choose one of them."
            )
        if self.symmetric and preconditioner is not None and not preconditioner.symmetric:
            raise ValueError(
                f"{name}: the preconditioner must be symmetric, but {preconditioner!r} is not. "
                "Choose another relaxation, or solve with GMRES or BiCGStab."
            )

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

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import PCG, Jacobi, Matrix, Pattern, solve
    >>> pattern = Pattern.from_coo([0, 0, 1, 1], [0, 1, 0, 1], n_local=2)
    >>> A = Matrix(pattern, jnp.array([2.0, 1.0, 1.0, 2.0]))
    >>> solver = PCG(rtol=1e-6, preconditioner=Jacobi())
    >>> bool(jnp.allclose(solve(A, jnp.ones(2), solver).value, 1 / 3))
    True
    """

    symmetric: ClassVar[bool] = True
    needs_positive_definite: ClassVar[bool] = True
    judges_residual: ClassVar[bool] = True
    hypre_method: ClassVar[int | None] = 0

    def iterate(self, system: LinearSystem) -> Outcome:
        return pcg(system)


@dataclasses.dataclass(frozen=True)
class GMRES(Krylov):
    """Generalised minimal residuals, restarted, preconditioned from the right, for any matrix.

    (Saad, Schultz 1986.) It needs `restart` vectors of memory. All preconditioners of mpigrad are
    fixed linear maps, so that the flexible variant would gain nothing.

    Attributes
    ----------
    rtol, max_steps, preconditioner
        See `Krylov`.
    restart
        The number of iterations between restarts.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import GMRES, solve
    >>> A = lambda v: jnp.array([2 * v[0] + v[1], 2 * v[1]])  # not symmetric
    >>> x = solve(A, jnp.array([3.0, 2.0]), GMRES(rtol=1e-6, preconditioner=None)).value
    >>> bool(jnp.allclose(x, 1, atol=1e-5))
    True
    """

    restart: int = 30
    judges_residual: ClassVar[bool] = True
    hypre_method: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.restart < 2**31:
            raise ValueError(
                f"{type(self).__name__}: restart must be positive and below 2**31, got "
                f"restart={self.restart}. Choose one such as 30."
            )

    def iterate(self, system: LinearSystem) -> Outcome:
        return gmres(system, self.restart)


@dataclasses.dataclass(frozen=True)
class BiCGStab(Krylov):
    """Stabilised bi-conjugate gradients, for any matrix: two products a step, little memory.

    (Van der Vorst 1992.) It may break down on systems that GMRES solves.

    Attributes
    ----------
    rtol, max_steps, preconditioner
        See `Krylov`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import BiCGStab, solve
    >>> A = lambda v: jnp.array([2 * v[0] + v[1], 2 * v[1]])  # not symmetric
    >>> x = solve(A, jnp.array([3.0, 2.0]), BiCGStab(rtol=1e-6, preconditioner=None)).value
    >>> bool(jnp.allclose(x, 1, atol=1e-5))
    True
    """

    judges_residual: ClassVar[bool] = True
    hypre_method: ClassVar[int | None] = 2

    def iterate(self, system: LinearSystem) -> Outcome:
        return bicgstab(system)


@final
@sealed
@dataclasses.dataclass(frozen=True)
class Multigrid(LinearSolver):
    """Multigrid alone: x <- x + M (b - A x), where M is one cycle, until the residual is small.

    A Krylov method with the same cycle takes fewer iterations and fails less often. This method
    needs the least memory, and no inner products other than the residual's. hypre runs it, so this
    class is final: it cannot be subclassed.

    Attributes
    ----------
    cycle
        `BoomerAMG(...)`, or `PFMG(...)` for grid stencils.
    rtol, max_steps
        See `Krylov`.

    Examples
    --------
    >>> from mpigrad.sparse import PFMG, Multigrid
    >>> Multigrid(PFMG(), rtol=1e-6).max_steps
    500
    """

    cycle: Preconditioner = BoomerAMG()  # noqa: RUF009 (frozen)
    rtol: float = 1e-8
    max_steps: int = 500
    preconditioner: Preconditioner | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    needs_matrix: ClassVar[bool] = True
    judges_residual: ClassVar[bool] = True
    hypre_method: ClassVar[int | None] = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "preconditioner", self.cycle)
        check_steps("Multigrid", self.rtol, self.max_steps)
        if not isinstance(self.cycle, Preconditioner) or not self.cycle.by_hypre:
            raise TypeError(
                f"Multigrid: the cycle must be BoomerAMG(...) or PFMG(...), got {self.cycle!r}. "
                "Choose one of them."
            )

    @property
    def transposed(self) -> Multigrid:
        return dataclasses.replace(self, cycle=self.cycle.transposed)

    def iterate(self, system: LinearSystem) -> tuple[jax.Array, Any]:
        raise TypeError("Multigrid: only hypre runs it. Solve with a Matrix in float64.")
