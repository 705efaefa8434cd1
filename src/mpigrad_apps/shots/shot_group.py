"""Groups of ranks that share the shots. The ranks of a group divide the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves.survey import Survey
from mpigrad_apps.shots.experiment import Experiment, limiting_velocity, p_velocity
from mpigrad_apps.shots.physics import Physics

__all__ = ["ShotGroup", "make_shot_group"]


@dataclasses.dataclass(frozen=True)
class ShotGroup:
    """This rank's group.

    Attributes
    ----------
    comm
        Communicator of all groups' ranks.
    grid
        Grid of the model, divided among this group's ranks (`grid.comm`).
    physics
        The wave equation on that grid.
    experiment
        The experiment with the group's shots only.
    survey
        Survey of the group's shots.
    shots
        Indices of the group's shots among all shots.
    n_groups
        Number of groups.
    """

    comm: Communicator
    grid: Grid
    physics: Physics
    experiment: Experiment
    survey: Survey
    shots: np.ndarray
    n_groups: int

    def summary(self, command: str, n_shots: int) -> str:
        """Return one line about the computation of a command."""
        some, ranks = self.experiment, self.comm.size
        tiles = " x ".join(map(str, self.grid.dims))
        groups = f", {self.n_groups} groups" * (self.n_groups > 1)
        return (
            f"{command}: {some.shape[0]} x {some.shape[1]} cells of {some.spacing[0]:.4g} m x "
            f"{some.spacing[1]:.4g} m in {tiles} tiles on {ranks} rank{'s' * (ranks > 1)}{groups}, "
            f"{n_shots} shots, {some.receivers.shape[1]} receivers, {some.steps} steps of "
            f"{some.dt * 1e3:.4g} ms"
        )

    def gather_shots(self, values: np.ndarray) -> np.ndarray | None:
        """Gather values of all shots in order on rank 0, None on other ranks (collective).

        The first axis of `values` is the group's shots. It is the same on all ranks of the group.
        """
        part = values if self.grid.comm.rank == 0 else None
        parts = self.comm.mpi.gather(part, root=0)
        if parts is None:
            return None
        return np.concatenate([part for part in parts if part is not None])


def make_shot_group(
    comm: Communicator,
    n_groups: int,
    experiment: Experiment,
    make_physics: Callable[[Grid, Experiment], Physics],
) -> ShotGroup:
    """Make this rank's group (collective). Ranks and shots are divided in their order.

    Parameters
    ----------
    make_physics
        Makes the physics of an experiment on a grid.

    Raises
    ------
    ValueError
        On every rank: if there are more groups than ranks or shots, a tile has too few cells, or
        the time step is not stable.
    """
    if n_groups > min(comm.size, experiment.n_shots):
        raise ValueError(
            f"--groups: each group needs a rank and a shot, got {n_groups} groups for {comm.size} "
            f"ranks and {experiment.n_shots} shots. Use at most "
            f"{min(comm.size, experiment.n_shots)}."
        )
    index, group_comm = 0, comm
    if n_groups > 1:
        ranks = np.array_split(np.arange(comm.size), n_groups)
        index = next(g for g, members in enumerate(ranks) if comm.rank in members)
        group_comm = comm.split(index, comm.rank)
    shots = np.array_split(np.arange(experiment.n_shots), n_groups)[index]
    part = experiment.shots(shots)
    # Groups may differ in size, so one group may have too few cells for its ranks and another not.
    with raise_on_all_ranks(comm):
        grid = Grid(experiment.shape, experiment.spacing, group_comm)
        physics = make_physics(grid, experiment)
        physics.tile.check(physics.reach)
        _check_time_step(experiment, physics.max_stable_velocity)
    survey = Survey(part.sources, part.receivers)
    return ShotGroup(comm, grid, physics, part, survey, shots, n_groups)


def _check_time_step(experiment: Experiment, max_stable_velocity: float) -> None:
    fields = experiment.fields
    limit = limiting_velocity(fields)
    if limit <= max_stable_velocity * (1 + 1e-9):
        return
    highest, light = float(np.max(p_velocity(fields))), ""
    if limit > 1.1 * highest:
        light = f" and densities down to {np.min(fields['rho']):.3g} kg/m3"
    stable = experiment.dt * max_stable_velocity / limit
    raise ValueError(
        f"--dt: a time step of {experiment.dt:.6g} s is not stable for velocities up to "
        f"{highest:.6g} m/s{light}, the largest stable one is {stable:.6g} s. Use a smaller --dt."
    )
