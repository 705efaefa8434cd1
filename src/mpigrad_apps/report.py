"""Reports of a computation: pictures and tables in one self-contained HTML file."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import os
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.runtime import write_atomically

__all__ = [
    "Panel",
    "Picture",
    "Table",
    "curve",
    "drawing",
    "maps",
    "plain_numbers",
    "points",
    "versions",
    "write_report",
]

_PIXELS = 150  # per inch
_SHOWN = 100  # pixels of the page for an inch, so that 10 points are 14 pixels
_WIDTH = 10.8  # inches of the page


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG picture with a file name (without extension) and a caption."""

    name: str
    caption: str
    png: bytes


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table of two columns."""

    title: str
    rows: Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One map of values at the centres of cells.

    Attributes
    ----------
    title
        Text above the map.
    values
        Shape (nx, ny), with x along the first axis. NaN stays white.
    limits
        Values at the two ends of the colour bar; by default the smallest and the largest value.
    extent
        The rectangle (x0, x1, y0, y1) that the cells fill.
    diverging
        Colour zero white.
    labels
        Names of the two axes.
    downwards
        Let the second axis point downwards, as in a section of the ground.
    stretched
        Scale the axes independently, for axes with different units.
    quantity
        The quantity and its unit, next to the colour bar. Default: the title.
    mask
        The values are 0 and 1: draw the cells with 1 black, without a colour bar.
    """

    title: str
    values: NDArray[Any]
    limits: tuple[float, float] | None = None
    extent: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 1.0)
    diverging: bool = False
    labels: tuple[str, str] = ("x", "y")
    downwards: bool = False
    stretched: bool = False
    quantity: str | None = None
    mask: bool = False


def _figure(width: float, height: float) -> Any:
    """Make a figure that needs neither a display nor global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "mpigrad_apps.report: matplotlib is not installed. Run pip install 'mpigrad[apps]'."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_PIXELS)
    return buffer.getvalue()


def maps(name: str, caption: str, panels: Sequence[Panel], columns: int | None = None) -> Picture:
    """Draw maps with their colour bars and x to the right, in `columns` columns.

    Default: one row of up to three maps, and two columns of more.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad_apps import report
    >>> picture = report.maps("u", "A field.", [report.Panel("u", np.eye(3))])
    >>> picture.name, picture.png[1:4]
    ('u', b'PNG')
    """
    columns = columns or (len(panels) if len(panels) <= 3 else 2)
    rows, width = -(-len(panels) // columns), min(5.2, _WIDTH / columns)
    figure = _figure(width * columns, rows * max(_height(panel, width) for panel in panels))
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        low, high = panel.limits or (
            float(np.nanmin(panel.values)),
            float(np.nanmax(panel.values)),
        )
        if panel.diverging:
            high = max(abs(low), abs(high))
            low = -high
        x0, x1, y0, y1 = panel.extent
        image = axes.imshow(
            panel.values.T,
            origin="upper" if panel.downwards else "lower",
            extent=(x0, x1, y1, y0) if panel.downwards else panel.extent,
            vmin=low,
            vmax=high,
            cmap="Greys" if panel.mask else "RdBu_r" if panel.diverging else "viridis",
            aspect="auto" if panel.stretched else "equal",
            interpolation="nearest",
        )
        axes.set_title(panel.title, fontsize=None if width > 4 else 10)
        axes.set_xlabel(panel.labels[0])
        axes.set_ylabel(panel.labels[1])
        if not panel.mask:
            label = panel.title if panel.quantity is None else panel.quantity
            tall = _height(panel, width)
            shrink = 0.9 if panel.stretched else min(0.9, (tall - 0.9) / tall)
            figure.colorbar(image, ax=axes, shrink=shrink, label=label)
    return Picture(name, caption, _png(figure))


def _height(panel: Panel, width: float) -> float:
    """Return the height in inches of a panel with this width in inches."""
    x0, x1, y0, y1 = panel.extent
    most = 0.85 * width if width > 4 else 1.05 * width
    return most if panel.stretched else min(most, (width - 1.4) * (y1 - y0) / (x1 - x0) + 1.0)


def points(
    name: str,
    caption: str,
    title: str,
    xy: NDArray[Any],
    values: NDArray[Any],
    extent: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 1.0),
) -> Picture:
    """Draw the values at scattered points xy, shape (k, 2), as coloured dots.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad_apps import report
    >>> xy = np.array([[0.1, 0.2], [0.7, 0.4]])
    >>> report.points("observed", "Values at two points.", "u", xy, np.array([1.0, 2.0])).name
    'observed'
    """
    figure = _figure(5.2, 4.4)
    axes = figure.add_subplot()
    size = float(np.clip(2e4 / max(len(values), 1), 0.5, 30))
    dots = axes.scatter(xy[:, 0], xy[:, 1], c=values, s=size, cmap="viridis", linewidths=0)
    axes.set(title=title, xlabel="x", ylabel="y", aspect="equal")
    axes.set_xlim(extent[0], extent[1])
    axes.set_ylim(extent[2], extent[3])
    figure.colorbar(dots, ax=axes, shrink=0.9, label=title)
    return Picture(name, caption, _png(figure))


def curve(
    name: str,
    caption: str,
    lines: Mapping[str, tuple[Sequence[float | int], Sequence[float | int]]],
    x_label: str = "iteration",
    y_label: str = "",
    linear: bool = False,
) -> Picture:
    """Draw positive values on a logarithmic axis, or any values on a `linear` one.

    `lines` maps each label to its (x, values).

    Examples
    --------
    >>> from mpigrad_apps import report
    >>> report.curve("loss", "The loss.", {"loss": ([0, 1, 2], [1.0, 0.1, 0.01])}).name
    'loss'
    """
    figure = _figure(6.4, 4.2)
    axes = figure.add_subplot()
    for label, (x, values) in lines.items():
        axes.plot(x, values, label=label, linewidth=1.5)
    axes.set(xlabel=x_label, ylabel=y_label, yscale="linear" if linear else "log")
    plain_numbers(axes)
    if all(isinstance(value, int) for x, _ in lines.values() for value in x):
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, which="major", alpha=0.3)
    if len(lines) > 1 or not y_label:
        axes.legend()
    return Picture(name, caption, _png(figure))


def plain_numbers(axes: Any) -> None:
    """Label logarithmic axes that span less than two decades by plain numbers, such as 0.5 and 0.6.

    Call it after everything is drawn.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from mpigrad_apps import report
    >>> axes = Figure().add_subplot()
    >>> _ = axes.semilogy([0, 1], [0.5, 0.8])
    >>> report.plain_numbers(axes)
    >>> axes.yaxis.get_major_formatter()(0.6)
    '0.6'
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        if axis.get_scale() == "log" and high < 100 * low:
            few = MaxNLocator(4, steps=[1, 2, 5, 10])
            axis.set_major_locator(few if high < 10 * low else LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FormatStrFormatter("%.4g"))


def drawing(
    name: str, caption: str, size: tuple[float, float], draw: Callable[[Any], None]
) -> Picture:
    """Make a picture by a function that draws into an empty matplotlib Figure.

    Parameters
    ----------
    name, caption
        File name (without extension) and caption of the picture.
    size
        Width and height in inches. The page is 10.8 inches wide.
    draw
        Function of the Figure.

    Raises
    ------
    ValueError
        If the picture is wider than the page.

    Examples
    --------
    >>> from mpigrad_apps import report
    >>> def draw(figure):
    ...     figure.add_subplot().plot([0, 1], [1, 0])
    >>> report.drawing("line", "A line.", (3.0, 2.0), draw).name
    'line'
    """
    if size[0] > _WIDTH:
        raise ValueError(
            f"drawing: expected a width of at most {_WIDTH} inches, got {size[0]:g}. The page "
            "would shrink the texts of a wider picture. Use fewer columns."
        )
    figure = _figure(*size)
    draw(figure)
    return Picture(name, caption, _png(figure))


def versions() -> dict[str, object]:
    """Return the versions of Python, the packages, MPI and hypre, and the kind of machine.

    Examples
    --------
    >>> from mpigrad_apps import report
    >>> "JAX" in report.versions()
    True
    """
    import mpi4py

    import mpigrad
    from mpigrad import sparse

    return {
        "mpigrad": mpigrad.__version__,
        "Python": platform.python_version(),
        "JAX": jax.__version__,
        "NumPy": np.__version__,
        "mpi4py": mpi4py.__version__,
        "MPI": MPI.Get_library_version().strip("\0\n ").splitlines()[0].split(",")[0],
        "hypre": sparse.hypre_version() if sparse.hypre_available() else "none",
        "machine": f"{platform.system()} {platform.machine()}",
    }


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
figure { margin: 1.5rem 0 } img { max-width: 100%; height: auto } td { overflow-wrap: anywhere }
figcaption { color: #57606a; max-width: 50rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td { padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid #e5e7ea; vertical-align: top }
td:first-child { color: #57606a } .tables { display: flex; flex-wrap: wrap; gap: 0 3rem }
.summary { font-size: 1.1rem; max-width: 50rem }
@media (max-width: 40rem) { figure { overflow-x: auto } img { max-width: none } }
"""


def _shown_width(png: bytes) -> int:
    """Return the width at which a picture is shown, so that all texts have one size."""
    return round(int.from_bytes(png[16:20], "big") * _SHOWN / _PIXELS)


def write_report(
    directory: str | os.PathLike[str],
    title: str,
    summary: str,
    pictures: Sequence[Picture],
    tables: Sequence[Table],
) -> pathlib.Path:
    """Write `report.html` with its pictures inside, and each picture as a PNG file next to it.

    Call it on one rank.

    Parameters
    ----------
    directory
        Directory of the report. It is made if it does not exist.
    title, summary
        Heading and first paragraph. All texts are escaped.
    pictures, tables
        Content of the report, in this order.

    Returns
    -------
    pathlib.Path
        The path of the report.

    Examples
    --------
    >>> from mpigrad_apps import report
    >>> table = report.Table("Result", {"loss": 0.1})
    >>> report.write_report("results", "A run", "It converged.", [], [table]).name
    'report.html'
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    figures, blocks = [], []
    for picture in pictures:
        write_atomically(directory / f"{picture.name}.png", lambda f, p=picture: f.write(p.png))
        data = base64.b64encode(picture.png).decode()
        caption = html.escape(picture.caption)
        figures.append(
            f'<figure><img src="data:image/png;base64,{data}" alt="{caption}" '
            f'width="{_shown_width(picture.png)}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    for table in tables:
        rows = "".join(
            f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in table.rows.items()
        )
        blocks.append(f"<div><h2>{html.escape(table.title)}</h2><table>{rows}</table></div>")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f'<p class="summary">{html.escape(summary)}</p>{"".join(figures)}'
        f'<div class="tables">{"".join(blocks)}</div></body></html>\n'
    )
    path = directory / "report.html"
    write_atomically(path, lambda file: file.write(page.encode()))
    return path
