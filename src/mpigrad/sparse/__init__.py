"""Distributed sparse matrices and solves, differentiable in values and right-hand sides."""

from mpigrad.solution import Result, Solution
from mpigrad.sparse.eigenpairs import Eigenpairs, eigh
from mpigrad.sparse.matrix.assembly import Selection, Stencil
from mpigrad.sparse.matrix.blocks import Blocks
from mpigrad.sparse.matrix.ghost_exchange import GhostExchange
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern, local_range
from mpigrad.sparse.nonlinear.newton import newton
from mpigrad.sparse.nonlinear.pattern_search import find_pattern
from mpigrad.sparse.nonlinear.sparse_jacobian import sparse_jacobian
from mpigrad.sparse.slepc import SLEPc
from mpigrad.sparse.solvers.block_solve import LSC, BlockDiagonal, BlockTriangular
from mpigrad.sparse.solvers.guesses import Guesses, pass_guesses
from mpigrad.sparse.solvers.krylov import LinearSystem
from mpigrad.sparse.solvers.libraries import (
    hypre_available,
    hypre_version,
    solver_seconds,
    why_no_hypre,
    why_no_petsc,
    why_no_slepc,
)
from mpigrad.sparse.solvers.methods import (
    GMRES,
    MINRES,
    PCG,
    BiCGStab,
    Krylov,
    LinearSolver,
    Multigrid,
    default_solver,
)
from mpigrad.sparse.solvers.nullspace import NullSpace
from mpigrad.sparse.solvers.operator_solve import Operator
from mpigrad.sparse.solvers.petsc import PETSc
from mpigrad.sparse.solvers.preconditioners import PFMG, BoomerAMG, BoxMG, Jacobi, Preconditioner
from mpigrad.sparse.solvers.solve import solve

__all__ = [
    "GMRES",
    "LSC",
    "MINRES",
    "PCG",
    "PFMG",
    "BiCGStab",
    "BlockDiagonal",
    "BlockTriangular",
    "Blocks",
    "BoomerAMG",
    "BoxMG",
    "Eigenpairs",
    "GhostExchange",
    "Guesses",
    "Jacobi",
    "Krylov",
    "LinearSolver",
    "LinearSystem",
    "Matrix",
    "Multigrid",
    "NullSpace",
    "Operator",
    "PETSc",
    "Pattern",
    "Preconditioner",
    "Result",
    "SLEPc",
    "Selection",
    "Solution",
    "Stencil",
    "default_solver",
    "eigh",
    "find_pattern",
    "hypre_available",
    "hypre_version",
    "local_range",
    "newton",
    "pass_guesses",
    "solve",
    "solver_seconds",
    "sparse_jacobian",
    "why_no_hypre",
    "why_no_petsc",
    "why_no_slepc",
]
