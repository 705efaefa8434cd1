"""Import the packages of the extra `fem`, with an error that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_package"]

# The names of the distributions, if they differ from the names of the modules.
_DISTRIBUTIONS = {"basix": "fenics-basix"}


def import_package(name: str, function: str) -> Any:
    """Return an imported package.

    Parameters
    ----------
    name
        The name of the module.
    function
        The public function that needs it, for the error.

    Raises
    ------
    ImportError
        If the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        distribution = _DISTRIBUTIONS.get(name, name)
        raise ImportError(
            f"{function}: expected the package {distribution}, got none ({error}). Install it with "
            "pip install mpigrad[fem]."
        ) from error
