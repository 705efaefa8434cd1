"""Transforms along axes that are whole on each rank, and exchanges that make others whole."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.fft
import numpy as np
from jax.lax import FftType

from mpigrad.communicator import Communicator, derivative_slot
from mpigrad.extend import Primitive, call_site, carrier, linear_map, primitive

__all__ = [
    "dct",
    "dst",
    "fft",
    "idct",
    "idst",
    "ifft",
    "irfft",
    "redistribute",
    "rfft",
]

# ---- Transforms along the last axes, which are whole on each rank ----


def _linear(name: str, run: Any, result: Any, transpose: Any) -> Primitive:
    """Make a linear primitive of one operand. Axes before those of `lengths` are a batch."""
    made: Primitive = primitive(
        name,
        shapes=lambda x, **params: [jax.ShapeDtypeStruct(*result(x, **params))],
        run=lambda x, **params: [run(x, **params)],
        messages=False,
        differentiate="linear",
        transpose=lambda cts, xs, linear, params: [transpose(cts[0], xs[0], **params)],
        batch=lambda xs, dims, params: (made.bind(jnp.moveaxis(xs[0], dims[0], 0), **params), [0]),
    )
    return made


def _is_empty(x: Any) -> bool:
    return 0 in x.shape


# ---- complex transforms of the last axes ----


def fft(x: Any, axes: int) -> Any:
    """Return the unscaled transform along the last axes."""
    return x if _is_empty(x) else jax.lax.fft(x, FftType.FFT, x.shape[x.ndim - axes :])


def ifft(x: Any, axes: int) -> Any:
    """Return the inverse of `fft`."""
    return x if _is_empty(x) else jax.lax.fft(x, FftType.IFFT, x.shape[x.ndim - axes :])


# ---- real transforms. XLA's transpose of the first is twice as long as the transform ----


def _complex(dtype: Any) -> Any:
    return np.result_type(dtype, np.complex64)


def _rfft(x: Any, *, lengths: tuple[int, ...]) -> Any:
    if _is_empty(x):
        return jnp.zeros((*x.shape[:-1], lengths[-1] // 2 + 1), _complex(x.dtype))
    return jax.lax.fft(x, FftType.RFFT, lengths)


def _irfft(x: Any, *, lengths: tuple[int, ...]) -> Any:
    if _is_empty(x):
        return jnp.zeros((*x.shape[:-1], lengths[-1]), x.real.dtype)
    return jax.lax.fft(x, FftType.IRFFT, lengths)


def _weights(lengths: tuple[int, ...], paired: float, dtype: Any) -> Any:
    """Return 1 for the frequencies of the last axis that are their own partner, else `paired`."""
    n = lengths[-1]
    weights = np.full(n // 2 + 1, paired)
    weights[0] = 1
    if n % 2 == 0:
        weights[-1] = 1
    return weights.astype(dtype)


def _rfft_transpose(ct: Any, x: Any, *, lengths: tuple[int, ...]) -> Any:
    # The real part of sum_k ct_k exp(-2 pi i k n / N).
    weights = _weights(lengths, 0.5, x.dtype) * np.asarray(math.prod(lengths), x.dtype)
    return irfft_p.bind(jnp.conj(ct) * weights, lengths=lengths)[0]


def _irfft_transpose(ct: Any, x: Any, *, lengths: tuple[int, ...]) -> Any:
    weights = _weights(lengths, 2.0, ct.dtype) / np.asarray(math.prod(lengths), ct.dtype)
    return jnp.conj(rfft_p.bind(ct, lengths=lengths)[0]) * weights


rfft_p: Primitive = _linear(
    "rfft",
    _rfft,
    lambda x, *, lengths: ((*x.shape[:-1], lengths[-1] // 2 + 1), _complex(x.dtype)),
    _rfft_transpose,
)
irfft_p: Primitive = _linear(
    "irfft",
    _irfft,
    lambda x, *, lengths: ((*x.shape[:-1], lengths[-1]), np.empty(0, x.dtype).real.dtype),
    _irfft_transpose,
)


def rfft(x: Any, axes: int) -> Any:
    """Return the unscaled transform of a real array along the last axes: half the spectrum."""
    return rfft_p.bind(x, lengths=tuple(x.shape[x.ndim - axes :]))[0]


def irfft(x: Any, axes: int, n: int) -> Any:
    """Return the inverse of `rfft`, with `n` entries along the last axis."""
    return irfft_p.bind(x, lengths=(*x.shape[x.ndim - axes : -1], n))[0]


# ---- transforms between walls, of the last axis ----


def _parts(f: Any, x: Any) -> Any:
    """Apply a real map to the real and the imaginary part."""
    if _is_empty(x):
        return x
    return jax.lax.complex(f(x.real), f(x.imag)) if jnp.iscomplexobj(x) else f(x)


def _signs(x: Any) -> Any:
    return np.where(np.arange(x.shape[-1]) % 2, -1, 1).astype(x.real.dtype)


def dct(x: Any) -> Any:
    """Return the cosine transform of type II: the field is mirrored at the walls."""
    return _parts(lambda v: jax.scipy.fft.dct(v, type=2), x)


def idct(x: Any) -> Any:
    """Return the inverse of `dct`."""
    return _parts(lambda v: jax.scipy.fft.idct(v, type=2), x)


def dst(x: Any) -> Any:
    """Return the sine transform of type II: the field is zero at the walls."""
    return jnp.flip(dct(x * _signs(x)), -1)


def idst(x: Any) -> Any:
    """Return the inverse of `dst`."""
    return idct(jnp.flip(x, -1)) * _signs(x)


# ---- Redistribution: an array divided along one axis becomes divided along another ----


def _result(
    x: Any, *, gather: int, split: int, own: int, to: Any, order: tuple[int, ...], **rest: Any
) -> jax.ShapeDtypeStruct:
    batch = x.ndim - len(order)
    shape = list(x.shape[batch:])
    shape[gather] = sum(rest["from"])
    shape[split] = own
    return jax.ShapeDtypeStruct((*x.shape[:batch], *(shape[i] for i in order)), x.dtype)


def _transpose(
    ct: Any, x: Any, a: Any, *, gather: int, split: int, own: int, to: Any, order: Any, **rest: Any
) -> Any:
    axes, sizes = len(order), rest.pop("from")
    back = tuple(int(i) for i in np.argsort(order))
    return redistribute_p.bind(
        ct,
        a,
        gather=order.index(split),
        split=order.index(gather),
        own=x.shape[x.ndim - axes + gather],
        to=sizes,
        order=back,
        **{**rest, "from": to},
    )[0]


def _attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "own"}


redistribute_p: Primitive = linear_map(
    "redistribute", result=_result, transpose=_transpose, attributes=_attributes
)


def redistribute(
    x: Any,
    comm: Communicator,
    gather: int,
    sizes: tuple[int, ...],
    split: int,
    parts: tuple[int, ...],
    order: tuple[int, ...],
) -> Any:
    """Make the axis `gather` of `x` whole and divide the axis `split`, in one exchange.

    Parameters
    ----------
    x
        This rank's block. Axes before the last `len(order)` are a batch.
    comm
        The ranks whose blocks together are whole along `gather`, in the order of their blocks.
    gather, sizes
        The axis that becomes whole, without the batch, and its entries on each rank.
    split, parts
        The axis that becomes divided, and its entries on each rank afterwards.
    order
        The order of the axes in the result, as in `transpose`.

    Returns
    -------
    This rank's block of the other division. The adjoint is the exchange in the other direction.
    """
    # The messages of other ranks never meet receives from any source, as those of halos.
    space = derivative_slot(comm.slot)
    return redistribute_p.bind(
        x,
        carrier(),
        comm=space,
        site=call_site(""),
        gather=gather,
        split=split,
        own=parts[comm.rank],
        to=parts,
        order=order,
        **{"from": sizes},
    )[0]
