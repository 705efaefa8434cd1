"""Shots at a model of the ground: experiments with acoustic and elastic waves."""
