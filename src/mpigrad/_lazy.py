"""Public names of a package, imported at their first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["attach"]


def attach(
    package: str, names: Mapping[str, str], before: Callable[[], None] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports its names lazily.

    Parameters
    ----------
    package
        The package: `__name__`.
    names
        For each public name the module that has it, relative to the package (`grid.grid`). A name
        whose module is "" is a subpackage.
    before
        Called before the first import.
    """

    def get(name: str) -> Any:
        module = names.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if before is not None:
            before()
        if module:
            value = getattr(importlib.import_module(f"{package}.{module}"), name)
        else:
            value = importlib.import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(names), sorted(names)
