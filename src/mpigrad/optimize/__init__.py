"""Optimizers whose inner products and decisions are those of all ranks."""

from mpigrad.optimize.inner import clip_by_global_norm, global_norm, inner_products
from mpigrad.optimize.lbfgs import LBFGS
from mpigrad.optimize.line_search import StrongWolfe
from mpigrad.optimize.method import Method, State
from mpigrad.optimize.minimize import minimize
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.pictures import draw_history
from mpigrad.optimize.serving import Served, root_driven
from mpigrad.optimize.solution import Record, Result, Solution
from mpigrad.optimize.unknowns import Unknowns

__all__ = [
    "LBFGS",
    "Method",
    "Objective",
    "Point",
    "Record",
    "Result",
    "Served",
    "Solution",
    "State",
    "StrongWolfe",
    "Unknowns",
    "clip_by_global_norm",
    "draw_history",
    "global_norm",
    "inner_products",
    "minimize",
    "root_driven",
]
