"""Restart files of long runs: atomic, checked, and readable on another number of ranks."""

from mpigrad.checkpoint.layout import Stripes
from mpigrad.checkpoint.schedule import Checkpoint, Decision, Saving
from mpigrad.checkpoint.signals import Interruption, listen
from mpigrad.checkpoint.store import Saved, Store

__all__ = [
    "Checkpoint",
    "Decision",
    "Interruption",
    "Saved",
    "Saving",
    "Store",
    "Stripes",
    "listen",
]
