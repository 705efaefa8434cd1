"""Grids of cells over ranks: their tiles, halos and stencils."""

from mpigrad._renamed import old_names
from mpigrad.grid.grid import Grid, Neighbor
from mpigrad.grid.halo_exchange import halo_exchange
from mpigrad.grid.stencil import apply_stencil

__all__ = ["Grid", "Neighbor", "apply_stencil", "halo_exchange"]

__getattr__ = old_names(__name__)
