"""Inverse problems: a model, its observations, and the estimation of what is unknown in it."""
