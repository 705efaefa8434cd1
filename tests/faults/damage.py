"""Strategies of hypothesis that damage the bytes of a valid file, or the values of a JSON text."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

# Offsets as fractions, so that they fit every length.
_PLACE = st.floats(0, 1)
_BYTES = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from([b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"-1",
                     b"9" * 9, b"nan", b"inf", b"1e999", b'"', b",", b"\n", b"\r", b"{", b"]"]),
)  # fmt: skip
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "repeat", "cut"]), _PLACE, _PLACE, _BYTES
    ),
    min_size=1,
    max_size=4,
)


def _edited(data: bytes, edits: list[tuple[str, float, float, bytes]]) -> bytes:
    for how, first, second, new in edits:
        at = round(first * len(data))
        to = min(len(data), at + 1 + round(16 * second))
        if how == "set":
            data = data[:at] + new + data[at + len(new) :]
        elif how == "insert":
            data = data[:at] + new + data[at:]
        elif how == "delete":
            data = data[:at] + data[to:]
        elif how == "repeat":
            data = data[:to] + data[at:to] + data[to:]
        else:
            data = data[:at]
    return data


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy of bytes: mostly the valid ones with some edits, seldom any."""
    return st.one_of(*3 * [_EDITS.map(lambda edits: _edited(data, edits))], st.binary(max_size=300))


_VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
        st.sampled_from([-1, 0, 1, 2, 1 << 40, 1 << 70, "../x", "/etc/passwd", "rank00001.bin",
                         "float32", "object", "Python int", "key<fry>", "U8", [], {}]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON value."""
    items: Any = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    inner = [place for key, entry in items for place in _places(entry, (*path, key))]
    return [path, *inner] if path else inner


@st.composite
def changed_json(draw: st.DrawFn, body: Any) -> Any:
    """Replace or remove one to three values of a JSON value."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(body)
        if not places:
            break
        *path, last = draw(st.sampled_from(places))
        where = body
        for key in path:
            where = where[key]
        if draw(st.integers(0, 5)) == 0:
            del where[last]
        else:
            where[last] = draw(_VALUES)
    return body
