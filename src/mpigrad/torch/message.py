"""The autograd function for all maps with messages."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.autograd import forward_ad

from mpigrad.torch._torch_compat import (
    dual_token,
    in_dual_level,
    in_transform,
    only_batched,
    transformed_token,
)
from mpigrad.torch.arrays import is_differentiable, zeros
from mpigrad.torch.chain import Chain, Reversal, current
from mpigrad.torch.maps import Map

__all__ = ["apply"]

_HOST = torch.device("cpu")


class _Call:
    """A map in autograd, with the reversal to which its node belongs."""

    __slots__ = ("device", "known", "map", "remember", "residuals", "reversal")

    def __init__(
        self,
        map_: Map,
        device: torch.device,
        reversal: Reversal | None,
        *,
        remember: bool = False,
        known: list[torch.Tensor] | None = None,
    ) -> None:
        self.map, self.device, self.reversal = map_, device, reversal
        self.remember = remember  # the residuals, for a backward pass without a graph
        self.known = known  # the results of a message that was received already
        self.residuals: Any = None

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.known is not None:
            known, self.known = self.known, None
            return known
        if self.remember:
            results, self.residuals = self.map.remember(tensors, self.device)
            return results
        return self.map.run(tensors, self.device)

    def of(self, map_: Map) -> _Call:
        return _Call(map_, self.device, self.reversal)


class _Message(torch.autograd.Function):
    """(call, token, *operands) -> (token, *results)."""

    @staticmethod
    def forward(call: _Call, token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return (torch.zeros(()), *call.run(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, _, *tensors = inputs
        if not ctx.call.map.linear:
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
        results = zip(ctx.call.map.results, output[1:], strict=True)
        ctx.mark_non_differentiable(*(y for t, y in results if not is_differentiable(t)))

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor, *cotangents: torch.Tensor) -> Any:  # type: ignore[override]
        call: _Call = ctx.call
        if call.reversal is not None:
            call.reversal.check(call.map.site)
        cts = [cotangents[i] for i in call.map.active_results]
        linear = call.map.linear
        if torch.is_grad_enabled() or in_transform():
            # A message, too, so that the backward pass has derivatives and can be batched.
            adjoint = call.map.transposed if linear else call.map.pullback
            operands = cts if linear else [*ctx.saved_tensors, *cts]
            token, *active = _Message.apply(call.of(adjoint), token, *operands)
        elif linear:
            active = call.map.transposed.run(cts, call.device)
        elif call.residuals is not None:
            active = call.map.pull(call.residuals, cts, call.device)
            if call.reversal is not None and not call.reversal.keeps:
                call.residuals = None  # otherwise a loss that the program keeps would keep them
        else:
            active = call.map.pullback.run([*ctx.saved_tensors, *cts], call.device)
        gradients: list[Any] = [None] * len(call.map.types)
        for i, ct in zip(call.map.active, active, strict=True):
            gradients[i] = ct
        return None, token, *gradients

    @staticmethod
    def jvp(ctx: Any, _: None, token: torch.Tensor | None, *tangents: Any) -> Any:  # type: ignore[override]
        map_: Map = ctx.call.map
        active = [
            zeros(map_.types[i], ctx.call.device) if tangents[i] is None else tangents[i]
            for i in map_.active
        ]
        token = torch.zeros(()) if token is None else token
        if map_.linear:
            derivative, operands = map_.transposed.transposed, active
        else:
            derivative, operands = map_.pushforward, [*ctx.saved_tensors, *active]
        token, *pushed = _Message.apply(ctx.call.of(derivative), token, *operands)
        results: list[Any] = [None] * len(map_.results)
        for i, t in zip(map_.active_results, pushed, strict=True):
            results[i] = t
        return token, *results

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, token: torch.Tensor, *tensors: Any) -> Any:  # type: ignore[override]
        _, token_axis, *axes = in_dims
        if token_axis is not None:
            token = token.sum(token_axis)
        types = [
            jax.ShapeDtypeStruct(tuple(x.shape), t.dtype)
            for x, t in zip(tensors, call.map.types, strict=True)
        ]
        batched = call.map.batched(tuple(axes), info.batch_size, types)
        outputs = _Message.apply(call.of(batched), token, *tensors)
        return outputs, (None, *(0 for _ in batched.results))


# Outside of transformations PyTorch's `apply` only binds arguments by name, and that takes longer
# than a message.
_record: Any = super(torch.autograd.Function, _Message).apply  # type: ignore[attr-defined]


def apply(
    map_: Map, tensors: Sequence[torch.Tensor], known: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Apply a map and record it in autograd and on the chain if it has a derivative.

    With `known` results the message was received already, and only its derivatives are sent.
    """
    device = tensors[0].device if tensors else _HOST
    transformed, forward_mode = in_transform(), in_dual_level()
    recording = torch.is_grad_enabled() and map_.has_derivative
    if not transformed and not recording and not (forward_mode and map_.has_derivative):
        return map_.run(tensors, device) if known is None else known
    # Transformations that differentiate work without a chain: mpigrad cannot join their graphs.
    chain = current() if recording and (not transformed or only_batched()) else None
    head = None if chain is None else chain.head
    call = _Call(
        map_,
        device,
        None if chain is None else chain.reversal,
        remember=recording and not transformed and not map_.linear,
        known=known,
    )
    if transformed:
        token, *results = _Message.apply(call, transformed_token(head), *tensors)
    else:
        token = torch.zeros(()) if head is None else head
        token, *results = _record(call, dual_token(token) if forward_mode else token, *tensors)
    if chain is not None:
        advance(chain, token, forward_mode)
    return results


def advance(chain: Chain, token: torch.Tensor, forward_mode: bool) -> None:
    """Order the next message after this one, and after the message of its tangent."""
    if forward_mode:
        token, tangent = forward_ad.unpack_dual(token)
        token = token if tangent is None else token + tangent
    chain.advance(token)
