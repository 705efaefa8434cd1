"""Sphinx's settings for `make docs`.

The pages are the Markdown files in this directory. Two kinds of pages are generated when the site
is built: the reference, with a page for each public function and class, and a page for each program
of examples/.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = pathlib.Path(__file__).parent
PROGRAMS = sorted((HERE.parent / "examples").glob("*.py"))

# The packages of the reference, with their titles. If several packages export a thing, the first
# one has its page, and the others link to it.
REFERENCE = {
    "mpigrad": "Operations, transformations and grids",
    "mpigrad.grid": "Grids",
    "mpigrad.fft": "Fourier transforms",
    "mpigrad.fem": "Finite elements",
    "mpigrad.io": "Files of fields",
    "mpigrad.loops": "Time loops",
    "mpigrad.sparse": "Sparse matrices and solvers",
    "mpigrad.optimize": "Optimizers",
    "mpigrad.checkpoint": "Restart files",
    "mpigrad.jobs": "Jobs",
    "mpigrad.training": "Training",
    "mpigrad.torch": "PyTorch",
    "mpigrad.waves": "Waves",
    "mpigrad.waves.acoustic": "Acoustic waves",
    "mpigrad.waves.elastic": "Elastic waves",
    "mpigrad.compat.mpi4jax": "The names of mpi4jax",
    "mpigrad_apps.report": "Reports",
    "mpigrad_apps.poisson": "Poisson",
    "mpigrad_apps.heat": "Heat",
    "mpigrad_apps.fwi": "Full-waveform inversion",
    "mpigrad_apps.population": "Population model",
    "mpigrad_apps.sgd": "Stochastic gradient descent",
}
# Packages that are left out if a module is not installed.
NEEDS = {"mpigrad.torch": "torch"}
# Headings on the page of `mpigrad`, by the room of a name. The longest match counts.
HEADINGS = {
    "operations": "Operations",
    "operations.norms": "Norms",
    "operations.jit": "Transformations",
    "autodiff": "Transformations",
    "autodiff.gradient_checks": "Checks",
    "operations.checks": "Checks",
    "communicator": "Communicators",
    "grid": "Grids",
    "sharding": "Sharded arrays",
    "sparse": "Grids",
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
napoleon_attr_annotations = False  # of shapes such as "*tile", whose star is markup to Sphinx
default_role = "py:obj"  # `name` in a docstring is a link if the name exists, else code
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
suppress_warnings = ["ref.python"]  # a name in a docstring that several classes have


@dataclass(frozen=True)
class Entry:
    """A public name of a package, and the package that has its page."""

    name: str
    thing: Any
    package: str
    home: str

    @property
    def file(self) -> str:
        """The page, relative to reference/. File names differ in more than upper case."""
        names = [name.lower() for name in importlib.import_module(self.home).__all__]
        twice = names.count(self.name.lower()) > 1
        suffix = "-class" if twice and inspect.isclass(self.thing) else ""
        return f"{self.home}/{self.name}{suffix}.md"

    def heading(self) -> str:
        """The heading under which the page of the package lists the name."""
        if self.package != "mpigrad":
            return ""
        room = importlib.import_module("mpigrad")._NAMES[self.name]
        parts = room.split(".")
        rooms = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next(HEADINGS[room] for room in rooms if room in HEADINGS)

    def page(self) -> str:
        """The page of reference."""
        kind = "class" if inspect.isclass(self.thing) else "function"
        directive = f".. auto{kind}:: {self.home}.{self.name}"
        return f"# {self.name}\n\n```{{eval-rst}}\n{directive}\n```\n"


def entries() -> Iterator[Entry]:
    """All public functions and classes of the reference."""
    homes: dict[int, str] = {}
    for package in REFERENCE:
        if not importlib.util.find_spec(NEEDS.get(package, package)):
            continue
        module = importlib.import_module(package)
        for name in module.__all__:
            if f"{package}.{name}" in REFERENCE:
                continue  # a package
            thing = getattr(module, name)
            if callable(thing):  # not a constant
                home = homes.setdefault(id(thing), package)
                yield Entry(name, thing, package, home)


def summary(thing: Any) -> str:
    """The first line of a docstring, as Markdown."""
    first = (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")
    parts = first.split("`")
    parts[::2] = [re.sub(r"[*_<\[\]|]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


def reference_pages() -> dict[str, str]:
    """The pages of reference: one for each name, one for each package, and the index."""
    pages: dict[str, str] = {}
    packages: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries():
        packages.setdefault(entry.package, {}).setdefault(entry.heading(), []).append(entry)
        if entry.package == entry.home:
            pages[entry.file] = entry.page()
    for package, headings in packages.items():
        text = f"# {REFERENCE[package]}\n\n```{{eval-rst}}\n"
        text += f".. automodule:: {package}\n   :no-members:\n```\n"
        for heading, some in sorted(headings.items()):
            text += f"\n## {heading}\n\n" if heading else "\n"
            for entry in sorted(some, key=lambda entry: entry.name.lower()):
                text += f"- [`{entry.name}`](../{entry.file}): {summary(entry.thing)}\n"
        own = [e for some in headings.values() for e in some if e.home == package]
        tree = "\n".join(sorted(e.file.partition("/")[2].removesuffix(".md") for e in own))
        if own:
            text += f"\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
        pages[f"{package}/index.md"] = text
    tree = "\n".join(f"{REFERENCE[package]} <{package}/index>" for package in packages)
    lines = [f"- [`{package}`]({package}/index.md): {REFERENCE[package]}" for package in packages]
    listing = "\n".join(lines)
    pages["index.md"] = f"# Reference\n\n{listing}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
    return pages


def program_page(program: pathlib.Path) -> str:
    """Return the page of an example: its docstring, its picture and its program."""
    source = program.read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    title, _, story = text.partition("\n\n")
    picture = HERE / "images" / f"{program.stem}.png"
    shown = f"![{program.stem}](../images/{picture.name})\n\n" if picture.exists() else ""
    code = source[source.index('"""\n', 3) + 4 :].strip()
    listing = f"`{program.name}`:\n\n```python\n{code}\n```\n"
    return f"# {title.rstrip('.')}\n\n{story}\n\n{shown}{listing}"


def write_pages(app: Any) -> None:
    """Write the generated pages that have changed, and delete those of names that are gone."""
    pages = {f"reference/{name}": text for name, text in reference_pages().items()}
    pages |= {f"examples/{p.stem}.md": program_page(p) for p in PROGRAMS}
    for folder in ("reference", "examples"):
        for path in (HERE / folder).rglob("*.md"):
            if str(path.relative_to(HERE)) not in pages:
                path.unlink()
    for name, text in pages.items():
        path = HERE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def link_programs(app: Any, name: str, source: list[str]) -> None:
    """Links to files outside of docs/ lead to their pages."""
    source[0] = source[0].replace("](../CONTRIBUTING.md)", "](contributing.md)")
    source[0] = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)", source[0])
    if name == "examples":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nexamples/*\n```\n"


def plain_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Escape what is not meant as markup in a docstring, and mark code after a colon."""

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
