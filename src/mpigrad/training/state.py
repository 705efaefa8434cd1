"""What a save of a training holds, and how it is read again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.training.history import Record
from mpigrad.training.replica import Replica
from mpigrad.training.replica_sync import bcast_bytes
from mpigrad.training.strategy import Run

__all__ = ["LAYOUT", "about", "check", "like", "own", "restore", "tree"]

Bytes = NDArray[np.uint8]
Tree = dict[str, Bytes]

LAYOUT = True  # every leaf: each rank's bytes, one rank after the other
_LEAVES = ("replica", "random", "batches")


def tree(replica: Replica, run: Run, position: dict[str, Any] | None) -> Tree:
    """This rank's part of a save; `position` is that of its batches."""
    parts = {
        "replica": replica.state() if run.keeps_state else b"",
        "random": replica.random_state(),
        "batches": json.dumps(position).encode(),
    }
    return {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}


def about(
    parts: Tree, replica: Replica, run: Run, comm: Communicator, strategy: str, records: Any
) -> dict[str, Any]:
    """What is saved beside the parts (collective): whose they are, and how long."""
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


def own(extra: Any) -> Any:
    """What `about` gave, also in a save that a `Checkpoint` has made."""
    return extra["extra"] if isinstance(extra, dict) and "about" in extra else extra


def check(extra: Any, replica: Replica, strategy: str, where: Any) -> None:
    """Raise a ValueError unless a save is of this model and this strategy."""
    if not (isinstance(extra, dict) and "training" in extra):
        raise ValueError(f"trainer: {where} holds no training")
    if extra["strategy"] != strategy:
        raise ValueError(
            f"trainer: {where} is of a training by {extra['strategy']}, not by {strategy}"
        )
    here = [str(parameter) for parameter in replica.parameters]
    for a, b in zip(extra["parameters"], here, strict=False):
        if a != b:
            raise ValueError(f"trainer: {where} is of another model: it has {a}, here is {b}")
    if len(extra["parameters"]) != len(here):
        raise ValueError(
            f"trainer: {where} is of another model: it has {len(extra['parameters'])} parameters, "
            f"here are {len(here)}"
        )


def like(extra: Any, comm: Communicator) -> Tree:
    """What this rank reads: its own parts; all of them on rank 0, if other ranks wrote them."""
    found = {}
    for name, sizes in extra["sizes"].items():
        size = sizes[comm.rank] if len(sizes) == comm.size else sum(sizes) * (comm.rank == 0)
        found[name] = np.empty(size, np.uint8)
    return found


def restore(
    parts: Tree, extra: Any, replica: Replica, run: Run, comm: Communicator
) -> tuple[tuple[Record, ...], dict[str, Any] | None]:
    """Go on from what was read (collective); the records, and the position of the batches."""
    sizes = extra["sizes"]
    same = len(sizes["replica"]) == comm.size
    own = parts["replica"].tobytes()
    first = own[: sizes["replica"][0]]
    if not (same and all(sizes["replica"])):  # rank 0's are everybody's
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
        Record(*numbers[:-1], staleness=tuple(numbers[-1])) for numbers in extra["records"]
    )
    return records, position


def _earliest(data: bytes, sizes: list[int]) -> dict[str, Any] | None:
    """The position of the rank that was least far."""
    ends = np.cumsum([0, *sizes]).tolist()
    found = [json.loads(data[a:b]) for a, b in itertools.pairwise(ends)]
    known = [position for position in found if position is not None]
    return min(known, key=lambda p: (p["epoch"], p["batch"]), default=None)
