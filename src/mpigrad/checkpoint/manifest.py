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

from mpigrad.checkpoint.layout import Leaf

__all__ = [
    "FORMAT",
    "DamagedSaveError",
    "Manifest",
    "RankFile",
    "read_manifest",
    "read_patiently",
    "sync_directory",
    "write_manifest",
]

T = TypeVar("T")
FORMAT = "mpigrad restart 1"
_MANIFEST = "manifest.json"


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
    with open(directory / _MANIFEST, "x", encoding="utf-8") as file:
        json.dump({"manifest": body, "sha256": _digest(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def sync_directory(directory: pathlib.Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by this file system
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
    except ValueError as error:
        raise DamagedSaveError(f"{path} is truncated or damaged: {error}") from error
    body = whole.get("manifest") if isinstance(whole, dict) else None
    if not isinstance(body, dict) or not str(body.get("format")).startswith("mpigrad restart"):
        raise DamagedSaveError(f"{path} is not a manifest of mpigrad")
    if _digest(body) != whole.get("sha256"):
        raise DamagedSaveError(f"{path} is damaged: its hash is wrong")
    for name, here in (("format", FORMAT), ("byteorder", sys.byteorder)):
        if body[name] != here:
            raise DamagedSaveError(f"{path} has {name} {body[name]!r}, expected {here!r}")
    return Manifest(
        body["identity"],
        body["step"],
        tuple(_leaf(**leaf) for leaf in body["leaves"]),
        tuple(RankFile(**file) for file in body["files"]),
        body["extra"],
    )


def _leaf(shape: list[int], boxes: list[Any] | None, **names: Any) -> Leaf:
    # The last axis is given, because reshape cannot infer it for a scalar.
    whole = None if boxes is None else np.array(boxes, np.int64).reshape(-1, 2, len(shape))
    return Leaf(shape=tuple(shape), boxes=whole, **names)
