"""Pictures of the true model, the start and the result: whole sections, or three of a volume."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mpigrad.grid import Grid
from mpigrad_apps import report
from mpigrad_apps.fwi.inversion import Inversion
from mpigrad_apps.fwi.result import Result
from mpigrad_apps.shots.pictures import section

__all__ = ["Sections", "gather_plane", "gather_sections", "model_picture", "result_tile"]

_UNITS = {"vp": "vp (m/s)"}
_MAX_PIXELS = 600  # along an axis
_LABELS = ("x (km)", "y (km)", "depth (km)")


@dataclasses.dataclass(frozen=True)
class Sections:
    """The sections of one unknown field that a picture shows.

    Attributes
    ----------
    name
        Name of the field.
    places
        Of a volume, a text for each section. One empty text in two dimensions.
    labels
        Labels of the axes of each section.
    sizes
        Extents of each section in m.
    start, result, true
        The sections of these models. `true` is None if it is not known.
    """

    name: str
    places: Sequence[str]
    labels: Sequence[tuple[str, str]]
    sizes: Sequence[tuple[float, ...]]
    start: Sequence[Float[np.ndarray, "_ _"]]
    result: Sequence[Float[np.ndarray, "_ _"]]
    true: Sequence[Float[np.ndarray, "_ _"]] | None


def result_tile(problem: Inversion, result: Result, name: str) -> Float[np.ndarray, "*tile"]:
    """Return this rank's tile of a field of the result."""
    field = result.fields[name]
    return field if problem.layout.divided else problem.tile(field)


def gather_sections(problem: Inversion, result: Result) -> list[Sections]:
    """Return the sections of all unknown fields, complete on rank 0 of the grid (collective)."""
    size, grid, truth = problem.experiment.size, problem.grid, problem.inputs.truth
    unknowns = problem.parametrization.unknowns
    if grid.ndim == 2:
        labels = [(_LABELS[0], _LABELS[2])]
        return [
            Sections(
                unknown.name, [""], labels, [size], [unknown.start], [result.fields[unknown.name]],
                None if truth is None else [truth[unknown.name]],
            )
            for unknown in unknowns
        ]  # fmt: skip
    # Through the middle, and at a quarter of the depth, which waves from above see well.
    planes = [(1, grid.shape[1] // 2), (0, grid.shape[0] // 2), (2, grid.shape[2] // 4)]
    sides = [tuple(k for k in range(3) if k != axis) for axis, _ in planes]
    centers = [(index + 0.5) * grid.spacing[axis] for axis, index in planes]
    sections = []
    for unknown in unknowns:
        models = [unknown.start, *([] if truth is None else [truth[unknown.name]])]
        tiles = [*map(problem.tile, models), result_tile(problem, result, unknown.name)]
        start, *true, end = [[gather_plane(grid, t, *plane) for plane in planes] for t in tiles]
        sections.append(
            Sections(
                unknown.name,
                [
                    f"{('x', 'y', 'depth')[axis]} = {center:.4g} m"
                    for (axis, _), center in zip(planes, centers, strict=True)
                ],
                [(_LABELS[u], _LABELS[v]) for u, v in sides],
                [(size[u], size[v]) for u, v in sides],
                start,
                end,
                true[0] if true else None,
            )
        )
    return sections


def gather_plane(
    grid: Grid, tile: Float[np.ndarray, "lx ly lz"], axis: int, index: int
) -> Float[np.ndarray, "_ _"]:
    """Gather a plane of a volume on rank 0, thinned for a picture (collective).

    Parameters
    ----------
    axis, index
        The plane is that of the cells `index` along `axis`.

    Returns
    -------
    The plane on rank 0, of at most 600 values along an axis, and zeros on other ranks.
    """
    sides = [k for k in range(3) if k != axis]
    step = math.ceil(max(grid.shape[k] for k in sides) / _MAX_PIXELS)
    whole = np.zeros([math.ceil(grid.shape[k] / step) for k in sides])
    part, piece = grid.slices, None
    if part[axis].start <= index < part[axis].stop:
        plane = np.take(tile, index - part[axis].start, axis)
        piece = plane[tuple(slice(-part[k].start % step, None, step) for k in sides)]
    pieces = grid.comm.mpi.gather(piece)
    for rank, values in enumerate(pieces or []):
        if values is not None:
            place = [-(-grid.slices_of(rank)[k].start // step) for k in sides]
            inside = zip(place, values.shape, strict=True)
            whole[tuple(slice(first, first + n) for first, n in inside)] = values
    return whole


def model_picture(found: Sections) -> report.Picture:
    """Draw the models in rows of their sections, or in two columns in two dimensions."""
    name, volume = found.name, len(found.places) > 1
    shown = found.true or [*found.start, *found.result]
    limits = min(float(f.min()) for f in shown), max(float(f.max()) for f in shown)
    rows = [("start", found.start), ("result", found.result)]
    caption = f"{name} of the start and of the result."
    if found.true is not None:
        rows.insert(0, ("true", found.true))
        caption = f"True {name}, the start and the result in the same colours, and the difference."
    limited = [(words, sections, limits) for words, sections in rows]
    if found.true is not None:
        differences = [end - true for end, true in zip(found.result, found.true, strict=True)]
        largest = max(float(np.abs(values).max()) for values in differences)
        limited.append(("result − true", differences, (-largest, largest)))
    panels = []
    for words, sections, ends in limited:
        diverging = words == "result − true"
        quantity = f"{'error of ' * diverging}{_UNITS.get(name, name)}" if volume else None
        title = words if volume else f"{words}{':' * (words in ('start', 'result'))} {name}"
        panels += [
            section(
                f"{title}, {place}" if volume else title, values, size, ends, diverging,
                quantity=quantity, labels=labels,
            )
            for place, labels, size, values in zip(
                found.places, found.labels, found.sizes, sections, strict=True
            )
        ]  # fmt: skip
    columns = 3 if volume else 2 if found.true is not None else None
    return report.maps(name, caption, panels, columns=columns)
