"""VTK's XML files: arrays, a piece, and the index of pieces.

The format is described in "VTK XML Formats" of VTK's documentation.

The values are appended to the XML as little-endian numbers, each array behind its size in bytes.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataArray", "index_text", "write_piece"]

# Raw bytes are smaller. Meshio, which reads unstructured grids only, misreads several raw arrays.
Encoding = Literal["raw", "base64"]


@dataclass(frozen=True)
class DataArray:
    """An array of a piece, shape (n,) or (n, components)."""

    name: str
    values: NDArray[Any]

    @classmethod
    def of(cls, name: str, values: NDArray[Any]) -> DataArray:
        """Return the array of a field. Vectors with two components get a third one, zero."""
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim == 2 and values.shape[1] == 2:
            values = np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
        return cls(name, values.astype(np.uint8) if values.dtype == bool else values)

    @property
    def attributes(self) -> str:
        """The attributes of the element of the array."""
        kind = self.values.dtype.name.capitalize().replace("Uint", "UInt")
        components = self.values.shape[1] if self.values.ndim == 2 else 1
        return f'type="{kind}" Name={quoteattr(self.name)} NumberOfComponents="{components}"'

    def length(self, encoding: Encoding) -> int:
        """Return the number of bytes that `write` writes."""
        size = 8 + self.values.nbytes
        return size if encoding == "raw" else 4 * -(-size // 3)

    def write(self, file: BinaryIO, encoding: Encoding) -> None:
        """Write the size in bytes and the values."""
        size = self.values.nbytes.to_bytes(8, "little")
        little = np.ascontiguousarray(self.values, self.values.dtype.newbyteorder("<"))
        if encoding == "raw":
            file.write(size)
            file.write(little.reshape(-1).view(np.uint8).data)
        else:
            file.write(base64.b64encode(size + little.tobytes()))


Sections = Mapping[str, Sequence[DataArray]]


def write_piece(
    file: BinaryIO, kind: str, attributes: str, piece: str, sections: Sections, encoding: Encoding
) -> None:
    """Write the file of a piece.

    Parameters
    ----------
    file
        The file.
    kind
        The kind of grid, "ImageData" or "UnstructuredGrid".
    attributes, piece
        The attributes of the elements of the grid and of the piece.
    sections
        The arrays of each section, for example "PointData".
    encoding
        How the values are written.
    """
    arrays = list(itertools.chain.from_iterable(sections.values()))
    offsets = itertools.accumulate((a.length(encoding) for a in arrays), initial=0)
    lines = [_first_line(kind), _element(kind, attributes), _element("Piece", piece)]
    for section, members in sections.items():
        lines.append(f"<{section}>")
        lines += [
            f'<DataArray {array.attributes} format="appended" offset="{next(offsets)}"/>'
            for array in members
        ]
        lines.append(f"</{section}>")
    lines += ["</Piece>", f"</{kind}>", f'<AppendedData encoding="{encoding}">', "_"]
    file.write("\n".join(lines).encode())
    for array in arrays:
        array.write(file, encoding)
    file.write(b"\n</AppendedData>\n</VTKFile>\n")


def index_text(
    kind: str, attributes: str, pieces: Sequence[str], sections: Sections, directory: str
) -> str:
    """Return the text of the index of the pieces `directory`/0, `directory`/1, ...

    `pieces` are the attributes of each piece, in which {} stands for the name of its file. The
    cells of unstructured grids are in the pieces only.
    """
    lines = [_first_line(f"P{kind}"), _element(f"P{kind}", attributes)]
    for section, members in sections.items():
        if section != "Cells":
            lines.append(f"<P{section}>")
            lines += [f"<PDataArray {array.attributes}/>" for array in members]
            lines.append(f"</P{section}>")
    suffix = {"ImageData": ".vti", "UnstructuredGrid": ".vtu"}[kind]
    for rank, piece in enumerate(pieces):
        source = f"Source={quoteattr(f'{directory}/{rank}{suffix}')}"
        lines.append(f"<Piece {piece.format(source)}/>")
    return "\n".join([*lines, f"</P{kind}>", "</VTKFile>", ""])


def _element(name: str, attributes: str) -> str:
    return f"<{name} {attributes}>" if attributes else f"<{name}>"


def _first_line(kind: str) -> str:
    return (
        f'<?xml version="1.0"?>\n<VTKFile type="{kind}" version="1.0" '
        'byte_order="LittleEndian" header_type="UInt64">'
    )
