"""Write the tables of private names and hooks into docs/jax_versions.md."""

from __future__ import annotations

import pathlib
import re
import sys

from mpigrad.operations._jax_private import ATTRIBUTES, FEATURES, PRIVATE
from mpigrad.operations._jax_repairs import HOOKS

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "jax_versions.md"


def link(issue: str) -> str:
    """A number of JAX's tracker, as a link."""
    number = issue.partition("#")[2]
    return f"[{number}](https://github.com/jax-ml/jax/issues/{number})" if number else ""


def refused(feature: str) -> str:
    """Return the mpigrad feature that raises an error if this JAX feature is missing."""
    return FEATURES.get(feature, "nothing: JAX itself ends with an error")


def tables() -> tuple[str, ...]:
    """The rows of the tables."""
    names = [f"| `{e.name}` | {e.use} | {e.versions} | {link(e.upstream)} |" for e in PRIVATE]
    hooks = [f"| {h.name} | {refused(h.feature)} | {link(h.upstream)} |" for h in HOOKS]
    attributes = [f"| `{name}` | {use} |" for name, use in ATTRIBUTES.items()]
    return "\n".join(names), "\n".join(attributes), "\n".join(hooks)


def written(page: str) -> str:
    """The page with the tables of today."""
    for heading, rows in zip(("name below", "of objects", "hook"), tables(), strict=True):
        table = re.compile(rf"(\| {heading}[^\n]*\n\|[-|]+\n)(?:.*?)(?=\n\n)", re.DOTALL)
        page = table.sub(lambda found, rows=rows: found[1] + rows, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.exit(0)
