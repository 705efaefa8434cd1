"""Tridiagonal systems over ranks, with exact derivatives of any order.

It is a package outside of mpigrad that uses its public names only: the solve is an implicit solve
of `mpigrad.extend`, and the count of sign changes a primitive of its own.
"""

from tridiagonal.inertia import count_negative
from tridiagonal.system import Tridiagonal, product, solve

__all__ = ["Tridiagonal", "count_negative", "product", "solve"]
