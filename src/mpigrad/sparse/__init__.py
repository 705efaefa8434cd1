"""Distributed sparse matrices and solves, differentiable in values and right-hand sides."""

from mpigrad.sparse.colouring import sparse_jacobian
from mpigrad.sparse.ghost import GhostExchange
from mpigrad.sparse.hypre_library import (
    hypre_available,
    hypre_version,
    solver_seconds,
    why_no_hypre,
)
from mpigrad.sparse.matrix import Matrix
from mpigrad.sparse.methods import GMRES, PCG, BiCGStab, Multigrid
from mpigrad.sparse.newton import newton
from mpigrad.sparse.operator_solve import Operator
from mpigrad.sparse.pattern import Pattern, even_stripe
from mpigrad.sparse.preconditioners import PFMG, BoomerAMG, Jacobi, Preconditioner
from mpigrad.sparse.solve import Solution, default_solver, solve
from mpigrad.sparse.stencil import Stencil
from mpigrad.sparse.strategy import LinearSolver, Result

__all__ = [
    "GMRES",
    "PCG",
    "PFMG",
    "BiCGStab",
    "BoomerAMG",
    "GhostExchange",
    "Jacobi",
    "LinearSolver",
    "Matrix",
    "Multigrid",
    "Operator",
    "Pattern",
    "Preconditioner",
    "Result",
    "Solution",
    "Stencil",
    "default_solver",
    "even_stripe",
    "hypre_available",
    "hypre_version",
    "newton",
    "solve",
    "solver_seconds",
    "sparse_jacobian",
    "why_no_hypre",
]
