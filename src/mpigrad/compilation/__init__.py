"""Compilation: the ranks of a host compile each program once, and jobs store programs."""

from mpigrad.compilation.compiler import install, store_programs

__all__ = ["install", "store_programs"]
