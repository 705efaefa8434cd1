"""Texts of a limited length in bytes, for native memory."""

from __future__ import annotations

__all__ = ["utf8", "utf8_end"]


def utf8(text: str, room: int) -> bytes:
    """Return the beginning of a text in at most `room` bytes, without half a character.

    Examples
    --------
    >>> from mpigrad.runtime.utf8 import utf8
    >>> utf8("tränen", 3)
    b'tr'
    """
    data = text.encode(errors="replace")
    return data if len(data) <= room else data[:room].decode(errors="ignore").encode()


def utf8_end(text: str, room: int) -> bytes:
    """Return the end of a text in at most `room` bytes, without half a character.

    Examples
    --------
    >>> from mpigrad.runtime.utf8 import utf8_end
    >>> utf8_end("tränen", 5)
    b'nen'
    """
    data = text.encode(errors="replace")
    return data if len(data) <= room else data[len(data) - room :].decode(errors="ignore").encode()
