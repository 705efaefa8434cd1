"""Grids of cells over ranks: their tiles, halos and stencils."""

from mpigrad.grid.grid import Grid, Neighbor
from mpigrad.grid.halo_exchange import halo_exchange
from mpigrad.grid.particles import exchange_particles, rank_at_position
from mpigrad.grid.stencil import apply_stencil

__all__ = [
    "Grid",
    "Neighbor",
    "apply_stencil",
    "exchange_particles",
    "halo_exchange",
    "rank_at_position",
]
