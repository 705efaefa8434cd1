"""One objective whose unknowns are replicated, sharded, or both, and the same on one rank.

The chained Rosenbrock function Σ 100 (x[i+1] - x[i]²)² + (1 - x[i])². Replicated, rank r of P
evaluates all of it with the weight (r + 1) / (1 + ... + P); sharded, each rank has the terms of its
own unknowns, and gets the next rank's first one by a message; in the mixed layout, the first five
unknowns are replicated and enter through rank 0.
"""

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from mpigrad.optimize import Objective

N, HEAD = 13, 5
X0 = np.where(np.arange(N) % 2 == 0, -1.2, 1.0) + 0.01 * np.arange(N)


def chain(x):
    return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def rows(n, comm):
    """Return this rank's stripe of n rows. Stripes are uneven, and the last one is the smallest."""
    ends = [-(-n * r // comm.size) for r in range(comm.size + 1)]
    return slice(ends[comm.rank], ends[comm.rank + 1])


def striped(x, before, comm):
    """Return the terms of non-empty stripes, after the unknown `before` if there is one."""
    left = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    right = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    following = mg.sendrecv(x[:1], dest=left, source=right, comm=comm)
    own = x if right == MPI.PROC_NULL else jnp.concatenate([x, following])
    if before is not None and comm.rank == 0:
        own = jnp.concatenate([before, own])
    return chain(own)


def layouts(comm, alone):
    """Return name -> (objective, x0, function that makes the global vector of a tree)."""
    weight = 2 * (comm.rank + 1) / (comm.size * (comm.size + 1))

    def gathered(part):
        return np.concatenate(comm.mpi.allgather(np.asarray(part)))

    def mixed(x):
        head = chain(x["head"]) if comm.rank == 0 else 0.0
        return head + striped(x["tail"], x["head"][-1:], comm)

    x0 = jnp.asarray(X0)
    own = x0[rows(N, comm)]
    both = {"head": x0[:HEAD], "tail": x0[HEAD:][rows(N - HEAD, comm)]}
    parts = {"head": False, "tail": True}
    return {
        "serial": (Objective(chain, x0, comm=alone), x0, np.asarray),
        "replicated": (
            Objective(lambda x: weight * chain(x), x0, replicated=True, comm=comm),
            x0,
            np.asarray,
        ),
        "sharded": (
            Objective(lambda x: striped(x, None, comm), own, sharded=True, comm=comm),
            own,
            gathered,
        ),
        "mixed": (
            Objective(mixed, both, sharded=parts, comm=comm),
            both,
            lambda x: np.concatenate([x["head"], gathered(x["tail"])]),
        ),
    }
