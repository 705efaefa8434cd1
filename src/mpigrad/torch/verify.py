"""Proofs of gradients over all ranks: finite differences, and the dot test."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.autograd import forward_ad

from mpigrad.autodiff.gradient_checks import DotTest
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
    """The real numbers that a tensor consists of."""
    x = x.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).cpu().double().numpy()


def _flat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(_real(x) for x in tensors)])


def _moved(x: torch.Tensor, entry: int, by: float) -> torch.Tensor:
    """`x`, one of its real numbers changed."""
    moved = x.detach().clone(memory_format=torch.contiguous_format)
    numbers = torch.view_as_real(moved) if moved.is_complex() else moved
    numbers.view(-1)[entry] += by
    return moved


def _gradients(outputs: Tensors, inputs: Tensors, cts: Tensors, **options: Any) -> Tensors:
    if not inputs:  # this rank's messages are reversed all the same
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
    """`torch.autograd.gradcheck` over all ranks: finite differences in the product of their inputs.

    Every real number of every rank's inputs is changed in turn, and the results of all ranks are
    looked at; every real number of every rank's results is seeded in turn, and the gradients of all
    ranks are looked at. On one rank alone neither could be seen.

    Parameters
    ----------
    f
        Function of tensors with messages; every rank calls `gradcheck`.
    inputs
        Its arguments, in double precision; those that require a gradient are differentiated. Ranks
        may have inputs of different number and shape, or none.
    eps
        Step of the finite differences.
    atol, rtol
        Tolerances of an entry of the Jacobian matrix.
    comm
        The ranks.

    Raises
    ------
    AssertionError
        On every rank, with the entry that differs most.
    """
    comm = resolve(comm)
    given: tuple[Any, ...] = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    places = [i for i, x in enumerate(given) if _has_derivative(x) and x.requires_grad]
    wrong = [str(given[i].dtype) for i in places if given[i].dtype not in _DOUBLE]
    found = [dtypes for dtypes in comm.mpi.allgather(wrong) if dtypes]
    if found:
        raise ValueError(
            f"gradcheck: an input is {found[0][0]}; finite differences need torch.float64 or "
            "torch.complex128"
        )
    numerical = _numerical(f, given, places, eps, comm)
    analytical = _analytical(f, given, places, comm)
    # Rank s holds d(its results)/d(all inputs), and columns of d(all results)/d(its inputs).
    blocks = comm.mpi.allgather(numerical)
    own = np.concatenate([block[comm.rank] for block in blocks])
    difference = np.abs(own - analytical) - atol - rtol * np.abs(own)
    report = None
    if difference.size and not difference.max() <= 0:
        row, column = np.unravel_index(np.argmax(difference), difference.shape)
        report = (
            f"gradcheck: the derivative of number {row} of all ranks' results by number {column} "
            f"of rank {comm.rank}'s inputs is {analytical[row, column]:.10g}, and "
            f"{own[row, column]:.10g} by finite differences"
        )
    reports = [text for text in comm.mpi.allgather(report) if text]
    if reports:
        raise AssertionError(reports[0])
    return True


def _numerical(
    f: Callable[..., Any], given: Tensors, places: list[int], eps: float, comm: Communicator
) -> list[np.ndarray]:
    """For each rank: d(this rank's results)/d(that rank's inputs), by central differences."""
    sizes = comm.mpi.allgather([_real(given[i]).size for i in places])
    blocks = []
    with torch.no_grad():
        for rank, lengths in enumerate(sizes):
            columns = []
            for place, length in enumerate(lengths):
                for entry in range(length):
                    ends = []
                    for by in (eps, -eps):
                        changed = [x.detach() if _has_derivative(x) else x for x in given]
                        if rank == comm.rank:
                            i = places[place]
                            changed[i] = _moved(given[i], entry, by)
                        with messages():  # `f` may be a gradient itself
                            ends.append(_flat(_outputs(f, changed)))
                        comm.mpi.barrier()  # as in dot_test
                    columns.append((ends[0] - ends[1]) / (2 * eps))
            n = len(columns[0]) if columns else len(_flat(_outputs(f, given)))
            blocks.append(np.stack(columns, 1) if columns else np.zeros((n, 0)))
    return blocks


def _analytical(
    f: Callable[..., Any], given: Tensors, places: list[int], comm: Communicator
) -> np.ndarray:
    """d(all ranks' results)/d(this rank's inputs), by reverse mode."""
    with messages(), torch.enable_grad():
        leaves = list(given)
        for i in places:
            leaves[i] = given[i].detach().clone().requires_grad_()
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
    """`gradcheck` of the gradient of `f` with random cotangents: second derivatives.

    The parameters are those of `gradcheck`; `seed` is that of the cotangents.
    """
    comm = resolve(comm)
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    places = [i for i, x in enumerate(given) if _has_derivative(x) and x.requires_grad]
    generator = np.random.default_rng([seed, comm.rank])
    with torch.no_grad():
        results = _outputs(f, given)
    cotangents = tuple(_random_like(y, generator).requires_grad_() for y in results)

    def gradient(*arguments: Any) -> Tensors:
        with torch.enable_grad():
            xs, cts = list(arguments[: len(given)]), arguments[len(given) :]
            for i in places:
                if not xs[i].requires_grad:
                    xs[i] = xs[i].detach().requires_grad_()
            wanted = tuple(xs[i] for i in places)
            return _gradients(_outputs(f, xs), wanted, cts, create_graph=True)

    return gradcheck(gradient, (*given, *cotangents), comm=comm, **tolerances)


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
    """Check ⟨F ẋ, ȳ⟩ = ⟨ẋ, Fᵀ ȳ⟩ over the product of all ranks, F the derivative of `f`.

    Tangents ẋ and cotangents ȳ are random and different on every rank; the product is the real
    part of the conjugate one, as in PyTorch.

    Parameters
    ----------
    f
        Function of tensors or pytrees of them, with messages; every rank calls `dot_test`.
    primals
        Where `f` is differentiated.
    comm
        The ranks over which the products are summed.
    seed
        Of the random numbers.
    rtol
        Largest relative difference; default 1e3 times the machine epsilon of the coarsest dtype.

    Raises
    ------
    AssertionError
        On every rank, with both products.
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
            f"dot test failed: <F x', y'> = {everywhere[0]}, <x', F^T y'> = {everywhere[1]}, "
            f"relative difference {error:.2e} > {limit:.1e} over {comm.size} ranks"
        )
    return DotTest(complex(everywhere[0]), complex(everywhere[1]), float(error))


def _products(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The inner product, and the sum of the absolute values of its terms."""
    terms = _flat(a) * _flat(b)
    return float(terms.sum()), float(np.abs(terms).sum())
