"""Optimizers whose inner products and decisions are those of all ranks."""

from mpigrad.optimize.lbfgs import LBFGS, Iterate

__all__ = ["LBFGS", "Iterate"]
