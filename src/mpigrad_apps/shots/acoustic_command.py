"""`mpigrad run acoustic`."""

from __future__ import annotations

from mpigrad.communicator import Communicator
from mpigrad_apps.shots.acoustic_physics import AcousticPhysics
from mpigrad_apps.shots.acoustic_settings import Settings
from mpigrad_apps.shots.forward import Shooting, shoot

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
