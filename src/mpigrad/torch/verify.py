"""Checks of gradients over all ranks by finite differences and by the dot test."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.autograd import forward_ad

from mpigrad.autodiff import DotTest
from mpigrad.communicator import Communicator, resolve
from mpigrad.torch.chain import messages

__all__ = ["dot_test", "gradcheck", "gradgradcheck"]

_DOUBLE = (torch.float64, torch.complex128)
Tensors = tuple[torch.Tensor, ...]


def _has_derivative(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _outputs(f: Callable[..., Any], inputs: Sequence[Any]) -> Tensors:
    return tuple(y for y in jax.tree.leaves(f(*inputs)) if _has_derivative(y))


def _real(x: torch.Tensor) -> np.ndarray:
    """Return the real numbers of a tensor as a vector."""
    x = x.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).cpu().double().numpy()


def _flat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(_real(x) for x in tensors)])


def _moved(x: torch.Tensor, entry: int, by: float) -> torch.Tensor:
    """Return a copy of `x` with one of its real numbers changed."""
    moved = x.detach().clone(memory_format=torch.contiguous_format)
    numbers = torch.view_as_real(moved) if moved.is_complex() else moved
    numbers.view(-1)[entry] += by
    return moved


def _gradients(outputs: Tensors, inputs: Tensors, cts: Tensors, **options: Any) -> Tensors:
    if not inputs:  # this rank must reverse its messages, too
        inputs = (torch.zeros((), requires_grad=True),)
        return torch.autograd.grad(outputs, inputs, cts, materialize_grads=True, **options)[:0]
    return torch.autograd.grad(outputs, inputs, cts, materialize_grads=True, **options)


def gradcheck(
    f: Callable[..., Any],
    inputs: torch.Tensor | Sequence[Any],
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    comm: Communicator | None = None,
) -> bool:
    """Check gradients over all ranks by finite differences, like `torch.autograd.gradcheck`.

    It changes every real number of every rank's inputs in turn and compares the results of all
    ranks. It seeds every real number of every rank's results in turn and compares the gradients of
    all ranks. A check on one rank would miss the effects on other ranks.

    Parameters
    ----------
    f
        A function of tensors with messages. Every rank calls `gradcheck`.
    inputs
        Its arguments in double precision. Arguments that require a gradient are differentiated.
        The count and shapes of inputs may differ between ranks, and a rank may have zero inputs.
    eps
        The step of the finite differences.
    atol, rtol
        Absolute and relative tolerance of an entry of the Jacobian matrix.
    comm
        The communicator (default: the default communicator).

    Raises
    ------
    AssertionError
        On every rank, with the entry that differs most.
    ValueError
        On every rank, if an input is not in double precision.

    Examples
    --------
    >>> import torch
    >>> import mpigrad.torch as mg
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    >>> mg.gradcheck(lambda x: mg.allreduce(x) ** 2, x)
    True
    """
    comm = resolve(comm)
    arguments: tuple[Any, ...] = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    places = [i for i, x in enumerate(arguments) if _has_derivative(x) and x.requires_grad]
    wrong = [str(arguments[i].dtype) for i in places if arguments[i].dtype not in _DOUBLE]
    rank_dtypes = [dtypes for dtypes in comm.mpi.allgather(wrong) if dtypes]
    if rank_dtypes:
        raise ValueError(
            f"gradcheck: finite differences need inputs of torch.float64 or torch.complex128, got "
            f"{rank_dtypes[0][0]}. Convert the inputs by x.double()."
        )
    numerical = _numerical(f, arguments, places, eps, comm)
    analytical = _analytical(f, arguments, places, comm)
    # Rank s holds d(its results)/d(all inputs), and columns of d(all results)/d(its inputs).
    blocks = comm.mpi.allgather(numerical)
    jacobian = np.concatenate([block[comm.rank] for block in blocks])
    difference = np.abs(jacobian - analytical) - atol - rtol * np.abs(jacobian)
    report = None
    if difference.size and not difference.max() <= 0:
        row, column = np.unravel_index(np.argmax(difference), difference.shape)
        report = (
            f"gradcheck: the derivative of entry {row} of all ranks' results with respect to entry "
            f"{column} of rank {comm.rank}'s inputs is {analytical[row, column]:.10g}, but finite "
            f"differences give {jacobian[row, column]:.10g}. Check the backward pass of f."
        )
    reports = [text for text in comm.mpi.allgather(report) if text]
    if reports:
        raise AssertionError(reports[0])
    return True


def _numerical(
    f: Callable[..., Any], arguments: Tensors, places: list[int], eps: float, comm: Communicator
) -> list[np.ndarray]:
    """Return d(this rank's results)/d(each rank's inputs), by central differences."""
    sizes = comm.mpi.allgather([_real(arguments[i]).size for i in places])
    blocks = []
    with torch.no_grad():
        for rank, lengths in enumerate(sizes):
            columns = []
            for place, length in enumerate(lengths):
                for entry in range(length):
                    ends = []
                    for by in (eps, -eps):
                        changed = [x.detach() if _has_derivative(x) else x for x in arguments]
                        if rank == comm.rank:
                            i = places[place]
                            changed[i] = _moved(arguments[i], entry, by)
                        with messages():  # `f` may be a gradient itself
                            ends.append(_flat(_outputs(f, changed)))
                        comm.mpi.barrier()  # as in dot_test
                    columns.append((ends[0] - ends[1]) / (2 * eps))
            n = len(columns[0]) if columns else len(_flat(_outputs(f, arguments)))
            blocks.append(np.stack(columns, 1) if columns else np.zeros((n, 0)))
    return blocks


def _analytical(
    f: Callable[..., Any], arguments: Tensors, places: list[int], comm: Communicator
) -> np.ndarray:
    """Return d(all ranks' results)/d(this rank's inputs), by reverse mode."""
    with messages(), torch.enable_grad():
        leaves = list(arguments)
        for i in places:
            leaves[i] = arguments[i].detach().clone().requires_grad_()
        inputs = tuple(leaves[i] for i in places)
        outputs = _outputs(f, leaves)
        rows = []
        for rank, lengths in enumerate(comm.mpi.allgather([_real(y).size for y in outputs])):
            for place, length in enumerate(lengths):
                for entry in range(length):
                    cts = [torch.zeros_like(y) for y in outputs]
                    if rank == comm.rank:
                        cts[place] = _moved(cts[place], entry, 1.0)
                    rows.append(_flat(_gradients(outputs, inputs, tuple(cts), retain_graph=True)))
    return np.stack(rows) if rows else np.zeros((0, _flat(inputs).size))


def gradgradcheck(
    f: Callable[..., Any],
    inputs: torch.Tensor | Sequence[Any],
    *,
    seed: int = 0,
    comm: Communicator | None = None,
    **tolerances: float,
) -> bool:
    """Check second derivatives: `gradcheck` of the gradient of `f` with random cotangents.

    Parameters and errors are those of `gradcheck`. The cotangents are random with the seed `seed`.

    Examples
    --------
    >>> import torch
    >>> import mpigrad.torch as mg
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    >>> mg.gradgradcheck(lambda x: mg.allreduce(x) ** 3, x)
    True
    """
    comm = resolve(comm)
    values = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    places = [i for i, x in enumerate(values) if _has_derivative(x) and x.requires_grad]
    generator = np.random.default_rng([seed, comm.rank])
    with torch.no_grad():
        results = _outputs(f, values)
    cotangents = tuple(_random_like(y, generator).requires_grad_() for y in results)

    def gradient(*arguments: Any) -> Tensors:
        with torch.enable_grad():
            xs, cts = list(arguments[: len(values)]), arguments[len(values) :]
            for i in places:
                if not xs[i].requires_grad:
                    xs[i] = xs[i].detach().requires_grad_()
            wanted = tuple(xs[i] for i in places)
            return _gradients(_outputs(f, xs), wanted, cts, create_graph=True)

    return gradcheck(gradient, (*values, *cotangents), comm=comm, **tolerances)


def _random_like(x: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    numbers = torch.from_numpy(generator.standard_normal((*x.shape, 2)))
    full = torch.view_as_complex(numbers) if x.is_complex() else numbers[..., 0]
    return full.to(x.dtype).to(x.device)


def dot_test(
    f: Callable[..., Any],
    *primals: Any,
    comm: Communicator | None = None,
    seed: int = 0,
    rtol: float | None = None,
) -> DotTest:
    """Check ⟨F ẋ, ȳ⟩ = ⟨ẋ, Fᵀ ȳ⟩ over all ranks for the derivative F of `f`.

    Tangents ẋ and cotangents ȳ are random and differ between ranks. The inner product is the real
    part of the complex one, as in PyTorch.

    Parameters
    ----------
    f
        A function of tensors or of pytrees of tensors, with messages. Every rank calls `dot_test`.
    primals
        The point at which `f` is differentiated.
    comm
        The communicator over which products are summed (default: the default communicator).
    seed
        The seed of the random numbers.
    rtol
        The largest relative difference (default: 1e3 times the machine epsilon of the coarsest
        dtype).

    Raises
    ------
    AssertionError
        On every rank, with both products.

    Examples
    --------
    >>> import torch
    >>> import mpigrad.torch as mg
    >>> result = mg.dot_test(lambda x: mg.allreduce(x) ** 2, torch.tensor([1.0, 2.0]))
    >>> result.error < 1e-3
    True
    """
    comm = resolve(comm)
    generator = np.random.default_rng([seed, comm.rank])
    leaves, structure = jax.tree.flatten(primals)
    places = [i for i, x in enumerate(leaves) if _has_derivative(x)]
    xs = tuple(leaves[i].detach().clone().requires_grad_() for i in places)
    tangents = tuple(_random_like(x, generator) for x in xs)

    def at(values: Sequence[torch.Tensor]) -> Tensors:
        full = list(leaves)
        for i, x in zip(places, values, strict=True):
            full[i] = x
        return _outputs(f, jax.tree.unflatten(structure, full))

    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(xs, tangents, strict=True)]
        pairs = [forward_ad.unpack_dual(y) for y in at(duals)]
        pushed = [torch.zeros_like(y) if t is None else t.clone() for y, t in pairs]
    comm.mpi.barrier()  # a receive from anyone must not take the next run's message
    with messages(), torch.enable_grad():
        ys = at(xs)
        cotangents = tuple(_random_like(y, generator) for y in ys)
        pulled = _gradients(ys, xs, cotangents)
    forward, forward_scale = _products(pushed, cotangents)
    reverse, reverse_scale = _products(tangents, pulled)
    local = np.array([forward, reverse, forward_scale, reverse_scale])
    everywhere = np.asarray(comm.mpi.allreduce(local))
    scale = max(everywhere[2], everywhere[3])  # the products themselves may cancel
    error = abs(everywhere[0] - everywhere[1]) / (scale or 1.0)
    limit = rtol
    if limit is None:
        eps = [torch.finfo(x.dtype).eps for x in (*xs, *ys)]
        limit = max(comm.mpi.allgather(1e3 * max(eps, default=0.0)))
    if not error <= limit:
        raise AssertionError(
            f"dot_test: <F x', y'> = {everywhere[0]} and <x', F^T y'> = {everywhere[1]} differ by "
            f"{error:.2e} > {limit:.1e} (relative) over {comm.size} ranks. Check the backward and "
            "forward derivatives of f."
        )
    return DotTest(complex(everywhere[0]), complex(everywhere[1]), float(error))


def _products(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the inner product, and the sum of the absolute values of its terms."""
    terms = _flat(a) * _flat(b)
    return float(terms.sum()), float(np.abs(terms).sum())
