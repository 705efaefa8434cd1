"""`mpigrad run acoustic`."""

from __future__ import annotations

from mpigrad.communicator import Communicator
from mpigrad.problems.acoustic.physics import AcousticPhysics
from mpigrad.problems.acoustic.settings import Settings
from mpigrad.problems.waves.forward import Shooting, shoot

__all__ = ["run"]


def run(settings: Settings, comm: Communicator | None = None) -> Shooting:
    """Shoot, and write the report (collective); see `waves.forward.shoot`."""
    return shoot(
        settings,
        settings.frames,
        settings.out,
        AcousticPhysics,
        lambda grid, whole: AcousticPhysics(grid, whole.dt, settings, settings.order),
        comm,
    )
