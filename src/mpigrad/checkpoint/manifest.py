"""The files of a save: those of the ranks, the manifest with the hashes of all, and the owner."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from mpigrad.checkpoint.layout import (
    Leaf,
    cover_once,
    dtype_of,
    is_kind,
    is_number,
    parse,
    to_host,
    to_leaf,
)
from mpigrad.runtime import name_in_errors

__all__ = [
    "FORMAT",
    "DamagedSaveError",
    "Manifest",
    "Owner",
    "RankFile",
    "check_file",
    "file_name",
    "read_leaves",
    "read_manifest",
    "read_patiently",
    "write_leaves",
    "write_manifest",
]

# ---- The manifest of a save: its step, its leaves, and the hashes of all its files, as JSON ----


T = TypeVar("T")
FORMAT = "mpigrad restart 1"
_MANIFEST = "manifest.json"
_MOST_AXES = 64  # of NumPy


class DamagedSaveError(Exception):
    """A file of a save is missing, or was read and is wrong. The message names it."""


@dataclasses.dataclass(frozen=True)
class RankFile:
    """Name, size in bytes and SHA-256 of a rank's file."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of one save. `identity` is unique and in the headers of all its files."""

    identity: str
    step: int
    leaves: tuple[Leaf, ...]
    files: tuple[RankFile, ...]
    extra: Any


# Seconds between attempts to read a file.
_PAUSES = (0.1, 0.4, 1.5)


def read_patiently(path: pathlib.Path, read: Callable[[], T]) -> T:
    """Call a function that reads a file, and call it again after errors that may pass.

    A rank without file descriptors, or a server that fails over, does not make a save wrong.

    Raises
    ------
    DamagedSaveError
        If the file does not exist.
    OSError
        If it cannot be read.
    """
    for pause in (*_PAUSES, None):
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise DamagedSaveError(f"{path} cannot be read: {error.strerror}") from error
        except OSError as error:
            if pause is None:
                raise OSError(
                    error.errno,
                    f"{path} cannot be read, after {len(_PAUSES) + 1} attempts: {error.strerror}. "
                    "The save may be whole, and nothing was removed. Mend the cause and try again",
                ) from error
        time.sleep(pause)
    raise AssertionError


def write_manifest(directory: pathlib.Path, manifest: Manifest) -> None:
    """Write the manifest with its own hash, and wait until it is on the disk."""
    body = {
        "format": FORMAT,
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
    body = json.loads(json.dumps(body))  # as it will be read: keys are strings and tuples are lists
    path = directory / _MANIFEST
    with name_in_errors(path), open(path, "x", encoding="utf-8") as file:
        json.dump({"manifest": body, "sha256": _digest(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank{rank:05d}.bin"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Read the manifest of a save, without checking its files.

    Raises
    ------
    DamagedSaveError
        If it is missing, or was read and is wrong.
    OSError
        If it cannot be read.
    """
    path = directory / _MANIFEST
    try:
        whole = json.loads(read_patiently(path, lambda: path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise DamagedSaveError(f"{path} is truncated or damaged: {error}") from error
    body = whole.get("manifest") if isinstance(whole, dict) else None
    if not isinstance(body, dict) or not str(body.get("format")).startswith("mpigrad restart"):
        raise DamagedSaveError(f"{path} is not a manifest of mpigrad")
    if _digest(body) != whole.get("sha256"):
        raise DamagedSaveError(f"{path} is damaged: its hash is wrong")
    for name, here in (("format", FORMAT), ("byteorder", sys.byteorder)):
        if body.get(name) != here:
            raise DamagedSaveError(f"{path} has {name} {body.get(name)!r}, expected {here!r}")
    try:
        return _manifest(body)
    except KeyError as error:
        raise DamagedSaveError(f"{path} has no {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedSaveError(f"{path} is not valid: {error}") from error


def _manifest(body: dict[str, Any]) -> Manifest:
    """Return a manifest if all that it says is possible. Its hash is not a signature."""
    identity, step = body["identity"], body["step"]
    is_text = isinstance(identity, str) and identity.isascii() and identity.isalnum()
    _require(is_text and len(identity) <= 64, f"identity {identity!r}")
    _require(_is_count(step, negative=True), f"step {step!r}")
    files = tuple(RankFile(**file) for file in body["files"])
    for rank, file in enumerate(files):
        valid = file.name == file_name(rank) and _is_count(file.size)
        _require(valid and isinstance(file.sha256, str), f"file {file.name!r} of rank {rank}")
    leaves = tuple(_leaf(len(files), **leaf) for leaf in body["leaves"])
    _require(len(files) > 0, "no files")
    return Manifest(identity, step, leaves, files, body["extra"])


def _leaf(ranks: int, name: str, kind: str, number: str | None, shape: Any, boxes: Any) -> Leaf:
    _require(isinstance(name, str), f"leaf {name!r}")
    _require(isinstance(kind, str) and is_kind(kind), f"{name}: kind {kind!r}")
    sizes = isinstance(shape, list) and len(shape) <= _MOST_AXES and all(map(_is_count, shape))
    _require(sizes, f"{name}: shape {shape!r}")
    is_text = isinstance(number, str) if is_number(kind) else number is None
    _require(is_text, f"{name}: {kind} with number {number!r}")
    if number is not None:
        parse(kind, number)
    if boxes is None:
        return Leaf(name, kind, tuple(shape), None, number)
    # The last axis is given, because reshape cannot infer it for a scalar.
    bounds = np.array(boxes, np.int64).reshape(-1, 2, len(shape))
    covers = len(bounds) == ranks and cover_once(bounds, tuple(shape))
    _require(covers, f"{name}: boxes of {len(bounds)} pieces that are not {tuple(shape)} once")
    return Leaf(name, kind, tuple(shape), bounds, number)


def _is_count(n: Any, *, negative: bool = False) -> bool:
    return type(n) is int and (n >= 0 or negative) and abs(n) < 1 << 63


def _require(valid: bool, what: str) -> None:
    if not valid:
        raise ValueError(f"it has {what}")


# ---- The file of each rank in a save ----
#
# It begins with a line of text that identifies save and rank, padded to 128 bytes. Then come the
# arrays of the leaves in C order, each at a multiple of 64 bytes.


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
    leaves = []
    for number, (leaf, here, template) in enumerate(
        zip(manifest.leaves, wanted, like, strict=True)
    ):
        if leaf.number is not None:
            leaves.append(parse(leaf.kind, leaf.number))
        else:
            leaves.append(to_leaf(files.cut(number, here.box(rank)), template))
    return leaves


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


# ---- The process that writes into a directory of saves, and whether it still lives ----


_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process that can be found again.

    Attributes
    ----------
    host
        The name of its host.
    kernel
        A digest of the boot of this host and of the name space of its process numbers: processes
        with the same digest see each other in /proc.
    pid, start
        Its number, and the time of its start in clock ticks since the boot.
    """

    host: str
    kernel: str
    pid: int
    start: int

    @classmethod
    def this_process(cls) -> Self:
        """Return the process that calls this."""
        view = f"{_BOOT.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
        kernel = hashlib.sha256(view.encode()).hexdigest()[:12]
        pid = os.getpid()
        return cls(socket.gethostname()[:64], kernel, pid, _start_of(pid))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the process of a text that `str` has made, or None."""
        words = text.strip().split(" ")
        if len(words) != 4 or not (words[2].isdecimal() and words[3].isdecimal()):
            return None
        return cls(words[0], words[1], int(words[2]), int(words[3]))

    def __str__(self) -> str:
        return f"{self.host} {self.kernel} {self.pid} {self.start}"

    def lives(self) -> bool | None:
        """Return whether the process lives, or None if that cannot be seen from here."""
        if self.kernel != Owner.this_process().kernel:
            return None
        try:
            return _start_of(self.pid) == self.start
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:  # this process has no file descriptors, for example
            return None


def _start_of(pid: int) -> int:
    """Return the start of a process. Its name, in parentheses, may have spaces.

    Raises
    ------
    ProcessLookupError
        If it has ended, also if nobody has asked for its exit code yet.
    """
    text = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
    state, *fields = text.rpartition(b")")[2].split()
    if state in (b"Z", b"X"):
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[18])
