"""The types of the requests of Mosaic: meshes of hexahedra, and groups of nodes with conditions."""

from __future__ import annotations

from pydantic import BaseModel, Field
from tesseract_core.runtime import Array, Float32, Int32

__all__ = ["Conditions", "HexMesh"]


class HexMesh(BaseModel):
    """Hexahedra. Arrays may be padded at the end."""

    points: Array[(None, 3), Float32] = Field(description="coordinates of nodes")
    faces: Array[(None, 8), Int32] = Field(description="nodes of cells, in the order of VTK")
    n_points: Int32 = Field(default=0, description="number of nodes that are used")
    n_faces: Int32 = Field(default=0, description="number of cells that are used")


class Fixed(BaseModel):
    """Given values."""

    mask: Array[(None,), Int32] = Field(description="group of each node, 0 for none")
    values: Array[(None, None), Float32] | None = Field(
        default=None, description="value of each group, (groups, components). None: zero"
    )


class Load(BaseModel):
    """Fluxes or tractions on facets whose nodes are all in the same group."""

    mask: Array[(None,), Int32] = Field(description="group of each node, 0 for none")
    values: Array[(None, None), Float32] = Field(
        description="value of each group, (groups, components)"
    )


class Conditions(BaseModel):
    """Conditions at the boundary."""

    dirichlet: Fixed | None = None
    neumann: Load | None = None
