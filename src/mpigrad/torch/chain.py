"""The order of messages, and that all of them are reversed: a chain of tokens through the graph.

PyTorch reverses a node only where its result is used and its operand is active, on that rank
alone. While autograd records, each message therefore takes a token from the message before it and
gives one to the next; and a backward pass begins at the last token, too, with a cotangent of zero.
So every rank reverses every message, in the opposite order.
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

from mpigrad.runtime.call_sites import call_site, describe
from mpigrad.torch._torch_compat import being_compiled, eagerly, in_backward, in_transform

__all__ = ["Chain", "Reversal", "current", "forget_messages", "join_backward", "messages"]

_MANY = 10_000
_warned = False


class Reversal:
    """Whether the messages of a chain are reversed now, or were; what their nodes know of it.

    A node that held its chain would keep the graph, and so itself, alive.
    """

    def __init__(self) -> None:
        self.running = False
        self.keeps = False  # the graph, for another backward pass
        self.done_at: int | None = None  # the line of what has ended the chain
        self.how = ""

    def check(self, site: int) -> None:
        """Refuse to reverse a message that this backward pass does not join."""
        if self.running:
            return
        if self.done_at is not None:
            raise RuntimeError(
                f"mpigrad: the message at {describe(site)} was {self.how} at "
                f"{describe(self.done_at)}; other ranks do not expect its adjoint. Sum the losses "
                "and go backward once, or keep the graph (retain_graph=True), or give "
                "each forward pass, with its backward pass, messages of its own: "
                "`with mpigrad.torch.messages():`."
            )
        raise RuntimeError(
            f"mpigrad: the message at {describe(site)} belongs to another forward pass than the "
            "one that is reversed here. Call backward inside the same "
            "`with mpigrad.torch.messages():` as the forward pass, by Tensor.backward, "
            "torch.autograd.backward or torch.autograd.grad as they are after the import of "
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
        """The last message has given this token."""
        global _warned
        self.head = token
        self.count += 1
        if self.count == _MANY and not _warned:
            _warned = True
            warnings.warn(
                f"mpigrad.torch: {_MANY} messages have been recorded for a backward pass that has "
                f"not come, the last at {describe(call_site())}; what they were computed from is "
                "kept. Send messages that are not differentiated in `with torch.no_grad():`.",
                stacklevel=2,
            )

    def end(self, site: int, how: str = "reversed already, by the backward pass") -> None:
        """That is done with the messages, at this line: later ones are on another chain."""
        self.reversal.done_at, self.reversal.how = site, how
        for context in _contexts():
            if context.current is self:
                context.current = Chain()


class messages:
    """A context in which forward passes, and their backward passes, have messages of their own.

    A backward pass reverses all messages since the last one. Where two of them are under way at
    once, each has its own context, which may be entered again:

        one, other = messages(), messages()
        with one:
            a = f(x)
        with other:
            b = g(x)
            b.backward()
        with one:
            a.backward()
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
    """Leave out the messages since the last backward pass: the next one does not reverse them.

    For a forward pass whose results are thrown away, such as a loss that is not finite: its
    messages would be reversed with cotangents of zero, and the derivative of what lies before them
    may be infinite. Every rank calls it, at the same place. A backward pass over such a result is
    an error.
    """
    _contexts()[-1].current.end(call_site(), "forgotten")


_threads = threading.local()


def _contexts() -> list[messages]:
    if not hasattr(_threads, "contexts"):
        _threads.contexts = [messages()]
    return _threads.contexts


def current() -> Chain:
    """The chain of a message that stands here; an error inside of a backward pass."""
    chain = _contexts()[-1].current
    if in_backward():
        raise RuntimeError(
            f"mpigrad: the message at {describe(call_site())} stands in a backward pass, and is to "
            "be differentiated itself. What torch.utils.checkpoint computes again must have no "
            "messages: other ranks may not compute theirs again, or not now. Take messages out of "
            "it; a linear map of your own is a mpigrad.torch.custom_operation."
        )
    return chain


@contextmanager
def _reversal(chain: Chain, keep: bool) -> Iterator[None]:
    """A backward pass that joins all messages of `chain`; it ends it, or they are kept."""
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
    """Outputs and their cotangents, and the end of the chain with a zero.

    A loss that is constant on this rank is left out: others may depend on this rank's messages.
    """
    roots = _tuple(outputs)
    given: Sequence[Any] = _tuple(seeds) if seeds is not None else (None,) * len(roots)
    pairs: list[tuple[Any, Any]] = [
        (root, seed)
        for root, seed in zip(roots, given, strict=True)
        if not isinstance(root, torch.Tensor) or root.requires_grad
    ]
    # With its own graph the backward pass is the next part of the chain.
    pairs.append((chain.head, chain.head if create_graph else torch.zeros(())))
    return [root for root, _ in pairs], [seed for _, seed in pairs]


@functools.cache
def join_backward() -> None:
    """Let the backward passes of PyTorch join all messages."""
    plain_backward, plain_grad = torch.autograd.backward, torch.autograd.grad

    def joined() -> Chain | None:
        """The chain that a backward pass joins; the compiler's passes over its graphs join none."""
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
        if is_grads_batched:  # one after the other: PyTorch's batching here knows no functions
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
