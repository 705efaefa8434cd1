"""Optimizers whose inner products and decisions are those of all ranks."""

from mpigrad.optimize.lbfgs import LBFGS, Iterate
from mpigrad.optimize.serving import Served, root_driven

__all__ = ["LBFGS", "Iterate", "Served", "root_driven"]
