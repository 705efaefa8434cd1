"""The manifest of a save: its step, its leaves, and the hashes of all its files, as JSON."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpigrad.checkpoint.file_errors import name_in_errors
from mpigrad.checkpoint.layout import Leaf, cover_once
from mpigrad.checkpoint.leaves import is_kind, is_number, parse

__all__ = [
    "FORMAT",
    "DamagedSaveError",
    "Manifest",
    "RankFile",
    "file_name",
    "read_manifest",
    "read_patiently",
    "sync_directory",
    "write_manifest",
]

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


def sync_directory(directory: pathlib.Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    with name_in_errors(directory):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot do it
                raise
        finally:
            os.close(handle)


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
    given = np.array(boxes, np.int64).reshape(-1, 2, len(shape))
    covers = len(given) == ranks and cover_once(given, tuple(shape))
    _require(covers, f"{name}: boxes of {len(given)} pieces that are not {tuple(shape)} once")
    return Leaf(name, kind, tuple(shape), given, number)


def _is_count(n: Any, *, negative: bool = False) -> bool:
    return type(n) is int and (n >= 0 or negative) and abs(n) < 1 << 63


def _require(valid: bool, what: str) -> None:
    if not valid:
        raise ValueError(f"it has {what}")
