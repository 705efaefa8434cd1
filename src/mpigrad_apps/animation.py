"""Animated pictures of a field that changes in time."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxtyping import Float
from numpy import ndarray

__all__ = ["animate"]


def animate(
    path: pathlib.Path,
    frames: Float[ndarray, "frames nx ny"],
    titles: Sequence[str],
    limits: tuple[float, float],
    extent: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 1.0),
    quantity: str = "",
) -> None:
    """Write an animated GIF with x to the right and y upwards. Call it on one rank.

    Parameters
    ----------
    path
        The GIF file to write.
    frames
        Values at the centres of the cells, shape (frames, nx, ny).
    titles
        One title for each frame.
    limits
        Values at the two ends of the colour bar.
    extent
        The rectangle (x0, x1, y0, y1) that the cells fill.
    quantity
        The quantity and its unit, next to the colour bar.
    """
    from matplotlib.animation import PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        frames[0].T,
        origin="lower",
        extent=extent,
        vmin=limits[0],
        vmax=limits[1],
        cmap="viridis",
        interpolation="nearest",
    )
    axes.set(xlabel="x", ylabel="y")
    figure.colorbar(image, ax=axes, shrink=0.9, label=quantity)
    writer = PillowWriter(fps=10)
    with writer.saving(figure, str(path), dpi=100):
        for frame, title in zip(frames, titles, strict=True):
            image.set_data(frame.T)
            axes.set_title(title)
            writer.grab_frame()
