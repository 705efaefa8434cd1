"""The entry `structural-mesh` of Mosaic by mpigrad: linear elasticity on hexahedra.

A Tesseract imports this file. The computation is in `entries.py`, in the folder above.
"""

# No `from __future__ import annotations`: a Tesseract reads the annotations.
import pathlib
import sys
from typing import Any

import jax
from pydantic import BaseModel, Field
from tesseract_core.runtime import Array, Differentiable, Float32, ShapeDType

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
jax.config.update("jax_enable_x64", True)

from entries import ElasticEntry
from schemas import Conditions, HexMesh

ENTRY = ElasticEntry()


class InputSchema(BaseModel):
    rho: Differentiable[Array[(None,), Float32]] = Field(description="density of each cell")
    boundary_conditions: Conditions
    hex_mesh: HexMesh
    E_max: float = Field(default=70_000.0, description="Young's modulus of the solid, MPa")
    nu: float = Field(default=0.3, description="Poisson's ratio")
    p_exp: float = Field(default=3.0, description="exponent of the density")


class OutputSchema(BaseModel):
    compliance: Differentiable[Array[(), Float32]] = Field(
        description="integral of traction times displacement over the loaded facets"
    )


def apply(inputs: InputSchema) -> OutputSchema:
    return OutputSchema(**ENTRY.apply(inputs.model_dump()))


def vector_jacobian_product(
    inputs: InputSchema,
    vjp_inputs: set[str],
    vjp_outputs: set[str],
    cotangent_vector: dict[str, Any],
) -> dict[str, Any]:
    given = inputs.model_dump()
    return ENTRY.vector_jacobian_product(given, vjp_inputs, vjp_outputs, cotangent_vector)


def jacobian_vector_product(
    inputs: InputSchema,
    jvp_inputs: set[str],
    jvp_outputs: set[str],
    tangent_vector: dict[str, Any],
) -> dict[str, Any]:
    given = inputs.model_dump()
    return ENTRY.jacobian_vector_product(given, jvp_inputs, jvp_outputs, tangent_vector)


def abstract_eval(abstract_inputs: Any) -> dict[str, Any]:
    return {name: ShapeDType(shape=(), dtype="float32") for name in ENTRY.outputs}
