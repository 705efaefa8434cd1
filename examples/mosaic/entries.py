"""Answers to the requests of the benchmark Mosaic: arrays in the order of a file, on all ranks.

An entry keeps the problem of the last mesh and conditions. So matrices' patterns, compiled programs
and, for an equal density, the multigrid hierarchy are made once. On several ranks each call is
collective, and all ranks give the same request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from problems import Elastic, Groups, Heat, Problem

from mpigrad import fem

__all__ = ["ElasticEntry", "Entry", "HeatEntry"]

Request = Mapping[str, Any]


class Entry:
    """An entry of Mosaic. The methods have the names and arguments of a Tesseract.

    Attributes
    ----------
    outputs
        The names of the outputs, all of them scalars.
    settings
        The defaults of fields that are settings of the problem.
    """

    outputs: tuple[str, ...] = ()
    settings: ClassVar[Mapping[str, float]] = {}
    problem_type: type[Problem] = Problem
    components = 1

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._problem: Problem | None = None

    def problem(self, request: Request) -> Problem:
        """Return the problem of a mesh and conditions. It is kept until another one comes."""
        box, conditions = request["hex_mesh"], request["boundary_conditions"]
        n, m = int(box["n_points"]), int(box["n_faces"])
        fixed = conditions.get("dirichlet") or {"mask": np.zeros(n, int), "values": None}
        load = conditions.get("neumann") or {"mask": np.zeros(n, int), "values": None}
        settings = {k: float(request.get(k, v)) for k, v in self.settings.items()}
        key = [box["points"], box["faces"], fixed["mask"], fixed["values"], load["mask"]]
        key += [load["values"], settings, n, m]
        if self._problem is None or not all(map(_equal, key, self._key)):
            mesh = fem.distribute_mesh(
                np.asarray(box["points"])[:n], np.asarray(box["faces"])[:m], "hexahedron"
            )
            groups = (self._groups(mesh, each["mask"], each["values"]) for each in (fixed, load))
            self._problem = self.problem_type(mesh, *groups, **settings)
            self._key = [np.array(k) if isinstance(k, np.ndarray) else k for k in key]
        return self._problem

    def _groups(self, mesh: fem.Mesh, mask: Any, values: Any) -> Groups:
        mask = np.asarray(mask)
        count = int(mask.max(initial=0))
        if values is None:
            values = np.zeros((count, self.components))
        own = np.asarray(mask)[mesh.vertex_ids]
        return Groups(own, np.asarray(values, float).reshape(-1, self.components)[:count])

    def arguments(self, request: Request) -> tuple[Problem, list[Any]]:
        """Return the problem, and the arguments of its programs on this rank."""
        problem = self.problem(request)
        ids = problem.mesh.cell_ids
        return problem, [jnp.asarray(_padded(request[k], ids)) for k in problem.inputs]

    def apply(self, inputs: Request) -> dict[str, np.float32]:
        problem, arguments = self.arguments(inputs)
        values = np.asarray(problem.outputs(*arguments))
        return {name: np.float32(v) for name, v in zip(self.outputs, values, strict=True)}

    def vector_jacobian_product(
        self,
        inputs: Request,
        vjp_inputs: Iterable[str],
        vjp_outputs: Iterable[str],
        cotangent_vector: Mapping[str, Any],
    ) -> dict[str, np.ndarray]:
        problem, arguments = self.arguments(inputs)
        asked = set(vjp_outputs)
        weights = [float(cotangent_vector[k]) if k in asked else 0.0 for k in self.outputs]
        _, gradients = problem.pullback(jnp.asarray(weights), *arguments)
        by_name = dict(zip(problem.inputs, gradients, strict=True))
        return {k: self._gathered(problem.mesh, by_name[k], inputs[k]) for k in vjp_inputs}

    def jacobian_vector_product(
        self,
        inputs: Request,
        jvp_inputs: Iterable[str],
        jvp_outputs: Iterable[str],
        tangent_vector: Mapping[str, Any],
    ) -> dict[str, np.float32]:
        problem, arguments = self.arguments(inputs)
        ids, asked = problem.mesh.cell_ids, set(jvp_inputs)
        directions = tuple(
            jnp.asarray(_padded(tangent_vector[k] if k in asked else np.zeros(0), ids))
            for k in problem.inputs
        )
        moved = np.asarray(problem.pushforward(directions, *arguments))
        by_name = dict(zip(self.outputs, moved, strict=True))
        return {k: np.float32(by_name[k]) for k in jvp_outputs}

    def _gathered(self, mesh: fem.Mesh, values: Any, like: Any) -> np.ndarray:
        """Return the values of all ranks' cells in the order and the shape of the request."""
        whole = np.zeros(max(mesh.n_cells_global, len(like)))
        whole[mesh.cell_ids] = np.asarray(values)
        if mesh.comm.size > 1:
            whole = np.asarray(mesh.comm.mpi.allreduce(whole))
        return whole[: len(like)].astype(np.float32)


class HeatEntry(Entry):
    """`thermal-mesh`."""

    outputs = ("thermal_compliance", "identification_error")
    settings: ClassVar = {"k_max": 1.0, "p_exp": 3.0}
    problem_type = Heat

    def arguments(self, request: Request) -> tuple[Problem, list[Any]]:
        problem, arguments = super().arguments(request)
        target, ids = np.asarray(request["target_temperature"]), problem.mesh.vertex_ids
        return problem, [*arguments, jnp.asarray(_padded(target, ids)), ids < len(target)]


class ElasticEntry(Entry):
    """`structural-mesh`."""

    outputs = ("compliance",)
    settings: ClassVar = {"E_max": 70_000.0, "nu": 0.3, "p_exp": 3.0}
    problem_type = Elastic
    components = 3


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _padded(array: Any, ids: np.ndarray) -> np.ndarray:
    """Return the entries at `ids` in float64, zero behind the end of the array."""
    array = np.asarray(array)
    if not len(array):
        return np.zeros(len(ids))
    return np.where(ids < len(array), array[np.minimum(ids, len(array) - 1)], 0).astype(float)
