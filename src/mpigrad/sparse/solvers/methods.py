"""Methods that solve linear systems: frozen settings, and iterations on a linear system."""

from __future__ import annotations

import abc
import copy
import dataclasses
from typing import Any, ClassVar, Literal, final

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.krylov import LinearSystem, Outcome, bicgstab, gmres, minres, pcg
from mpigrad.sparse.solvers.libraries import hypre_available
from mpigrad.sparse.solvers.preconditioners import (
    PFMG,
    BoomerAMG,
    BoxMG,
    Jacobi,
    Preconditioner,
    sealed,
    why_not_structured,
)

__all__ = [
    "GMRES",
    "INFO",
    "MINRES",
    "PCG",
    "BiCGStab",
    "Cycle",
    "Krylov",
    "LinearSolver",
    "Multigrid",
    "check_diagonal",
    "check_hashable",
    "check_steps",
    "default_solver",
    "request_text",
]

# ---- The protocol of linear solvers: frozen settings, and iterations on a linear system ----


# The entries of a solve's info, for each right-hand side and in its real dtype: `Result`, steps,
# relative residual |b - A x| / |b|, set-ups of the preconditioner so far, and the id of the
# matrix's values (0: none).
INFO = 5


class LinearSolver(abc.ABC):
    """A method that solves A x = b. Subclass it to write your own.

    A subclass is a frozen dataclass with the settings of the method, and implements `iterate`.
    Equal settings must be equal and hashable objects, since compiled programs are kept by them.
    `solve` then differentiates the solution, not the iterations: an adjoint solve calls `iterate`
    with the transposed matrix.

    `solve` computes the residual of the vector that `iterate` returns. If the residual is above
    the tolerance, all ranks raise an error, so that a wrong solver cannot give a wrong gradient.

    Attributes
    ----------
    symmetric
        True for a method that accepts symmetric matrices only. Then the matrix is checked, and the
        adjoint solve takes the matrix in place of its transpose. Default: False.
    rtol, max_steps
        The tolerance |b - A x| <= rtol |b|, and the largest number of steps.
    preconditioner
        A `Preconditioner`, or None.
    hypre_method
        The index of hypre's method with this name, or None. A subclass with its own `iterate` has
        none.
    needs_matrix
        True for a method that cannot solve with a function in place of a matrix.
    needs_positive_definite
        True for a method that accepts matrices with a positive diagonal only.
    judges_residual
        True for built-in methods, which check their input and end with the true residual.
    keeps_factors
        True for a method that can solve with the transpose of a matrix that it has kept.

    Examples
    --------
    >>> import dataclasses
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mpigrad import sparse
    >>> @dataclasses.dataclass(frozen=True)
    ... class Richardson(sparse.LinearSolver):
    ...     damping: float = 0.5
    ...     rtol: float = 1e-5
    ...     max_steps: int = 1000
    ...     preconditioner: sparse.Preconditioner | None = None
    ...
    ...     def iterate(self, system):
    ...         (bb,) = system.dots((system.b, system.b))
    ...
    ...         def running(state):
    ...             x, r, rr, steps = state
    ...             return (rr > self.rtol**2 * bb) & (steps < self.max_steps)
    ...
    ...         def step(state):
    ...             x, r, rr, steps = state
    ...             x = x + self.damping * system.precondition(r)
    ...             r = system.b - system.product(x)
    ...             return x, r, system.dots((r, r))[0], steps + 1
    ...
    ...         r = system.b - system.product(system.x0)
    ...         start = system.x0, r, system.dots((r, r))[0], 0
    ...         x, _, _, steps = jax.lax.while_loop(running, step, start)
    ...         return x, steps
    >>> solution = sparse.solve(lambda v: 1.5 * v, jnp.ones(2), Richardson())
    >>> bool(jnp.allclose(solution.value, 2 / 3)), int(solution.stats["num_steps"])
    (True, 9)
    """

    symmetric: ClassVar[bool] = False
    hypre_method: ClassVar[int | None] = None
    needs_matrix: ClassVar[bool] = False
    needs_positive_definite: ClassVar[bool] = False
    judges_residual: ClassVar[bool] = False
    keeps_factors: ClassVar[bool] = False
    rtol: float
    max_steps: int
    preconditioner: Preconditioner | None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Reset the attributes that describe the iterations if a subclass has its own."""
        super().__init_subclass__(**arguments)
        if "iterate" in cls.__dict__:
            cls.hypre_method = cls.__dict__.get("hypre_method")
            cls.judges_residual = cls.__dict__.get("judges_residual", False)

    @property
    def transposed(self) -> LinearSolver:
        """The same method for the transposed matrix."""
        return self

    @property
    def backend(self) -> Literal["jax", "hypre", "boxmg", "petsc"]:
        """Who runs the method: that of the preconditioner."""
        preconditioner = self.preconditioner
        return preconditioner.backend if isinstance(preconditioner, Preconditioner) else "jax"

    @property
    def for_function(self) -> LinearSolver:
        """The same method for a function in place of a matrix."""
        return self

    @property
    def for_matrix(self) -> LinearSolver:
        """The same method for a matrix."""
        return self

    def check(self, pattern: Pattern, dtype: Any) -> None:  # noqa: B027 (a hook, not abstract)
        """Raise an error if the method cannot solve such a system. The default accepts all.

        Parameters
        ----------
        pattern
            The matrix's pattern.
        dtype
            The common dtype of the matrix and the right-hand side.
        """

    @abc.abstractmethod
    def iterate(self, system: LinearSystem) -> tuple[jax.Array, Any] | Outcome:
        """Solve one system (collective, traced).

        Parameters
        ----------
        system
            This rank's part of A x = b: its product, its preconditioner, and inner products over
            all ranks. Loops must end on the same step on all ranks: decide from `system.dots`.

        Returns
        -------
        x
            This rank's part of the solution, like `system.b`.
        num_steps
            The number of steps taken, an integer scalar, the same on all ranks.
        """


def check_hashable(solver: LinearSolver) -> None:
    """Raise an error if compiled programs cannot be kept by this solver."""
    try:
        hash(solver)
    except TypeError as error:
        raise TypeError(
            f"solve: {type(solver).__name__} must be hashable with its preconditioner, got "
            f'"{error}". Make both frozen dataclasses, and compute arrays in `iterate` and '
            "`inverse`."
        ) from None


def request_text(solver: LinearSolver) -> str:
    """Return the settings of a solve by a library, which must be the same on all ranks."""
    restart = getattr(solver, "restart", None)
    return (
        f"{type(solver).__name__}(preconditioner={solver.preconditioner!r}, "
        f"rtol={float(solver.rtol)!r}, max_steps={int(solver.max_steps)}"
        + (f", restart={int(restart)})" if restart is not None else ")")
    )


def check_steps(name: str, rtol: float, max_steps: int) -> None:
    """Raise an error if the tolerance or the number of steps is out of range."""
    if not 0 < rtol < 1:
        raise ValueError(
            f"{name}: rtol must lie between 0 and 1, got rtol={rtol}. Choose one such as 1e-8."
        )
    if not 0 < max_steps < 2**31:
        raise ValueError(
            f"{name}: max_steps must be positive and below 2**31, got max_steps={max_steps}. "
            "Choose one such as 500."
        )


def check_diagonal(pattern: Pattern, name: str) -> None:
    """Raise an error if the pattern lacks a diagonal entry, by which `name` divides."""
    if pattern.row_without_diagonal >= 0:
        raise ValueError(
            f"solve: {name} needs a diagonal entry in every row, but the pattern has none in row "
            f"{pattern.row_without_diagonal}. Add the entry (i, i) to the pattern for every row i."
        )


# ---- Methods that solve linear systems: frozen settings, run by hypre or by mpigrad's
# iterations


def _is_auto(preconditioner: Any) -> bool:
    return isinstance(preconditioner, str) and preconditioner == "auto"


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
        "auto": `BoomerAMG()` for a matrix, or `Jacobi()` in a subclass with iterations of its own.
        None for a function in place of a matrix.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import GMRES, PCG, Krylov, solve
    >>> all(issubclass(method, Krylov) for method in (PCG, GMRES))
    True
    >>> print(solve(lambda v: 4 * v, jnp.ones(2), PCG(rtol=1e-6)).value)
    [0.25 0.25]
    """

    rtol: float = 1e-8
    max_steps: int = 500
    preconditioner: Preconditioner | Literal["auto"] | None = "auto"  # pyright: ignore

    def __post_init__(self) -> None:
        name, preconditioner = type(self).__name__, self.preconditioner
        check_steps(name, self.rtol, self.max_steps)
        if _is_auto(preconditioner):
            return
        if not isinstance(preconditioner, Preconditioner | None):
            raise TypeError(
                f"{name}: the preconditioner must be BoomerAMG(...), PFMG(...), BoxMG(...), "
                'Jacobi(), a Preconditioner of your own, "auto" or None, got '
                f"{preconditioner!r}. Choose one of them."
            )
        if self.symmetric and preconditioner is not None and not preconditioner.symmetric:
            raise ValueError(
                f"{name}: the preconditioner must be symmetric, but {preconditioner!r} is not. "
                "Choose another relaxation, or solve with GMRES or BiCGStab."
            )

    @property
    def for_function(self) -> Krylov:
        return self._with(None)

    @property
    def for_matrix(self) -> Krylov:
        return self._with(Jacobi() if self.hypre_method is None else BoomerAMG())

    def _with(self, meaning: Preconditioner | None) -> Krylov:
        """Return the method with what "auto" means."""
        if not _is_auto(self.preconditioner):
            return self
        method = copy.copy(self)  # a subclass may have an __init__ with other arguments
        object.__setattr__(method, "preconditioner", meaning)
        return method

    @property
    def transposed(self) -> Krylov:
        if not isinstance(self.preconditioner, Preconditioner):
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
class MINRES(Krylov):
    """Preconditioned minimal residuals, for real symmetric matrices that may be indefinite.

    (Paige, Saunders 1975.) The preconditioner must be symmetric positive definite: `BlockDiagonal`
    for `Blocks`, `Jacobi` for matrices with a positive diagonal, or your own. The adjoint of a
    solve is a solve with the same matrix.

    Attributes
    ----------
    rtol, max_steps, preconditioner
        See `Krylov`. "auto": None. Multigrid preconditions definite matrices only, in `PCG`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import MINRES, solve
    >>> A = lambda v: jnp.array([2 * v[0] + v[1], v[0]])  # indefinite
    >>> x = solve(A, jnp.array([3.0, 1.0]), MINRES(rtol=1e-6)).value
    >>> bool(jnp.allclose(x, 1, atol=1e-5))
    True
    """

    symmetric: ClassVar[bool] = True
    judges_residual: ClassVar[bool] = True

    @property
    def for_matrix(self) -> Krylov:
        return self._with(None)

    def iterate(self, system: LinearSystem) -> Outcome:
        if jnp.iscomplexobj(system.b):
            raise TypeError(
                f"MINRES: it solves real systems, got {system.b.dtype}. Take GMRES or BiCGStab."
            )
        return minres(system)


@dataclasses.dataclass(frozen=True)
class GMRES(Krylov):
    """Generalised minimal residuals, restarted, preconditioned from the right, for any matrix.

    (Saad, Schultz 1986.) It needs `restart` vectors of memory, twice as many if it is flexible. For
    `Blocks` with a preconditioner it minimises the residual in a norm that is scaled by the
    diagonal, until |b - A x| <= rtol |b| in the two-norm.

    Attributes
    ----------
    rtol, max_steps, preconditioner
        See `Krylov`.
    restart
        The number of iterations between restarts.
    flexible
        True for a preconditioner that is not a fixed linear map, such as an inner solve to a loose
        tolerance (Saad 1993).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import GMRES, solve
    >>> A = lambda v: jnp.array([2 * v[0] + v[1], 2 * v[1]])  # not symmetric
    >>> x = solve(A, jnp.array([3.0, 2.0]), GMRES(rtol=1e-6)).value
    >>> bool(jnp.allclose(x, 1, atol=1e-5))
    True
    """

    restart: int = 30
    flexible: bool = False
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
        return gmres(system, self.restart, flexible=self.flexible)


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
    >>> x = solve(A, jnp.array([3.0, 2.0]), BiCGStab(rtol=1e-6)).value
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
        if not isinstance(self.cycle, Preconditioner) or self.cycle.backend != "hypre":
            raise TypeError(
                f"Multigrid: the cycle must be BoomerAMG(...) or PFMG(...), got {self.cycle!r}. "
                "Choose one of them."
            )

    @property
    def transposed(self) -> Multigrid:
        return dataclasses.replace(self, cycle=self.cycle.transposed)

    def iterate(self, system: LinearSystem) -> tuple[jax.Array, Any]:
        raise TypeError("Multigrid: only hypre runs it. Solve with a Matrix in float64.")


@final
@sealed
@dataclasses.dataclass(frozen=True)
class Cycle(LinearSolver):
    """One cycle of a library's multigrid, x = M b, as a part of another method's preconditioner.

    No residual is computed, and no tolerance is met. The hierarchy is always that of the present
    values.

    Attributes
    ----------
    preconditioner
        `BoomerAMG(...)`, `PFMG(...)` or, for symmetric positive definite matrices, `BoxMG(...)`.
    """

    preconditioner: Preconditioner | None
    rtol: float = dataclasses.field(default=0.5, init=False, repr=False)
    max_steps: int = dataclasses.field(default=0, init=False, repr=False)
    needs_matrix: ClassVar[bool] = True
    judges_residual: ClassVar[bool] = True
    hypre_method: ClassVar[int | None] = 4

    def __post_init__(self) -> None:
        if getattr(self.preconditioner, "reuse", "equal") != "equal":
            fresh = dataclasses.replace(self.preconditioner, reuse="equal")  # type: ignore
            object.__setattr__(self, "preconditioner", fresh)
        object.__setattr__(self, "symmetric", self.backend == "boxmg")

    @property
    def transposed(self) -> Cycle:
        assert self.preconditioner is not None
        return Cycle(self.preconditioner.transposed)

    def iterate(self, system: LinearSystem) -> tuple[jax.Array, Any]:
        raise TypeError("Cycle: only a library runs it.")


# ---- The rule that chooses a method if none is given ----


def default_solver(
    rtol: float = 1e-8,
    pattern: Pattern | None = None,
    *,
    symmetric: bool = True,
    dtype: Any = np.float64,
    multigrid: BoomerAMG = BoomerAMG(),  # noqa: B008 (frozen)
) -> LinearSolver:
    """Return the method that is used if none is given: by multigrid, or else by Jacobi.

    Symmetric systems with the pattern of a grid stencil get `BoxMG` on one or two axes and `PFMG`
    on three, or `BoxMG` without hypre. Others get `BoomerAMG`. Without hypre, and in other dtypes
    than float64, it is Jacobi's preconditioner.

    Parameters
    ----------
    rtol
        The tolerance: |b - A x| <= rtol |b|.
    pattern
        The matrix's pattern, if it is known.
    symmetric
        True: `PCG`, for symmetric positive definite matrices. False: `GMRES`.
    dtype
        The dtype of the matrix.
    multigrid
        What is used where no grid stencil is known.

    Examples
    --------
    >>> from mpigrad.sparse import default_solver
    >>> default_solver(rtol=1e-6).rtol
    1e-06
    """
    dtype = np.dtype(dtype)
    stencil = None if pattern is None or why_not_structured(pattern) else pattern.stencil
    if dtype == np.float64 and symmetric and stencil is not None:
        # PFMG is the default on grids with three axes (docs/decisions/0078).
        by_hypre = stencil.grid.ndim == 3 and hypre_available()
        return PCG(rtol=rtol, preconditioner=PFMG() if by_hypre else BoxMG())
    method = PCG if symmetric else GMRES
    if dtype == np.float64 and hypre_available():
        return method(rtol=rtol, preconditioner=multigrid)
    return method(rtol=rtol, max_steps=10_000, preconditioner=Jacobi())
