"""The tests of what the working tree has changed: `make quick`, a minute and a half.

    python tests/quick.py [--base COMMIT] [--seconds 60] [--list]

A test file belongs to a change if it is changed itself, or if it names a changed module, by an
import or by a public name (`mg.halo_exchange`). Then come the tests that name a module of the same
room that imports the changed one. The tests stop after the given seconds and say how many were left
out.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import pathlib
import subprocess
import sys
import time

import tiers

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES, TESTS = ROOT / "src", ROOT / "tests"


def changed(base: str) -> list[pathlib.Path]:
    """Return the files that differ from a commit, and the new ones that git does not ignore."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names: list[str] = []
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names += done.stdout.split()
    return [ROOT / name for name in dict.fromkeys(names)]


def module_of(file: pathlib.Path) -> str:
    """Return the name of the module in a file of src/, or of a helper in tests/."""
    parts = (
        file.relative_to(SOURCES if file.is_relative_to(SOURCES) else TESTS).with_suffix("").parts
    )
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def public_names(package: str) -> dict[str, str]:
    """Return the modules of the names of a package with lazy imports."""
    file = SOURCES.joinpath(*package.split(".")) / "__init__.py"
    if not file.exists():
        return {}
    imports = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
    return {a.asname or a.name: f"{n.module}" for n in imports for a in n.names if n.module}


@functools.cache
def named_modules(file: pathlib.Path) -> frozenset[str]:
    """Return the modules of mpigrad that a test file names, also by the helpers that it imports."""
    tree = ast.parse(file.read_text())
    aliases: dict[str, str] = {}
    found: set[str] = set()
    helpers: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name] = alias.name
                helpers.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            helpers.add(node.module)
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(public_names(node.module).get(alias.name, node.module))
                if full in modules():
                    aliases[alias.asname or alias.name] = full

    def package_of(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            full = f"{package_of(node.value)}.{node.attr}"
            return full if full in modules() else ""
        return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = public_names(package_of(node.value))
            if node.attr in names:
                found.add(names[node.attr])
    found |= set(aliases.values())
    for name in helpers & helper_files().keys():
        if helper_files()[name] != file:
            found |= {*named_modules(helper_files()[name]), name}
    return frozenset(found)


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(module_of(file) for file in SOURCES.rglob("*.py"))


@functools.cache
def importers() -> dict[str, set[str]]:
    """Return the modules that import each module of src/."""
    found: dict[str, set[str]] = {name: set() for name in modules()}
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names} & modules()
                for name in names or {node.module} & modules():
                    found[name].add(module_of(file))
    return found


def distances(wanted: set[str]) -> dict[str, int]:
    """Return the modules that need the given ones, in the same rooms, and over how many imports."""
    rooms = {name.split(".")[:2][-1] for name in wanted}
    found = dict.fromkeys(wanted, 0)
    queue = list(wanted)
    for name in queue:
        for other in importers().get(name, ()):
            if other not in found and other.split(".")[:2][-1] in rooms:
                found[other] = found[name] + 1
                queue.append(other)
    return found


@functools.cache
def helper_files() -> dict[str, pathlib.Path]:
    """Return the modules in tests/ that are not tests, by their names."""
    files = (f for f in TESTS.rglob("*.py") if not f.name.startswith(("test_", "conftest")))
    return {file.stem: file for file in files if "programs" not in file.parts}


def tests_of(files: list[pathlib.Path]) -> list[str]:
    """Return the arguments for pytest that run the tests of changed files, the nearest first."""
    order: dict[str, tuple[int, bool]] = {}
    every = sorted(TESTS.rglob("test_*.py"))
    rooms = set()
    wanted = set()
    for file in files:
        parts = file.relative_to(ROOT).parts
        if file in every:
            order[str(file.relative_to(ROOT))] = (-1, False)
        elif parts[:2] == ("tests", "programs"):  # tests name them
            named = [test for test in every if file.stem in test.read_text()]
            order |= {str(test.relative_to(ROOT)): (0, False) for test in named}
        elif file.suffix == ".py" and parts[0] in {"src", "tests"}:
            wanted.add(module_of(file) if parts[0] == "src" else file.stem)
            rooms.add(parts[2] if parts[0] == "src" else parts[1])
        elif parts[0] == "native":
            rooms.add({"waves": "waves", "guard": "guard"}.get(parts[1], "operations"))
            wanted |= {name for name in modules() if "native" in name}
        elif file.suffix == ".md":
            order["tests/test_docs.py"] = (-1, False)
        if file.name == "conftest.py" or parts[0] in {"cmake", "CMakeLists.txt", "Makefile"}:
            print(f"quick: {file.relative_to(ROOT)} concerns all tests: run make test")
    far = distances(wanted)
    for test in every:
        if reached := named_modules(test) & far.keys():
            elsewhere = test.relative_to(TESTS).parts[0] not in rooms
            key = (min(far[name] for name in reached), elsewhere)
            order.setdefault(str(test.relative_to(ROOT)), key)
    return sorted(order, key=lambda name: order[name])


def main() -> int:
    """Collect all tests, and run those of the changes; 0 when nothing failed."""
    parser = argparse.ArgumentParser(description="Run the tests of what has changed.")
    parser.add_argument("--base", default="HEAD", help="compare with this commit")
    parser.add_argument("--seconds", type=float, default=50.0, help="start no test after them")
    parser.add_argument("--list", action="store_true", help="print the files of the tests only")
    options = parser.parse_args()
    chosen = tests_of(changed(options.base))
    if options.list:
        print("\n".join(chosen))
        return 0
    if not chosen:
        print("quick: nothing has changed that has a test (BASE=HEAD~1 compares with a commit)")
        return 0
    print(f"quick: {len(chosen)} files of tests: {', '.join(chosen[:6])}{' …' * (len(chosen) > 6)}")
    sizes = [n for n in (2, 1, 3, 4, 0) if any(tiers.may_run(ROOT / file, n) for file in chosen)]
    command = [sys.executable, "tests/run.py", "-n", ",".join(map(str, sizes))]
    environment = os.environ | {"MPIGRAD_TEST_DEADLINE": str(time.time() + options.seconds)}
    return subprocess.run([*command, *chosen], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
