"""The files of one save: each rank's numbers, and a manifest with everybody's hashes.

A rank's file is a line of text that says whose it is, padded to 128 bytes, and the leaves' numbers
one after the other in C order, each beginning at a multiple of 64 bytes. The manifest is JSON.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from mpigrad.checkpoint.layout import Leaf
from mpigrad.checkpoint.leaves import dtype_of, parse, restored, to_host

__all__ = [
    "Damaged",
    "Manifest",
    "RankFile",
    "check_file",
    "read_leaves",
    "read_manifest",
    "sync_directory",
    "write_manifest",
    "write_numbers",
]

_FORMAT = "mpigrad restart 1"
_MANIFEST = "manifest.json"
_HEADER = 128
_ALIGNMENT = 64
_BLOCK = 1 << 24  # bytes that are hashed at a time


class Damaged(Exception):
    """A save that must not be read; the message names the file and says what is wrong."""


@dataclasses.dataclass(frozen=True)
class RankFile:
    """Name, size in bytes and SHA-256 of what a rank has written."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What one save consists of; `identity` is its own, and in the header of all its files."""

    identity: str
    step: int
    leaves: tuple[Leaf, ...]
    files: tuple[RankFile, ...]
    extra: Any


def _name(rank: int) -> str:
    return f"rank{rank:05d}.bin"


def _header(identity: str, rank: int) -> bytes:
    return f"{_FORMAT} {identity} rank {rank}\n".encode().ljust(_HEADER, b"\0")


def _offsets(leaves: Iterable[Leaf], rank: int) -> Iterator[int]:
    """Where each leaf begins in a rank's file."""
    at = _HEADER
    for leaf in leaves:
        yield at
        at += -(-leaf.bytes_of(rank) // _ALIGNMENT) * _ALIGNMENT


def write_numbers(
    directory: pathlib.Path, identity: str, rank: int, leaves: list[Leaf], tree: Any
) -> RankFile:
    """Write what a rank holds, one leaf at a time, and wait until the disk has it."""
    path, digest = directory / _name(rank), hashlib.sha256()
    with open(path, "xb") as file:

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


def write_manifest(directory: pathlib.Path, manifest: Manifest) -> None:
    """Write the manifest, its own hash beside it, and wait until the disk has it."""
    body = {
        "format": _FORMAT,
        "byteorder": sys.byteorder,
        "identity": manifest.identity,
        "step": manifest.step,
        "leaves": [
            dataclasses.asdict(leaf)
            | {"boxes": None if leaf.boxes is None else leaf.boxes.tolist()}
            for leaf in manifest.leaves
        ],
        "files": [dataclasses.asdict(file) for file in manifest.files],
        "extra": manifest.extra,
    }
    body = json.loads(json.dumps(body))  # as it will be read: keys are strings, tuples lists
    with open(directory / _MANIFEST, "x", encoding="utf-8") as file:
        json.dump({"manifest": body, "sha256": _digest(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def sync_directory(directory: pathlib.Path) -> None:
    """Wait until the disk has the names in a directory."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that can't, or needn't
            raise
    finally:
        os.close(handle)


def read_manifest(directory: pathlib.Path) -> Manifest:
    """The manifest of a save; its files are not looked at.

    Raises
    ------
    Damaged
    """
    path = directory / _MANIFEST
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Damaged(f"{path} is truncated or damaged: {error}") from error
    body = whole.get("manifest") if isinstance(whole, dict) else None
    if not isinstance(body, dict) or not str(body.get("format")).startswith("mpigrad restart"):
        raise Damaged(f"{path} is no manifest of mpigrad")
    if _digest(body) != whole.get("sha256"):
        raise Damaged(f"{path} is damaged: it does not have the hash that it names")
    for name, here in (("format", _FORMAT), ("byteorder", sys.byteorder)):
        if body[name] != here:
            raise Damaged(f"{path} has {name} {body[name]!r}, and {here!r} is read here")
    return Manifest(
        body["identity"],
        body["step"],
        tuple(_leaf(**leaf) for leaf in body["leaves"]),
        tuple(RankFile(**file) for file in body["files"]),
        body["extra"],
    )


def _leaf(shape: list[int], boxes: list[Any] | None, **names: Any) -> Leaf:
    # The shape of the boxes, as there may be no axes.
    whole = None if boxes is None else np.array(boxes, np.int64).reshape(-1, 2, len(shape))
    return Leaf(shape=tuple(shape), boxes=whole, **names)


def check_file(directory: pathlib.Path, manifest: Manifest, rank: int) -> None:
    """Read all of a rank's file, and raise unless it is what the manifest says.

    Raises
    ------
    Damaged
    """
    expected = manifest.files[rank]
    path = directory / expected.name
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER)
            foreign = header != _header(manifest.identity, rank)
            if foreign and header.startswith(_FORMAT.encode()) and len(header) == _HEADER:
                whose = header.rstrip(b"\0").decode(errors="replace").split()
                raise Damaged(
                    f"{path} belongs to another save: it is of {whose[3]}, {' '.join(whose[4:])}, "
                    f"the manifest of {manifest.identity}, rank {rank}"
                )
            if size != expected.size:
                how = "truncated" if size < expected.size else "damaged"
                raise Damaged(f"{path} is {how}: {size} bytes of {expected.size}")
            digest = hashlib.sha256(header)
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    if digest.hexdigest() != expected.sha256:
        raise Damaged(f"{path} is damaged: its SHA-256 is not the manifest's")


def read_leaves(
    directory: pathlib.Path, manifest: Manifest, wanted: list[Leaf], like: list[Any], rank: int
) -> list[Any]:
    """What `rank` holds of each leaf, cut from the files of the ranks that have written it."""
    files = _Files(directory, manifest)
    found = []
    for number, (leaf, here, template) in enumerate(
        zip(manifest.leaves, wanted, like, strict=True)
    ):
        if leaf.number is not None:
            found.append(parse(leaf.kind, leaf.number))
        else:
            found.append(restored(files.cut(number, here.box(rank)), template))
    return found


class _Files:
    """The numbers in the files of a save; a file is opened when something is wanted from it."""

    def __init__(self, directory: pathlib.Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._open: dict[int, tuple[NDArray[np.uint8], list[int]]] = {}

    def cut(self, number: int, box: NDArray[np.int64]) -> NDArray[Any]:
        """The numbers of a leaf that lie in a box of the whole."""
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
            data = np.memmap(path, np.uint8, "r")
            self._open[rank] = data, list(_offsets(self._manifest.leaves, rank))
        data, offsets = self._open[rank]
        leaf, at = self._manifest.leaves[number], offsets[number]
        start, stop = leaf.box(rank)
        numbers = data[at : at + leaf.bytes_of(rank)].view(dtype_of(leaf.kind))
        return numbers.reshape((stop - start).tolist())


def _slices(start: NDArray[np.int64], stop: NDArray[np.int64]) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))
