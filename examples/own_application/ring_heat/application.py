"""The entry point `mine`, which `mpigrad run` finds."""

from mpigrad.launch.applications import Application

MINE = Application(
    "the temperature of a ring at the start, from its temperature later",
    settings="ring_heat.settings:Settings",
    run="ring_heat.inversion:run",
    packages=("jax",),
    requirement="ring-heat",
)
