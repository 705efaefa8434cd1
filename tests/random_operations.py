"""The steps of random programs: each operation as a call, and as the same map of all ranks' arrays.

A row of OPERATIONS is all that an operation needs in order to be part of random programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from helpers import CASES
from mpigrad.communicator import Communicator
from mpigrad.fft.local import redistribute

LENGTH = 3  # of every operand


@dataclass(frozen=True)
class Step:
    """A message, and a local function of what it brings.

    Parameters
    ----------
    operation
        A name in OPERATIONS.
    x, target
        The register that is read, and the one that is written.
    rank, other, tag, comm
        What the operation makes of them: a root, a sender and a receiver, a distance.
    then
        The local function in LOCAL.
    constant
        Ranks whose operand is a constant.
    unused
        Ranks that do not use the result.
    wraps
        For some ranks, a wrapper in WRAPS around their part of the message.
    """

    operation: str
    x: int = 0
    target: int = 0
    rank: int = 0
    other: int = 0
    tag: int = 0
    comm: str = "world"
    then: str = "set"
    constant: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    wraps: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Operation:
    """`run` on one rank, and `simulate` on the stack: (operand, register written, step, …)."""

    run: Callable[[Any, Any, Step, Communicator], Any]
    simulate: Callable[[Any, Any, Step], Any]


def weights(n: int) -> np.ndarray:
    """n different numbers with the sum 1."""
    return 2 * np.arange(1.0, n + 1) / (n * (n + 1))


def spread(x: Any, n: int) -> Any:
    """n different multiples of `x` along a new leading axis."""
    return weights(n)[:, None] * x


def gathered(y: Any) -> Any:
    """A weighted mean over the leading axis."""
    return jnp.tensordot(weights(y.shape[0]), y, 1)


def moved(stack: Callable[[Any, Step], Any]) -> Callable[[Any, Any, Step], Any]:
    """The simulation of an operation that moves and adds whole operands.

    `stack` is the map in NumPy, of an array whose first axis is the ranks. Its matrix is what it
    makes of the unit vectors.
    """
    return lambda X, old, step: jax.lax.dot(jnp.asarray(stack(np.eye(len(X)), step)), X)


def collective(
    call: Callable[..., Any],
    stack: Callable[[Any, int], Any],
    *,
    rows_in: bool = False,
    rows_out: bool = False,
) -> Operation:
    """A row for a linear collective: `call(x, root, comm)` and, in NumPy, `stack(X, root)`.

    With `rows_in` or `rows_out` it takes or gives one row for each rank.
    """

    def run(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
        y = call(spread(x, comm.size) if rows_in else x, step.rank % comm.size, comm)
        return gathered(y) if rows_out else y

    def stacked(X: Any, step: Step) -> Any:
        n = len(X)
        Y = stack(weights(n)[:, None] * X[:, None] if rows_in else X, step.rank % n)
        return np.tensordot(Y, weights(n), ([1], [0])) if rows_out else Y

    return Operation(run, moved(stacked))


def apart(operation: Operation) -> Operation:
    """`operation` of operands kept apart: rounding must not decide which of them is largest."""
    return Operation(
        lambda x, old, s, c: operation.run(x + (c.rank + 1) / 8, old, s, c),
        lambda X, old, s: operation.simulate(X + np.arange(1, len(X) + 1)[:, None] / 8, old, s),
    )


def on(root: int, value: Any, size: int) -> Any:
    """`value` on one rank, zeros on the others."""
    return np.stack([value if r == root else np.zeros_like(value) for r in range(size)])


def everywhere(value: Any, size: int) -> Any:
    return np.broadcast_to(value, (size, *value.shape))


def _pair(step: Step, size: int) -> tuple[int, int]:
    return step.rank % size, (step.rank + step.other) % size


def _send(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """One rank sends, another receives, the others have something else to do."""
    sender, receiver = _pair(step, comm.size)
    if comm.rank == sender != receiver:
        mg.send(x, receiver, step.tag, comm)
    if comm.rank == receiver != sender:
        return mg.recv(x if step.other % 2 else np.zeros(LENGTH), sender, step.tag, comm)
    return jnp.sin(old)


def _send_simulated(X: Any, old: Any, step: Step) -> Any:
    sender, receiver = _pair(step, len(X))
    if sender == receiver:
        return jnp.sin(old)
    arrives = np.zeros((len(X), len(X)))
    arrives[receiver, sender] = 1
    others = np.arange(len(X))[:, None] != receiver
    return jnp.sin(old) * others + jax.lax.dot(jnp.asarray(arrives), X)


def _chain(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """Every rank waits for its predecessor, and hands on what it makes of it."""
    if comm.rank > 0:
        x = jnp.sin(x + mg.recv(np.ones(LENGTH), comm.rank - 1, step.tag, comm))
    if comm.rank + 1 < comm.size:
        mg.send(x, comm.rank + 1, step.tag, comm)
    return x


def _chain_simulated(X: Any, old: Any, step: Step) -> Any:
    rows = [X[0]]
    for x in X[1:]:
        rows.append(jnp.sin(x + rows[-1]))
    return jnp.stack(rows)


def _ring(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """To the rank at a distance; the tag names the sender."""
    dest, source = (comm.rank + step.other) % comm.size, (comm.rank - step.other) % comm.size
    return mg.sendrecv(x, dest, source, step.tag + comm.rank, step.tag + source, comm=comm)


def _shift(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """To the next rank; nobody sends to the first."""
    dest = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    source = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    return mg.sendrecv(x, dest, source, step.tag, step.tag, comm=comm)


def _shorter(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """A ring in which rank r sends its first 1 + r mod 3 numbers."""
    dest, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    like = np.zeros(1 + source % LENGTH)
    y = mg.sendrecv(x[: 1 + comm.rank % LENGTH], dest, source, like=like, comm=comm)
    return jnp.concatenate([y, jnp.zeros(LENGTH - y.size)])


def _shorter_simulated(X: Any, old: Any, step: Step) -> Any:
    sent = np.arange(LENGTH) <= np.arange(len(X))[:, None] % LENGTH
    return jnp.roll(X * sent, 1, axis=0)


def _tree(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """A pytree as one message, integers in it."""
    tree = {"a": x[:1], "b": (x[1:] * 2, jnp.int32(comm.rank))}
    got = mg.allreduce(tree, comm=comm)
    return jnp.concatenate([got["a"], got["b"][0] / 2]) / (1 + got["b"][1])


def _barrier(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    mg.barrier(comm)
    return x


OPERATIONS: dict[str, Operation] = {
    "local": Operation(lambda x, old, s, c: x, lambda X, old, s: X),
    "barrier": Operation(_barrier, lambda X, old, s: X),
    "bcast": collective(
        lambda x, root, c: mg.bcast(x, root, c), lambda X, root: everywhere(X[root], len(X))
    ),
    "reduce": collective(
        lambda x, root, c: mg.reduce(x, root=root, comm=c) / c.size,
        lambda X, root: on(root, X.mean(0), len(X)),
    ),
    "allreduce": collective(
        lambda x, root, c: mg.allreduce(x, comm=c) / c.size,
        lambda X, root: everywhere(X.mean(0), len(X)),
    ),
    "gather": collective(
        lambda x, root, c: mg.gather(x, root, c), lambda X, root: on(root, X, len(X)), rows_out=True
    ),
    "scatter": collective(
        lambda x, root, c: mg.scatter(x, root, c), lambda X, root: X[root], rows_in=True
    ),
    "tree": Operation(
        _tree,
        moved(lambda X, s: everywhere(X.sum(0) / (1 + sum(range(len(X)))), len(X))),
    ),
    "send": Operation(_send, _send_simulated),
    "chain": Operation(_chain, _chain_simulated),
    "ring": Operation(_ring, moved(lambda X, s: np.roll(X, s.other, axis=0))),
    "shift": Operation(_shift, moved(lambda X, s: np.concatenate([0 * X[:1], X[:-1]]))),
    "shorter": Operation(_shorter, _shorter_simulated),
    "neighbors": Operation(
        lambda x, old, s, c: CASES["neighbor_alltoallv"].run(x, c),
        lambda X, old, s: CASES["neighbor_alltoallv"].simulate(X),
    ),
}
OPERATIONS["allgather"] = collective(
    lambda x, root, c: mg.allgather(x, comm=c),
    lambda X, root: everywhere(X, len(X)),
    rows_out=True,
)
OPERATIONS["alltoall"] = collective(
    lambda x, root, c: mg.alltoall(x, comm=c),
    lambda X, root: np.swapaxes(X, 0, 1),
    rows_in=True,
    rows_out=True,
)
OPERATIONS["reduce_scatter"] = collective(
    lambda x, root, c: mg.reduce_scatter(x, comm=c), lambda X, root: X.sum(0), rows_in=True
)
OPERATIONS["scan"] = collective(
    lambda x, root, c: mg.scan(x, comm=c) / c.size,
    lambda X, root: np.cumsum(X, axis=0) / len(X),
)
OPERATIONS["exscan"] = collective(
    lambda x, root, c: mg.exscan(x, comm=c) / c.size,
    lambda X, root: (np.cumsum(X, axis=0) - X) / len(X),
)


# ---- as many rows from each rank as it likes ----


def folded(y: Any) -> Any:
    """A vector of any length, made LENGTH long."""
    return jnp.tensordot(_mixing(y.shape[0]), y, 1)


def unfolded(x: Any, n: int) -> Any:
    """A vector of LENGTH, made n long."""
    return jnp.tensordot(_mixing(n).T, x, 1)


def _mixing(n: int) -> np.ndarray:
    return np.cos(np.arange(LENGTH)[:, None] + 3 * np.arange(n)) / max(n, 1)


def _counts(step: Step, size: int) -> tuple[int, ...]:
    """How many rows each rank has: zero, too."""
    return tuple((r + step.tag) % (LENGTH + 1) for r in range(size))


def _to_each(step: Step, rank: int, size: int) -> tuple[int, ...]:
    return tuple((rank + 2 * other + step.tag) % LENGTH for other in range(size))


def _padded(y: Any) -> Any:
    return jnp.concatenate([y, jnp.zeros(LENGTH - y.shape[0])])


def _all_rows(X: Any, step: Step) -> Any:
    rows = zip(X, _counts(step, len(X)), strict=True)
    return jnp.concatenate([x[:n] for x, n in rows])


def _parts(y: Any, counts: tuple[int, ...]) -> Any:
    """The rows for each rank, as operands."""
    ends = np.cumsum((0, *counts))
    return jnp.stack([_padded(y[a:b]) for a, b in itertools.pairwise(ends)])


def _on_rank(rank: int, y: Any, size: int) -> Any:
    return jnp.stack([y if r == rank else jnp.zeros_like(y) for r in range(size)])


def _exchanged(X: Any, step: Step) -> Any:
    n = len(X)
    counts = [_to_each(step, r, n) for r in range(n)]
    sent = [unfolded(x, sum(c)) for x, c in zip(X, counts, strict=True)]
    ends = [np.cumsum((0, *c)) for c in counts]
    return jnp.stack(
        [
            folded(jnp.concatenate([sent[s][ends[s][r] : ends[s][r + 1]] for s in range(n)]))
            for r in range(n)
        ]
    )


def _alltoallv(x: Any, step: Step, c: Communicator) -> Any:
    mine = _to_each(step, c.rank, c.size)
    theirs = tuple(_to_each(step, s, c.size)[c.rank] for s in range(c.size))
    return folded(mg.alltoallv(unfolded(x, sum(mine)), mine, theirs, comm=c))


def _blocks(step: Step, size: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """The rows of each rank before, its columns afterwards, and the order of axes, for a step."""
    rows = tuple((r + step.tag) % LENGTH + (r == 0) for r in range(size))
    columns = tuple((2 * r + step.tag) % LENGTH + (r == size - 1) for r in range(size))
    return rows, columns, (0, 1) if step.other % 2 else (1, 0)


def _redistribute(x: Any, step: Step, c: Communicator) -> Any:
    """From blocks of whole rows to blocks of whole columns, with the axes in one of two orders."""
    rows, columns, order = _blocks(step, c.size)
    block = unfolded(x, rows[c.rank] * sum(columns)).reshape(rows[c.rank], sum(columns))
    if step.rank % 2:  # the same with the axes exchanged
        moved = redistribute(block.T, c, 1, rows, 0, columns, order)
        return folded((moved.T if order == (0, 1) else moved).ravel())
    moved = redistribute(block, c, 0, rows, 1, columns, order)
    return folded((moved if order == (0, 1) else moved.T).ravel())


def _redistributed(X: Any, step: Step) -> Any:
    rows, columns, _ = _blocks(step, len(X))
    whole = jnp.concatenate(
        [
            unfolded(x, n * sum(columns)).reshape(n, sum(columns))
            for x, n in zip(X, rows, strict=True)
        ]
    )
    ends = np.cumsum((0, *columns))
    return jnp.stack([folded(whole[:, a:b].ravel()) for a, b in itertools.pairwise(ends)])


OPERATIONS["allgatherv"] = Operation(
    lambda x, old, s, c: folded(
        mg.allgatherv(x[: _counts(s, c.size)[c.rank]], _counts(s, c.size), comm=c)
    ),
    lambda X, old, s: jnp.stack([folded(_all_rows(X, s))] * len(X)),
)
OPERATIONS["gatherv"] = Operation(
    lambda x, old, s, c: folded(
        mg.gatherv(x[: _counts(s, c.size)[c.rank]], _counts(s, c.size), s.rank % c.size, c)
    ),
    lambda X, old, s: _on_rank(s.rank % len(X), folded(_all_rows(X, s)), len(X)),
)
OPERATIONS["scatterv"] = Operation(
    lambda x, old, s, c: _padded(
        mg.scatterv(unfolded(x, sum(_counts(s, c.size))), _counts(s, c.size), s.rank % c.size, c)
    ),
    lambda X, old, s: _parts(
        unfolded(X[s.rank % len(X)], sum(_counts(s, len(X)))), _counts(s, len(X))
    ),
)
OPERATIONS["reduce_scatterv"] = Operation(
    lambda x, old, s, c: _padded(
        mg.reduce_scatterv(unfolded(x, sum(_counts(s, c.size))), _counts(s, c.size), comm=c)
    ),
    lambda X, old, s: _parts(unfolded(X.sum(0), sum(_counts(s, len(X)))), _counts(s, len(X))),
)
OPERATIONS["alltoallv"] = Operation(
    lambda x, old, s, c: _alltoallv(x, s, c), lambda X, old, s: _exchanged(X, s)
)
OPERATIONS["redistribute"] = Operation(
    lambda x, old, s, c: _redistribute(x, s, c), lambda X, old, s: _redistributed(X, s)
)


# ---- reductions that are no sums ----


def _largest(X: Any) -> Any:
    """The largest of all rows, its derivative shared equally by ties.

    JAX's own derivative looks for the operands that are equal to the result: none is, 0/0, where a
    compiler computes an operand twice and rounds differently. Here operands meet one another.
    """
    wins = jnp.all(X[:, None] >= X[None], axis=1)
    return jnp.sum(jax.lax.stop_gradient(wins / jnp.sum(wins, axis=0)) * X, axis=0)


for _op, _reduced in (
    ("PROD", lambda X: jnp.prod(X, axis=0)),
    ("MAX", _largest),
    ("MIN", lambda X: -_largest(-X)),
):
    OPERATIONS[f"allreduce {_op}"] = apart(
        Operation(
            lambda x, old, s, c, op=_op: mg.allreduce(x, op=getattr(MPI, op), comm=c),
            lambda X, old, s, f=_reduced: jnp.broadcast_to(f(X), X.shape),
        )
    )


# ---- requests, any sender, one-sided ----


def _requests(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    dest, source = (comm.rank + step.other) % comm.size, (comm.rank - step.other) % comm.size
    coming = mg.irecv(np.zeros(LENGTH), source, step.tag, comm)
    going = mg.isend(x, dest, step.tag, comm)
    local = jnp.sin(old)
    mg.wait(going)
    return (mg.wait(coming) + local) / 2


def _anyone(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """A rank adds what the others send, in whatever order it comes."""
    root = step.rank % comm.size
    if comm.rank != root:
        mg.send(x, root, step.tag, comm)
    else:
        for _ in range(comm.size - 1):
            x = x + mg.recv(np.zeros(LENGTH), tag=step.tag, comm=comm)
        x = x / comm.size
    mg.barrier(comm)  # nobody sends for the next such step before this one is done
    return x


def _anyone_simulated(X: Any, old: Any, step: Step) -> Any:
    return jnp.stack([X.mean(0) if r == step.rank % len(X) else X[r] for r in range(len(X))])


def _posted_for_anyone(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    coming = mg.irecv(np.zeros(LENGTH), MPI.ANY_SOURCE, step.tag, comm)
    mg.send(x, (comm.rank + step.other) % comm.size, step.tag, comm)
    y, source, tag = mg.wait_with_status(coming)
    right = (source == (comm.rank - step.other) % comm.size) & (tag == step.tag)
    mg.barrier(comm)
    return (jnp.where(right, y, 0) + jnp.sin(old)) / 2


def _in_turn(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """Two messages each way that only their order tells apart, waited for as it comes."""
    dest, source = (comm.rank + step.other) % comm.size, (comm.rank - step.other) % comm.size
    coming = [mg.irecv(np.zeros(LENGTH), source, step.tag, comm) for _ in range(2)]
    going = [mg.isend(v, dest, step.tag, comm) for v in (x, jnp.sin(old))]
    second, _, first, _ = mg.waitall([coming[1], going[1], coming[0], going[0]])
    return (2 * first + second) / 3


def _in_turn_simulated(X: Any, old: Any, step: Step) -> Any:
    return jnp.roll(2 * X + jnp.sin(old), step.other, axis=0) / 3


def _window(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """Adds to another rank's window and reads a third's."""
    there, from_there = (comm.rank + step.other) % comm.size, (comm.rank + 1) % comm.size
    content, (got,) = mg.one_sided(
        x, get=[(from_there, 1, 2)], accumulate=[(jnp.sin(x[:2]), there, 1)], comm=comm
    )
    return (content + _padded(got)) / 2


def _window_simulated(X: Any, old: Any, step: Step) -> Any:
    added = jnp.roll(jnp.sin(X[:, :2]), step.other, axis=0)
    got = jnp.roll(X, -1, axis=0)[:, 1:]
    one = jnp.zeros((len(X), 1))
    return (X + jnp.concatenate([one, added], 1) + jnp.concatenate([got, one], 1)) / 2


def _window_of_two(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    """Of a pytree, whose integers say how many ranks have added to a row."""
    there = (comm.rank + step.other) % comm.size
    (content, n), ((got, m),) = mg.one_sided(
        (x, jnp.ones(LENGTH, "int32")),
        get=[((comm.rank + 1) % comm.size, 0, LENGTH)],
        accumulate=[((jnp.sin(old[:1]), jnp.ones(1, "int32")), there, 2)],
        comm=comm,
    )
    return content / n + got * m / 4


def _window_of_two_simulated(X: Any, old: Any, step: Step) -> Any:
    content = X.at[:, 2].add(jnp.roll(jnp.sin(old[:, 0]), step.other, axis=0))
    return content / np.array([1, 1, 2]) + jnp.roll(X, -1, axis=0) / 4


OPERATIONS["requests"] = Operation(
    _requests, lambda X, old, s: (jnp.roll(X, s.other, axis=0) + jnp.sin(old)) / 2
)
OPERATIONS["anyone"] = Operation(_anyone, _anyone_simulated)
OPERATIONS["posted for anyone"] = Operation(_posted_for_anyone, OPERATIONS["requests"].simulate)
OPERATIONS["requests in turn"] = Operation(_in_turn, _in_turn_simulated)
OPERATIONS["one_sided"] = Operation(_window, _window_simulated)
OPERATIONS["one_sided of two"] = Operation(_window_of_two, _window_of_two_simulated)


# ---- reductions that move the values, and a message written with mpi4py ----


def _circle(a: Any, b: Any) -> Any:
    return a + b + a * b / 8  # 8 (1 + a / 8) (1 + b / 8) - 8: associative


def _located(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    value, rank = mg.allreduce(x, op=MPI.MAXLOC, comm=comm)
    return value / (1 + rank.astype(x.dtype))


def _located_simulated(X: Any, old: Any, step: Step) -> Any:
    rank = jnp.argmax(X, axis=0)
    largest = jnp.take_along_axis(X, rank[None], 0)[0]
    return jnp.broadcast_to(largest / (1 + rank.astype(X.dtype)), X.shape)


def _before(X: Any, old: Any, step: Step) -> Any:
    rows = [X[0]]
    for x in X[1:]:
        rows.append(_circle(rows[-1], x))
    return jnp.stack(rows)


@dataclass(frozen=True)
class Turned:
    """A ring of mpi4py's: to the rank at a distance."""

    distance: int

    def __call__(self, v: Any, mpi: MPI.Comm) -> Any:
        got = np.empty_like(v)
        there, here = (mpi.rank + self.distance) % mpi.size, (mpi.rank - self.distance) % mpi.size
        mpi.Sendrecv(v, there, recvbuf=got, source=here)
        return got


def _by_hand(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    return mg.custom_operation(Turned(step.other), Turned(-step.other))(x, comm)


@dataclass(frozen=True)
class TurnedBeside:
    """The first of two, moved by a ring, and the second as it is."""

    turned: Turned

    def __call__(self, both: Any, mpi: MPI.Comm) -> Any:
        return {"x": self.turned(both["x"], mpi), "y": both["y"][::-1]}


def _two_by_hand(x: Any, old: Any, step: Step, comm: Communicator) -> Any:
    forward, back = TurnedBeside(Turned(step.other)), TurnedBeside(Turned(-step.other))
    got = mg.custom_operation(forward, back)({"x": x, "y": jnp.sin(old)}, comm)
    return (got["x"] + got["y"]) / 2


def _two_by_hand_simulated(X: Any, old: Any, step: Step) -> Any:
    return (jnp.roll(X, step.other, axis=0) + jnp.sin(old)[:, ::-1]) / 2


_circled = mg.reduction(_circle)
OPERATIONS["allreduce MAXLOC"] = apart(Operation(_located, _located_simulated))
OPERATIONS["scan own"] = Operation(
    lambda x, old, s, c: mg.scan(x, op=_circled, comm=c) / c.size,
    lambda X, old, s: _before(X, old, s) / len(X),
)
OPERATIONS["custom"] = Operation(_by_hand, moved(lambda X, s: np.roll(X, s.other, axis=0)))
OPERATIONS["custom of two"] = Operation(_two_by_hand, _two_by_hand_simulated)
