"""Pictures of models, shot gathers and wavefields."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mpigrad_apps.report import Panel

__all__ = ["animate", "clip_of", "gather_panel", "receiver_line", "section"]

_UNITS = {"vp": "m/s", "vs": "m/s", "rho": "kg/m³", "lambda": "Pa", "mu": "Pa"}
_MAX_PIXELS = 600  # along an axis


def section(
    title: str,
    values: Float[np.ndarray, "nx ny"],
    size: tuple[float, ...],
    limits: tuple[float, float] | None = None,
    diverging: bool = False,
    quantity: str | None = None,
    labels: tuple[str, str] = ("x (km)", "depth (km)"),
) -> Panel:
    """Return a panel of a section of the ground, depth downwards. `size` is in m.

    `quantity` is the label of the colour bar. Default: the field that the title ends with. A
    section whose second axis is not the depth is drawn as a map.
    """
    thin = math.ceil(max(values.shape) / _MAX_PIXELS)
    name = title.rsplit(maxsplit=1)[-1]
    if quantity is None:
        quantity = f"{'error of ' * diverging}{name}"
        quantity += f" ({_UNITS[name]})" if name in _UNITS else ""
    return Panel(
        title,
        values[::thin, ::thin],
        limits,
        (0.0, size[0] / 1e3, 0.0, size[1] / 1e3),
        diverging,
        labels,
        downwards=labels[1].startswith("depth"),
        quantity=quantity,
    )


def receiver_line(
    receivers: Float[np.ndarray, "receivers axes"], source: Float[np.ndarray, " axes"]
) -> np.ndarray:
    """Return the indices of the receivers to draw: in volumes those on the line next to a source.

    The line runs along x.
    """
    if receivers.shape[1] == 2:
        return np.arange(len(receivers))
    away = np.abs(receivers[:, 1] - source[1])
    return np.flatnonzero(away <= away.min() * (1 + 1e-9))


def gather_panel(
    title: str,
    gather: Float[np.ndarray, "receivers steps"],
    dt: float,
    receivers: Float[np.ndarray, "receivers axes"],
    quantity: str,
    scale: float | None = None,
) -> Panel:
    """Return a panel of a shot gather over x (or depth) in m, clipped at the amplitude `scale`.

    Time points downwards. `quantity` is the label of the colour bar.
    """
    if scale is None:
        scale = clip_of(gather)
    thin = math.ceil(gather.shape[1] / _MAX_PIXELS)
    axis = int(np.argmax(np.ptp(receivers, axis=0)))
    names = ("x", "depth") if receivers.shape[1] == 2 else ("x", "y", "depth")
    place = receivers[:, axis]
    # Pixels of equal width, each with the nearest receiver.
    pixels = np.linspace(place.min(), place.max(), len(place))
    nearest = np.argmin(np.abs(place - pixels[:, None]), axis=1)
    half = 0.5 * (pixels[1] - pixels[0] if pixels[-1] > pixels[0] else 1.0)
    return Panel(
        title,
        np.clip(gather[nearest, ::thin], -scale, scale),
        (-scale, scale),
        (pixels[0] - half, pixels[-1] + half, 0.0, gather.shape[1] * dt),
        True,
        (f"{names[axis]} of the receiver (m)", "time (s)"),
        downwards=True,
        stretched=True,
        quantity=quantity,
    )


def clip_of(values: Float[np.ndarray, "*n"]) -> float:
    """Return the amplitude that 2 % of the values exceed."""
    return float(np.quantile(np.abs(values), 0.98)) or 1.0


def animate(
    path: pathlib.Path,
    background: Float[np.ndarray, "nx ny"],
    frames: Sequence[Float[np.ndarray, "nx ny"]],
    times: Sequence[float],
    size: tuple[float, ...],
    quantity: str,
) -> None:
    """Write a GIF of a wavefield over its model with one frame for each time (on one rank)."""
    from matplotlib.animation import PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    thin = math.ceil(max(background.shape) / _MAX_PIXELS)
    height = max(2.4, min(6.4, 5.0 * size[1] / size[0] + 0.8))
    figure = Figure(figsize=(6.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    extent = (0.0, size[0] / 1e3, size[1] / 1e3, 0.0)
    axes.imshow(background[::thin, ::thin].T, extent=extent, cmap="Greys", alpha=0.6)
    scale = max(clip_of(frame) for frame in frames)
    image = axes.imshow(
        np.zeros_like(frames[0][::thin, ::thin]).T,
        extent=extent, cmap="RdBu_r", vmin=-scale, vmax=scale, alpha=0.7,
    )  # fmt: skip
    axes.set(xlabel="x (km)", ylabel="depth (km)")
    figure.colorbar(image, ax=axes, shrink=0.9, label=quantity)
    writer = PillowWriter(fps=10)
    with writer.saving(figure, str(path), dpi=100):
        for frame, time in zip(frames, times, strict=True):
            image.set_data(frame[::thin, ::thin].T)
            axes.set_title(f"{time:.3f} s")
            writer.grab_frame()
