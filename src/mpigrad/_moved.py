"""Old public paths, which work for one release with a warning that names the new path."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

__all__ = ["MOVED", "install"]

# Modules that users could import before version 0.2, and the modules that have their names now.
# The modules of a package have moved with it. docs/moved.md lists all modules.
MOVED = {
    "mpigrad.bench": "",
    "mpigrad.custom_rules": "mpigrad.autodiff.custom_rules",
    "mpigrad.decomposition": "mpigrad.grid.decomposition",
    "mpigrad.halo": "mpigrad.grid",
    "mpigrad.interruption": "mpigrad.checkpoint",
    "mpigrad.jacobians": "mpigrad.autodiff.jacobian",
    "mpigrad.norms": "mpigrad.operations.norms",
    "mpigrad.overlap": "mpigrad.grid",
    "mpigrad.problems": "mpigrad_apps",
    "mpigrad.problems.acoustic": "mpigrad.waves.acoustic",
    "mpigrad.problems.elastic": "mpigrad.waves.elastic",
    "mpigrad.problems.waves": "mpigrad.waves",
    "mpigrad.profile": "mpigrad.profiling.table",
    "mpigrad.progress": "mpigrad.profiling.progress_bar",
    "mpigrad.report": "mpigrad_apps.report",
    "mpigrad.selection": "mpigrad.operations.indexing",
    "mpigrad.stepping": "mpigrad.loops",
    "mpigrad.together": "mpigrad.collective_errors",
    "mpigrad.trace": "mpigrad.profiling.trace",
    "mpigrad.transformations": "mpigrad",
    "mpigrad.verify": "mpigrad.autodiff.gradient_checks",
}


def _new_path(name: str) -> str | None:
    """Return the new path of a module, "" if it is gone, or None if it has not moved."""
    if name in MOVED:
        return MOVED[name]
    parent, _, child = name.rpartition(".")
    above = _new_path(parent) if parent else None
    return f"{above}.{child}" if above else None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = _new_path(name)
        if new is None:
            return None
        if not new:
            raise ModuleNotFoundError(
                f"{name} has been removed from the library. Read docs/moved.md for a replacement."
            )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        new = _new_path(module.__name__)
        assert new
        warnings.warn(
            f"{module.__name__} has moved to {new}. The old path will be removed in the next "
            "release.",
            FutureWarning,
            stacklevel=_user_level(),
        )
        target = importlib.import_module(new)
        module.__getattr__ = lambda name: getattr(target, name)  # type: ignore[method-assign]
        module.__all__ = getattr(target, "__all__", [])  # type: ignore[attr-defined]


def _user_level() -> int:
    """Return the level of the frame that imports, for `warnings.warn`."""
    level, frame = 2, sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame, level = frame.f_back, level + 1
    return level


def install() -> None:
    """Let old paths be imported, after all other finders of modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
