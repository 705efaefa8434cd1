"""Functions with messages on tensors: conversions, compiled programs, and the autograd function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.autograd import forward_ad

from mpigrad.autodiff import jvp, vmap
from mpigrad.extend import CARRIER, at_call_site, opaque_zero, outer_carrier, with_carrier
from mpigrad.operations import jit
from mpigrad.torch._torch_compat import (
    dual_token,
    in_dual_level,
    in_transform,
    only_batched,
    transformed_token,
)
from mpigrad.torch.chain import Chain, Reversal, current

__all__ = [
    "Map",
    "apply",
    "from_array",
    "is_differentiable",
    "to_array",
    "type_of",
    "zeros",
]

# ---- Conversion between PyTorch tensors and JAX arrays, by views if the memory allows it ----


# pyright: reportMissingImports=false


_DTYPES: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
_TORCH_DTYPES = {array: tensor for tensor, array in _DTYPES.items()}


def is_differentiable(x: Any) -> bool:
    """Return True if a tensor, or the type of an array, has a derivative."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def type_of(x: torch.Tensor) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of `x` as an array, or raise an error if MPI cannot send it."""
    dtype = _DTYPES.get(x.dtype)
    if dtype is None:
        raise TypeError(
            f"mpigrad.torch: MPI cannot send tensors of {x.dtype}. Convert the tensor first, for "
            "instance by x.to(torch.float32)."
        )
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(
            f"mpigrad.torch: a tensor of layout {x.layout} cannot be sent. Send its parts, or "
            "x.to_dense()."
        )
    if x.device.type == "meta":
        raise TypeError(
            "mpigrad.torch: expected a tensor with values, got a meta tensor. Send "
            "a tensor of a CPU or GPU."
        )
    return tuple(x.shape), dtype


def to_array(x: torch.Tensor) -> Any:
    """Return the values of `x` for a JAX program, as a view if `x` is contiguous on the host.

    The program must end before the tensor is written again.
    """
    x = x.detach()
    if x.device.type != "cpu":
        x = x.cpu()
    x = x.resolve_conj().resolve_neg().contiguous()
    if x.dtype is torch.bfloat16:  # an extension type in NumPy
        return x.view(torch.int16).numpy().view(jnp.bfloat16)
    return x.numpy()


def from_array(y: jax.Array, device: torch.device) -> torch.Tensor:
    """Convert an array without other references to a tensor, which may be written."""
    x = torch.from_dlpack(y.__dlpack__())
    return x if device.type == "cpu" else x.to(device)


def zeros(type_: jax.ShapeDtypeStruct, device: torch.device) -> torch.Tensor:
    """Return zeros with the shape and dtype of an array type."""
    return torch.zeros(type_.shape, dtype=_TORCH_DTYPES[np.dtype(type_.dtype)], device=device)


# ---- Compiled programs on tensors for a JAX function with messages and for its derivatives ----


# pyright: reportMissingImports=false


Arrays = Sequence[Any]


class Map:
    """A function of arrays with messages, with its derivatives for autograd.

    All operands are differentiated on every rank, even if they are constant there. So no message of
    a derivative depends on which operands are active on one rank.

    Parameters
    ----------
    function
        A function (*arrays) -> tuple of arrays, made of operations of mpigrad.
    types
        Shapes and dtypes of its arguments.
    linear
        True if it is linear in all arguments that have a derivative.
    site
        The id of the source line of its messages.

    Notes
    -----
    Derivatives with respect to complex numbers follow PyTorch: the adjoint of a linear map is its
    conjugate transpose.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Any, ...]],
        types: Sequence[jax.ShapeDtypeStruct],
        *,
        linear: bool,
        site: int,
    ) -> None:
        self.function, self.types = function, tuple(types)
        self.linear, self.site = linear, site
        with jax.enable_x64(True), at_call_site(site):
            self.results = tuple(jax.eval_shape(function, *types))
        self.active = tuple(i for i, t in enumerate(self.types) if is_differentiable(t))
        self.active_results = tuple(i for i, t in enumerate(self.results) if is_differentiable(t))
        self.has_derivative = bool(self.active or self.active_results)
        self._batched: dict[Any, Map] = {}
        self._residuals: Any = None  # the structure of what `remember` keeps

    def run(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Return the results of the function."""
        return _tensors(_execute(self._program, tensors), device)

    def remember(
        self, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> tuple[list[torch.Tensor], Arrays]:
        """Return the results, and the residuals for `pull`."""
        results, residuals = _execute(self._remembering, tensors)
        return _tensors(results, device), residuals

    def pull(
        self, residuals: Arrays, cotangents: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """Return the cotangents of the active operands."""
        return _tensors(_execute(self._pulling, cotangents, residuals), device)

    # ---- derivatives, which are maps themselves ----

    @functools.cached_property
    def transposed(self) -> Map:
        """The adjoint of a linear map: cotangents of active results -> of active operands."""
        with jax.enable_x64(True), at_call_site(self.site):
            shapes = jax.eval_shape(lambda *xs: self._vjp(*xs)[1], *self.types)

        def transpose(*cotangents: Any) -> tuple[Any, ...]:
            # The residuals of a linear map are links whose values do not matter. They make
            # messages active that do not depend on anything else.
            link = outer_carrier()
            return self._pull(jax.tree.map(lambda s: opaque_zero(link, s), shapes), cotangents)

        return Map(transpose, self._cotangent_types, linear=True, site=self.site)

    @functools.cached_property
    def pullback(self) -> Map:
        """The map (operands, cotangents of active results) -> cotangents of active operands."""
        n = len(self.types)

        def pull(*xs: Any) -> tuple[Any, ...]:
            return self._pull(self._vjp(*xs[:n])[1], xs[n:])

        return Map(pull, (*self.types, *self._cotangent_types), linear=False, site=self.site)

    @functools.cached_property
    def pushforward(self) -> Map:
        """The map (operands, tangents of active operands) -> tangents of active results."""
        n = len(self.types)

        def push(*xs: Any) -> tuple[Any, ...]:
            f = self._of_active(*xs[:n])
            tangents = jvp(f, self._active_of(xs[:n]), xs[n:])[1]
            return tuple(tangents[i] for i in self.active_results)

        types = (*self.types, *self._active_of(self.types))
        return Map(push, types, linear=False, site=self.site)

    def batched(self, axes: tuple[int | None, ...], size: int, types: Any) -> Map:
        """Return the map for a batch of `size`, whose results have a leading batch axis."""
        key = (axes, size)
        if key not in self._batched:
            function = vmap(self.function, in_axes=axes, axis_size=size)
            self._batched[key] = Map(function, types, linear=self.linear, site=self.site)
        return self._batched[key]

    # ---- programs ----

    @property
    def _cotangent_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self.results[i] for i in self.active_results)

    def _active_of(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(xs[i] for i in self.active)

    def _of_active(self, *xs: Any) -> Callable[..., tuple[Any, ...]]:
        """Return the function of its active operands, with the others fixed."""

        def f(*active: Any) -> tuple[Any, ...]:
            full = list(xs)
            for i, x in zip(self.active, active, strict=True):
                full[i] = x
            return self.function(*full)

        return f

    def _vjp(self, *xs: Any) -> tuple[Any, Any]:
        # Like mpigrad.vjp, but compiled programs can return this pull-back.
        f = with_carrier(self._of_active(*xs))
        return jax.vjp(f, np.zeros((), CARRIER.dtype), *self._active_of(xs))

    def _pull(self, back: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        full: list[Any] = [np.zeros(t.shape, jax.dtypes.float0) for t in self.results]
        for i, ct in zip(self.active_results, cotangents, strict=True):
            full[i] = _conjugate(ct)
        return tuple(_conjugate(ct) for ct in back(tuple(full))[1:])

    def _compiled(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any) -> Any:
            with at_call_site(self.site):
                return f(*args)

        return jit(traced)

    @functools.cached_property
    def _program(self) -> Callable[..., Any]:
        return self._compiled(self.function)

    @functools.cached_property
    def _remembering(self) -> Callable[..., Any]:
        def f(*xs: Any) -> Any:
            results, back = self._vjp(*xs)
            residuals, self._residuals = jax.tree.flatten(back)
            return results, residuals

        return self._compiled(f)

    @functools.cached_property
    def _pulling(self) -> Callable[..., Any]:
        def f(residuals: Any, *cotangents: Any) -> Any:
            return self._pull(jax.tree.unflatten(self._residuals, residuals), cotangents)

        return self._compiled(f)


def _conjugate(x: Any) -> Any:
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


def _execute(program: Callable[..., Any], tensors: Sequence[torch.Tensor], *before: Any) -> Any:
    with jax.enable_x64(True):  # PyTorch's precision is that of the tensor
        results = program(*before, *(to_array(x) for x in tensors))
    # The operands may be written after the return. Dispatch is synchronous, except for programs
    # that a single process started before it imported mpigrad.
    if results and isinstance(results, tuple) and isinstance(results[0], jax.Array):
        results[0].block_until_ready()
    else:
        jax.block_until_ready(results)
    return results


def _tensors(arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    return [from_array(y, device) for y in arrays]


# ---- The autograd function for all maps with messages ----


# pyright: reportMissingImports=false


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
