"""Nonlinear solves: Newton's method and sparse Jacobians."""
