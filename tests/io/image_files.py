"""Read VTK image data by its description, with no code of mpigrad."""

from __future__ import annotations

import pathlib
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_image(path: pathlib.Path, ndim: int) -> dict[str, NDArray[Any]]:
    """Return the fields of a .pvti file. Pieces with a common point have the same value there."""
    (image,) = ET.parse(path).getroot()
    assert image.get("GhostLevel") == "0"
    (data,) = (element for element in image if element.tag in ("PCellData", "PPointData"))
    last = int(data.tag == "PPointData")
    shape = [stop - start + last for start, stop in _ends(image.attrib["WholeExtent"], ndim)]
    fields: dict[str, NDArray[Any]] = {}
    for array in data:
        components = int(array.get("NumberOfComponents", 1))
        kind = array.attrib["type"].lower()
        fields[array.attrib["Name"]] = np.ma.masked_all((*shape, components), kind)
    for piece in image.findall("Piece"):
        place = tuple(
            slice(start, stop + last) for start, stop in _ends(piece.attrib["Extent"], ndim)
        )
        values = _read_piece(path.parent / piece.attrib["Source"], image, piece, ndim)
        assert values.keys() == fields.keys()
        for name, value in values.items():
            there = fields[name][place]
            assert there.shape == value.shape
            assert last or np.ma.count(there) == 0  # no ghost cells
            assert np.all(np.ma.filled(there == value, True))
            fields[name][place] = value
    assert all(np.ma.count_masked(field) == 0 for field in fields.values())
    return {name: np.squeeze(np.ma.getdata(field)) for name, field in fields.items()}


def _ends(extent: str, ndim: int) -> list[tuple[int, int]]:
    numbers = [int(number) for number in extent.split()]
    assert numbers[2 * ndim :] == [0] * (6 - 2 * ndim)
    return list(zip(numbers[::2], numbers[1::2], strict=True))[:ndim]


def _read_piece(
    path: pathlib.Path, whole: ET.Element, listed: ET.Element, ndim: int
) -> dict[str, NDArray[Any]]:
    content = path.read_bytes()
    header, _, rest = content.partition(b'<AppendedData encoding="raw">\n_')
    root = ET.fromstring(header + b"</VTKFile>")
    assert (root.get("byte_order"), root.get("header_type")) == ("LittleEndian", "UInt64")
    image = root[0]
    for name in ("Origin", "Spacing"):  # the extent says where the piece is
        assert image.get(name) == whole.get(name)
    piece = image[0]
    assert image.get("WholeExtent") == piece.get("Extent") == listed.get("Extent")
    last = int(piece[0].tag == "PointData")
    shape = [stop - start + last for start, stop in _ends(piece.attrib["Extent"], ndim)]
    found = {}
    for array in piece[0]:
        offset, components = int(array.attrib["offset"]), int(array.get("NumberOfComponents", 1))
        size = int.from_bytes(rest[offset : offset + 8], "little")
        raw = rest[offset + 8 : offset + 8 + size]
        kind = np.dtype(array.attrib["type"].lower()).newbyteorder("<")
        values = np.frombuffer(raw, kind).reshape(*reversed(shape), components)
        found[array.attrib["Name"]] = values.transpose(*reversed(range(ndim)), ndim)
    return found
