"""Physical groups of gmsh's files, which meshio reads only in part.

meshio has one group for each name, and one tag for each block of cells. A file may have groups of
several dimensions with one name, and a cell may belong to several groups.
"""

from __future__ import annotations

import itertools
import mmap
import pathlib
import shlex
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GmshGroups", "has_partitions", "read_gmsh_groups"]


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
