"""A chain of tokens through the graph, which orders messages and reverses all of them.

PyTorch reverses a node only if its result is used and its operand is active on that rank. So, while
autograd records, each message takes a token from the message before it and passes one to the next.
A backward pass also starts at the last token, with a zero cotangent. Therefore every rank reverses
every message, in the opposite order.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from mpigrad.extend import call_site, describe
from mpigrad.torch._torch_compat import being_compiled, eagerly, in_backward, in_transform

__all__ = ["Chain", "Reversal", "current", "forget_messages", "join_backward", "messages"]

_MANY = 10_000
_warned = False


class Reversal:
    """The state of the reversal of a chain's messages, which their nodes hold.

    A node must not hold the chain itself, which would keep the graph, and so the node, alive.
    """

    def __init__(self) -> None:
        self.running = False
        self.keeps = False  # the graph, for another backward pass
        self.done_at: int | None = None  # the line of what has ended the chain
        self.how = ""

    def check(self, site: int) -> None:
        """Raise an error if this backward pass must not reverse the message."""
        if self.running:
            return
        if self.done_at is not None:
            raise RuntimeError(
                f"mpigrad: the message at {describe(site)} was {self.how} at "
                f"{describe(self.done_at)}, so other ranks do not expect its adjoint. Sum the "
                "losses and call backward once, or keep the graph (retain_graph=True), or run "
                "each forward pass with its backward pass inside its own "
                "`with mpigrad.torch.messages():`."
            )
        raise RuntimeError(
            f"mpigrad: the message at {describe(site)} does not belong to the forward pass that "
            "is reversed here. Call backward inside the same "
            "`with mpigrad.torch.messages():` as the forward pass, by Tensor.backward, "
            "torch.autograd.backward or torch.autograd.grad, looked up after the import of "
            "mpigrad.torch."
        )


class Chain:
    """The messages between two backward passes, from `origin` to `head`."""

    def __init__(self) -> None:
        self.origin = torch.zeros((), requires_grad=True)
        self.head = self.origin
        self.count = 0
        self.reversal = Reversal()

    def advance(self, token: torch.Tensor) -> None:
        """Append a message, which has returned this token."""
        global _warned
        self.head = token
        self.count += 1
        if self.count == _MANY and not _warned:
            _warned = True
            warnings.warn(
                f"mpigrad.torch: {_MANY} messages have been recorded without a backward pass, the "
                f"last at {describe(call_site())}. Their operands are kept in memory. Send "
                "messages that are not differentiated in `with torch.no_grad():`.",
                stacklevel=2,
            )

    def end(self, site: int, how: str = "reversed already, by the backward pass") -> None:
        """End the chain at this line, so that later messages are on another chain."""
        self.reversal.done_at, self.reversal.how = site, how
        for context in _contexts():
            if context.current is self:
                context.current = Chain()


class messages:
    """A context with a separate chain of messages for forward and backward passes.

    A backward pass reverses all messages since the last backward pass. If two forward passes are
    active at the same time, use a context for each, which may be entered again.

    Examples
    --------
    >>> import torch
    >>> import mpigrad.torch as mg
    >>> x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    >>> first, second = mg.messages(), mg.messages()
    >>> with first:
    ...     a = mg.allreduce(2 * x)
    >>> with second:
    ...     mg.allreduce(3 * y).backward()
    >>> with first:
    ...     a.backward()
    >>> print(x.grad, y.grad)
    tensor(2.) tensor(3.)
    """

    @eagerly
    def __init__(self) -> None:
        self.current = Chain()

    @eagerly
    def __enter__(self) -> Self:
        _contexts().append(self)
        return self

    @eagerly
    def __exit__(self, *exception: object) -> None:
        _contexts().pop()


@eagerly
def forget_messages() -> None:
    """Drop the messages since the last backward pass, so that the next one does not reverse them.

    Call it after a forward pass whose results are not used, such as a non-finite loss. Otherwise
    its messages would be reversed with zero cotangents, and derivatives of the operations before
    them may be infinite. Every rank calls it at the same place. A backward pass over such a result
    is an error.

    Examples
    --------
    >>> import torch
    >>> import mpigrad.torch as mg
    >>> x = torch.zeros((), requires_grad=True)
    >>> unused = mg.allreduce(x.sqrt())
    >>> mg.forget_messages()
    >>> mg.allreduce(x + 1).backward()
    >>> print(x.grad)
    tensor(1.)
    """
    _contexts()[-1].current.end(call_site(), "forgotten")


_threads = threading.local()


def _contexts() -> list[messages]:
    if not hasattr(_threads, "contexts"):
        _threads.contexts = [messages()]
    return _threads.contexts


def current() -> Chain:
    """Return the chain for a message at this place, or raise an error in a backward pass."""
    chain = _contexts()[-1].current
    if in_backward():
        raise RuntimeError(
            f"mpigrad: the message at {describe(call_site())} is inside a backward pass and would "
            "be differentiated itself. A function that torch.utils.checkpoint recomputes must not "
            "send messages, because other ranks may not recompute theirs, or at another time. Move "
            "messages out of it. For a linear map of your own use mpigrad.torch.custom_operation."
        )
    return chain


@contextmanager
def _reversal(chain: Chain, keep: bool) -> Iterator[None]:
    """Run a backward pass over all messages of `chain`, which then ends unless it is kept."""
    site, done = call_site(), False
    chain.reversal.running, chain.reversal.keeps = True, keep
    try:
        yield
        done = True
    finally:
        chain.reversal.running = False
        chain.origin.grad = None
        if not (keep and done):
            chain.end(site)


def _tuple(x: Any) -> tuple[Any, ...]:
    if x is None:
        return ()
    if isinstance(x, (torch.Tensor, torch.autograd.graph.GradientEdge)):
        return (x,)
    return tuple(x.values()) if isinstance(x, dict) else tuple(x)


def _with_head(
    chain: Chain, outputs: Any, seeds: Any, create_graph: bool
) -> tuple[list[Any], list[Any]]:
    """Return outputs and cotangents, extended by the end of the chain with a zero cotangent.

    A loss that is constant on this rank is left out, but its messages are reversed, because other
    ranks may depend on them.
    """
    roots = _tuple(outputs)
    cotangents: Sequence[Any] = _tuple(seeds) if seeds is not None else (None,) * len(roots)
    pairs: list[tuple[Any, Any]] = [
        (root, seed)
        for root, seed in zip(roots, cotangents, strict=True)
        if not isinstance(root, torch.Tensor) or root.requires_grad
    ]
    # With create_graph the backward pass is the next part of the chain.
    pairs.append((chain.head, chain.head if create_graph else torch.zeros(())))
    return [root for root, _ in pairs], [seed for _, seed in pairs]


@functools.cache
def join_backward() -> None:
    """Replace PyTorch's backward passes by functions that reverse all messages."""
    plain_backward, plain_grad = torch.autograd.backward, torch.autograd.grad

    def joined() -> Chain | None:
        """Return the chain of a backward pass, or None for the compiler's passes over graphs."""
        if in_transform() or being_compiled():
            return None
        chain = _contexts()[-1].current
        return None if chain.count == 0 or chain.reversal.running else chain

    @eagerly
    @functools.wraps(plain_backward)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        chain = joined()
        if chain is None:
            plain_backward(
                tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
            )
            return
        seeds = grad_variables if grad_tensors is None else grad_tensors
        roots, seeds = _with_head(chain, tensors, seeds, create_graph)
        keep = create_graph if retain_graph is None else retain_graph
        into = None if inputs is None else [*_tuple(inputs), chain.origin]
        with _reversal(chain, keep):
            plain_backward(roots, seeds, retain_graph, create_graph, None, into)
            if create_graph and chain.origin.grad is not None:
                chain.head = chain.origin.grad

    @eagerly
    @functools.wraps(plain_grad)
    def grad(
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> Any:
        chain = joined()
        options = (only_inputs, allow_unused, is_grads_batched, materialize_grads)
        if chain is None:
            return plain_grad(outputs, inputs, grad_outputs, retain_graph, create_graph, *options)
        keep = create_graph if retain_graph is None else retain_graph
        inputs = inputs if isinstance(inputs, dict) else _tuple(inputs)
        if is_grads_batched:  # in a loop, because PyTorch cannot batch autograd functions here
            seeds = _tuple(grad_outputs)
            each = (only_inputs, allow_unused, False, materialize_grads)
            rows = [
                grad(outputs, inputs, [ct[i] for ct in seeds], True, create_graph, *each)
                for i in range(len(seeds[0]))
            ]
            if not keep:
                chain.end(call_site())
            columns = zip(*(_tuple(row) for row in rows), strict=True)
            stacked = tuple(None if c[0] is None else torch.stack(c) for c in columns)
            return dict(zip(inputs, stacked, strict=True)) if isinstance(inputs, dict) else stacked
        roots, seeds = _with_head(chain, outputs, grad_outputs, create_graph)
        into = [*_tuple(inputs), chain.origin]
        with _reversal(chain, keep):
            *gradients, last = plain_grad(roots, into, seeds, retain_graph, create_graph, *options)
            if create_graph and last is not None:
                chain.head = last
        if isinstance(inputs, dict):
            return dict(zip(inputs, gradients, strict=True))
        return tuple(gradients)

    torch.autograd.backward, torch.autograd.grad = backward, grad
