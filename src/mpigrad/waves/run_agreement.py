"""Ranks must do the same run."""

from __future__ import annotations

import hashlib
from typing import Any

import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations import allreduce, require

__all__ = ["fingerprint", "require_same"]


def fingerprint(values: Any) -> int:
    """A number of 48 bits that tells what is printed differently apart."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big")


def require_same(number: int, comm: Communicator) -> None:
    """One error on all ranks, at run time, where their fingerprints differ (collective)."""
    low, high = number % 2**24, number // 2**24
    most = allreduce(jnp.array([low, high, -low, -high], jnp.int32), MPI.MAX, comm)
    require(
        jnp.all(most[:2] == -most[2:]),
        "the ranks disagree about the run: give the same time step, number of steps, survey and "
        "settings on every rank",
        comm=comm,
    )
