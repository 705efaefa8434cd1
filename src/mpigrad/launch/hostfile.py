"""The hosts file, which lists the hosts for the ranks of a job.

Each line has the name or address of a host and its number of ranks (1 by default).

    # two nodes
    node1 slots=32
    node2:32

Ranks fill the hosts in this order, so that consecutive ranks share a host. Only the standard
library is imported.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

__all__ = ["Host", "place_ranks", "read_hosts"]

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_LINE = re.compile(rf"({_NAME})(?:\s+slots\s*=\s*([0-9]{{1,9}})|:([0-9]{{1,9}}))?")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine and its number of ranks."""

    name: str
    slots: int = 1


def read_hosts(file: pathlib.Path) -> tuple[Host, ...]:
    """Read the hosts of a file. A host in two lines takes the ranks of both.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file is empty or a line is invalid. The message has the line number.
    """
    slots: dict[str, int] = {}
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}.") from None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = _LINE.fullmatch(words)
        if found is None:
            raise ValueError(
                f"{file}, line {number}: expected a host, got {words!r}. Write: name slots=RANKS"
            )
        name, count = found[1], int(found[2] or found[3] or 1)
        if count < 1:
            raise ValueError(
                f"{file}, line {number}: {name} must take at least 1 rank, got {count}."
            )
        slots[name] = slots.get(name, 0) + count
    if not slots:
        raise ValueError(f"{file}: expected at least one host, got none. Write: name slots=RANKS")
    return tuple(Host(name, count) for name, count in slots.items())


def place_ranks(hosts: Sequence[Host], ranks: int) -> list[int]:
    """Return how many of `ranks` ranks each host runs, filling the first hosts first.

    Without hosts, all ranks run on this host.

    Raises
    ------
    ValueError
        If the hosts take fewer ranks.
    """
    if not hosts:
        return [ranks]
    counts: list[int] = []
    for host in hosts:
        counts.append(min(host.slots, ranks - sum(counts)))
    if sum(counts) < ranks:
        raise ValueError(f"-n: got {ranks} ranks, but the hosts take {sum(counts)}.")
    return counts
