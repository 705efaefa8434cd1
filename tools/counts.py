"""Print what a reader has to look through: files, lines by kind, and imports below doors.

    python tools/counts.py [directory]

The directory is a checkout, by default this one. Two checkouts are compared by two calls.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys

RULES = re.compile(r"\bPrimitive\(|primitive_(jvps|transposes|batchers)|\.register_lowering\(")
ABOVE = {  # the rooms that import doors only (tests/test_layers.py)
    *(
        "grid",
        "loops",
        "sharding",
        "checkpoint",
        "jobs",
        "sparse",
        "torch",
        "waves",
        "fft",
        "io",
        "ode",
    ),
    *("optimize", "training", "fem", "compat"),
}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def lines(nodes: list[ast.stmt] | list[ast.ImportFrom | ast.Import]) -> int:
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def main() -> None:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve() / "src"
    files = sorted((root / "mpigrad").rglob("*.py"))
    names = {".".join(f.relative_to(root).with_suffix("").parts) for f in files}
    total = dict.fromkeys(
        ("files", "lines", "imports", "docstrings", "lines with Any", "imports below a door"), 0
    )
    with_rules = []
    for file in files:
        text = file.read_text()
        tree = ast.parse(text)
        own = room(".".join(file.relative_to(root).with_suffix("").parts))
        total["files"] += 1
        total["lines"] += len(text.splitlines())
        nodes = list(ast.walk(tree))
        total["imports"] += lines([n for n in nodes if isinstance(n, ast.ImportFrom | ast.Import)])
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False)
                total["docstrings"] += 0 if doc is None else doc.count("\n") + 1
            if isinstance(node, ast.ImportFrom) and own in ABOVE and node.module:
                other = node.module
                below = [a for a in node.names if other.count(".") > 1]
                door = root / "mpigrad" / room(other) / "__init__.py"
                exported = door.read_text() if door.exists() else ""
                below += [
                    a for a in node.names
                    if f"{other}.{a.name}" in names and f'"{a.name}"' not in exported
                ]  # fmt: skip
                if other.startswith("mpigrad.") and room(other) != own:
                    total["imports below a door"] += len(below)
        total["lines with Any"] += len(re.findall(r"^.*\bAny\b.*$", text, re.M))
        if RULES.search(text) and own not in ("operations", "extend"):
            with_rules.append(file.relative_to(root / "mpigrad").as_posix())
    for name, count in total.items():
        print(f"{name:28}{count:8}")
    print(f"{'files with rules of JAX':28}{len(with_rules):8}  {' '.join(with_rules)}")


if __name__ == "__main__":
    main()
