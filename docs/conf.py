"""Sphinx's settings for `make docs`.

The pages are the Markdown files beside this one. Two kinds are made here, when the site is made: a
page of reference for each module of the table below, from its docstrings, and a page for each
program of examples/.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import re
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = pathlib.Path(__file__).parent
PROGRAMS = sorted((HERE.parent / "examples").glob("*.py"))

# What the reference shows, and under which title.
REFERENCE = {
    "mpigrad": "Operations and transformations",
    "mpigrad.grid": "Grids, halo exchange and stencils",
    "mpigrad.loops": "Time stepping",
    "mpigrad.sparse": "Sparse matrices and solvers",
    "mpigrad.optimize": "Optimizers",
    "mpigrad.checkpoint": "Restart files",
    "mpigrad.jobs": "Jobs",
    "mpigrad.training": "Training",
    "mpigrad.torch": "PyTorch",
    "mpigrad.waves": "Waves",
    "mpigrad.waves.acoustic": "Acoustic waves",
    "mpigrad.waves.elastic": "Elastic waves",
    "mpigrad_apps.report": "Reports",
    "mpigrad_apps.poisson": "Poisson",
    "mpigrad_apps.heat": "Heat",
    "mpigrad_apps.fwi": "Full-waveform inversion",
    "mpigrad_apps.population": "A population",
}
# Without these there is no page.
NEEDS = {"mpigrad.torch": "torch"}
# What is on another module's page already.
ELSEWHERE = {
    "mpigrad": "Grid, halo_exchange, apply_stencil, GhostExchange",
    "mpigrad.torch": "Communicator",
    "mpigrad.waves": "Acoustic, Elastic, lame",
    "mpigrad.waves.acoustic": "Survey",
    "mpigrad.waves.elastic": "Survey",
}

project = "mpigrad"
author = "the mpigrad authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = "mpigrad"
html_copy_source = False
myst_heading_anchors = 3  # links to headings, as GitHub names them
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "py:obj"  # `name` in a docstring is a link where there is such a name, else code
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
suppress_warnings = ["ref.python"]  # a name in a docstring that several classes have


def reference_page(module: str, title: str) -> str:
    """A page of reference."""
    left_out = f"   :exclude-members: {ELSEWHERE[module]}\n" if module in ELSEWHERE else ""
    return f"# {title}\n\n```{{eval-rst}}\n.. automodule:: {module}\n{left_out}```\n"


def program_page(program: pathlib.Path) -> str:
    """An example: what it says of itself, its picture, the program."""
    source = program.read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    title, _, story = text.partition("\n\n")
    picture = HERE / "images" / f"{program.stem}.png"
    shown = f"![{program.stem}](../images/{picture.name})\n\n" if picture.exists() else ""
    code = source[source.index('"""\n', 3) + 4 :].strip()
    listing = f"`{program.name}`:\n\n```python\n{code}\n```\n"
    return f"# {title.rstrip('.')}\n\n{story}\n\n{shown}{listing}"


def write_pages(app: Any) -> None:
    """Write the pages that are made; only those that have changed."""
    pages = {
        f"reference/{number:02}-{module.rpartition('.')[2]}.md": reference_page(module, title)
        for number, (module, title) in enumerate(REFERENCE.items())
        if importlib.util.find_spec(NEEDS.get(module, module))
    }
    pages |= {f"examples/{p.stem}.md": program_page(p) for p in PROGRAMS}
    for name, text in pages.items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def link_programs(app: Any, name: str, source: list[str]) -> None:
    """What a page says of a program leads to the program's page."""
    source[0] = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)", source[0])
    if name == "examples":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nexamples/*\n```\n"


def plain_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: |x| and (n, *rest) are no markup; code stands after a colon."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    for number, line in enumerate(lines):
        parts = line.split("`")  # every second one is code
        parts[::2] = [re.sub(r"\||\*(?=[\w.]+[),\]])", r"\\\g<0>", part) for part in parts[::2]]
        lines[number] = "`".join(parts)
        blank, code = [*lines[number + 1 : number + 3], "", ""][:2]
        if line.endswith(":") and not blank and indent(code) > indent(line):
            lines[number] += ":"


def setup(app: Any) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_programs)
    app.connect("autodoc-process-docstring", plain_text, priority=100)  # before napoleon
