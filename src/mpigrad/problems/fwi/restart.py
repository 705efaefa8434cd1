"""Restart files: where an inversion was, to the last bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any, BinaryIO

import equinox as eqx

from mpigrad.communicator import Communicator
from mpigrad.problems.files import write_whole
from mpigrad.problems.fwi.parametrization import Parametrization
from mpigrad.problems.lbfgs import LBFGS
from mpigrad.problems.training import Record, Standing
from mpigrad.together import from_root

__all__ = ["load_restart", "save_restart"]

_FORMAT = "mpigrad inversion 1"


def _problem(values: Parametrization, objective: str) -> dict[str, object]:
    """What a restart must have in common with the run that wrote the file."""
    digest = hashlib.sha256(values.active.tobytes())
    for unknown in values.unknowns:
        digest.update(unknown.start.tobytes())
        digest.update(repr((unknown.low, unknown.high)).encode())
    return {
        "unknown": type(values).__name__,
        "fields": [unknown.name for unknown in values.unknowns],
        "cells": list(values.shape),
        "start, bounds and mask": digest.hexdigest()[:16],
        "shots, data and weights": objective,
    }


def save_restart(
    path: pathlib.Path, values: Parametrization, objective: str, standing: Standing
) -> None:
    """Write where the inversion is (on one rank); the file is whole at any time.

    `objective` is a digest of what is minimised.
    """

    def write(file: BinaryIO) -> None:
        header = {
            "format": _FORMAT,
            "problem": _problem(values, objective),
            "lowest": standing.lowest,
            "stuck": standing.stuck,
            "history": [dataclasses.asdict(record) for record in standing.history],
        }
        file.write(json.dumps(header).encode() + b"\n")
        eqx.tree_serialise_leaves(file, (standing.now, standing.best))

    write_whole(path, write)


def load_restart(
    path: pathlib.Path,
    values: Parametrization,
    objective: str,
    optimizer: LBFGS,
    comm: Communicator,
) -> Standing:
    """What `save_restart` wrote, on every rank (collective).

    Raises
    ------
    ValueError
        On every rank, where the file is damaged or of another problem.
    """
    like = values.first(0)
    blank = (optimizer.blank(like), like)
    return from_root(comm, lambda: _read(path, values, objective, blank))


def _read(path: pathlib.Path, values: Parametrization, objective: str, blank: Any) -> Standing:
    with open(path, "rb") as file:
        try:
            header = json.loads(file.readline())
            if header["format"] != _FORMAT:
                raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
        except Exception as error:
            raise ValueError(f"--restart: {path} is not a restart file: {error}") from error
        for name, here in _problem(values, objective).items():
            there = header["problem"].get(name)
            if there != here:
                raise ValueError(
                    f"--restart: {path} is of another problem: {name} {there}, here {here}"
                )
        try:
            now, best = eqx.tree_deserialise_leaves(file, blank)
        except Exception as error:
            raise ValueError(
                f"--restart: {path} is damaged, or of a run with another --memory: {error}"
            ) from error
    history = tuple(Record(**record) for record in header["history"])
    return Standing(now, best, header["lowest"], header["stuck"], history)
