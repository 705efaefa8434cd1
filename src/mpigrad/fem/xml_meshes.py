"""Check VTU and XDMF files for attributes that meshio does not apply."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

import numpy as np

__all__ = ["check_content", "check_file"]

_GHOSTS = "vtkGhostType"
# Attributes of XDMF elements, and the values with which meshio reads what they say.
_XDMF = {
    "BaseOffset": ("0",),
    "Order": (),
    "Seek": ("0",),
    "Compression": ("Raw",),
    "Endian": ("Native", sys.byteorder.capitalize()),
    "ItemType": ("Uniform",),
}


def check_file(function: str, path: pathlib.Path) -> None:
    """Raise a ValueError of `function` if a file has an element that meshio leaves out."""
    suffix = path.suffix.lower()
    if suffix == ".vtu":
        pieces = re.findall(rb'<Piece[^>]*NumberOfCells\s*=\s*["\']\s*(\d+)', path.read_bytes())
        filled = [int(cells) for cells in pieces if int(cells)]
        if len(filled) > 1:
            raise ValueError(
                f"{function}: expected one piece with cells in {path}, got {len(filled)} pieces. "
                "Merge them into one."
            )
    if suffix in (".xdmf", ".xmf"):
        text = path.read_text(encoding="utf-8", errors="replace")
        for name, known in _XDMF.items():
            for value in re.findall(rf'\b{name}\s*=\s*["\']([^"\']*)["\']', text):
                if value not in known:
                    raise ValueError(
                        f'{function}: {path} has {name}="{value}", which the reader does not '
                        "apply. Write the file without it."
                    )


def check_content(function: str, path: pathlib.Path, content: Any) -> None:
    """Raise a ValueError of `function` if cells of a mesh that meshio has read are ghosts."""
    ghosts = sum(int(np.count_nonzero(part)) for part in content.cell_data.get(_GHOSTS, ()))
    if ghosts:
        raise ValueError(
            f"{function}: expected no ghost cells in {path}, got {ghosts} of them by the array "
            f"{_GHOSTS}. Write the mesh without them."
        )
