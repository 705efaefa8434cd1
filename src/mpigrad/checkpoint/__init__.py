"""Restart files of long runs: atomic, verified, and readable on another count of ranks."""

from mpigrad.checkpoint.layout import Stripes, leaf_from_bytes, leaf_to_bytes
from mpigrad.checkpoint.schedule import (
    Checkpoint,
    CheckpointSession,
    Decision,
    Interruption,
    listen,
)
from mpigrad.checkpoint.store import Snapshot, Store

__all__ = [
    "Checkpoint",
    "CheckpointSession",
    "Decision",
    "Interruption",
    "Snapshot",
    "Store",
    "Stripes",
    "leaf_from_bytes",
    "leaf_to_bytes",
    "listen",
]
