"""Find cells that have no volume or are turned inside out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpigrad.fem.reference import reference_cell

__all__ = ["check_cells", "corner_jacobians"]

# A cell is degenerate if its Jacobian is smaller than this, relative to the product of its edges.
_SMALLEST = 1e-12
_CHUNK = 1 << 18  # cells whose Jacobians are in memory at one time


def corner_jacobians(
    points: NDArray[np.float64], cells: NDArray[np.integer], cell_type: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the determinants of the Jacobian at the corners of each cell, and their bounds.

    The Jacobian is that of the map from the reference cell. It is constant in triangles and
    tetrahedra. The bound of a determinant is the product of the lengths of its columns.

    Returns
    -------
    determinants, bounds
        Shape (n_cells, 1) for triangles and tetrahedra, else (n_cells, n_corners).
    """
    cell = reference_cell(cell_type)
    places = cell.points[:1] if cell.is_simplex else cell.points
    gradients = cell.shape_gradients(places)
    result = np.empty((2, len(cells), len(places)))
    for first in range(0, len(cells), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        corners = points[cells[chunk]]  # (chunk, n_corners, dim)
        jacobians = np.einsum("qkd,ckx->cqxd", gradients, corners, optimize=True)
        result[0, chunk] = _determinants(jacobians)
        result[1, chunk] = np.sqrt((jacobians**2).sum(axis=-2)).prod(axis=-1)
    return result[0], result[1]


def check_cells(
    function: str,
    points: NDArray[np.float64],
    cells: NDArray[np.integer],
    cell_type: str,
    cell_ids: NDArray[np.int64],
) -> ValueError | None:
    """Return an error that names the first cell without a positive Jacobian, or None."""
    finite = np.isfinite(points).all(axis=1)
    if not finite.all():
        wrong = int(np.flatnonzero(~finite)[0])
        return ValueError(
            f"{function}: expected finite coordinates, got {points[wrong].tolist()}. Repair the "
            "mesh."
        )
    determinants, bounds = corner_jacobians(points, cells, cell_type)
    smallest, largest = determinants.min(axis=1), determinants.max(axis=1)
    flat = (np.abs(determinants) <= _SMALLEST * bounds).any(axis=1)
    for wrong, what, remedy in (
        (flat, "degenerate", "Remove it, or move its vertices."),
        (
            largest < 0,
            "inverted",
            "Give its corners in the other order: reorient=True does it for all such cells.",
        ),
        (smallest < 0, "folded", "Make it convex."),
    ):
        if np.any(wrong):
            index = int(np.flatnonzero(wrong)[0])
            return ValueError(
                f"{function}: expected cells with a positive Jacobian, got {what} cell "
                f"{cell_ids[index]} with the Jacobian {determinants[index].min():.3g} (one of "
                f"{np.count_nonzero(wrong)} such cells of this rank). {remedy}"
            )
    return None


def _determinants(matrices: NDArray[np.float64]) -> NDArray[np.float64]:
    m = matrices
    if m.shape[-1] == 2:
        return m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]
    return (
        m[..., 0, 0] * (m[..., 1, 1] * m[..., 2, 2] - m[..., 1, 2] * m[..., 2, 1])
        - m[..., 0, 1] * (m[..., 1, 0] * m[..., 2, 2] - m[..., 1, 2] * m[..., 2, 0])
        + m[..., 0, 2] * (m[..., 1, 0] * m[..., 2, 1] - m[..., 1, 1] * m[..., 2, 0])
    )
