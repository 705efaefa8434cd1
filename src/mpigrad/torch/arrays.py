"""Conversion between PyTorch tensors and JAX arrays, by views if the memory allows it."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

__all__ = ["from_array", "is_differentiable", "to_array", "type_of", "zeros"]

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
