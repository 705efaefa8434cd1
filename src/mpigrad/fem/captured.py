"""The variables that a function uses, besides its arguments."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["are_same", "captured_values"]


def captured_values(function: Callable[..., Any]) -> list[Any]:
    """Return the present values of the variables of enclosing functions and of its module.

    Variables that are used only by functions which it calls are not among them, nor are attributes
    of objects.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    names, codes = set(), [code]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    around = getattr(function, "__globals__", {})
    values = [around[name] for name in sorted(names) if name in around]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            values.append(None)
    return values


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return True if both have the same objects, or equal numbers."""
    return len(a) == len(b) and all(map(_is_same, a, b))


def _is_same(a: Any, b: Any) -> bool:
    simple = (int, float, complex, str)
    return a is b or (type(a) is type(b) and isinstance(a, simple) and a == b)
