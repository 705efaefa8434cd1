"""Distributed sparse matrices and solves, differentiable in values and right-hand sides."""

from mpigrad.sparse.ghost import GhostExchange
from mpigrad.sparse.hypre import (
    PCG,
    BoomerAMG,
    hypre_available,
    hypre_version,
    solver_seconds,
    why_no_hypre,
)
from mpigrad.sparse.krylov import CG, Jacobi
from mpigrad.sparse.matrix import Matrix
from mpigrad.sparse.pattern import Pattern
from mpigrad.sparse.solve import Solution, default_solver, solve
from mpigrad.sparse.strategy import LinearSolver, Result

__all__ = [
    "CG",
    "PCG",
    "BoomerAMG",
    "GhostExchange",
    "Jacobi",
    "LinearSolver",
    "Matrix",
    "Pattern",
    "Result",
    "Solution",
    "default_solver",
    "hypre_available",
    "hypre_version",
    "solve",
    "solver_seconds",
    "why_no_hypre",
]
