"""Compiled programs on tensors for a JAX function with messages and for its derivatives."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mpigrad.autodiff.transforms import jvp, vmap
from mpigrad.operations.carrier import CARRIER, opaque_zero, outer_carrier, with_carrier
from mpigrad.operations.jit import jit
from mpigrad.runtime.call_sites import at_call_site
from mpigrad.torch.arrays import from_array, is_differentiable, to_array

__all__ = ["Map"]

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
