"""`mpigrad run acoustic`."""

from __future__ import annotations

from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad_apps.shots.acoustic_physics import AcousticPhysics
from mpigrad_apps.shots.acoustic_settings import Settings
from mpigrad_apps.shots.experiment import Experiment
from mpigrad_apps.shots.forward import ForwardRun, forward_model

__all__ = ["run"]


def run(settings: Settings, comm: Communicator | None = None) -> ForwardRun:
    """Propagate all shots and write the report (collective). See `shots.forward.forward_model`."""

    def make_physics(grid: Grid, experiment: Experiment) -> AcousticPhysics:
        return AcousticPhysics(grid, experiment.dt, settings.kernels(grid.ndim))

    return forward_model(
        settings, settings.frames, settings.out, AcousticPhysics, make_physics, comm, settings.vtk
    )
