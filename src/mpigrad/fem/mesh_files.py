"""Read meshes from files of gmsh, VTK and XDMF."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.fem.distribute import MeshArrays, distribute_arrays
from mpigrad.fem.mesh import Mesh
from mpigrad.fem.packages import import_package
from mpigrad.fem.reference import CELL_TYPES

__all__ = ["read_mesh"]

_NAME = "fem.read_mesh"
# Names of arrays with tags that programs write.
_TAGS = ("gmsh:physical", "cell_tags", "medit:ref", "tags")
# Cells of two dimensions and of three, as meshio calls them: type and dimension.
_DIMENSION = {"vertex": 0, "line": 1, "triangle": 2, "quad": 2, "tetra": 3, "hexahedron": 3}


def read_mesh(
    path: str | os.PathLike[str],
    *,
    tags: str | None = None,
    partition: str | ArrayLike = "auto",
    reorient: bool = False,
    drop_unused: bool = False,
    comm: Communicator | None = None,
) -> Mesh:
    """Read a mesh from a file and distribute it (collective).

    Rank 0 reads the file by meshio: gmsh's `.msh`, `.vtu`, `.xdmf` and other formats. It divides
    the cells, and sends each rank its part. `cell_ids` and `vertex_ids` of the mesh are the numbers
    in the file, from 0.

    The cells of the highest dimension are the cells of the mesh. Cells of one dimension less are
    facets with tags: gmsh's physical groups of lines in the plane, and of surfaces in space. Names
    of physical groups are names of tags. A cell in several physical groups has the tag of the first
    one, and a facet has all of its tags.

    Parameters
    ----------
    path
        The file, the same on all ranks. Only rank 0 has to see it.
    tags
        The name of the array of the file that has the tags. Default: the first that is found of
        "gmsh:physical", "cell_tags", "medit:ref" and "tags".
    partition, reorient, drop_unused
        As for `distribute_mesh`.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Mesh

    Raises
    ------
    FileNotFoundError
        On all ranks: if the file does not exist.
    ValueError
        On all ranks: if the file cannot be read, or its mesh cannot be used: several types of
        cells, curved cells, degenerate or inverted cells, vertices without cells, facets without
        cells, or fewer cells than ranks.
    ImportError
        On rank 0, and as a RuntimeError on the others: if meshio is not installed.

    Examples
    --------
    >>> import meshio
    >>> from mpigrad import fem
    >>> points = [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    >>> meshio.Mesh(points, {"quad": [[0, 1, 2, 3]]}).write("square.vtu")
    >>> fem.read_mesh("square.vtu")
    Mesh(quadrilateral, n_cells=1 of 1, n_vertices=4 of 4)
    """
    comm = resolve(comm)
    file = pathlib.Path(path)
    assert_same_on_all_ranks(comm, str(file), f"{_NAME}: path")
    return distribute_arrays(
        _NAME,
        comm,
        lambda: _arrays(file, tags),
        corner_order="vtk",
        partition=partition,
        reorient=reorient,
        drop_unused=drop_unused,
    )


def _arrays(path: pathlib.Path, tags: str | None) -> MeshArrays:
    content = _read(path)
    blocks = [(block.type, np.asarray(block.data)) for block in content.cells]
    cell = _cell_type(path, [kind for kind, data in blocks if len(data)])
    names = CELL_TYPES[cell]
    name = _tag_name(path, content, tags)
    by_block: list[Any] = [None] * len(blocks)
    if name:
        by_block = [np.reshape(tags, -1) for tags in content.cell_data[name]]
    dim = _DIMENSION[names.meshio]
    groups = {
        level: {
            str(group): int(value[0])
            for group, value in content.field_data.items()
            if np.shape(value) == (2,) and int(value[1]) == level
        }
        for level in (dim - 1, dim)
    }

    chosen = [i for i, (kind, data) in enumerate(blocks) if kind == names.meshio and len(data)]
    cell_tags = None
    if name:
        cell_tags = np.concatenate([by_block[i] for i in chosen])
    facets, facet_tags = [], []
    for i, (kind, data) in enumerate(blocks):
        if kind != names.facet or not len(data):
            continue
        if by_block[i] is not None:
            tagged = np.flatnonzero(by_block[i])
            facets.append(data[tagged])
            facet_tags.append(by_block[i][tagged])
        # Further physical groups of the same facets.
        for group, tag in groups[dim - 1].items():
            members = content.cell_sets.get(group, [None] * len(blocks))[i]
            if members is not None and len(members):
                facets.append(data[members])
                facet_tags.append(np.full(len(members), tag))
    return MeshArrays(
        points=content.points,
        cells=np.concatenate([blocks[i][1] for i in chosen]),
        cell_type=cell,
        cell_tags=cell_tags,
        facets=np.concatenate(facets) if facets else None,
        facet_tags=np.concatenate(facet_tags) if facets else None,
        cell_groups=groups[dim],
        facet_groups=groups[dim - 1],
    )


def _read(path: pathlib.Path) -> Any:
    meshio = import_package("meshio", _NAME)
    if not path.is_file():
        raise FileNotFoundError(f"{_NAME}: the file {path} does not exist. Check the path.")
    printed = io.StringIO()
    try:
        # meshio prints errors, and ends the program.
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return meshio.read(path)
    except ImportError as error:  # h5py, for XDMF
        raise ImportError(
            f"{_NAME}: meshio needs another package for {path} ({error}). Install it with pip "
            "install mpigrad[fem]."
        ) from error
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = " ".join(printed.getvalue().split())
        raise ValueError(
            f"{_NAME}: expected a mesh that meshio can read, got {path} ({reason}). Check the file "
            "and its suffix."
        ) from error


def _cell_type(path: pathlib.Path, kinds: list[str]) -> str:
    """Return the type of the cells of a file, or raise an error."""
    unknown = sorted({kind for kind in kinds if kind not in _DIMENSION})
    if unknown:
        raise ValueError(
            f"{_NAME}: expected cells of the types {', '.join(CELL_TYPES)} with straight edges, "
            f"got {', '.join(unknown)} in {path}. Write the mesh with elements of order 1 (gmsh "
            "-order 1) of one of these types."
        )
    highest = max((_DIMENSION[kind] for kind in kinds), default=0)
    cells = sorted({kind for kind in kinds if _DIMENSION[kind] == highest})
    if highest < 2 or len(cells) > 1:
        raise ValueError(
            f"{_NAME}: expected cells of one type, got {' and '.join(cells) or 'none'} in {path}. "
            "Make a mesh of triangles, quadrilaterals, tetrahedra or hexahedra."
        )
    return next(name for name, names in CELL_TYPES.items() if names.meshio == cells[0])


def _tag_name(path: pathlib.Path, content: Any, tags: str | None) -> str | None:
    if tags is None:
        return next((name for name in _TAGS if name in content.cell_data), None)
    if tags not in content.cell_data:
        listed = ", ".join(map(repr, content.cell_data)) or "none"
        raise ValueError(
            f"{_NAME}: expected an array of cell data with the name {tags!r} in {path}, got "
            f"{listed}. Choose one of them."
        )
    return tags
