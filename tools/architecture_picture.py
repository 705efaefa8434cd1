"""Draw docs/images/architecture.svg: the floors of tests/test_layers.py, as a picture.

    python tools/architecture_picture.py

`tests/test_docs.py` fails if the picture is out of date.
"""

from __future__ import annotations

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
# What each room does, in two or three words. A room without a line here is not shown.
ROOMS = {
    "solution": "Solution, Result",
    "runtime": "MPI start-up, native libraries",
    "guard": "board, contracts, watchdog",
    "communicator": "Communicator",
    "collective_errors": "one error on all ranks",
    "operations": "MPI operations, jit",
    "profiling": "trace, table",
    "autodiff": "grad, jvp, vjp, vmap",
    "grid": "tiles, halos, stencils",
    "loops": "time loops",
    "sharding": "arrays of shard_map",
    "checkpoint": "restart files",
    "fem": "meshes, finite elements",
    "fft": "Fourier transforms",
    "jobs": "parallel map",
    "sparse": "matrices, solvers",
    "torch": "PyTorch",
    "waves": "acoustic, elastic",
    "io": "VTK, zarr",
    "optimize": "minimize",
    "training": "SGD, parameter server",
    "__init__": "import mpigrad as mg",
    "compat": "mpi4jax",
    "launch": "the mpigrad command",
    "mpigrad_apps": "applications",
}
NATIVE = ("native/", "mpi, guard, gpu, sparse, hypre, waves (C++)")
WIDTH, HEIGHT, GAP, MARGIN = 960, 46, 10, 20
COLOURS = ("#e8f0fe", "#fff4e0", "#e9f6ec", "#fdeaf1")


def floors() -> list[list[tuple[str, str]]]:
    """Return the rooms of each floor with their descriptions, from the top down."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    table = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    shown = [[(room, ROOMS[room]) for room in rooms if room in ROOMS] for rooms in table]
    return [rooms for rooms in reversed(shown) if rooms] + [[NATIVE]]


def picture() -> str:
    """Return the picture as SVG."""
    rows = floors()
    height = 2 * MARGIN + len(rows) * (HEIGHT + GAP) - GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" text-anchor="middle">',
        "<title>The rooms of mpigrad: each imports from lower floors only</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<g stroke="#5f6b7a" stroke-width="1.5" fill="none">',
        f'<path d="M{WIDTH - 24} {MARGIN} V{height - MARGIN}"/>',
        f'<path d="M{WIDTH - 29} {height - MARGIN - 9} l5 9 l5 -9"/>',
        "</g>",
        f'<text x="{WIDTH - 8}" y="{height // 2}" font-size="12" fill="#5f6b7a" '
        f'transform="rotate(90 {WIDTH - 8} {height // 2})">imports</text>',
    ]
    inside = WIDTH - 2 * MARGIN - 30
    for number, rooms in enumerate(rows):
        y = MARGIN + number * (HEIGHT + GAP)
        width = (inside - GAP * (len(rooms) - 1)) / len(rooms)
        for place, (room, text) in enumerate(rooms):
            x = MARGIN + place * (width + GAP)
            middle = x + width / 2
            lines += [
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" rx="5" '
                f'fill="{COLOURS[number % len(COLOURS)]}" stroke="#8a96a6"/>',
                f'<text x="{middle:.1f}" y="{y + 20}" font-size="15" font-weight="bold" '
                f'fill="#1f2933">{"mpigrad" if room == "__init__" else room}</text>',
                f'<text x="{middle:.1f}" y="{y + 37}" font-size="12" fill="#3e4c59">{text}</text>',
            ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
