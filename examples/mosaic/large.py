"""One slab of any size, made by all ranks without a file, checked with the closed form."""

from __future__ import annotations

import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problems import Groups, Heat

import mpigrad as mg
from mpigrad import fem

__all__ = ["heated_box", "large"]


def heated_box(nx: int) -> Heat:
    """Return the slab of `cases.slab`. Each rank makes its own cells."""
    mesh = fem.box((nx, nx // 2, 1), (2.0, 1.0, 2.0 / nx), cell_type="hexahedron")
    x = mesh.points[: mesh.vertices.n_local, 0]
    cold = Groups((x < 1e-9).astype(int), np.zeros((1, 1)))
    return Heat(mesh, cold, Groups((x > 2 - 1e-9).astype(int), np.array([[nx / 2]])))


def large(nx: int, say: Any) -> float:
    """Return the relative error of C = nx / k, or of its derivative in a uniform density."""
    comm, start = mg.default_communicator(), time.perf_counter()
    problem = heated_box(nx)
    mesh = problem.mesh
    nodes, total = mesh.vertices.n_local, mesh.vertices.n_global
    rho = jnp.full(mesh.n_cells, 0.5)
    rest = (jnp.zeros(mesh.n_cells), jnp.zeros(nodes), np.ones(nodes, bool))
    say(f"{total} unknowns on {comm.size} ranks, mesh after {time.perf_counter() - start:.1f} s")
    exact = nx / (1e-3 + (1 - 1e-3) * 0.5**3)
    seconds = []
    weights = jnp.array([1.0, 0.0])
    for density in (rho, rho * (1 + 1e-12)):  # the second call compiles nothing
        comm.mpi.Barrier()
        start = time.perf_counter()
        value, gradients = jax.block_until_ready(problem.pullback(weights, density, *rest))
        seconds.append(time.perf_counter() - start)
    # C = nx / k, so that dC/dρ of all cells together is -nx k'(ρ) / k².
    slope = float(comm.mpi.allreduce(float(jnp.sum(gradients[0]))))
    expected = -(exact**2) / nx * (1 - 1e-3) * 3 * 0.25
    peak = comm.mpi.allreduce(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    error = max(abs(float(value) / exact - 1), abs(slope / expected - 1))
    say(
        f"value and gradient: {seconds[0]:.1f} s with compilation, then {seconds[1]:.1f} s; "
        f"peak memory of all ranks {peak / 2**30:.2f} GiB, {peak / total:.0f} bytes per unknown; "
        f"C {float(value):.9g}, error of C or its slope {error:.1e}"
    )
    return error
