"""Collectives with counts: uneven ones, zeros among them, and none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close, uneven
from mpigrad.communicator import Communicator


@pytest.mark.cases(
    *("uneven-(2,)", "none-()", "uneven-(0,)"), reason="rows, no rows, and rows without elements"
)
@pytest.mark.parametrize("width", [(), (2,), (0,)], ids=str)
@pytest.mark.parametrize("rows", [uneven, lambda size: [0] * size], ids=["uneven", "none"])
@pytest.mark.thin(3)
def test_values(
    rows: Callable[[int], list[int]], width: tuple[int, ...], comm: Communicator
) -> None:
    """Every operation and adjoint, on whole numbers and truths: what goes where."""
    rank, counts = comm.rank, rows(comm.size)
    total, root = sum(counts), comm.size - 1
    ends = np.cumsum([0, *counts])
    mine = slice(ends[rank], ends[rank + 1])
    whole = np.arange(total * np.prod(width, dtype=int)).reshape(total, *width)
    for dtype in ("int16", "bool", "float32"):
        data = jnp.asarray(whole % 5).astype(dtype)
        gathered = mg.gatherv(data[mine], counts, root)
        np.testing.assert_array_equal(gathered, data if rank == root else jnp.zeros_like(data))
        np.testing.assert_array_equal(mg.allgatherv(data[mine], counts), data)
        sent = data if rank == root else jnp.zeros_like(data)
        np.testing.assert_array_equal(mg.scatterv(sent, counts, root), data[mine])
        assert gathered.dtype == dtype
    x = jnp.asarray(whole, "float64")
    np.testing.assert_array_equal(
        mg.reduce_scatterv((rank + 1) * x, counts), x[mine] * sum(range(1, comm.size + 1))
    )
    if total:
        mg.dot_test(lambda x: mg.gatherv(x, counts, root), x[mine])
        mg.dot_test(lambda x: mg.reduce_scatterv(x, counts), x)


def test_compiled_parts_of_which_all_but_one_are_empty(comm: Communicator) -> None:
    """XLA may give an empty result the address of its operand, which MPICH does not accept."""
    rank, size = comm.rank, comm.size
    for one in range(size):
        counts = [int(r == one) for r in range(size)]
        own = counts[rank]

        @mg.jit
        def parts(x: Any, counts: list[int] = counts, one: int = one) -> Any:
            rows = mg.allgatherv(2 * x, counts)
            back = mg.scatterv(3 * mg.gatherv(5 * rows[: x.shape[0]], counts, one), counts, one)
            return mg.reduce_scatterv(rows, counts), back

        summed, back = parts(jnp.ones(own))
        np.testing.assert_array_equal(summed, [2.0 * size] * own)
        np.testing.assert_array_equal(back, [30.0] * own)
        to = (one + 1) % size
        send = [int(rank == one and s == to) for s in range(size)]
        receive = [int(rank == to and s == one) for s in range(size)]
        exchanged = mg.jit(lambda x, s=send, r=receive: mg.alltoallv(2 * x, s, r))
        np.testing.assert_array_equal(exchanged(jnp.ones(sum(send))), [2.0] * sum(receive))


def test_alltoallv_of_any_counts(comm: Communicator) -> None:
    """Rank r sends 2 r + s rows to rank s, but none to the next one."""
    rank, size = comm.rank, comm.size
    n = np.array(
        [[0 if s == (r + 1) % size else 2 * r + s for s in range(size)] for r in range(size)]
    )
    send, receive = n[rank].tolist(), n[:, rank].tolist()
    label = lambda r, s: np.stack([np.full(n[r, s], r), np.full(n[r, s], s)], 1)
    x = np.concatenate([label(rank, s) for s in range(size)])
    y = mg.alltoallv(jnp.asarray(x), send, receive)
    np.testing.assert_array_equal(y, np.concatenate([label(r, rank) for r in range(size)]))
    back = mg.alltoallv(y, receive, send)
    np.testing.assert_array_equal(back, x)
    program = lambda x: jnp.sin(mg.alltoallv(jnp.cos(x), send, receive))
    mg.dot_test(program, jnp.asarray(x, "float64"))
    mg.dot_test(mg.vmap(program, in_axes=-1, out_axes=1), jnp.asarray(x, "float64"))


def test_pytrees_share_the_rows(comm: Communicator) -> None:
    rank, counts = comm.rank, uneven(comm.size)
    n, total = counts[rank], sum(counts)
    tree = {
        "a": jnp.full(n, 1.0 + rank),
        "b": (jnp.full((n, 2, 2), rank), jnp.full((n, 3), 2.0 + rank)),
    }
    owner = np.repeat(np.arange(comm.size), counts)
    got = mg.allgatherv(tree, counts)
    np.testing.assert_array_equal(got["a"], 1.0 + owner)
    np.testing.assert_array_equal(got["b"][0], np.broadcast_to(owner[:, None, None], (total, 2, 2)))
    np.testing.assert_array_equal(got["b"][1], np.broadcast_to(2.0 + owner[:, None], (total, 3)))
    close(mg.scatterv(mg.gatherv(tree, counts), counts), tree)
    sums = mg.reduce_scatterv(got, counts)
    close(sums, jax.tree.map(lambda x: comm.size * x, tree))


def test_what_is_constant_on_a_rank(comm: Communicator) -> None:
    """The last rank's rows are constants: its messages stay in the derivatives."""
    counts = uneven(comm.size)
    x = jnp.arange(2.0 * counts[comm.rank]).reshape(-1, 2) + comm.rank

    def loss(x: Any) -> Any:
        x = x if comm.rank < comm.size - 1 else jnp.ones_like(x)
        return jnp.sum(mg.allgatherv(x, counts) ** 3)

    here = comm.rank < comm.size - 1
    close(mg.grad(loss)(x), 3 * x**2 * comm.size * here)
    close(mg.jvp(mg.grad(loss), (x,), (x,))[1], 6 * x**2 * comm.size * here)


def test_wrong_arguments(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    counts = [2] * size
    with pytest.raises(ValueError, match=f"got {size + 1} entries on rank {rank}"):
        mg.gatherv(jnp.ones(2), [2] * (size + 1))
    with pytest.raises(ValueError, match="counts must not be negative"):
        mg.scatterv(jnp.ones(2), [-1] * size)
    with pytest.raises(TypeError, match="Python integers"):
        mg.allgatherv(jnp.ones(2), [2.0] * size)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="Python integers"):
        mg.jit(lambda n: mg.allgatherv(jnp.ones(2), [n] * size))(2)
    with pytest.raises(ValueError, match=rf"axis 0 of x must have counts\[{rank}\] = 2 rows"):
        mg.allgatherv({"a": jnp.ones(2), "b": jnp.ones(3)}, counts)
    with pytest.raises(ValueError, match=r"sum\(counts\)"):
        mg.reduce_scatterv(jnp.ones(2 * size + 1), counts)
    with pytest.raises(ValueError, match=r"sum\(sendcounts\)"):
        mg.alltoallv(jnp.ones(()), counts, counts)
    with pytest.raises(ValueError, match="sends to itself"):
        mg.alltoallv(jnp.ones(2 * size), counts, [1] * size)
    with pytest.raises(ValueError, match=rf"root must be a rank .* got {size} on"):
        mg.gatherv(jnp.ones(2), counts, root=size)


_OTHER_DTYPE = pytest.mark.full("float64 runs the same code")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=_OTHER_DTYPE)])
def test_of_any_length_with_a_rank_that_has_none(comm, dtype):
    """MPI takes another algorithm for every length, and no two ranks may take different ones."""
    counts = uneven(comm.size)  # rank 2, of two ranks rank 1, has no row
    counts[min(2, comm.size - 1)] = 0
    for width in (1, 30, 100, 400, 1500, 6000, 50_000):
        whole = (jnp.arange(sum(counts) * width) % 31).reshape(-1, width).astype(dtype)
        start = sum(counts[: comm.rank])
        mine = whole[start : start + counts[comm.rank]]
        every = mg.allgatherv(mine, counts, comm=comm)
        on_root = mg.gatherv(mine, counts, 0, comm=comm)
        back = mg.scatterv(whole, counts, 0, comm=comm)
        swapped = mg.alltoallv(
            jnp.concatenate([mine] * comm.size), [counts[comm.rank]] * comm.size, counts, comm=comm
        )
        summed = mg.reduce_scatterv(whole, counts, comm=comm)
        np.testing.assert_array_equal(every, whole)
        np.testing.assert_array_equal(on_root, whole if comm.rank == 0 else 0 * whole)
        np.testing.assert_array_equal(back, mine)
        np.testing.assert_array_equal(swapped, whole)
        np.testing.assert_array_equal(summed, mine * comm.size)
