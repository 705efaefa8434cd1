"""Conversion from and to SciPy's sparse arrays, whole on one rank or by rows on each rank."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mpigrad.collective_errors import raise_error
from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.extend import as_array
from mpigrad.sparse.matrix.pattern import Pattern, local_range

__all__ = ["distribute", "gather", "local_block"]


def distribute(
    A: Any,
    comm: Communicator | None = None,
    root: int | None = None,
    n_local: int | None = None,
    n_local_columns: int | None = None,
) -> tuple[Pattern, jax.Array]:
    """Return the pattern and the values of a SciPy matrix (`Matrix.from_scipy`)."""
    comm = resolve(comm)
    if root is not None:
        root = check_rank(root, comm, "Matrix.from_scipy: root")
    block, error = None, None
    if root is None or comm.rank == root:
        try:
            block = _csr(A, "root=None" if root is None else f"root={root}")
        except (TypeError, ValueError) as problem:
            error = problem
    raise_error(comm, error)
    if root is not None:
        block = _scatter(block, comm, root, n_local)
    assert block is not None
    rows, wide = block.shape
    if n_local is not None and n_local != rows:
        error = ValueError(
            f"Matrix.from_scipy: n_local={n_local}, but the block of rank {comm.rank} has {rows} "
            "rows. Leave out n_local."
        )
    raise_error(comm, error)
    shapes = comm.mpi.allgather(block.shape)
    for rank, (_, theirs) in enumerate(shapes):
        if theirs != wide and error is None:
            error = ValueError(
                f"Matrix.from_scipy: the block of rank {comm.rank} has {wide} columns, that of "
                f"rank {rank} has {theirs}, but every block has all columns of the matrix. Give "
                "blocks of rows."
            )
    raise_error(comm, error)
    total = sum(n for n, _ in shapes)
    if n_local_columns is None and wide != total:
        n_local_columns = len(local_range(wide, comm))
    columns = np.asarray(block.indices, np.int64)
    offset = sum(n for n, _ in shapes[: comm.rank])
    local_rows = np.repeat(np.arange(rows, dtype=np.int64), np.diff(block.indptr))
    owned = comm.mpi.allreduce(rows if n_local_columns is None else n_local_columns)
    if owned != wide:
        error = ValueError(
            f"Matrix.from_scipy: the matrix has {wide} columns, but the ranks' n_local_columns "
            f"add up to {owned}. Give n_local_columns on all ranks, or leave it out on all."
        )
    raise_error(comm, error)
    pattern = Pattern.from_coo(
        local_rows + offset, columns, rows, comm, n_local_columns=n_local_columns
    )
    return pattern, as_array(block.data)


def local_block(pattern: Pattern, values: Any) -> Any:
    """Return this rank's rows as a `scipy.sparse.csr_array` of shape (n_local, n_columns)."""
    from scipy.sparse import csr_array

    data = np.asarray(values)
    data = data if pattern.is_ordered else data[pattern.order]
    shape = (pattern.n_local, pattern.n_columns)
    return csr_array((data, pattern.columns, pattern.row_starts), shape=shape)


def gather(pattern: Pattern, values: Any, root: int = 0) -> Any:
    """Return the matrix as a `scipy.sparse.csr_array` on the root, None elsewhere (collective)."""
    from scipy.sparse import vstack

    comm = pattern.comm
    root = check_rank(root, comm, "Matrix.to_scipy: root")
    block = local_block(pattern, values)
    if comm.rank != root:
        comm.send_object(block, root)
        return None
    blocks = [block if rank == root else comm.receive_object(rank) for rank in range(comm.size)]
    return vstack(blocks, format="csr")


def _csr(A: Any, how: str) -> Any:
    """Return compressed rows, with each entry once and columns sorted. Explicit zeros stay."""
    from scipy.sparse import csr_array, issparse

    if not issparse(A) or A.ndim != 2:
        raise TypeError(
            f"Matrix.from_scipy({how}): expected a two-dimensional sparse array of SciPy, got "
            f"{type(A).__name__}. Convert it with scipy.sparse.csr_array."
        )
    if not np.issubdtype(A.dtype, np.inexact):
        raise TypeError(
            f"Matrix.from_scipy({how}): the values must be floating-point, got dtype {A.dtype}. "
            "Convert them with A.astype(float)."
        )
    block = csr_array(A, copy=True)  # the caller's array is not changed
    block.sum_duplicates()
    return block


def _scatter(whole: Any, comm: Communicator, root: int, n_local: int | None) -> Any:
    """Return this rank's rows of the root's matrix."""
    n_rows = comm.mpi.bcast(whole.shape[0] if comm.rank == root else None, root)
    sizes = comm.mpi.allgather(len(local_range(n_rows, comm)) if n_local is None else n_local)
    error = None
    if sum(sizes) != n_rows or min(sizes) < 0:
        error = ValueError(
            f"Matrix.from_scipy: the matrix has {n_rows} rows, but the ranks own {sizes}, in total "
            f"{sum(sizes)}. Give n_local on all ranks, or leave it out on all."
        )
    raise_error(comm, error)
    if comm.rank != root:
        return comm.receive_object(root)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    blocks = [whole[starts[rank] : starts[rank + 1]] for rank in range(comm.size)]
    for rank in range(comm.size):
        if rank != root:
            comm.send_object(blocks[rank], rank)
    return blocks[root]
