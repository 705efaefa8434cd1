"""Krylov methods written in JAX: for any linear map, any floating-point type, without hypre."""

from mpigrad.sparse.solvers.krylov.errors import require_success
from mpigrad.sparse.solvers.krylov.iteration import ITERATIONS, iterate
from mpigrad.sparse.solvers.krylov.matrices import check, run
from mpigrad.sparse.solvers.krylov.system import RUNNING, System, noise

__all__ = ["ITERATIONS", "RUNNING", "System", "check", "iterate", "noise", "require_success", "run"]
