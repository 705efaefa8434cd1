"""Every private name of PyTorch that mpigrad needs."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType, _add_batch_dim, _wrap_for_grad
from torch._guards import TracingContext
from torch.autograd import forward_ad

__all__ = [
    "being_compiled",
    "dual_token",
    "eagerly",
    "in_backward",
    "in_dual_level",
    "in_transform",
    "only_batched",
    "transformed_token",
]


def in_transform() -> bool:
    """Return True if a transformation of torch.func is active."""
    return torch._C._are_functorch_transforms_active()


def being_compiled() -> bool:
    """Return True if torch.compile traces a graph in this thread, with tensors without values."""
    return TracingContext.try_get() is not None


def in_backward() -> bool:
    """Return True if the autograd engine runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_dual_level() -> bool:
    """Return True if forward mode is active."""
    return forward_ad._current_level >= 0


def dual_token(token: torch.Tensor) -> torch.Tensor:
    """Return the token with a zero tangent, which makes a message active on every rank."""
    return forward_ad.make_dual(token, torch.zeros_like(token))


def only_batched() -> bool:
    """Return True if vmap is the only active transformation."""
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return all(i.key() == TransformType.Vmap for i in retrieve_all_functorch_interpreters())


def transformed_token(token: torch.Tensor | None) -> torch.Tensor:
    """Return the token, or a new one, batched and active in all current torch.func transformations.

    So a message is batched, and has a tangent, on every rank, even if its operand is not.
    """
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    if not in_transform():
        return torch.zeros(()) if token is None else token
    inner = retrieve_current_functorch_interpreter()
    batched = inner.key() == TransformType.Vmap
    with inner.lower():
        token = transformed_token(token)
        if batched:
            token = token.expand(inner.batch_size())  # type: ignore[attr-defined]
    if batched:
        return _add_batch_dim(token, 0, inner.level())
    if inner.key() == TransformType.Jvp:
        return dual_token(_wrap_for_grad(token, inner.level()))
    return token


def eagerly(f: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude `f` from torch.compile, which breaks the graph there.

    `torch.compiler.disable` alone would import the compiler, which takes seconds.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return f(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(f))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
