"""Groups of ranks that share the shots. The ranks of a group divide the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves import Survey
from mpigrad_apps.shots.experiment import Experiment
from mpigrad_apps.shots.physics import Physics

__all__ = ["ShotGroup", "make_shot_group", "split_ranks"]


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

    @property
    def is_first(self) -> bool:
        """True if this group has the first shot. It writes the files of the model."""
        return 0 in self.shots

    def summary(self, command: str, n_shots: int) -> str:
        """Return one line about the computation of a command."""
        some, ranks = self.experiment, self.comm.size
        tiles = " x ".join(map(str, self.grid.dims))
        cells = " x ".join(map(str, some.shape))
        lengths = " x ".join(f"{h:.4g} m" for h in some.spacing)
        groups = f", {self.n_groups} groups" * (self.n_groups > 1)
        return (
            f"{command}: {cells} cells of {lengths} in {tiles} tiles on {ranks} "
            f"rank{'s' * (ranks > 1)}{groups}, {n_shots} shots, "
            f"{some.receivers.shape[1]} receivers, {some.steps} steps of {some.dt * 1e3:.4g} ms"
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


def split_ranks(comm: Communicator, n_groups: int, n_shots: int) -> tuple[int, Communicator]:
    """Return the index of this rank's group, and the group's communicator (collective).

    Raises
    ------
    ValueError
        On every rank: if there are more groups than ranks or shots.
    """
    if n_groups > min(comm.size, n_shots):
        raise ValueError(
            f"--groups: each group needs a rank and a shot, got {n_groups} groups for {comm.size} "
            f"ranks and {n_shots} shots. Use at most {min(comm.size, n_shots)}."
        )
    if n_groups == 1:
        return 0, comm
    ranks = np.array_split(np.arange(comm.size), n_groups)
    index = next(g for g, members in enumerate(ranks) if comm.rank in members)
    return index, comm.split(index, comm.rank)


def make_shot_group(
    comm: Communicator,
    n_groups: int,
    experiment: Experiment,
    make_physics: Callable[[Grid, Experiment], Physics],
    split: tuple[int, Communicator] | None = None,
) -> ShotGroup:
    """Make this rank's group (collective). Ranks and shots are divided in their order.

    Parameters
    ----------
    make_physics
        Makes the physics of an experiment on a grid.
    split
        The result of `split_ranks`, if the ranks have been split before.

    Raises
    ------
    ValueError
        On every rank: if there are more groups than ranks or shots, a tile has too few cells, or
        the time step is not stable.
    """
    index, group_comm = split_ranks(comm, n_groups, experiment.n_shots) if split is None else split
    shots = np.array_split(np.arange(experiment.n_shots), n_groups)[index]
    part = experiment.shots(shots)
    # Groups may differ in size, so one group may have too few cells for its ranks and another not.
    with raise_on_all_ranks(comm):
        grid = Grid(experiment.shape, experiment.spacing, group_comm)
        physics = make_physics(grid, experiment)
        physics.model(1)  # its checks
        _check_time_step(experiment, physics.max_stable_velocity)
    survey = Survey(part.sources, part.receivers)
    return ShotGroup(comm, grid, physics, part, survey, shots, n_groups)


def _check_time_step(experiment: Experiment, max_stable_velocity: float) -> None:
    highest, _, limit = experiment.speeds
    if limit <= max_stable_velocity * (1 + 1e-9):
        return
    light = ""
    if limit > 1.1 * highest:
        light = f" and densities down to {np.min(experiment.fields['rho']):.3g} kg/m3"
    stable = experiment.dt * max_stable_velocity / limit
    raise ValueError(
        f"--dt: a time step of {experiment.dt:.6g} s is not stable for velocities up to "
        f"{highest:.6g} m/s{light}, the largest stable one is {stable:.6g} s. Use a smaller --dt."
    )
