"""Restart files of long runs: atomic, verified, and readable on another count of ranks."""

from mpigrad._renamed import old_names
from mpigrad.checkpoint.layout import Stripes
from mpigrad.checkpoint.schedule import Checkpoint, CheckpointSession, Decision
from mpigrad.checkpoint.signals import Interruption, listen
from mpigrad.checkpoint.store import Snapshot, Store

__all__ = [
    "Checkpoint",
    "CheckpointSession",
    "Decision",
    "Interruption",
    "Snapshot",
    "Store",
    "Stripes",
    "listen",
]

__getattr__ = old_names(__name__)
