"""Messages between two ranks, windows and messages written with mpi4py, as rows of helpers.CASES.

Linear, and of any dtype; in loops, and mapped, too, only one sender can be meant by a wildcard, or
its place in the result is named by what has come with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from mpigrad.communicator import Communicator


def _ring(c: Communicator | MPI.Intracomm) -> tuple[int, int]:
    return (c.rank + 1) % c.size, (c.rank - 1) % c.size


def _requests(x: Any, c: Communicator) -> Any:
    """Four messages under way at once, given to `waitall` in another order.

    One and two ranks have one neighbour, whose messages are told apart by their order alone.
    """
    right, left = _ring(c)
    from_left, from_right = mg.irecv(x, left, 1, comm=c), mg.irecv(x[:1], right, 1, comm=c)
    sends = [mg.isend(x, right, 1, comm=c), mg.isend(x[1:2], left, 1, comm=c)]
    _, b, _, a = mg.waitall([sends[1], from_right, sends[0], from_left])
    return jnp.concatenate([a, b])


def _requests_simulated(X: Any) -> Any:
    return jnp.concatenate([jnp.roll(X, 1, axis=0), jnp.roll(X[:, 1:2], -1, axis=0)], axis=1)


def _beside_blocking(x: Any, c: Communicator) -> Any:
    """Ranks differ: blocking sends meet posted receives, and the ends have one partner."""
    got = jnp.zeros_like(x)
    if c.rank % 2 == 0:
        request = mg.isend(x, c.rank + 1 if c.rank + 1 < c.size else MPI.PROC_NULL, comm=c)
        if c.rank > 0:
            got = mg.recv(x, c.rank - 1, comm=c)
        mg.wait(request)
    else:
        request = mg.irecv(jnp.zeros_like(x), c.rank - 1, comm=c)
        if c.rank + 1 < c.size:
            mg.send(x, c.rank + 1, comm=c)
        got = mg.wait(request)
    return got


def _beside_blocking_simulated(X: Any) -> Any:
    return jnp.concatenate([jnp.zeros_like(X[:1]), X[:-1]])


def _from_anyone(x: Any, c: Communicator) -> Any:
    """Rank 0 puts what comes, in whatever order, where its sender and its tag say."""
    rows = jnp.zeros((c.size, *x.shape), x.dtype)
    if c.rank > 0:
        mg.send(x, 0, tag=2 * c.rank, comm=c)
    else:
        rows = rows.at[0].set(x)
        for _ in range(c.size - 1):
            y, source, tag = mg.recv_with_status(x, comm=c)
            rows = rows.at[tag - source].set(y)
    mg.barrier(c)  # in a loop, nobody sends a second message before all have sent the first
    return rows


def _from_anyone_simulated(X: Any) -> Any:
    return jnp.zeros((len(X), *X.shape), X.dtype).at[0].set(X)


def _any_tag(x: Any, c: Communicator) -> Any:
    """From a named rank with any tag, and before it with a named tag from any rank."""
    right, left = _ring(c)
    requests = [mg.isend(x, right, tag=3, comm=c), mg.isend(x[:1], right, tag=4, comm=c)]
    second = mg.recv(x[:1], tag=4, comm=c)
    first, source, tag = mg.recv_with_status(x, left, comm=c)
    mg.waitall(requests)
    first = jnp.where((source == left) & (tag == 3), first, jnp.zeros_like(first))
    return jnp.concatenate([second, first])


def _any_tag_simulated(X: Any) -> Any:
    left = jnp.roll(X, 1, axis=0)
    return jnp.concatenate([left[:, :1], left], axis=1)


def _both_ways(x: Any, c: Communicator) -> Any:
    """From anyone with a named tag, and with any tag from a named rank."""
    right, left = _ring(c)
    first = mg.sendrecv(x, right, MPI.ANY_SOURCE, 5, 5, comm=c)
    second = mg.sendrecv(x[1:2], left, right, c.rank, MPI.ANY_TAG, comm=c)
    return jnp.concatenate([first, second])


def _both_ways_simulated(X: Any) -> Any:
    return jnp.concatenate([jnp.roll(X, 1, axis=0), jnp.roll(X[:, 1:2], -1, axis=0)], axis=1)


def _posted_for_anyone(x: Any, c: Communicator) -> Any:
    """Posted from anyone with a named tag, and with any tag from a named rank."""
    right, left = _ring(c)
    arriving = mg.irecv(x, MPI.ANY_SOURCE, 6, comm=c)
    row = mg.irecv(x[:1], right, MPI.ANY_TAG, comm=c)
    leaving = mg.isend(x, right, 6, comm=c)
    mg.send(x[1:2], left, 7 + c.rank, comm=c)
    second, source, tag = mg.wait_with_status(row)
    second = jnp.where(tag == 7 + source, second, jnp.zeros_like(second))
    return jnp.concatenate([mg.waitall([leaving, arriving])[1], second])


def _put_and_get(x: Any, c: Communicator) -> Any:
    """Row 1 replaces the right neighbour's row 0; rank 0 reads its left one twice, others once."""
    right, left = _ring(c)
    window, gotten = mg.one_sided(
        x,
        put=[(x[1:2], right, 0)],
        get=[(left, 1, 2), (c.rank, 0, 1)] + [(left, 0, 3)] * (c.rank == 0),
        comm=c,
    )
    whole = gotten[2] if c.rank == 0 else jnp.zeros_like(x)
    return jnp.concatenate([window, *gotten[:2], whole])


def _put_and_get_simulated(X: Any) -> Any:
    left = jnp.roll(X, 1, axis=0)
    window = X.at[:, 0].set(left[:, 1])
    whole = jnp.zeros_like(X).at[0].set(X[-1])
    return jnp.concatenate([window, left[:, 1:], X[:, :1], whole], axis=1)


def _accumulate(x: Any, c: Communicator) -> Any:
    """Puts and accumulations meet in row 0; all add to the last rank's row 2."""
    right, left = _ring(c)
    window, (row,) = mg.one_sided(
        x,
        put=[(x[1:2], right, 0)],
        get=[(right, 0, 1)],
        accumulate=[(x[:2], left, 0), (x[2:], c.size - 1, 2)],
        comm=c,
    )
    return jnp.concatenate([window, row])


def _accumulate_simulated(X: Any) -> Any:
    W = X.at[:, 0].set(jnp.roll(X[:, 1], 1, axis=0))
    W = W.at[:, :2].add(jnp.roll(X[:, :2], -1, axis=0))
    W = W.at[-1, 2].add(X[:, 2].sum(0, dtype=X.dtype))
    return jnp.concatenate([W, jnp.roll(X[:, :1], -1, axis=0)], axis=1)


def _combined(a: Any, b: Any, n: Any) -> Any:
    """a, with the other sign where n is odd, beside b."""
    return jnp.concatenate([a * (1 - 2 * (n[..., None] % 2)).astype(a.dtype), b[..., None]], -1)


def _window_of_three(x: Any, c: Communicator) -> Any:
    """A pytree of two dtypes as a window: its integers are signs of what is got."""
    right, left = _ring(c)
    tree = lambda x, n: {"a": x, "b": [x[:, 1], jnp.full(len(x), n, jnp.int32)]}
    window, (got,) = mg.one_sided(
        tree(x, c.rank),
        put=[(tree(x[1:2], 7), right, 0)],
        get=[(left, 1, 2)],
        accumulate=[(tree(x[:1], 1), c.size - 1, 2)],
        comm=c,
    )
    return jnp.concatenate([_combined(t["a"], *t["b"]) for t in (window, got)])


def _window_of_three_simulated(X: Any) -> Any:
    ranks = jnp.broadcast_to(jnp.arange(len(X), dtype="int32")[:, None], X.shape[:2])
    whole = [X, X[:, :, 1], ranks]  # before the epoch
    put = [jnp.roll(w[:, 1], 1, axis=0) for w in whole]
    put[2] = jnp.full_like(put[2], 7)
    added = [X[:, 0], X[:, 0, 1], jnp.ones_like(ranks[:, 0])]
    after = [w.at[:, 0].set(p) for w, p in zip(whole, put, strict=True)]
    after = [w.at[-1, 2].add(t.sum(0, dtype=t.dtype)) for w, t in zip(after, added, strict=True)]
    got = [jnp.roll(w, 1, axis=0)[:, 1:] for w in whole]
    return jnp.concatenate([_combined(*after), _combined(*got)], axis=1)


# ---- written with mpi4py ----


def _bytes(rows: np.ndarray) -> np.ndarray:
    """For MPI, which has no name for some of JAX's dtypes."""
    return rows.view(np.uint8)


def _forward(x: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """Row 0 of the left neighbour under this rank's rows, last one first: (n, 2) -> (n + 1, 2)."""
    right, left = _ring(comm)
    row, sent = np.empty_like(x[:1]), x[:1].copy()
    request = comm.Irecv(_bytes(row), left)
    if comm.size > 1:
        comm.Send(_bytes(sent), right)
    else:
        comm.Isend(_bytes(sent), right).Wait()
    request.Wait()
    x[:] = x[::-1].copy()  # its own copy
    return np.concatenate([x, row])


def _transpose(ct: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    right, left = _ring(comm)
    row, sent = np.empty_like(ct[:1]), ct[-1:].copy()
    comm.Sendrecv(_bytes(sent), left, recvbuf=_bytes(row), source=right)
    result = ct[:-1][::-1].copy()
    result[:1] += row
    return result


def _longer(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), x.dtype)


under = mg.custom_operation(_forward, _transpose, _longer)


def under_simulated(X: Any) -> Any:
    return jnp.concatenate([X[:, ::-1], jnp.roll(X[:, :1], 1, axis=0)], axis=1)


def _shift(array: np.ndarray, comm: MPI.Intracomm, to: int) -> np.ndarray:
    got = np.empty_like(array)
    dest, source = (comm.rank + to) % comm.size, (comm.rank - to) % comm.size
    comm.Sendrecv(_bytes(np.ascontiguousarray(array)), dest, recvbuf=_bytes(got), source=source)
    return got


# {"a", "b", "n"} -> (b, {"a", "n"}): n is an integer, and moves with the others.
turned = mg.custom_operation(
    lambda x, comm: (_shift(x["b"], comm, 1), {"a": x["a"][::-1], "n": _shift(x["n"], comm, 1)}),
    lambda ct, comm: {
        "a": ct[1]["a"][::-1],
        "b": _shift(ct[0], comm, -1),
        "n": _shift(ct[1]["n"], comm, -1),
    },
    lambda x: (x["b"], {"a": x["a"], "n": x["n"]}),
)


def _turned(x: Any, c: Communicator) -> Any:
    b, rest = turned({"a": x, "b": x[:, 1], "n": jnp.full(len(x), c.rank, jnp.int32)}, c)
    return _combined(rest["a"], b, rest["n"])


def _turned_simulated(X: Any) -> Any:
    ranks = jnp.broadcast_to(jnp.arange(len(X), dtype="int32")[:, None], X.shape[:2])
    return _combined(X[:, ::-1], *(jnp.roll(v, 1, axis=0) for v in (X[:, :, 1], ranks)))


# name -> (on one rank, on the stack of all ranks' operands, what it takes)
MESSAGES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], str]] = {
    "isend and irecv": (_requests, _requests_simulated, "anything"),
    "requests beside send and recv": (_beside_blocking, _beside_blocking_simulated, "anything"),
    "recv from anyone": (_from_anyone, _from_anyone_simulated, "anything"),
    "recv of any tag": (_any_tag, _any_tag_simulated, "anything"),
    "sendrecv of any tag": (_both_ways, _both_ways_simulated, "anything"),
    "irecv from anyone": (_posted_for_anyone, _both_ways_simulated, "anything"),
    "one_sided put and get": (_put_and_get, _put_and_get_simulated, "anything"),
    "one_sided accumulate": (_accumulate, _accumulate_simulated, "numbers"),
    "one_sided of a pytree": (_window_of_three, _window_of_three_simulated, "numbers"),
    "custom_operation": (under, under_simulated, "anything"),
    "custom_operation of a pytree": (_turned, _turned_simulated, "anything"),
}
