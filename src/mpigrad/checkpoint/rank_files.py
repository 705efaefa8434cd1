"""The file of each rank in a save.

It begins with a line of text that identifies save and rank, padded to 128 bytes. Then come the
arrays of the leaves in C order, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from mpigrad.checkpoint.file_errors import name_in_errors
from mpigrad.checkpoint.layout import Leaf
from mpigrad.checkpoint.leaves import dtype_of, parse, to_host, to_leaf
from mpigrad.checkpoint.manifest import (
    FORMAT,
    DamagedSaveError,
    Manifest,
    RankFile,
    file_name,
    read_patiently,
)

__all__ = ["check_file", "read_leaves", "write_leaves"]

_HEADER = 128
_ALIGNMENT = 64
_BLOCK = 1 << 24  # bytes hashed at a time


def _header(identity: str, rank: int) -> bytes:
    return f"{FORMAT} {identity} rank {rank}\n".encode().ljust(_HEADER, b"\0")


def _offsets(leaves: Iterable[Leaf], rank: int) -> Iterator[int]:
    """Yield the position of each leaf in a rank's file."""
    at = _HEADER
    for leaf in leaves:
        yield at
        at += -(-leaf.bytes_of(rank) // _ALIGNMENT) * _ALIGNMENT


def _size(leaves: Iterable[Leaf], rank: int) -> int:
    """Return the size of a rank's file."""
    leaves = tuple(leaves)
    ends = (
        at + leaf.bytes_of(rank)
        for leaf, at in zip(leaves, _offsets(leaves, rank), strict=True)
        if leaf.bytes_of(rank)
    )
    return max(ends, default=_HEADER)


def write_leaves(
    directory: pathlib.Path, identity: str, rank: int, leaves: list[Leaf], tree: Any
) -> RankFile:
    """Write a rank's leaves one after the other, and wait until they are on the disk."""
    path, digest = directory / file_name(rank), hashlib.sha256()
    with name_in_errors(path), open(path, "xb") as file:

        def write(data: Any) -> None:
            digest.update(data)
            file.write(data)

        write(_header(identity, rank))
        for leaf, value, at in zip(
            leaves, jax.tree.leaves(tree), _offsets(leaves, rank), strict=True
        ):
            if leaf.bytes_of(rank):
                write(bytes(at - file.tell()))
                write(to_host(value).reshape(-1).view(np.uint8))
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return RankFile(path.name, size, digest.hexdigest())


def check_file(directory: pathlib.Path, manifest: Manifest, rank: int) -> None:
    """Read a rank's file and compare it with the manifest.

    Raises
    ------
    DamagedSaveError
        If it is missing, or was read and is wrong.
    OSError
        If it cannot be read.
    """
    expected = manifest.files[rank]
    path = directory / expected.name
    if expected.size != (needed := _size(manifest.leaves, rank)):
        raise DamagedSaveError(
            f"the manifest of {path} is not valid: its size is {expected.size}, but its arrays "
            f"need {needed} bytes"
        )

    def digest_of_file() -> str:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER)
            line = header.partition(b"\n")[0]
            foreign = line != _header(manifest.identity, rank).partition(b"\n")[0]
            if foreign and line.startswith(FORMAT.encode()) and len(line) < len(header):
                words = line.decode(errors="replace").split()[3:]
                raise DamagedSaveError(
                    f"{path} belongs to another save: its header has {' '.join(words[:1])}, "
                    f"{' '.join(words[1:])}, and the manifest has {manifest.identity}, rank {rank}"
                )
            if size != expected.size:
                how = "truncated" if size < expected.size else "damaged"
                raise DamagedSaveError(f"{path} is {how}: {size} bytes of {expected.size}")
            digest = hashlib.sha256(header)
            while block := file.read(_BLOCK):
                digest.update(block)
            return digest.hexdigest()

    if read_patiently(path, digest_of_file) != expected.sha256:
        raise DamagedSaveError(f"{path} is damaged: its SHA-256 differs from the manifest")


def read_leaves(
    directory: pathlib.Path, manifest: Manifest, wanted: list[Leaf], like: list[Any], rank: int
) -> list[Any]:
    """Read the piece of each leaf that `rank` holds, from the files of several ranks."""
    files = _Files(directory, manifest)
    found = []
    for number, (leaf, here, template) in enumerate(
        zip(manifest.leaves, wanted, like, strict=True)
    ):
        if leaf.number is not None:
            found.append(parse(leaf.kind, leaf.number))
        else:
            found.append(to_leaf(files.cut(number, here.box(rank)), template))
    return found


class _Files:
    """The arrays in the files of a save. A file is opened when its first array is read."""

    def __init__(self, directory: pathlib.Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._open: dict[int, tuple[NDArray[np.uint8], list[int]]] = {}

    def cut(self, number: int, box: NDArray[np.int64]) -> NDArray[Any]:
        """Return the part of a leaf that lies in a box of the global array."""
        leaf = self._manifest.leaves[number]
        result = np.empty((box[1] - box[0]).tolist(), dtype_of(leaf.kind))
        boxes = leaf.box(0)[None] if leaf.boxes is None else leaf.boxes
        starts, stops = np.maximum(boxes[:, 0], box[0]), np.minimum(boxes[:, 1], box[1])
        for rank in np.nonzero(np.all(starts < stops, axis=1))[0].tolist():
            start, stop, origin = starts[rank], stops[rank], boxes[rank, 0]
            result[_slices(start - box[0], stop - box[0])] = self._piece(rank, number)[
                _slices(start - origin, stop - origin)
            ]
        return result

    def _piece(self, rank: int, number: int) -> NDArray[Any]:
        if rank not in self._open:
            path = self._directory / self._manifest.files[rank].name
            data = read_patiently(path, lambda: np.memmap(path, np.uint8, "r"))
            self._open[rank] = data, list(_offsets(self._manifest.leaves, rank))
        data, offsets = self._open[rank]
        leaf, at = self._manifest.leaves[number], offsets[number]
        start, stop = leaf.box(rank)
        numbers = data[at : at + leaf.bytes_of(rank)].view(dtype_of(leaf.kind))
        return numbers.reshape((stop - start).tolist())


def _slices(start: NDArray[np.int64], stop: NDArray[np.int64]) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))
