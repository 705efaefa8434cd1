"""Groups of ranks that share the shots; each divides the model among its ranks."""

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

__all__ = ["Team", "team_of"]


@dataclasses.dataclass(frozen=True)
class Team:
    """This rank's group.

    Attributes
    ----------
    comm
        All groups' ranks.
    grid
        The model's, divided among this group's ranks (`grid.comm`).
    physics
        The equation on that grid.
    experiment
        With the group's shots.
    survey
        Of the group's shots.
    shots
        The numbers of the group's shots among all.
    count
        Number of groups.
    fastest
        The largest velocity for which the time step is stable, m/s.
    """

    comm: Communicator
    grid: Grid
    physics: Physics
    experiment: Experiment
    survey: Survey
    shots: np.ndarray
    count: int
    fastest: float

    def announcement(self, what: str, n_shots: int) -> str:
        """One line that says what is computed on what."""
        some, ranks = self.experiment, self.comm.size
        tiles = " x ".join(map(str, self.grid.dims))
        groups = f", {self.count} groups" * (self.count > 1)
        return (
            f"{what}: {some.shape[0]} x {some.shape[1]} cells of {some.spacing[0]:.4g} m x "
            f"{some.spacing[1]:.4g} m in {tiles} tiles on {ranks} rank{'s' * (ranks > 1)}{groups}, "
            f"{n_shots} shots, {some.receivers.shape[1]} receivers, {some.steps} steps of "
            f"{some.dt * 1e3:.4g} ms"
        )

    def collect(self, of_shots: np.ndarray) -> np.ndarray | None:
        """What belongs to shots, of all groups, in order, on rank 0; None elsewhere (collective).

        `of_shots` has the group's shots along its first axis, on every rank of the group.
        """
        mine = of_shots if self.grid.comm.rank == 0 else None
        parts = self.comm.mpi.gather(mine, root=0)
        if parts is None:
            return None
        return np.concatenate([part for part in parts if part is not None])


def team_of(
    comm: Communicator,
    groups: int,
    whole: Experiment,
    physics_on: Callable[[Grid, Experiment], Physics],
) -> Team:
    """This rank's group (collective). Ranks and shots are shared out in their order.

    Parameters
    ----------
    physics_on
        Makes the physics of an experiment on a grid.

    Raises
    ------
    ValueError
        On every rank: where a group would have no rank or no shot, a tile has too few cells, or
        the time step is not stable.
    """
    if groups > min(comm.size, whole.n_shots):
        raise ValueError(
            f"--groups: {groups} groups for {comm.size} ranks and {whole.n_shots} shots; each "
            "needs a rank and a shot"
        )
    number, group = 0, comm
    if groups > 1:
        ranks = np.array_split(np.arange(comm.size), groups)
        number = next(g for g, members in enumerate(ranks) if comm.rank in members)
        group = comm.split(number, comm.rank)
    shots = np.array_split(np.arange(whole.n_shots), groups)[number]
    some = whole.shots(shots)
    # A group of another size may have no place for all its ranks: what its ranks find together,
    # the other groups' ranks learn here.
    with raise_on_all_ranks(comm):
        grid = Grid(whole.shape, whole.spacing, group)
        physics = physics_on(grid, whole)
        fastest = physics.fastest()
        highest, limit = float(np.max(p_velocity(whole.fields))), limiting_velocity(whole.fields)
        if limit > fastest * (1 + 1e-9):
            light = ""
            if limit > 1.1 * highest:
                light = f", and there are cells of {np.min(whole.fields['rho']):.3g} kg/m3"
            raise ValueError(
                f"--dt: a time step of {whole.dt:.6g} s is not stable, velocities reach "
                f"{highest:.6g} m/s{light}; the largest stable one is "
                f"{whole.dt * fastest / limit:.6g} s"
            )
    survey = Survey(some.sources, some.receivers)
    return Team(comm, grid, physics, some, survey, shots, groups, fastest)
