"""The requests of the benchmark Mosaic: slabs and beams of bricks, with densities and sources.

Arrays are in float32 and in the order of the file: x runs fastest, then y, then z.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from problems import Heat, stiffness_ratio

from mpigrad import fem, sparse

__all__ = ["beam", "bell", "bricks", "flawed_target", "noise", "slab", "two_bells"]

SOLID = 0.5  # the density of cells if nothing else is said


def bricks(shape: tuple[int, int, int], lengths: tuple[float, float, float]) -> dict[str, Any]:
    """Return a box of equal bricks as an unstructured mesh. Corners are in the order of VTK."""
    axes = [np.linspace(0, end, n + 1, dtype="f4") for end, n in zip(lengths, shape, strict=True)]
    z, y, x = np.meshgrid(*reversed(axes), indexing="ij")
    points = np.stack([x.reshape(-1), y.reshape(-1), z.reshape(-1)], axis=1)
    nx, ny, _ = shape
    k, j, i = (a.reshape(-1) for a in np.meshgrid(*map(np.arange, shape[::-1]), indexing="ij"))
    first = (k * (ny + 1) + j) * (nx + 1) + i
    bottom = np.array([0, 1, nx + 2, nx + 1])
    around = np.concatenate([bottom, bottom + (nx + 1) * (ny + 1)])
    cells = (first[:, None] + around).astype("i4")
    return {"points": points, "faces": cells, "n_points": len(points), "n_faces": len(cells)}


def slab(
    nx: int,
    rho: Any = SOLID,
    source: Any = 0.0,
    flux: float = 1.0,
    *,
    hot_spot: bool = False,
) -> dict[str, Any]:
    """Return a request of `thermal-mesh`: cold at x = 0, heated at x = 2."""
    ny, depth = max(1, nx // 2), 2.0 / nx
    mesh = bricks((nx, ny, 1), (2.0, 1.0, depth))
    x, y, _ = mesh["points"].T
    heated, width = x > 2 - 2e-6, 1.0
    if hot_spot:
        width = 1 / 3
        heated &= (y >= width - 2e-6) & (y <= 2 * width + 2e-6)
    q = np.array([[flux / (width * depth)]], "f4")
    return {
        "rho": _cells(rho, nx * ny),
        "source": _cells(source, nx * ny),
        "target_temperature": np.zeros(mesh["n_points"], "f4"),
        "hex_mesh": mesh,
        "boundary_conditions": {
            "dirichlet": {"mask": (x < 2e-6).astype("i4"), "values": np.zeros((1, 1), "f4")},
            "neumann": {"mask": heated.astype("i4"), "values": q},
        },
    }


def beam(
    shape: tuple[int, int, int], rho: Any = SOLID, force: float = 1.0, *, corner: bool = False
) -> dict[str, Any]:
    """Return a request of `structural-mesh`: clamped at x = 0, loaded at x = 2 or in its corner."""
    mesh = bricks(shape, (2.0, 1.0, 1.0))
    x, y, z = mesh["points"].T
    dy, dz = 1 / shape[1], 1 / shape[2]
    loaded, traction = x > 2 - 2e-6, -force
    if corner:
        loaded &= (y < dy + 2e-6) & (z < dz + 2e-6)
        traction = force / (dy * dz)
    return {
        "rho": _cells(rho, mesh["n_faces"]),
        "hex_mesh": mesh,
        "boundary_conditions": {
            "dirichlet": {"mask": (x < 2e-6).astype("i4"), "values": None},
            "neumann": {
                "mask": loaded.astype("i4"),
                "values": np.array([[0, 0, traction]], "f4"),
            },
        },
    }


def noise(n_cells: int) -> np.ndarray:
    """Return a random density."""
    values = np.random.default_rng(0).standard_normal(n_cells).astype("f4")
    return np.clip(0.5 + 0.3 * values, 0.05, 0.95).astype("f4")


def bell(nx: int, height: float = 1.0, width: float = 0.2, center: float = 0.5) -> np.ndarray:
    """Return a bell at (2 center, 1/2) in the slab."""
    ny = max(1, nx // 2)
    x, y = (np.arange(nx) + 0.5) * (2.0 / nx), (np.arange(ny) + 0.5) / ny
    distance = (x - 2 * center) ** 2 + (y[:, None] - 0.5) ** 2
    return (height * np.exp(-distance / (2 * width**2))).astype("f4").reshape(-1)


def two_bells(nx: int) -> np.ndarray:
    """Return the two bells that are to be found."""
    return bell(nx, width=0.15, center=0.3) + bell(nx, width=0.15, center=0.7)


def flawed_target(problem: Heat, rho: np.ndarray, source: np.ndarray, flux: float) -> np.ndarray:
    """Return the temperatures that Mosaic takes for data, in the order of the file (collective).

    Its flux is not that of the problem: each node of the heated side gets the flux through a
    quarter of a face once, and not once for each of its faces.

    Parameters
    ----------
    rho, source
        Of all cells, in the order of the file.
    flux
        The flux through a quarter of a face.
    """
    ids = problem.mesh.cell_ids
    k = problem.k_max * stiffness_ratio(jnp.asarray(rho[ids], float), problem.p_exp)
    equation = problem.conduction(fem.PerCell(k), fem.PerCell(jnp.asarray(source[ids], float)))
    points = problem.mesh.points[: problem.mesh.vertices.n_local]
    b = flux * (points[:, 0] > 2 - 2e-6) - equation.residual(jnp.zeros(len(points)))
    A, b = equation.jacobian().at_boundary(problem.fixed, b, 0.0)
    exact = sparse.PCG(rtol=1e-12, preconditioner=problem.solver.preconditioner)
    T = np.asarray(sparse.solve(A, b, exact).value)
    whole = np.zeros(problem.mesh.vertices.n_global)
    whole[problem.mesh.vertex_ids] = T
    return np.asarray(problem.mesh.comm.mpi.allreduce(whole)).astype("f4")


def _cells(values: Any, n: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, "f4"), (n,)).copy()
