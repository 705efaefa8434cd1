"""The file that says which hosts run the ranks of a job.

A line for each: its name or address, and how many ranks it takes (1 where nothing is said).

    # two nodes
    node1 slots=32
    node2:32

Ranks fill the hosts in this order, so that neighbouring ranks are neighbours. Only the standard
library is imported.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

__all__ = ["Host", "placed", "read_hosts"]

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_LINE = re.compile(rf"({_NAME})(?:\s+slots\s*=\s*(\d+)|:(\d+))?")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int = 1


def read_hosts(file: pathlib.Path) -> tuple[Host, ...]:
    """The hosts of a file; one that is named twice takes the ranks of both lines.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It names no host, or has a line that is not understood; the message has its number.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = _LINE.fullmatch(words)
        if found is None:
            raise ValueError(
                f"{file}, line {number}: {words!r} is no host; write: name slots=RANKS"
            )
        name, count = found[1], int(found[2] or found[3] or 1)
        if count < 1:
            raise ValueError(f"{file}, line {number}: {name} takes at least 1 rank")
        slots[name] = slots.get(name, 0) + count
    if not slots:
        raise ValueError(f"{file} names no host; a line for each: name slots=RANKS")
    return tuple(Host(name, count) for name, count in slots.items())


def placed(hosts: Sequence[Host], ranks: int) -> list[int]:
    """How many of `ranks` ranks each host runs (no hosts: this one): the first are filled first.

    Raises
    ------
    ValueError
        The hosts take fewer.
    """
    if not hosts:
        return [ranks]
    counts: list[int] = []
    for host in hosts:
        counts.append(min(host.slots, ranks - sum(counts)))
    if sum(counts) < ranks:
        raise ValueError(f"-n {ranks}, but the hosts take {sum(counts)} ranks")
    return counts
