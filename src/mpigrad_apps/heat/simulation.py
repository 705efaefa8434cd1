"""The forward run: heat in the plate, frame by frame."""

from __future__ import annotations

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import mpigrad
from mpigrad import checkpoint
from mpigrad.profiling import Progress
from mpigrad_apps.heat.experiment import Experiment

__all__ = ["Film", "simulate"]

_MOST_PIXELS = 300  # along an axis of a picture; larger fields are thinned out


@dataclasses.dataclass(frozen=True)
class Film:
    """The frames of a forward run.

    Attributes
    ----------
    times
        Shape (frames + 1,): the times of the frames.
    heat
        Shape (frames + 1,): the integral of u over the plate, equal on all ranks.
    pictures
        Shape (frames + 1, px, py) on rank 0: u, thinned out. None on the other ranks.
    snapshots
        This rank's tiles (lx, ly) of u at some of these times, by time.
    ending
        The reason why the run ended.
    seconds
        Time for all frames except the first, which compiles.
    """

    times: NDArray[np.float64]
    heat: NDArray[np.float64]
    pictures: NDArray[np.float64] | None
    snapshots: dict[float, NDArray[np.float64]]
    ending: str
    seconds: float


def simulate(plan: Experiment, frames: int) -> Film:
    """Simulate the heat in `frames` frames with an equal number of steps each (collective).

    When asked to stop (SIGTERM, SIGINT, SIGUSR1, or the launcher's Ctrl-C), it finishes its frame
    and ends.
    """
    grid, comm = plan.grid, plan.grid.comm
    each = plan.model.steps // frames
    model = dataclasses.replace(plan.model, steps=each)
    advance = mpigrad.jit(lambda u, t: model.run(plan.kappa, u, plan.source, start=t)[0])
    stride = -(-max(grid.shape) // _MOST_PIXELS)
    kept = {round(frames * part / 4) for part in range(5)}
    u, pictures, totals, snapshots = plan.initial, [], [], {}
    progress = Progress(frames, comm.rank)
    ending, begun = f"all {plan.model.steps} steps done", time.monotonic()

    with checkpoint.listen() as stop:
        for frame in range(frames + 1):
            if frame > 0:
                u = advance(u, jnp.asarray((frame - 1) * each * model.dt))
            if frame == 1:
                begun = time.monotonic()
            pictures.append(grid.gather(u, stride))
            if frame in kept:
                snapshots[frame * each * model.dt] = np.asarray(u)
            here = float(jnp.sum(u)) * grid.spacing[0] * grid.spacing[1], stop.requested()
            shares = comm.mpi.allgather(here)
            totals.append(sum(share for share, _ in shares))
            progress.update(frame, heat=totals[-1])
            if any(asked for _, asked in shares):
                ending = f"stopped at step {frame * each}"
                break
    progress.close()
    return Film(
        np.arange(len(totals), dtype=np.float64) * each * model.dt,
        np.asarray(totals),
        None if comm.rank > 0 else np.stack(pictures),
        snapshots,
        ending,
        time.monotonic() - begun,
    )
