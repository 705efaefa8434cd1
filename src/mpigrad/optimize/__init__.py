"""Optimizers of unknowns that are replicated or sharded over ranks."""

from mpigrad.optimize.gradient_transformation import Optax
from mpigrad.optimize.lbfgs import LBFGS
from mpigrad.optimize.lbfgsb import LBFGSB
from mpigrad.optimize.line_search import StrongWolfe
from mpigrad.optimize.method import Method, MinimizeError, NotFiniteError, Record, State
from mpigrad.optimize.minimize import minimize
from mpigrad.optimize.multi_start import MultiStart, continuation, multi_start
from mpigrad.optimize.nonlinear_cg import NonlinearCG
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.root_worker import RootObjective, root_objective
from mpigrad.optimize.trust_region import GaussNewton, NewtonCG
from mpigrad.optimize.unknowns import (
    Unknowns,
    clip_by_global_norm,
    global_norm,
    inner_products,
)
from mpigrad.solution import Result, Solution

__all__ = [
    "LBFGS",
    "LBFGSB",
    "GaussNewton",
    "Method",
    "MinimizeError",
    "MultiStart",
    "NewtonCG",
    "NonlinearCG",
    "NotFiniteError",
    "Objective",
    "Optax",
    "Point",
    "Record",
    "Result",
    "RootObjective",
    "Solution",
    "State",
    "StrongWolfe",
    "Unknowns",
    "clip_by_global_norm",
    "continuation",
    "global_norm",
    "inner_products",
    "minimize",
    "multi_start",
    "root_objective",
]
