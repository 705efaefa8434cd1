"""Finite elements on unstructured meshes over ranks."""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad.fem.boxes import box as box
    from mpigrad.fem.distribute import distribute_mesh as distribute_mesh
    from mpigrad.fem.equation import Equation as Equation
    from mpigrad.fem.forms import Energy as Energy
    from mpigrad.fem.forms import Nodal as Nodal
    from mpigrad.fem.forms import PerCell as PerCell
    from mpigrad.fem.forms import PerPoint as PerPoint
    from mpigrad.fem.forms import Point as Point
    from mpigrad.fem.forms import WeakForm as WeakForm
    from mpigrad.fem.mesh import Facets as Facets
    from mpigrad.fem.mesh import Mesh as Mesh
    from mpigrad.fem.mesh import PartitionReport as PartitionReport
    from mpigrad.fem.mesh_files import read_mesh as read_mesh
    from mpigrad.fem.mixed import Mixed as Mixed
    from mpigrad.fem.numbering import Numbering as Numbering
    from mpigrad.fem.observation import Observation as Observation
    from mpigrad.fem.solving import solve as solve
    from mpigrad.fem.space import Space as Space
    from mpigrad.fem.stepping import Motion as Motion
    from mpigrad.fem.stepping import integrate as integrate
    from mpigrad.fem.stepping import newmark_step as newmark_step
    from mpigrad.fem.stepping import start_motion as start_motion
    from mpigrad.fem.stepping import theta_step as theta_step

_NAMES = {
    "Energy": "forms",
    "Equation": "equation",
    "Facets": "mesh",
    "Mesh": "mesh",
    "Mixed": "mixed",
    "Motion": "stepping",
    "Nodal": "forms",
    "Numbering": "numbering",
    "Observation": "observation",
    "PartitionReport": "mesh",
    "PerCell": "forms",
    "PerPoint": "forms",
    "Point": "forms",
    "Space": "space",
    "WeakForm": "forms",
    "box": "boxes",
    "distribute_mesh": "distribute",
    "integrate": "stepping",
    "newmark_step": "stepping",
    "read_mesh": "mesh_files",
    "solve": "solving",
    "start_motion": "stepping",
    "theta_step": "stepping",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
