"""Sharded arrays of JAX: without `jax.distributed` here, with it in a job of its own."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import mpigrad as mg
from helpers import close
from launching import PROGRAMS, mpigrad
from mpigrad.communicator import Communicator


def one_device() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("x",))


@pytest.mark.launcher
@pytest.mark.long("jax.distributed starts; test_one_rank_needs_no_distributed_processes is short")
@pytest.mark.parametrize(
    "ranks",
    [2, *(pytest.param(n, marks=pytest.mark.full("2 ranks have all cases")) for n in (3, 4))],
)
def test_messages_and_sharded_arrays_in_one_program(ranks: int) -> None:
    """The program says what it checks: derivatives, no copy, activity, and errors on all ranks."""
    settings = {"XLA_FLAGS": os.environ["XLA_FLAGS"], "MPIGRAD_GUARD": "1", "MPIGRAD_TIMEOUT": "60"}
    done = mpigrad("launch", "-n", ranks, PROGRAMS / "sharded.py", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        assert f"rank {rank}: right" in done.stdout


def test_distributed_must_be_started(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"jax\.distributed has not been started, so JAX on rank"):
        mg.to_sharded(jnp.ones(3), one_device(), PartitionSpec("x"), comm)


@pytest.mark.ranks(1, 2)
def test_one_rank_needs_no_distributed_processes(alone: Communicator) -> None:
    mesh, x = one_device(), jnp.arange(3.0)
    double = jax.jit(lambda v: 2 * v**2)

    def f(x):
        whole = mg.to_sharded(x, mesh, PartitionSpec("x"), alone)
        return jnp.sum(mg.from_sharded(double(whole), alone) * x)

    close(mg.grad(f, comm=alone)(x), 6 * x**2)
    close(mg.grad(f, comm=alone)(np.arange(3, dtype=np.float32)), 6 * x**2)


@pytest.mark.ranks(2)
def test_one_rank_finds_an_error_and_all_raise_it(comm: Communicator) -> None:
    mesh: Any = None if comm.rank == 1 else one_device()
    with pytest.raises((TypeError, ValueError), match=r"has not been started|mesh must be a jax"):
        mg.to_sharded(jnp.ones(3), mesh, PartitionSpec("x"), comm)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("mesh", "spec", "text"),
    [
        ("x", PartitionSpec("x"), "mesh must be a jax.sharding.Mesh, got str"),
        (None, "x", "spec must be a jax.sharding.PartitionSpec, got str"),
        (None, PartitionSpec("y"), "does not fit the mesh"),
        (None, PartitionSpec(None, "x"), "has 2 entries, but x has 1 axes"),
    ],
)
def test_rejects_meshes_and_specs(mesh: Any, spec: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        mg.to_sharded(jnp.ones(3), mesh or one_device(), spec)


@pytest.mark.ranks(1)
def test_vmap_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"traced by jax\.jit, vmap"):
        jax.vmap(lambda x: mg.to_sharded(x, one_device(), PartitionSpec()))(jnp.ones((2, 3)))
