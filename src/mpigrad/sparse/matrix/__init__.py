"""Distributed sparse matrices: patterns, assembly, products and boundary conditions."""
