"""Do the messages of all ranks match? Found by tracing alone, in one process, without MPI.

`record` reads a traced program and lists its messages, in the branches that it takes and as often
as it loops. `mismatch` plays the lists of all ranks against each other.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

_COLLECTIVES = (
    *("allgather", "allreduce", "alltoall", "barrier", "bcast", "exscan", "gather", "reduce"),
    *("reduce_scatter", "scan", "scatter"),
)
_BETWEEN_TWO = ("send", "recv", "sendrecv", "neighbor_alltoallv", "redistribute")


@dataclass(frozen=True)
class Message:
    """One operation of one rank, as the primitive has it."""

    name: str
    params: dict[str, Any]
    shape: tuple[int, ...]  # of the operand
    result: tuple[int, ...] | None
    group: tuple[int, ...]  # the ranks of its communicator, in their order there

    def __str__(self) -> str:
        params = {k: v for k, v in self.params.items() if k not in ("dtype", "shape")}
        adjoint = params.pop("site") < 0
        words = ", ".join(f"{k}={v}" for k, v in params.items())
        return f"{'adjoint ' * adjoint}{self.name}({list(self.shape)}, {words})"


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan."""
    if "ft_in" in params:  # since JAX 0.11
        fixed, carried, _ = params["ft_in"].unpack()
        return len(list(fixed)), len(list(carried))
    return params["num_consts"], params["num_carry"]


def record(
    closed: Any, operands: Sequence[Any], groups: dict[int, tuple[int, ...]]
) -> list[Message]:
    """The messages of a traced program for these operands; only its integers are computed.

    `groups` are the ranks of the communicator in each slot.
    """
    found: list[Message] = []

    def known(value: Any) -> bool:
        return value is not None and not jnp.issubdtype(jnp.result_type(value), jnp.inexact)

    def inner(part: Any, values: Sequence[Any]) -> list[Any]:
        if hasattr(part, "consts"):
            return evaluate(part.jaxpr, part.consts, values)
        return evaluate(part, (), values)

    def evaluate(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, values, strict=True))
        read = lambda v: v.val if hasattr(v, "val") else env[v]
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            given = [read(v) for v in eqn.invars]
            if name.startswith("mpigrad_") and eqn.effects:
                result = tuple(eqn.outvars[0].aval.shape) if eqn.outvars else None
                shape = tuple(eqn.invars[0].aval.shape)
                members = groups.get(params["comm"], ())
                name = name.removeprefix("mpigrad_")
                found.append(Message(name, params, shape, result, members))
                out = [None] * len(eqn.outvars)
            elif name == "scan":
                fixed, carried = scan_counts(params)
                state, xs = given[fixed : fixed + carried], given[fixed + carried :]
                length = params["length"]
                order = reversed(range(length)) if params["reverse"] else range(length)
                rows: dict[int, list[Any]] = {}
                for i in order:
                    row = [None if x is None else x[i] for x in xs]
                    step = inner(params["jaxpr"], [*given[:fixed], *state, *row])
                    state, rows[i] = step[:carried], step[carried:]
                ys = zip(*(rows[i] for i in range(length)), strict=True)
                out = [*state, *(jnp.stack(y) if all(map(known, y)) else None for y in ys)]
                out += [None] * (len(eqn.outvars) - len(out))  # of no step
            elif name == "cond":
                out = inner(params["branches"][int(given[0])], given[1:])
            elif inside := params.get("jaxpr", params.get("call_jaxpr")):
                out = inner(inside, given)
            elif any("jaxpr" in key for key in params) and not name.startswith("scatter"):
                raise NotImplementedError(f"message_order: {name}")
            elif all(map(known, given)):
                got = eqn.primitive.bind(*given, **params)
                out = got if eqn.primitive.multiple_results else [got]
            else:
                out = [None] * len(eqn.outvars)
            env |= dict(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    evaluate(closed.jaxpr, closed.consts, [v if known(v) else None for v in operands])
    return found


def mismatch(lists: Sequence[list[Message]]) -> str:
    """What does not match in the messages of all ranks, or nothing.

    Nothing, too, where there are operations or communicators that are not known here.
    """
    known = (*_COLLECTIVES, *_BETWEEN_TWO)
    if any(m.name not in known or not m.group for messages in lists for m in messages):
        return ""
    at = [0] * len(lists)
    sent = [False] * len(lists)  # the sending half of the operation that the rank is in
    channels: dict[Any, collections.deque[tuple[Any, Message]]] = collections.defaultdict(
        collections.deque
    )

    def head(rank: int) -> Message | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    def where(rank: int) -> str:
        return f"rank {rank} is at {head(rank) or 'the end'}"

    def step(rank: int) -> str | bool:
        """Whether the rank got further, or what is wrong."""
        m = head(rank)
        if m is None:
            return False
        p, group = m.params, m.group
        me, slot = group.index(rank), (p["comm"], group)
        sends: list[tuple[int, int, Any]] = []
        receives: list[tuple[int, int, Any]] = []
        if m.name == "send":
            sends = [(p["dest"], p["tag"], m.shape)]
        elif m.name == "recv":
            receives = [(p["source"], p["tag"], m.result)]
        elif m.name == "sendrecv":
            sends = [(p["dest"], p["sendtag"], m.shape)]
            receives = [(p["source"], p["recvtag"], m.result)]
        elif m.name == "neighbor_alltoallv":
            rest = m.shape[1:]
            parts = lambda counts: [
                (n, -1, (c, *rest)) for n, c in zip(p["neighbors"], counts, strict=True) if c
            ]
            sends, receives = parts(p["sendcounts"]), parts(p["recvcounts"])
        elif m.name == "redistribute":
            # Its block is cut along one axis. The blocks that it gets are joined along another one.
            assert m.result is not None
            after = len(m.result) - len(p["order"]) + list(p["order"]).index(p["gather"])
            part = lambda shape, whole, counts: [
                (n, -2, (int(np.prod(shape)) // whole * c,))
                for n, c in enumerate(counts)
                if n != me
            ]
            sends = part(m.shape, sum(p["to"]), p["to"])
            receives = part(m.result, m.result[after], p["from"])
        else:  # a collective
            key = lambda m: (m.name, m.shape, {k: v for k, v in m.params.items() if k != "site"})
            here = lambda m: (m.params["comm"], m.group) == slot and m.name not in _BETWEEN_TWO
            for other in group:
                theirs = head(other)
                if theirs is None or not here(theirs):
                    return False
                if key(theirs) != key(m):
                    return f"{where(rank)}, {where(other)}"
            for other in group:
                at[other] += 1
            return True
        if not sent[rank]:
            for dest, tag, shape in sends:
                if dest != MPI.PROC_NULL:
                    channels[slot, me, dest, tag].append((shape, m))
            sent[rank] = True
            if sends and receives:
                return True
        wanted = [r for r in receives if r[0] != MPI.PROC_NULL]
        if any(not channels[slot, source, me, tag] for source, tag, _ in wanted):
            return False
        for source, tag, shape in wanted:
            got, message = channels[slot, source, me, tag].popleft()
            if np.prod(got, dtype=int) != np.prod(shape, dtype=int):
                return f"{where(rank)}, which meets {message} of rank {group[source]}"
        at[rank], sent[rank] = at[rank] + 1, False
        return True

    moving = True
    while moving:
        moving = False
        for rank in range(len(lists)):
            said = step(rank)
            if isinstance(said, str):
                return said
            moving |= said
    if any(head(rank) for rank in range(len(lists))):
        return "nobody gets further: " + ", ".join(map(where, range(len(lists))))
    left = [str(queue[0][1]) for queue in channels.values() if queue]
    return f"never received: {left[0]}" if left else ""
