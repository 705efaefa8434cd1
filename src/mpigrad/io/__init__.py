"""Files of fields on a grid that other programs read: ParaView, xarray, NetCDF."""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad.io.vtk import write_pvd as write_pvd
    from mpigrad.io.vtk import write_vtk as write_vtk
    from mpigrad.io.vtk import write_vtu as write_vtu
    from mpigrad.io.zarr import write_zarr as write_zarr

_NAMES = {"write_pvd": "vtk", "write_vtk": "vtk", "write_vtu": "vtk", "write_zarr": "zarr"}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
