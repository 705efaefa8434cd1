"""The entry `thermal-mesh` of Mosaic by mpigrad: heat conduction on hexahedra.

A Tesseract imports this file. The computation is in `entries.py`, in the folder above.
"""

# No `from __future__ import annotations`: a Tesseract reads the annotations.
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, Field
from tesseract_core.runtime import Array, Differentiable, Float32, ShapeDType

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
jax.config.update("jax_enable_x64", True)

from entries import HeatEntry
from schemas import Conditions, HexMesh

ENTRY = HeatEntry()


class InputSchema(BaseModel):
    rho: Differentiable[Array[(None,), Float32]] = Field(description="density of each cell")
    source: Differentiable[Array[(None,), Float32]] = Field(
        default_factory=lambda: np.zeros(1, "f4"), description="heat source of each cell, W/m³"
    )
    target_temperature: Array[(None,), Float32] = Field(
        default_factory=lambda: np.zeros(1, "f4"), description="target at each node, K"
    )
    boundary_conditions: Conditions
    hex_mesh: HexMesh
    k_max: float = Field(default=1.0, description="conductivity of the solid, W/(m K)")
    p_exp: float = Field(default=3.0, description="exponent of the density")


class OutputSchema(BaseModel):
    thermal_compliance: Differentiable[Array[(), Float32]] = Field(
        description="integral of flux times temperature over the heated facets"
    )
    identification_error: Differentiable[Array[(), Float32]] = Field(
        description="sum of squares of the difference to the target over nodes"
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
