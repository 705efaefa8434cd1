"""`mpigrad run elastic`."""

from __future__ import annotations

from mpigrad.communicator import Communicator
from mpigrad_apps.shots.elastic_physics import ElasticPhysics
from mpigrad_apps.shots.elastic_settings import Settings
from mpigrad_apps.shots.forward import Shooting, shoot

__all__ = ["run"]


def run(settings: Settings, comm: Communicator | None = None) -> Shooting:
    """Shoot, and write the report (collective); see `waves.forward.shoot`."""
    return shoot(
        settings,
        settings.frames,
        settings.out,
        ElasticPhysics,
        lambda grid, whole: ElasticPhysics(grid, whole.dt, settings, whole.peak, settings.source),
        comm,
    )
