"""User-defined reductions of tensors, which gather the ranks' values and fold them in PyTorch."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import torch

from mpigrad.communicator import Communicator, check_rank
from mpigrad.operations.v_collectives import check_counts

__all__ = ["Reduction", "reduced", "reduction"]

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reduction:
    """A user-defined reduction for the argument `op`, made by `reduction`."""

    fn: Combine
    derivative: Combine | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Combine the rows of a tensor into one, from first to last."""
        if self.derivative is None or not (rows.is_floating_point() or rows.is_complex()):
            return self.combine(rows)
        return _Folded.apply(self, rows)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Combine the rows with the derivative of PyTorch."""
        y, *rest = rows.unbind(0)
        for x in rest:
            combined = self.fn(y, x)
            if (combined.shape, combined.dtype) != (y.shape, y.dtype):
                raise TypeError(
                    f"reduction: fn must return a tensor {y.dtype}{list(y.shape)} like its "
                    f"arguments, got {combined.dtype}{list(combined.shape)}. Correct fn."
                )
            y = combined
        return y.clone() if not rest else y


class _Folded(torch.autograd.Function):
    """A fold with a given elementwise derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Reduction, rows: torch.Tensor) -> torch.Tensor:
        return op.combine(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, rows = inputs
        ctx.save_for_backward(rows)
        ctx.save_for_forward(rows)

    @staticmethod
    def _slopes(ctx: Any) -> torch.Tensor:
        (rows,) = ctx.saved_tensors
        y = ctx.op(rows)
        return torch.stack([ctx.op.derivative(x, y) for x in rows.unbind(0)])

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:  # type: ignore[override]
        return None, _Folded._slopes(ctx).conj() * ct

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (_Folded._slopes(ctx) * tangent).sum(0)


def reduction(fn: Combine, derivative: Combine | None = None) -> Reduction:
    """Make a reduction for `op=` of reduce, allreduce, reduce_scatter, scan and exscan.

    Parameters
    ----------
    fn
        An associative function (a, b) of two tensors that returns a tensor of the same shape and
        dtype. It combines the ranks' values in the order of ranks, and pytrees leaf by leaf. It
        need not be commutative.
    derivative
        An elementwise function (x, y) -> dy/dx of the value x of one rank and the result y.
        Default: PyTorch differentiates `fn`.

    Returns
    -------
    A reduction for `op=`. It sends all values on which a result depends to the rank of the result,
    and combines them there. The adjoint is the adjoint of these messages.

    Examples
    --------
    >>> import torch
    >>> import mpigrad.torch as mg
    >>> product = mg.reduction(torch.mul, lambda x, y: y / x)
    >>> float(mg.allreduce(torch.tensor(3.0), op=product))
    3.0
    """
    return Reduction(fn, derivative)


def reduced(
    name: str,
    operations: dict[str, Callable[..., Any]],
    x: Any,
    op: Reduction,
    comm: Communicator,
    root: int = 0,
    counts: tuple[int, ...] = (),
) -> Any:
    """Run the operation `name` with `op`, by the `operations` that move values."""
    if name == "reduce":
        check_rank(root, comm, "reduce: root")
        rows = operations["gather"](x, root, comm)
    elif name == "reduce_scatter":
        rows = operations["alltoall"](x, comm)
    elif name == "reduce_scatterv":
        own = check_counts("reduce_scatterv: counts", counts, comm)[comm.rank]
        rows = operations["alltoallv"](x, counts, (own,) * comm.size, comm)
        rows = jax.tree.map(lambda r: r.reshape(comm.size, own, *r.shape[1:]), rows)
    else:
        rows = operations["allgather"](x, comm)

    def finish(rows: torch.Tensor) -> torch.Tensor:
        if name == "scan":
            return op(rows[: comm.rank + 1])
        if name == "exscan":
            return op(rows[: comm.rank]) if comm.rank else torch.zeros_like(rows[0])
        if name == "reduce" and comm.rank != root:
            return torch.zeros_like(rows[0])
        return op(rows)

    return jax.tree.map(finish, rows)
