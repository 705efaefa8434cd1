"""A halo exchange whose adjoint forgets its ghosts: the dot test holds on one rank only."""

import numpy as np
from mpi4py import MPI

N = 24


def with_halo(x: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """Return this rank's rows between one row of each neighbour."""
    before = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    behind = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    first = comm.sendrecv(x[-1], dest=behind, source=before)
    last = comm.sendrecv(x[0], dest=before, source=behind)
    return np.concatenate([[first or 0.0], x, [last or 0.0]])


def without_halo(y: np.ndarray) -> np.ndarray:
    """Crop, which is not the adjoint: that adds the ghosts to the rows of the neighbours."""
    return y[1:-1]


def outputs() -> dict[str, object]:
    """Return both sides of the dot test."""
    comm, draw = MPI.COMM_WORLD, np.random.default_rng(3)
    rows = np.array_split(np.arange(N), comm.size)[comm.rank]
    x, y = draw.standard_normal(N)[rows], np.ones(len(rows) + 2)
    return {"forward": ("sum", with_halo(x, comm) @ y), "reverse": ("sum", x @ without_halo(y))}
