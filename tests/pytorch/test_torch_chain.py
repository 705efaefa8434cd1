"""The chain of messages: which messages a backward pass reverses, and which memory is kept."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any

import jax
import pytest
import torch
from mpi4py import MPI
from torch_cases import ONES, close, leaf, points

import mpigrad.torch as mt
from mpigrad.communicator import Communicator


@pytest.mark.ranks(2)
def test_backward_more_than_once(comm: Communicator) -> None:
    x = leaf(comm)
    a, b = mt.allreduce(x).sum(), (mt.allreduce(x) ** 2).sum()
    a.backward(retain_graph=True)
    close(x.grad, [2.0] * 3)
    b.backward()
    close(x.grad, 2 + 4 * points(2).sum(0))
    with pytest.raises(RuntimeError, match=r"reversed already(.|\n)*messages\(\)"):
        a.backward()
    # Two forward passes at once.
    one, other, x = mt.messages(), mt.messages(), leaf(comm)
    with one:
        a = mt.allreduce(x).sum()
    with other:
        b = mt.allreduce(2 * x).sum()
        b.backward()
    with pytest.raises(RuntimeError, match="does not belong to the forward pass"):
        a.backward()
    with one:
        a.backward()
    close(x.grad, [6.0] * 3)
    # Afterwards all goes on as before.
    x = leaf(comm)
    (g,) = torch.autograd.grad(mt.allreduce(x).sum(), x)
    close(g, [2.0] * 3)
    assert x.grad is None


@pytest.mark.ranks(1)
def test_graphs_are_let_go(comm: Communicator) -> None:
    """Graphs are freed with a backward pass, without one, and with create_graph."""
    gone = []
    for i in range(4):
        x = leaf(comm)
        with mt.messages():
            local = torch.sin(x)
            mt.send(local, 0)
            got = mt.recv(local)
            y = mt.allreduce(local * got, MPI.PROD if i else MPI.SUM)
            gone.append(weakref.ref(local))
            if i == 0:
                y.sum().backward()
            if i == 1:
                torch.autograd.grad(y.sum(), x, create_graph=True)
        del x, local, got, y
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


@pytest.mark.ranks(1)
def test_a_kept_loss_keeps_no_operands(comm: Communicator) -> None:
    """The residuals of a product are freed with the graph, like tensors that PyTorch saves."""
    kept = lambda: sum(array.shape == (4321,) for array in jax.live_arrays())
    x = torch.ones(4321, requires_grad=True)
    loss = mt.allreduce(x, MPI.PROD).sum()
    loss.backward(retain_graph=True)
    assert kept() > 0
    loss.backward()
    close(x.grad, [2.0] * 4321)
    x.grad = None  # is an array of JAX itself
    gc.collect()
    assert kept() == 0


@pytest.mark.ranks(2)
def test_many_cotangents_at_once(comm: Communicator) -> None:
    x = leaf(comm)
    rows = torch.stack([ONES, (comm.rank + 1) * ONES])
    (g,) = torch.autograd.grad(mt.allreduce(x), {"x": x}, rows, is_grads_batched=True).values()
    close(g, [[2.0] * 3, [3.0] * 3])
    (g,) = torch.autograd.grad(mt.allreduce(x), (y for y in [x]), rows, is_grads_batched=True)
    close(g, [[2.0] * 3, [3.0] * 3])


@pytest.mark.ranks(2)
def test_without_recording(comm: Communicator) -> None:
    x = leaf(comm)
    with torch.no_grad():
        assert not mt.allreduce(x).requires_grad
    with torch.inference_mode():
        mt.allreduce(x)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.tensor(1.0).backward()
    assert mt.allreduce(torch.arange(3)).tolist() == [0, 2, 4]
    from mpigrad.torch import chain

    chain._MANY, many = 3, chain._MANY
    try:
        with mt.messages(), pytest.warns(UserWarning, match=r"torch_chain\.py:\d+\..*no_grad"):
            for _ in range(4):
                mt.allreduce(x)
        with mt.messages(), warnings.catch_warnings():  # once
            warnings.simplefilter("error")
            for _ in range(4):
                mt.allreduce(x)
    finally:
        chain._MANY, chain._warned = many, False


@pytest.mark.ranks(2)
def test_forget_messages_of_an_unused_forward_pass(comm: Communicator) -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    thrown = mt.allreduce(torch.sqrt(x)).sum()
    mt.forget_messages()
    mt.allreduce(x).sum().backward()
    assert x.grad is not None
    close(x.grad, [2.0, 2.0])
    with pytest.raises(RuntimeError, match=r"forgotten at .*torch_chain\.py:\d+"):
        thrown.backward()


@pytest.mark.ranks(2)
def test_a_chain_for_each_thread(comm: Communicator) -> None:
    """An open message of the main thread is not reversed by another thread's backward pass."""
    x = leaf(comm)
    y = mt.allreduce(x).sum()
    done: list[Any] = []

    def work() -> None:
        z = leaf(comm)
        (mt.allreduce(z) ** 2).sum().backward()
        done.append(z.grad)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    close(done[0], 4 * points(2).sum(0))
    y.backward()
    close(x.grad, [2.0] * 3)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_rejects_messages_in_a_checkpoint(reentrant: bool, comm: Communicator) -> None:
    from torch.utils.checkpoint import checkpoint

    x = leaf(comm)
    y = checkpoint(lambda x: torch.sin(mt.allreduce(x)), x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"):
        y.sum().backward()
