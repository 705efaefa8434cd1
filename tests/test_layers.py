"""The rooms of the library: imports point downwards, without circles, and the door is complete."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re

import pytest

import mpigrad

SOURCES = pathlib.Path(mpigrad.__file__).parent.parent
# From the ground floor up. A room may import from lower floors only; rooms of one floor do not
# know each other.
FLOORS = (
    ("_version", "solution"),
    ("_lazy",),
    ("runtime",),
    ("guard",),
    ("communicator",),
    ("collective_errors", "operations", "profiling"),
    ("autodiff", "compilation", "extend"),
    ("grid", "loops", "sharding"),
    ("checkpoint", "jobs", "sparse", "torch", "waves"),
    ("fft", "io", "ode", "optimize", "training"),
    ("fem",),
    ("_start",),
    ("__init__",),
    ("compat",),
    ("launch",),
    ("__main__", "mpigrad_apps"),
)
# The core, whose rooms know each other's files. All rooms above it import doors only: packages, or
# modules at the top, by the names that they export.
CORE = {
    *("_version", "solution", "_lazy", "runtime", "guard", "communicator", "collective_errors"),
    *("operations", "profiling", "autodiff", "compilation", "extend"),
    *("_start", "__init__", "launch", "__main__"),
}
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

pytestmark = pytest.mark.ranks(1)


def modules() -> dict[str, pathlib.Path]:
    """All modules by name, with their files."""
    found = {}
    for package in ("mpigrad", "mpigrad_apps"):
        for file in (SOURCES / package).rglob("*.py"):
            parts = file.relative_to(SOURCES).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """The modules of ours that a file imports, at its top or within a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] in ("mpigrad", "mpigrad_apps")}


def room(module: str) -> str:
    first, *rest = module.split(".")
    return first if first == "mpigrad_apps" else rest[0] if rest else "__init__"


def test_imports_point_downwards() -> None:
    known = modules()
    assert len(known) > 150
    wrong = [
        f"{module} imports {other}"
        for module, file in known.items()
        for other in imports(file, known)
        if room(module) != room(other) and FLOOR[room(module)] <= FLOOR[room(other)]
    ]
    assert not wrong


def below_a_door(file: pathlib.Path, own_room: str, known: dict[str, pathlib.Path]) -> list[str]:
    """The imports of a file from other rooms that are not names of a door."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("mpigrad."):
            continue
        if room(node.module) == own_room:
            continue
        door = known.get(node.module)
        is_door = door is not None and (door.name == "__init__.py" or door.parent.name == "mpigrad")
        names = importlib.import_module(node.module).__all__ if is_door else ()
        found += [f"{node.module}.{a.name}" for a in node.names if a.name not in names]
    return found


def test_rooms_above_the_core_import_doors_only() -> None:
    known = modules()
    above = {m: file for m, file in known.items() if room(m) not in {*CORE, "mpigrad_apps"}}
    assert len(above) > 100
    wrong = [f"{m}: {x}" for m, file in above.items() for x in below_a_door(file, room(m), known)]
    assert not wrong
    assert below_a_door(known["mpigrad.autodiff.transforms"], "autodiff", known)  # it would be seen


def test_rules_of_jax_are_registered_in_operations_only() -> None:
    rules = re.compile(r"\bPrimitive\(|register_lowering|primitive_(jvps|transposes|batchers)")
    private = re.compile(r"jax\._src|_jax_|jax\.interpreters")
    checks = {  # of JAX's private parts, which say what is missing
        *("mpigrad.launch.selftest", "mpigrad.launch.doctor", "mpigrad._start"),
        "mpigrad.compilation.compiler",
    }
    texts = {m: file.read_text() for m, file in modules().items()}
    with_rules = {m for m, text in texts.items() if rules.search(text)}
    with_private = {m for m, text in texts.items() if private.search(text)} - checks
    assert {room(m) for m in with_rules} == {"operations"}
    assert {room(m) for m in with_private} == {"operations", "extend", "autodiff"}


def test_the_page_names_all_of_extend() -> None:
    page = (SOURCES.parent / "docs" / "extend.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(names) == sorted(importlib.import_module("mpigrad.extend").__all__)


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    arrows = {module: imports(file, known) & known.keys() for module, file in known.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(arrows[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in known:
        visit(module, ())


@pytest.mark.parametrize(
    "package", [name for name, file in modules().items() if "_lazy.attach(" in file.read_text()]
)
def test_lazy_names_are_typed_and_exist(package: str) -> None:
    if package == "mpigrad_apps.population":
        pytest.importorskip("diffrax")
    module = importlib.import_module(package)
    tree = ast.parse(modules()[package].read_text())
    typed = set()
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                typed |= {(alias.asname, line.module) for alias in line.names}
    names = module._NAMES
    assert {name for name, _ in typed} == set(names) == set(module.__all__) == set(dir(module))
    for name, where in names.items():
        assert (name, f"{package}.{where}" if where else package) in typed
        if name != "torch":
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_the_architecture_page_names_every_room() -> None:
    page = (SOURCES.parent / "docs" / "architecture.md").read_text()
    rooms = [path.parent.name for path in (SOURCES / "mpigrad").glob("*/*.py")]
    native = [path.name for path in (SOURCES.parent / "native").iterdir() if path.is_dir()]
    missing = [room for room in (*rooms, *native) if f"`{room}/`" not in page]
    assert len(rooms) > 100 and not missing


def test_the_house_does_not_grow() -> None:
    """What a reader has to look through: files, and modules at the top.

    199 files, and 17 that replace nothing: seven of steps in time (decision 0115), one of states in
    files (0116), one of PETSc (0120), three of eigenpairs and one of SLEPc (0121), two of blocks
    (0122), two of mixed elements (0123).
    """
    assert len([m for m in modules() if m.startswith("mpigrad.")]) <= 216
    assert len(list((SOURCES / "mpigrad").glob("*.py"))) <= 10


def test_the_code_in_a_day_is_twenty_files() -> None:
    page = SOURCES.parent / "docs" / "code.md"
    found = re.findall(r"^\| \d+ \| \[[^]]*\]\(([^)]*)\)", page.read_text(), re.M)
    lines = [len((page.parent / file).read_text().splitlines()) for file in found]
    assert len(found) == 20 and sum(lines) < 9000
