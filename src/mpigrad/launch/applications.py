"""Applications that `mpigrad run` finds: entry points of the group `mpigrad.apps`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from typing import Any

__all__ = ["GROUP", "Application", "application", "application_names"]

GROUP = "mpigrad.apps"


@dataclasses.dataclass(frozen=True)
class Application:
    """A program that `mpigrad run NAME` starts on several ranks.

    Attributes
    ----------
    summary
        A one-line description.
    settings
        `module:Class` of a dataclass. Its fields become the options, their docstrings the help. If
        the class has a method `check` or `check_output`, it is called before anything is launched.
        Its ValueErrors and OSErrors are printed without a traceback. `check_output` is for the
        files of an earlier run. The module must import neither JAX nor MPI.
        The class must be defined at the top level of the module, because ranks get a pickle.
    run
        `module:function`, which is called on every rank with the settings.
    packages
        Modules that must be installed.
    requirement
        The argument of `pip install` if one of them is missing.
    """

    summary: str
    settings: str
    run: str
    packages: tuple[str, ...] = ()
    requirement: str = ""

    def settings_class(self) -> type[Any]:
        """Import the class of the settings."""
        return _load(self.settings)

    def run_function(self) -> Any:
        """Import the function that runs on every rank."""
        return _load(self.run)


def application_names() -> list[str]:
    """Return the names of the applications that are installed, in alphabetical order."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def application(name: str) -> Application:
    """Load an application.

    Raises
    ------
    KeyError
        If no installed package has an application of this name.
    TypeError
        If the entry point cannot be imported, or is not an `Application`.
    """
    for entry in importlib.metadata.entry_points(group=GROUP, name=name):
        expected = (
            f"mpigrad run {name}: expected an mpigrad.launch.applications.Application at the entry "
            f"point {entry.value}"
        )
        remedy = "Correct the entry point in its package, and install the package again."
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as error:
            raise TypeError(f"{expected}, got {type(error).__name__}: {error}. {remedy}") from error
        if not isinstance(loaded, Application):
            raise TypeError(f"{expected}, got {type(loaded).__name__}. {remedy}")
        return loaded
    raise KeyError(name)


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
