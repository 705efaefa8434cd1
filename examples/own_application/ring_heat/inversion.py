"""The function that runs on every rank: heat on a ring, and gradient descent on its start."""

import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from ring_heat.settings import Settings

FLOW = 0.25  # part of a temperature difference that flows into a neighbouring cell in a step


def later(u, steps, comm):
    """Return this rank's cells after `steps` time steps. Each step exchanges the ends."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(steps):
        before = mg.sendrecv(u[-1:], right, left, sendtag=1, recvtag=1, comm=comm)
        after = mg.sendrecv(u[:1], left, right, sendtag=2, recvtag=2, comm=comm)
        padded = jnp.concatenate([before, u, after])
        u = u + FLOW * (padded[2:] - 2 * u + padded[:-2])
    return u


def run(settings: Settings) -> None:
    """Recover the start, print the losses and the error, and write the result (collective)."""
    comm = mg.default_communicator()
    if settings.cells < comm.size:
        raise ValueError(
            f"--cells: expected at least one for each of {comm.size} ranks, got {settings.cells}"
        )
    cells = mg.sparse.local_range(settings.cells, comm)
    angle = 2 * jnp.pi * jnp.arange(cells.start, cells.stop) / settings.cells
    truth = 1 + jnp.sin(angle) + 0.3 * jnp.cos(2 * angle)
    observed = mg.jit(lambda u: later(u, settings.time_steps, comm))(truth)

    def share(u):
        """This rank's share of the loss: the misfit of its cells."""
        return 0.5 * jnp.sum((later(u, settings.time_steps, comm) - observed) ** 2)

    step = mg.jit(mg.value_and_grad(share, loss="share", comm=comm))
    u = jnp.zeros_like(truth)
    losses = []
    for _ in range(settings.descent_steps):
        # The cells of a rank are its own parameters, so their gradient is not summed over ranks.
        # All eigenvalues of the heat flow lie between 0 and 1: a step of length 1 is stable.
        loss, gradient = step(u)
        losses.append(float(loss))
        u = u - gradient
    error = float(mg.max_norm(u - truth, comm=comm))
    whole = comm.mpi.gather(np.asarray(u))
    if comm.rank == 0:
        np.save(settings.out, np.concatenate(whole))
        print(f"loss {losses[0]:.3g} -> {losses[-1]:.3g}, largest error {error:.2g}", flush=True)
