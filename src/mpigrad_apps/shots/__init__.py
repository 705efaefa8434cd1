"""Experiments with acoustic and elastic waves: shots at a model of the ground."""
