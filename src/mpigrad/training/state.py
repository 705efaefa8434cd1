"""The contents of a save of a training, written and restored."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.training.history import StepRecord
from mpigrad.training.replica import Replica
from mpigrad.training.replica_sync import bcast_bytes
from mpigrad.training.strategy import Run

__all__ = ["LAYOUT", "check", "local_parts", "metadata", "rank_parts", "restore", "unwrap"]

Bytes = NDArray[np.uint8]
Tree = dict[str, Bytes]

LAYOUT = True  # the layout of every leaf: the bytes of all ranks, concatenated
_LEAVES = ("replica", "random", "batches")


def rank_parts(replica: Replica, run: Run, position: dict[str, Any] | None) -> Tree:
    """Return this rank's part of a save, with the position of its batches."""
    parts = {
        "replica": replica.state() if run.keeps_state else b"",
        "random": replica.random_state(),
        "batches": json.dumps(position).encode(),
    }
    return {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}


def metadata(
    parts: Tree, replica: Replica, run: Run, comm: Communicator, strategy: str, records: Any
) -> dict[str, Any]:
    """Return the metadata of a save (collective): model, strategy, history and sizes of parts."""
    state: Any = None
    with raise_on_all_ranks(comm):
        state = run.state()
    sizes = comm.mpi.allgather([parts[name].size for name in _LEAVES])
    return {
        "training": 1,
        "strategy": strategy,
        "sizes": dict(zip(_LEAVES, zip(*sizes, strict=True), strict=True)),
        "parameters": [str(parameter) for parameter in replica.parameters],
        "records": [dataclasses.astuple(record) for record in records],
        "step": run.step_number,
        "run": state,
    }


def unwrap(extra: Any) -> Any:
    """Return the metadata of a save, also if a `Checkpoint` wrapped them."""
    return extra["extra"] if isinstance(extra, dict) and "about" in extra else extra


def check(extra: Any, replica: Replica, strategy: str, where: Any) -> None:
    """Raise a ValueError unless a save belongs to this model and this strategy."""
    if not (isinstance(extra, dict) and "training" in extra):
        raise ValueError(
            f"trainer: {where} is not a save of a training. Pass a directory that Trainer.save "
            "wrote."
        )
    if extra["strategy"] != strategy:
        raise ValueError(
            f"trainer: {where} is a save of a training by {extra['strategy']}, but this trainer "
            f"uses {strategy}. Use the strategy of the save."
        )
    here = [str(parameter) for parameter in replica.parameters]
    for a, b in zip(extra["parameters"], here, strict=False):
        if a != b:
            raise ValueError(
                f"trainer: {where} is a save of another model: it has {a}, this model has {b}. "
                "Build the saved model."
            )
    if len(extra["parameters"]) != len(here):
        raise ValueError(
            f"trainer: {where} is a save of another model: it has {len(extra['parameters'])} "
            f"parameters, this model has {len(here)}. Build the saved model."
        )


def local_parts(extra: Any, comm: Communicator) -> Tree:
    """Return empty arrays for the parts that this rank reads.

    A rank reads its own parts. If another count of ranks wrote the save, rank 0 reads all parts.
    """
    found = {}
    for name, sizes in extra["sizes"].items():
        size = sizes[comm.rank] if len(sizes) == comm.size else sum(sizes) * (comm.rank == 0)
        found[name] = np.empty(size, np.uint8)
    return found


def restore(
    parts: Tree, extra: Any, replica: Replica, run: Run, comm: Communicator
) -> tuple[tuple[StepRecord, ...], dict[str, Any] | None]:
    """Restore the replica and the run (collective) and return records and position of batches."""
    sizes = extra["sizes"]
    same = len(sizes["replica"]) == comm.size
    own = parts["replica"].tobytes()
    first = own[: sizes["replica"][0]]
    if not (same and all(sizes["replica"])):  # the save has rank 0's replica only
        own = bcast_bytes(comm, first)
    position: dict[str, Any] | None = None
    with raise_on_all_ranks(comm):
        replica.load(own)
        if same:
            replica.load_random_state(parts["random"].tobytes())
            position = json.loads(parts["batches"].tobytes())
        elif comm.rank == 0:
            position = _earliest(parts["batches"].tobytes(), sizes["batches"])
    run.load(extra["run"])
    if not same:
        position = comm.mpi.bcast(position)
    run.step_number = extra["step"]
    records = tuple(
        StepRecord(*numbers[:-1], staleness=tuple(numbers[-1])) for numbers in extra["records"]
    )
    return records, position


def _earliest(data: bytes, sizes: list[int]) -> dict[str, Any] | None:
    """Return the position of the rank that had seen the fewest batches."""
    ends = np.cumsum([0, *sizes]).tolist()
    found = [json.loads(data[a:b]) for a, b in itertools.pairwise(ends)]
    known = [position for position in found if position is not None]
    return min(known, key=lambda p: (p["epoch"], p["batch"]), default=None)
