"""Recover the temperature that a ring had at the start: an application of a user's own."""
