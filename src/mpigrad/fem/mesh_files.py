"""Read meshes from files of gmsh, VTK and XDMF."""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import pathlib
import re
import shlex
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.fem.cells import CELL_TYPES, import_package
from mpigrad.fem.distribute import MeshArrays, distribute_arrays
from mpigrad.fem.mesh import Mesh
from mpigrad.fem.numbering import repeated_rows, row_groups

__all__ = [
    "GmshGroups",
    "check_content",
    "check_file",
    "has_partitions",
    "read_gmsh_groups",
    "read_mesh",
]

# ---- Physical groups of gmsh's files, which meshio reads only in part ----
#
# meshio has one group for each name, and one tag for each block of cells. A file may have groups
# of several dimensions with one name, and a cell may belong to several groups.


@dataclass(frozen=True)
class GmshGroups:
    """The physical groups of a file.

    Attributes
    ----------
    names
        Dimension, tag and name of each group that has a name.
    entities
        The tags of each entity, by its dimension and number. None in format 2, which has one tag
        for each cell.
    """

    names: tuple[tuple[int, int, str], ...]
    entities: Mapping[tuple[int, int], tuple[int, ...]] | None


def read_gmsh_groups(path: pathlib.Path) -> GmshGroups | None:
    """Read the names and members of physical groups, None if the file is not one of gmsh."""
    with path.open("rb") as file:
        if file.readline().strip() != b"$MeshFormat":
            return None
        words = file.readline().split()
        version, binary, size = words[0].decode(), int(words[1]) == 1, int(words[2])
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            names = _names(_section(content, b"PhysicalNames").decode())
            if version.startswith("2"):
                return GmshGroups(names, None)
            section = _section(content, b"Entities")
    if not section:
        return GmshGroups(names, {})
    take = _binary_values(section, size) if binary else _ascii_values(section)
    return GmshGroups(names, _entities(take, 3 if version == "4.1" else 6))


def has_partitions(path: pathlib.Path) -> bool:
    """Return True if gmsh has divided the mesh of a file into parts."""
    with path.open("rb") as file:
        return file.readline().strip() == b"$MeshFormat" and b"$PartitionedEntities" in file.read()


def _section(content: mmap.mmap, name: bytes) -> bytes:
    start = content.find(b"\n$" + name)
    if start < 0:
        return b""
    start = content.find(b"\n", start + 1) + 1
    return content[start : content.find(b"$End" + name, start)]


def _names(section: str) -> tuple[tuple[int, int, str], ...]:
    rows = [shlex.split(line) for line in section.splitlines()[1:] if line.strip()]
    return tuple((int(dim), int(tag), name) for dim, tag, name in rows)


def _entities(
    take: Callable[[str, int], list[Any]], n_of_point: int
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the tags of each entity.

    Parameters
    ----------
    take
        Returns the next values of a kind: "i" int, "n" a count, "d" double.
    n_of_point
        The number of coordinates of a point. Other entities have six, of a box.
    """
    tags = {}
    for dim, count in enumerate(take("n", 4)):
        for _ in range(count):
            (entity,) = take("i", 1)
            take("d", 6 if dim else n_of_point)
            # A tag is negative if the group has the entity in the other direction.
            tags[dim, entity] = tuple(abs(tag) for tag in take("i", take("n", 1)[0]))
            if dim:
                take("i", take("n", 1)[0])
    return tags


def _ascii_values(section: bytes) -> Callable[[str, int], list[Any]]:
    words = iter(section.split())

    def take(kind: str, n: int) -> list[Any]:
        chosen = list(itertools.islice(words, n))
        return chosen if kind == "d" else [int(word) for word in chosen]

    return take


def _binary_values(section: bytes, size: int) -> Callable[[str, int], list[Any]]:
    place = 0
    kinds = {"i": "i", "d": "d", "n": "Q" if size == 8 else "I"}

    def take(kind: str, n: int) -> list[Any]:
        nonlocal place
        layout = f"={n}{kinds[kind]}"
        values = struct.unpack_from(layout, section, place)
        place += struct.calcsize(layout)
        return list(values)

    return take


# ---- Check VTU and XDMF files for attributes that meshio does not apply ----


_GHOSTS = "vtkGhostType"
# Attributes of XDMF elements, and the values with which meshio reads what they say.
_XDMF = {
    "BaseOffset": ("0",),
    "Order": (),
    "Seek": ("0",),
    "Compression": ("Raw",),
    "Endian": ("Native", sys.byteorder.capitalize()),
    "ItemType": ("Uniform",),
}


def check_file(function: str, path: pathlib.Path) -> None:
    """Raise a ValueError of `function` if a file has an element that meshio leaves out."""
    suffix = path.suffix.lower()
    if suffix == ".vtu":
        pieces = re.findall(rb'<Piece[^>]*NumberOfCells\s*=\s*["\']\s*(\d+)', path.read_bytes())
        filled = [int(cells) for cells in pieces if int(cells)]
        if len(filled) > 1:
            raise ValueError(
                f"{function}: expected one piece with cells in {path}, got {len(filled)} pieces. "
                "Merge them into one."
            )
    if suffix in (".xdmf", ".xmf"):
        text = path.read_text(encoding="utf-8", errors="replace")
        for name, known in _XDMF.items():
            for value in re.findall(rf'\b{name}\s*=\s*["\']([^"\']*)["\']', text):
                if value not in known:
                    raise ValueError(
                        f'{function}: {path} has {name}="{value}", which the reader does not '
                        "apply. Write the file without it."
                    )


def check_content(function: str, path: pathlib.Path, content: Any) -> None:
    """Raise a ValueError of `function` if cells of a mesh that meshio has read are ghosts."""
    ghosts = sum(int(np.count_nonzero(part)) for part in content.cell_data.get(_GHOSTS, ()))
    if ghosts:
        raise ValueError(
            f"{function}: expected no ghost cells in {path}, got {ghosts} of them by the array "
            f"{_GHOSTS}. Write the mesh without them."
        )


# ---- Read meshes from files of gmsh, VTK and XDMF ----


_NAME = "fem.read_mesh"
# Names of arrays with tags that programs write.
_PHYSICAL = "gmsh:physical"
_TAGS = (_PHYSICAL, "cell_tags", "medit:ref", "tags")
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
    of physical groups are names of tags. A cell or a facet in several physical groups has all of
    their tags. A cell that the file has once for each of its tags, as gmsh writes format 2.2, is
    one cell, and `cell_ids` counts it once. Named sets of cells of Abaqus and families of MED are
    names of tags too, whose integers `fem.read_mesh` chooses. A `.vtu` file has one piece without
    ghost cells, and an `.xdmf` file one grid, whose indices count from 0 (no `BaseOffset`).

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
        cells, curved cells, degenerate or inverted cells, cells that occur twice, vertices without
        cells, facets without cells, two groups with one name and dimension, or fewer cells than
        ranks.
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
    content, gmsh = _read(path)
    blocks = [(block.type, np.asarray(block.data)) for block in content.cells]
    cell = _cell_type(path, [kind for kind, data in blocks if len(data)])
    names = CELL_TYPES[cell]
    array = _tag_name(path, content, tags)
    if gmsh is not None and array not in (None, _PHYSICAL):
        gmsh = GmshGroups((), None)  # the names are names of physical groups
    groups, unused = _group_names(path, content, gmsh, _DIMENSION[names.meshio])
    rows = _tag_rows(path, content, gmsh, array)
    if gmsh is None:
        _add_sets(content, rows, array, groups, unused, (names.facet, names.meshio))

    cells, cell_rows = _join(blocks, rows, names.meshio)
    if gmsh is None or gmsh.entities is None:
        cells, cell_rows = _merge_repeated(cells, cell_rows)
    facets, facet_rows = _join(blocks, rows, names.facet)
    # A cell's first tag is the first of its rows.
    first, place = np.unique(cell_rows[:, 0], return_index=True)
    cell_tags = np.zeros(len(cells), cell_rows.dtype)
    cell_tags[first.astype(np.int64)] = cell_rows[place, 1]
    further = np.delete(cell_rows, place, axis=0)
    tagged = facet_rows[:, 0].astype(np.int64)
    return MeshArrays(
        points=content.points,
        cells=cells,
        cell_type=cell,
        cell_tags=cell_tags,
        facets=facets[tagged] if len(tagged) else None,
        facet_tags=facet_rows[:, 1] if len(tagged) else None,
        cell_groups=groups[1],
        facet_groups=groups[0],
        further_cell_tags=further,
        unused_groups=unused,
    )


def _group_names(
    path: pathlib.Path, content: Any, gmsh: GmshGroups | None, dim: int
) -> tuple[tuple[dict[str, int], dict[str, int]], dict[str, str]]:
    """Return the tags of facets and of cells by name, and why other names have none."""
    if gmsh is not None:
        named = gmsh.names
    else:
        named = [
            (int(value[1]), int(value[0]), str(name))
            for name, value in content.field_data.items()
            if np.shape(value) == (2,)
        ]
    groups: dict[int, dict[str, int]] = {}
    for level, tag, name in named:
        group = groups.setdefault(level, {})
        if group.get(name, tag) != tag:
            raise ValueError(
                f"{_NAME}: expected one group of dimension {level} with the name {name!r} in "
                f"{path}, got the tags {group[name]} and {tag}. Rename one of them."
            )
        group[name] = tag
    unused = {
        name: f"a group of dimension {level} of the file: {_NAME} reads groups of cells and facets"
        for level, group in groups.items()
        if level not in (dim, dim - 1)
        for name in group
    }
    return (groups.get(dim - 1, {}), groups.get(dim, {})), unused


def _tag_rows(
    path: pathlib.Path,
    content: Any,
    gmsh: GmshGroups | None,
    array: str | None,
) -> list[NDArray[Any]]:
    """Return for each block of the file rows of a cell of the block and a tag of it."""
    rows = []
    for i, block in enumerate(content.cells):
        n = len(block.data)
        here = [np.zeros((0, 2), np.int64)]
        if gmsh is not None and gmsh.entities is not None and n:
            entity = int(content.cell_data["gmsh:geometrical"][i][0])
            tags = np.array(gmsh.entities.get((_DIMENSION.get(block.type, -1), entity), ()), int)
            here.append(np.column_stack([np.repeat(np.arange(n), len(tags)), np.tile(tags, n)]))
        elif array is not None:
            tags = np.reshape(content.cell_data[array][i], -1)
            if len(tags) != n:
                raise ValueError(
                    f"{_NAME}: expected one tag for each cell in the array {array!r} of {path}, "
                    f"got {len(tags)} values for {n} cells. Choose another array by tags=..."
                )
            tags = np.abs(tags) if gmsh is not None else tags
            tagged = np.flatnonzero(tags)
            here.append(np.column_stack([tagged, tags[tagged]]))
        rows.append(np.concatenate(here))
    return rows


def _add_sets(
    content: Any,
    rows: list[NDArray[Any]],
    array: str | None,
    groups: tuple[dict[str, int], dict[str, int]],
    unused: dict[str, str],
    kinds: tuple[str, str],
) -> None:
    """Give named sets of cells and facets a tag each: those of Abaqus, and families of MED."""
    sets: dict[str, list[NDArray[Any]]] = {
        str(name): [np.asarray(() if part is None else part, int) for part in parts]
        for name, parts in content.cell_sets.items()
    }
    if array == "cell_tags":
        families = getattr(content, "cell_tags", {})
        for name in {str(name) for names in families.values() for name in names}:
            numbers = [number for number, names in families.items() if name in names]
            sets[name] = [
                np.flatnonzero(np.isin(np.ravel(tags), numbers))
                for tags in content.cell_data[array]
            ]
    used = [0, *groups[0].values(), *groups[1].values()]
    largest = max([*used, *(int(np.max(np.abs(part[:, 1]))) for part in rows if len(part))])
    for new, (name, parts) in enumerate(sorted(sets.items()), largest + 1):
        places = [
            [i for i, block in enumerate(content.cells) if block.type == kind and len(parts[i])]
            for kind in kinds
        ]
        if not any(places):
            unused[name] = "a set of the file without cells and facets"
        for group, chosen in zip(groups, places, strict=True):
            tag = group.setdefault(name, new) if chosen else new
            for i in chosen:
                more = np.column_stack([parts[i], np.full(len(parts[i]), tag)])
                rows[i] = np.concatenate([rows[i], more])


def _join(
    blocks: list[tuple[str, NDArray[Any]]], rows: list[NDArray[Any]], kind: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the cells of all blocks of a type, and rows of one of them and a tag."""
    chosen = [i for i, (block, data) in enumerate(blocks) if block == kind and len(data)]
    if not chosen:
        return np.zeros((0, 1), np.int64), np.zeros((0, 2), np.int64)
    counts = np.cumsum([0] + [len(blocks[i][1]) for i in chosen])
    shifted = [rows[i] + [[first, 0]] for i, first in zip(chosen, counts[:-1], strict=True)]
    return np.concatenate([blocks[i][1] for i in chosen]), np.concatenate(shifted)


def _merge_repeated(cells: NDArray[Any], rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Make one cell of those that a file has once for each of their tags, as gmsh 2.2 writes them.

    Cells that occur twice with the same tag, or without a tag, stay: they are a fault of the mesh.
    """
    repeated = repeated_rows(cells)
    if not len(repeated):
        return cells, rows
    group, n = row_groups(cells[repeated], int(cells.max()) + 1)
    first = np.full(n, len(cells))
    np.minimum.at(first, group, repeated)
    target = np.arange(len(cells))
    target[repeated] = first[group]
    cell_numbers = rows[:, 0].astype(np.int64)
    pairs = np.column_stack([target[cell_numbers], rows[:, 1]])[np.isin(cell_numbers, repeated)]
    if len(np.unique(pairs, axis=0)) < len(pairs) or not np.all(np.isin(repeated, cell_numbers)):
        return cells, rows
    stays = target == np.arange(len(cells))
    merged = rows.copy()
    merged[:, 0] = (np.cumsum(stays) - 1)[target[cell_numbers]]
    return cells[stays], merged


def _read(path: pathlib.Path) -> tuple[Any, GmshGroups | None]:
    meshio = import_package("meshio", _NAME)
    if not path.is_file():
        raise FileNotFoundError(f"{_NAME}: the file {path} does not exist. Check the path.")
    check_file(_NAME, path)
    printed = io.StringIO()
    try:
        # meshio prints errors, and ends the program.
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            content, gmsh = meshio.read(path), read_gmsh_groups(path)
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
            f"{_NAME}: expected a mesh that meshio can read, got {path} ({reason}). "
            f"{_remedy(path, reason)}"
        ) from error
    check_content(_NAME, path, content)
    return content, gmsh


def _remedy(path: pathlib.Path, reason: str) -> str:
    if has_partitions(path):
        return "The file is partitioned by gmsh: save it without partitions."
    if _PHYSICAL in reason:
        return (
            "Some cells of the file belong to physical groups and others do not: give all of them "
            "a group, or save without Mesh.SaveAll."
        )
    return "Check the file and its suffix."


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
        remedy = "Make a mesh of triangles, quadrilaterals, tetrahedra or hexahedra."
        if highest < 2:
            remedy += (
                " gmsh saves only cells of physical groups: give the surfaces one, or in space the "
                "volumes."
            )
        raise ValueError(
            f"{_NAME}: expected cells of one type, got {' and '.join(cells) or 'none'} in {path}. "
            f"{remedy}"
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
