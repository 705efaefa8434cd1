"""Every operation, beside the same map without messages on the stacked arrays of all ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from message_cases import MESSAGES
from mpigrad.communicator import Communicator


@dataclass(frozen=True)
class Case:
    """`run` on one rank, and `simulate` on the stack of all ranks' operands."""

    run: Callable[[Any, Communicator], Any]
    simulate: Callable[[Any], Any]
    shape: Callable[[int], tuple[int, ...]] = lambda size: (3, 2)
    # "anything" moves; MPI has arithmetic for "numbers", and an order for "real numbers".
    takes: str = "anything"
    ties: bool = False  # zeros and equal values on several ranks, beside others
    heavy: bool = False  # takes long to compile
    full: bool = False  # in make test-full only


def _on(row: int, value: Any, size: int) -> Any:
    """`value` on one rank, zeros on the others."""
    return jnp.zeros((size, *value.shape), value.dtype).at[row].set(value)


def _ring(x: Any, comm: Communicator) -> Any:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # The tag names the sender, so that sent and received tags differ.
    return mg.sendrecv(x, right, left, sendtag=comm.rank, recvtag=left, comm=comm)


def _chain(x: Any, comm: Communicator) -> Any:
    if comm.rank + 1 < comm.size:
        mg.send(x, comm.rank + 1, tag=5, comm=comm)
    if comm.rank > 0:
        return mg.recv(x, comm.rank - 1, tag=5, comm=comm)
    return jnp.zeros_like(x)


def _open_ends(x: Any, comm: Communicator) -> Any:
    right = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    left = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    return mg.sendrecv(x, right, left, comm=comm)


def _neighbors(x: Any, comm: Communicator) -> Any:
    """Row 0 goes to the left and rows 1, 2 to the right neighbour on a line of ranks."""
    left = [comm.rank - 1] if comm.rank > 0 else []
    right = [comm.rank + 1] if comm.rank + 1 < comm.size else []
    packed = jnp.concatenate([x[:1]] * len(left) + [x[1:3]] * len(right) + [x[:0]])
    got = mg.neighbor_alltoallv(
        packed, left + right, [1] * len(left) + [2] * len(right),
        [2] * len(left) + [1] * len(right), comm=comm,
    )  # fmt: skip
    got = got if left else jnp.concatenate([jnp.zeros_like(x[:2]), got])
    return got if right else jnp.concatenate([got, jnp.zeros_like(x[:1])])


def _neighbors_simulated(X: Any) -> Any:
    from_left = jnp.concatenate([jnp.zeros_like(X[:1, :2]), X[:-1, 1:3]])
    from_right = jnp.concatenate([X[1:, :1], jnp.zeros_like(X[:1, :1])])
    return jnp.concatenate([from_left, from_right], axis=1)


def _shifted(X: Any) -> Any:
    return jnp.concatenate([jnp.zeros_like(X[:1]), X[:-1]])


def uneven(size: int) -> list[int]:
    """Rows of each rank, up to three, of one rank none."""
    return [(r + 2) % 4 for r in range(size)]


def _padded(rows: Any) -> Any:
    return jnp.concatenate([rows, jnp.zeros((3 - len(rows), *rows.shape[1:]), rows.dtype)])


def _joined(X: Any) -> Any:
    return jnp.concatenate([x[:n] for x, n in zip(X, uneven(len(X)), strict=True)])


def _parted(x: Any, size: int) -> list[Any]:
    ends = np.cumsum([0, *uneven(size)])
    return [_padded(x[i:j]) for i, j in itertools.pairwise(ends)]


def _gatherv(x: Any, comm: Communicator, operation: Callable[..., Any], **root: int) -> Any:
    counts = uneven(comm.size)
    return operation(x[: counts[comm.rank]], counts, comm=comm, **root)


def _alltoallv(x: Any, comm: Communicator) -> Any:
    """Rank r sends (r + s) % 3 rows to rank s, the same ones to all."""
    counts = [(comm.rank + s) % 3 for s in range(comm.size)]
    got = mg.alltoallv(jnp.concatenate([x[:n] for n in counts]), counts, counts, comm=comm)
    ends = np.cumsum([0, *counts])
    return jnp.stack([_padded(got[i:j]) for i, j in itertools.pairwise(ends)])


def _alltoallv_simulated(X: Any) -> Any:
    ranks = range(len(X))
    return jnp.stack([jnp.stack([_padded(X[s][: (r + s) % 3]) for s in ranks]) for r in ranks])


def _total_rows(size: int) -> tuple[int, int]:
    return sum(uneven(size)), 2


def _row_for_each(size: int) -> tuple[int, int]:
    return size, 2


CASES: dict[str, Case] = {
    "bcast": Case(
        lambda x, c: mg.bcast(x, c.size - 1, comm=c),
        lambda X: jnp.broadcast_to(X[-1], X.shape),
    ),
    "gather": Case(
        lambda x, c: mg.gather(x, c.size // 2, comm=c), lambda X: _on(len(X) // 2, X, len(X))
    ),
    "scatter": Case(
        lambda x, c: mg.scatter(x, c.size // 2, comm=c),
        lambda X: X[len(X) // 2],
        _row_for_each,
    ),
    "sendrecv ring with tags": Case(_ring, lambda X: jnp.roll(X, 1, axis=0)),
    "sendrecv to nobody": Case(_open_ends, _shifted),
    "send and recv": Case(_chain, _shifted),
    "neighbor_alltoallv": Case(_neighbors, _neighbors_simulated),
    "allgather": Case(
        lambda x, c: mg.allgather(x, comm=c), lambda X: jnp.broadcast_to(X, (len(X), *X.shape))
    ),
    "alltoall": Case(
        lambda x, c: mg.alltoall(x, comm=c),
        lambda X: jnp.swapaxes(X, 0, 1),
        _row_for_each,
    ),
    "gatherv": Case(
        lambda x, c: _gatherv(x, c, mg.gatherv, root=c.size - 1),
        lambda X: _on(-1, _joined(X), len(X)),
    ),
    "scatterv": Case(
        lambda x, c: _padded(mg.scatterv(x, uneven(c.size), c.size // 2, comm=c)),
        lambda X: jnp.stack(_parted(X[len(X) // 2], len(X))),
        _total_rows,
    ),
    "allgatherv": Case(
        lambda x, c: _gatherv(x, c, mg.allgatherv),
        lambda X: jnp.broadcast_to(_joined(X), (len(X), *_joined(X).shape)),
    ),
    "alltoallv": Case(_alltoallv, _alltoallv_simulated),
    "reduce_scatterv": Case(
        lambda x, c: _padded(mg.reduce_scatterv(x, uneven(c.size), comm=c)),
        lambda X: jnp.stack(_parted(X.sum(0), len(X))),
        _total_rows,
        takes="numbers",
    ),
    "reduce_scatterv PROD": Case(
        lambda x, c: _padded(mg.reduce_scatterv(x, uneven(c.size), MPI.PROD, comm=c)),
        lambda X: jnp.stack(_parted(jnp.prod(X, 0, dtype=X.dtype), len(X))),
        _total_rows,
        takes="numbers",
    ),
}

# Each operation that reduces: on a rank, and on the stack of all ranks' operands by a function that
# reduces the rows of an array.
Rows = Callable[[Any], Any]
REDUCING: dict[str, tuple[Callable[..., Any], Callable[[Rows, Any], Any]]] = {
    "reduce": (
        lambda x, op, c: mg.reduce(x, op, c.size - 1, c),
        lambda f, X: _on(-1, f(X), len(X)),
    ),
    "allreduce": (mg.allreduce, lambda f, X: jnp.stack([f(X)] * len(X))),
    "reduce_scatter": (
        mg.reduce_scatter,
        lambda f, X: jnp.stack([f(X[:, r]) for r in range(len(X))]),
    ),
    "scan": (mg.scan, lambda f, X: jnp.stack([f(X[: r + 1]) for r in range(len(X))])),
    "exscan": (
        mg.exscan,
        lambda f, X: jnp.stack([f(X[: max(r, 1)]) * (r > 0) for r in range(len(X))]),
    ),
}


def _circle(a: Any, b: Any) -> Any:
    return a * b + a + b  # (1 + a)(1 + b) - 1: associative


def _own(X: Any) -> Any:
    return functools.reduce(_circle, X)


def _located(find: Callable[..., Any]) -> Rows:
    def value_and_rank(X: Any) -> Any:
        rank = find(X, axis=0)
        return jnp.take_along_axis(X, rank[None], 0)[0] * (1 + rank.astype(X.dtype))

    return value_and_rank


# name -> (op, the same for the rows of an array)
OPS: dict[str, tuple[Any, Rows]] = {
    "PROD": (MPI.PROD, lambda X: jnp.prod(X, 0, dtype=X.dtype)),
    "MAX": (MPI.MAX, lambda X: jnp.max(X, 0)),
    "MIN": (MPI.MIN, lambda X: jnp.min(X, 0)),
    "MAXLOC": (MPI.MAXLOC, _located(jnp.argmax)),
    "MINLOC": (MPI.MINLOC, _located(jnp.argmin)),
    "own function": (mg.reduction(_circle), _own),
    "own derivative": (mg.reduction(_circle, lambda x, y: (1 + y) / (1 + x)), _own),
}


def reducing(operation: str, op: str) -> Case:
    """One operation by one reduction; value times (1 + rank) for those that return both."""
    (run, simulate), (native, rows) = REDUCING[operation], OPS[op]

    def one_array(x: Any, comm: Communicator) -> Any:
        y = run(x, native, comm)
        return y[0] * (1 + y[1].astype(y[0].dtype)) if isinstance(y, tuple) else y

    shape = _row_for_each if operation == "reduce_scatter" else Case.shape
    return Case(one_array, lambda X: simulate(rows, X), shape, "real numbers")


def _sum(operation: str) -> Case:
    run, simulate = REDUCING[operation]
    total = lambda X: X.sum(0, dtype=X.dtype)
    shape = _row_for_each if operation == "reduce_scatter" else Case.shape
    return Case(
        lambda x, c: run(x, MPI.SUM, c), lambda X: simulate(total, X), shape, takes="numbers"
    )


def _together(operation: str) -> Case:
    """The operation by every other reduction: compiling one program costs less than seven."""
    all_ops = [reducing(operation, op) for op in OPS]
    return Case(
        lambda x, c: jnp.stack([case.run(x, c) for case in all_ops]),
        lambda X: jnp.stack([case.simulate(X) for case in all_ops], axis=1),
        all_ops[0].shape,
        "real numbers",
        ties=True,
        heavy=True,
    )


CASES |= {operation: _sum(operation) for operation in REDUCING}
CASES |= {f"{operation} not of sums": _together(operation) for operation in REDUCING}
# Of these the derivative is of complex numbers, too.
CASES |= {
    f"{operation} {op}": dataclasses.replace(reducing(operation, op), takes="numbers", full=True)
    for operation in REDUCING
    for op in ("PROD", "own function", "own derivative")
}
CASES |= {name: Case(run, simulate, takes=t) for name, (run, simulate, t) in MESSAGES.items()}


def operand(case: Case, comm: Communicator, dtype: Any = np.float64) -> tuple[Any, Any]:
    """(this rank's operand, the stack of all ranks' operands), the same for every rank count."""
    shape = case.shape(comm.size)
    generator = np.random.default_rng(7)
    stack = generator.standard_normal((comm.size, *shape))
    if np.issubdtype(dtype, np.complexfloating):
        # Small ones: cos(100j) is infinite in complex64.
        stack = (stack + 1j * generator.standard_normal(stack.shape)) / 4
    elif not jnp.issubdtype(dtype, np.inexact):
        stack = np.rint(3 * np.abs(stack))
    if case.ties:
        stack[:, 0] = stack[0, 0]  # equal on all ranks
        stack[:2, -1, 0] = 0  # a product of two zeros, and of one
        stack[-1, -1, 1] = 0
    stack = stack.astype(dtype)  # in NumPy, which compiles nothing
    return jax.device_put(np.array(stack[comm.rank])), jax.device_put(stack)


def trace_only(rank: int, size: int) -> Communicator:
    """A communicator for tracing: programs are traced with it, never run."""
    comm = object.__new__(Communicator)
    comm.rank, comm.size, comm.slot = rank, size, 0
    return comm


def close(got: Any, expected: Any, rtol: float = 1e-11) -> None:
    """Equal within `rtol`, and finite: NaN is close to NaN, which proves nothing."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(np.asarray(b, complex)).all(), expected
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=rtol)


def found_on(comm: Communicator, rank: int, message: str) -> str:
    """A pattern for an error that `rank` has found: the others say where it comes from."""
    return message if comm.rank == rank else rf"{message}.*\(found on rank {rank}\)"
