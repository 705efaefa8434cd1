"""Derivatives of programs with messages: transformations, custom rules, Jacobians and checks."""
