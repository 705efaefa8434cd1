"""Let `import mpi4jax` give mpigrad's module, and run programs that do so."""

from __future__ import annotations

import importlib
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

__all__ = [
    "explain",
    "install",
    "refuse",
    "run",
]

# ---- Errors for names that mpi4jax has and this module lacks ----


_LACKING = {
    "_src": (
        "the internals of mpi4jax do not exist in mpigrad. Use the public functions of mpi4jax."
    ),
    "_version": "it has one attribute only. Use mpi4jax.__version__.",
    "get_versions": "it has one result only. Use mpi4jax.__version__.",
}


def explain(name: str) -> str | None:
    """Return why a name of mpi4jax is lacking here and what to do, or None for other names."""
    reason = _LACKING.get(name.partition(".")[0])
    return None if reason is None else f"mpi4jax.{name}: {reason}"


def refuse(name: str) -> None:
    """Raise an error for a name that mpi4jax has and this module lacks."""
    reason = explain(name)
    if reason is not None:
        raise NotImplementedError(reason)


# ---- Let `import mpi4jax` give mpigrad's module, and run programs that do so ----


_USAGE = "python -m mpigrad.compat.mpi4jax PROGRAM.py [ARGUMENT ...], or -m MODULE"


class _Submodules:
    """A finder for the other modules of mpi4jax, none of which exist in mpigrad."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        first, _, rest = name.partition(".")
        if first == "mpi4jax" and rest:
            text = explain(rest) or f"there is no module mpi4jax.{rest} in mpigrad."
            raise ModuleNotFoundError(text, name=name)


def install() -> None:
    """Let `import mpi4jax` give mpigrad's module from here on.

    Examples
    --------
    >>> from mpigrad.compat.mpi4jax.stand_in import install
    >>> install()
    >>> import mpi4jax
    >>> mpi4jax.__name__
    'mpigrad.compat.mpi4jax'
    """
    for name in ("", ".experimental", ".experimental.notoken"):
        sys.modules[f"mpi4jax{name}"] = importlib.import_module(f"mpigrad.compat.mpi4jax{name}")
    if _Submodules not in sys.meta_path:
        sys.meta_path.insert(0, _Submodules)


def run() -> None:
    """Run the program that sys.argv names after this module, as `python` does."""
    match sys.argv[1:]:
        case ["-m", module, *arguments]:
            install()
            sys.argv = [module, *arguments]
            sys.path[0] = os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [file, *arguments] if not file.startswith("-"):
            install()
            sys.argv = [file, *arguments]
            sys.path[0] = str(pathlib.Path(file).resolve().parent)
            runpy.run_path(file, run_name="__main__")
        case _:
            sys.exit(f"mpi4jax: expected a program. Write: {_USAGE}")
