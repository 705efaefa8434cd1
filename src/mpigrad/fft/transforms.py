"""Fourier transforms of a grid's fields, with the names and norms of `jax.numpy.fft`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpigrad.extend import as_array, jit_local
from mpigrad.fft import local
from mpigrad.fft.layout import Exchange, Layout, Reorder, Transform, known_layout
from mpigrad.fft.local import redistribute
from mpigrad.grid import Grid

__all__ = [
    "Norm", "dctn", "dstn", "fft", "fftn", "forward", "idctn", "idstn", "ifft", "ifftn", "inverse",
    "irfft", "irfftn", "rfft", "rfftn",
]  # fmt: skip

Norm = Literal["backward", "ortho", "forward"]


def forward(u: Any, layout: Layout, norm: Norm | None = None) -> Any:
    """Transform fields to the spectrum of `layout`.

    Parameters
    ----------
    u
        This rank's tile of a field, of shape (lx, ly, *rest) on a grid with two axes, or a pytree
        of fields. They travel together: the number of messages does not depend on their number.
    layout
        The layout of the spectrum.
    norm
        As in `jax.numpy.fft`: "backward" (default), "ortho" or "forward". Between walls there is
        only the first.

    Returns
    -------
    Any
        This rank's part of the spectra, each of shape (*layout.local_shape, *rest).

    Raises
    ------
    TypeError, ValueError
        On its own rank: if the shape is not that of the tile, the dtype has no transform, or
        `norm` is unknown.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fft
    >>> from mpigrad.grid import Grid
    >>> layout = fft.Layout(Grid((4, 4), (1.0, 1.0)), kinds=("fft", "dct"), real=True)
    >>> fft.forward(jnp.ones((4, 4)), layout).shape
    (3, 4)
    """
    factor = _factor(layout, norm, {"backward": 0.0, "ortho": -0.5, "forward": -1.0})

    def run(x: Any) -> Any:
        x = _steps(x, layout.plan.steps, layout, back=False)
        return x if factor is None else x * factor

    shape = layout.grid.local_shape
    return _on_fields(u, layout, shape, "forward", not layout.real, run)


def inverse(spectrum: Any, layout: Layout, norm: Norm | None = None) -> Any:
    """Transform spectra back to fields: the inverse of `forward`.

    Parameters
    ----------
    spectrum
        This rank's part of a spectrum, of shape (*layout.local_shape, *rest), or a pytree of
        spectra.
    layout, norm
        As for `forward`.

    Returns
    -------
    Any
        This rank's tile of the fields, each of shape (lx, ly, *rest).

    Raises
    ------
    TypeError, ValueError
        On its own rank: if the shape is not that of the part, the dtype has no transform, or `norm`
        is unknown.
    """
    factor = _factor(layout, norm, {"backward": 0.0, "ortho": 0.5, "forward": 1.0})

    def run(x: Any) -> Any:
        x = _steps(x, layout.plan.steps[::-1], layout, back=True)
        return x if factor is None else x * factor

    return _on_fields(spectrum, layout, layout.local_shape, "inverse", True, run)


# ---- the steps, on arrays whose first axis is a batch ----


def _steps(x: Any, steps: Sequence[Any], layout: Layout, *, back: bool) -> Any:
    for moves, some in itertools.groupby(steps, lambda step: isinstance(step, Exchange)):
        if moves:
            for step in some:
                x = _exchange(x, step, layout, back=back)
        else:
            x = _local_steps(x, steps=tuple(some), back=back)
    return x


@jit_local(static_argnames=("steps", "back"))
def _local_steps(x: Any, steps: tuple[Any, ...], back: bool) -> Any:
    for step in steps:
        x = (_inverse_step if back else _forward_step)(x, step)
    return x


def _forward_step(x: Any, step: Any) -> Any:
    match step:
        case Transform("fft", axes):
            return local.fft(as_array(x, _complex(x)), len(axes))
        case Transform("rfft", axes):
            return local.rfft(x, len(axes))
        case Transform("dct"):
            return local.dct(x)
        case Transform("dst"):
            return local.dst(x)
    return _reorder(x, step, back=False)


def _inverse_step(x: Any, step: Any) -> Any:
    match step:
        case Transform("fft", axes):
            return local.ifft(as_array(x, _complex(x)), len(axes))
        case Transform("rfft", axes, n):
            return local.irfft(as_array(x, _complex(x)), len(axes), n)
        case Transform("dct"):
            return local.idct(x)
        case Transform("dst"):
            return local.idst(x)
    return _reorder(x, step, back=True)


def _order(step: Exchange | Reorder, back: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes in memory before a step, and the places where the later ones are found."""
    before, after = step.order[::-1] if back else step.order
    return before, tuple(before.index(a) for a in after)


def _reorder(x: Any, step: Reorder, *, back: bool) -> Any:
    return jnp.transpose(x, (0, *(i + 1 for i in _order(step, back)[1])))


def _exchange(x: Any, step: Exchange, layout: Layout, *, back: bool) -> Any:
    before, order = _order(step, back)
    comm, rank = layout.grid.comm, layout.grid.comm.rank
    old, new = step.division, step.division.moved(step.gather, step.split)
    ranks = old.group(rank, step.gather)
    gathered = tuple(old.local_shape(r)[step.gather] for r in ranks)
    divided = tuple(new.local_shape(r)[step.split] for r in ranks)
    whole, parts, sizes = step.gather, divided, gathered
    split = step.split
    if back:
        whole, split, sizes, parts = split, whole, divided, gathered
    return redistribute(
        x,
        old.communicator(comm, step.gather),
        gather=before.index(whole),
        sizes=sizes,
        split=before.index(split),
        parts=parts,
        order=order,
    )


# ---- arguments ----


def _complex(x: Any) -> Any:
    return jnp.result_type(x, jnp.complex64)


def _factor(layout: Layout, norm: Norm | None, powers: dict[str, float]) -> float | None:
    name = norm or "backward"
    if name not in powers:
        raise ValueError(f'fft: norm must be "backward", "ortho" or "forward", got {norm!r}.')
    if name != "backward" and {"dct", "dst"} & set(layout.kinds):
        raise ValueError(
            f'fft: transforms between walls have the norm "backward" only, got {norm!r}. Leave '
            "norm out and scale the result."
        )
    return None if powers[name] == 0 else layout.scale ** powers[name]


def _on_fields(
    tree: Any,
    layout: Layout,
    shape: tuple[int, ...],
    name: str,
    takes_complex: bool,
    run: Callable[[Any], Any],
) -> Any:
    """Apply `run` to the fields of each dtype together, with all of them as a batch."""
    leaves, structure = jax.tree.flatten(tree)
    fields = [_checked(x, layout, shape, name, takes_complex) for x in leaves]
    results: list[Any] = [None] * len(fields)
    axes = len(shape)
    for dtype in dict.fromkeys(x.dtype for x in fields):
        members = [i for i, x in enumerate(fields) if x.dtype == dtype]
        y = run(_as_batch([fields[i] for i in members], axes=axes))
        rests = tuple(fields[i].shape[axes:] for i in members)
        for i, part in zip(members, _as_fields(y, rests=rests, axes=axes), strict=True):
            results[i] = part
    return jax.tree.unflatten(structure, results)


@jit_local(static_argnames=("axes",))
def _as_batch(fields: list[Any], axes: int) -> Any:
    """Return fields with all axes after the first ones in one batch axis in front."""

    def batch(x: Any) -> Any:
        rest = tuple(range(axes, x.ndim))
        moved = jnp.moveaxis(x, rest, tuple(range(len(rest))))
        return moved.reshape(math.prod(x.shape[axes:]), *x.shape[:axes])

    batches = list(map(batch, fields))
    return batches[0] if len(batches) == 1 else jnp.concatenate(batches)


@jit_local(static_argnames=("rests", "axes"))
def _as_fields(y: Any, rests: tuple[tuple[int, ...], ...], axes: int) -> list[Any]:
    """Return the fields of a batch, whose axes after the first ones have these lengths."""
    fields, start = [], 0
    for rest in rests:
        part = y[start : start + math.prod(rest)]
        start += math.prod(rest)
        lead = tuple(range(len(rest)))
        part = part.reshape(*rest, *part.shape[1:])
        fields.append(jnp.moveaxis(part, lead, tuple(axes + k for k in lead)))
    return fields


def _checked(x: Any, layout: Layout, shape: tuple[int, ...], name: str, takes_complex: bool) -> Any:
    x = as_array(x)
    rank = layout.grid.comm.rank
    if x.shape[: len(shape)] != shape:
        of = "the tile" if name == "forward" else "this rank's part of the spectrum"
        raise ValueError(
            f"fft.{name}: the first axes of a field must be those of {of}, {shape}, got shape "
            f"{x.shape} on rank {rank}. Give this rank's part in the layout {layout!r}."
        )
    if x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.result_type(float))
    if x.dtype.name not in ("float32", "float64", "complex64", "complex128"):
        raise TypeError(
            f"fft.{name}: transforms are for float32, float64, complex64 and complex128, got "
            f"{x.dtype} on rank {rank}. Convert the field first, for example "
            'x.astype("float32").'
        )
    if jnp.iscomplexobj(x) and not takes_complex:
        raise TypeError(
            f"fft.{name}: a real transform takes real fields, got {x.dtype} on rank {rank}. Use "
            "the complex transform, or take the real part."
        )
    return x


# ---- the names of jax.numpy.fft ----


def fftn(a: Any, grid: Grid, axes: Sequence[int] | None = None, norm: Norm | None = None) -> Any:
    """Transform fields on a grid, as `jax.numpy.fft.fftn` transforms whole arrays.

    Parameters
    ----------
    a
        This rank's tile of a field, of shape (lx, ly, *rest) on a grid with two axes, real or
        complex, or a pytree of fields. They travel together.
    grid
        The grid.
    axes
        The axes of the grid that are transformed. Default: all.
    norm
        "backward" (default), "ortho" or "forward".

    Returns
    -------
    Any
        This rank's part of the spectra in the layout `Layout(grid, axes=axes)`, with its trailing
        axes.

    Raises
    ------
    TypeError, ValueError
        As `forward`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fft
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((4, 4), spacing=(1.0, 1.0), periodic=True)
    >>> fft.fftn(jnp.ones(grid.local_shape), grid)[0, 0]
    Array(16.+0.j, dtype=complex64)
    """
    return forward(a, _layout(grid, axes), norm)


def ifftn(a: Any, grid: Grid, axes: Sequence[int] | None = None, norm: Norm | None = None) -> Any:
    """Return the inverse of `fftn`: complex fields on the tiles of `grid`."""
    return inverse(a, _layout(grid, axes), norm)


def rfftn(a: Any, grid: Grid, axes: Sequence[int] | None = None, norm: Norm | None = None) -> Any:
    """Transform real fields on a grid, as `jax.numpy.fft.rfftn`: half the spectrum.

    The parameters are those of `fftn`. The layout is `Layout(grid, real=True, axes=axes)`, which
    has n // 2 + 1 entries along the last of `axes`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fft
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((4, 6), spacing=(1.0, 1.0), periodic=True)
    >>> fft.rfftn(jnp.ones(grid.local_shape), grid).shape
    (4, 4)
    """
    return forward(a, _layout(grid, axes, real=True), norm)


def irfftn(a: Any, grid: Grid, axes: Sequence[int] | None = None, norm: Norm | None = None) -> Any:
    """Return the inverse of `rfftn`: real fields on the tiles of `grid`."""
    return inverse(a, _layout(grid, axes, real=True), norm)


def fft(a: Any, grid: Grid, axis: int = -1, norm: Norm | None = None) -> Any:
    """Transform fields along one axis of a grid: `fftn` with axes=(axis,)."""
    return fftn(a, grid, (axis,), norm)


def ifft(a: Any, grid: Grid, axis: int = -1, norm: Norm | None = None) -> Any:
    """Return the inverse of `fft`."""
    return ifftn(a, grid, (axis,), norm)


def rfft(a: Any, grid: Grid, axis: int = -1, norm: Norm | None = None) -> Any:
    """Transform real fields along one axis of a grid: `rfftn` with axes=(axis,)."""
    return rfftn(a, grid, (axis,), norm)


def irfft(a: Any, grid: Grid, axis: int = -1, norm: Norm | None = None) -> Any:
    """Return the inverse of `rfft`."""
    return irfftn(a, grid, (axis,), norm)


# ---- between walls ----


def dctn(a: Any, grid: Grid, axes: Sequence[int] | None = None) -> Any:
    """Return the cosine transform of type II: fields with no flux through the walls.

    The parameters are those of `fftn`, the convention is that of `scipy.fft.dctn`, and the layout
    is `Layout(grid, axes=axes, kinds="dct")`.
    """
    return forward(a, _layout(grid, axes, kinds="dct"))


def idctn(a: Any, grid: Grid, axes: Sequence[int] | None = None) -> Any:
    """Return the inverse of `dctn`."""
    return inverse(a, _layout(grid, axes, kinds="dct"))


def dstn(a: Any, grid: Grid, axes: Sequence[int] | None = None) -> Any:
    """Return the sine transform of type II: fields that are zero at the walls.

    The parameters are those of `fftn`, the convention is that of `scipy.fft.dstn`, and the layout
    is `Layout(grid, axes=axes, kinds="dst")`.
    """
    return forward(a, _layout(grid, axes, kinds="dst"))


def idstn(a: Any, grid: Grid, axes: Sequence[int] | None = None) -> Any:
    """Return the inverse of `dstn`."""
    return inverse(a, _layout(grid, axes, kinds="dst"))


def _layout(
    grid: Grid, axes: Sequence[int] | None, real: bool = False, kinds: str = "fft"
) -> Layout:
    return known_layout(grid, real, None if axes is None else tuple(axes), kinds)
