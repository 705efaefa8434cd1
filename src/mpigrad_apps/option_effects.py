"""Check that the options of an application have an effect. It imports neither JAX nor MPI."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["check_effects"]


def check_effects(settings: Any, *needs: tuple[bool, str, str]) -> None:
    """Raise a ValueError for the first option that is given and has no effect.

    Parameters
    ----------
    settings
        A dataclass. An option is given if its value is not the default.
    needs
        What some options need: whether the settings have it, its text, and the names of these
        options, separated by spaces.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for has, text, names in needs:
        for name in () if has else names.split():
            value, option = getattr(settings, name), name.replace("_", "-")
            if value != defaults[name]:
                raise ValueError(
                    f"--{option}: expected {text} with it, got {value}, which has no effect. "
                    f"Leave --{option} out."
                )
