"""Every block of code in the README and the docs runs."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import jax
import pytest

from launching import mpigrad
from mpigrad.communicator import Communicator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages that have links and no programs.
PLAIN_PAGES = [
    ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]  # fmt: skip
TUTORIAL = ROOT / "docs" / "tutorial.md"
# These pages are read first: make test runs their blocks, each on the given numbers of ranks.
FIRST = {
    "README.md-0": (2,),
    "README.md-1": (2,),
    "fem_meshes.md-1": (2,),
    "files.md-0": (2,),
    "gradients.md-1": (2,),
    "gradients.md-2": (3,),
    "libraries.md-1": (2,),
    "mpi4jax.md-0": (2,),
    "samplers.md-1": (2,),  # blackjax
    "own_matrix.md-0": (1,),
    "own_operator.md-1": (3,),
    "own_stencil.md-0": (2,),
}


def blocks(language: str) -> list[tuple[str, str]]:
    """(name, text) of every block of the language."""
    found = []
    for page in PAGES:
        if page == TUTORIAL and language == "python":
            continue  # below
        texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)
        found += [(f"{page.name}-{i}", text) for i, text in enumerate(texts)]
    return found


def is_job(text: str) -> bool:
    """Return True if a block starts `jax.distributed`, which needs processes of its own."""
    return "jax.distributed.initialize" in text


def marks(name: str, text: str) -> list[pytest.MarkDecorator]:
    needs_torch = re.search(r"^(import|from) (mpigrad\.)?torch\b", text, re.M)
    later = pytest.mark.full("a page that is read later, with parts that other tests cover")
    first = [pytest.mark.thin(*FIRST[name]) if name in FIRST else later]
    if re.search(r"^import xarray\b", text, re.M):
        missing = importlib.util.find_spec("xarray") is None
        first.append(pytest.mark.skipif(missing, reason="make test-files installs xarray"))
    return [pytest.mark.torch, *first] if needs_torch else first


# Blocks of commands that take seconds.
SLOW = {
    "installing.md-0": "test_doctor runs `mpigrad doctor`",
    "mosaic.md-0": "it imports the program four times; tests/fem/test_mosaic.py runs it",
    "seeing.md-0": "tests/profiling profiles programs",
}


def parametrize(language: str) -> pytest.MarkDecorator:
    slow = lambda name: [pytest.mark.full(SLOW[name])] if name in SLOW else []
    cases = [
        pytest.param(text, id=name, marks=marks(name, text) if language == "python" else slow(name))
        for name, text in blocks(language)
        if not is_job(text)
    ]
    return pytest.mark.parametrize("text", cases)


def run(text: str) -> None:
    jax.config.update("jax_enable_x64", False)  # as a user starts
    try:
        exec(compile(text, "<a page>", "exec"), {"__name__": "__main__"})
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.fixture
def elsewhere(tmp_path: pathlib.Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(comm.mpi.bcast(tmp_path))  # for the files that a page writes


# Skipped where they are absent. The dev extra has NumPyro, and not PyMC, which is large.
OPTIONAL = ("numpyro", "pymc")


@parametrize("python")
def test_python(text: str, elsewhere: None) -> None:
    for package in OPTIONAL:
        if re.search(rf"^(import|from) {package}\b", text, re.M):
            pytest.importorskip(package)
    run(text)


@pytest.mark.full("test_sharding has more of it in one program")
@pytest.mark.launcher
@pytest.mark.parametrize(
    "text", [pytest.param(text, id=name) for name, text in blocks("python") if is_job(text)]
)
def test_jobs(text: str, tmp_path: pathlib.Path) -> None:
    """Blocks that start `jax.distributed` run on two ranks."""
    (tmp_path / "program.py").write_text(text)
    done = mpigrad("launch", "-n", 2, tmp_path / "program.py", MPIGRAD_TIMEOUT="60")
    assert done.returncode == 0, done.stdout + done.stderr


def steps() -> list[Any]:
    """The tutorial's programs, what they print, and on how many ranks each is tried."""
    found = re.findall(
        r"^```python\n(.*?)^```.*?^```text\n(.*?)^```", TUTORIAL.read_text(), re.S | re.M
    )
    ranks = [1, 3, 2, 1, 2]
    later = [pytest.mark.full("an optimizer takes 100 steps; tests/optimize has shorter runs")]
    return [
        pytest.param(program, said, id=str(i), marks=[pytest.mark.thin(*[n]), *later * (i == 5)])
        for i, ((program, said), n) in enumerate(zip(found, ranks, strict=True), 1)
    ]


@pytest.mark.parametrize(("program", "said"), steps())
def test_tutorial(
    program: str, said: str, comm: Communicator, capsys: pytest.CaptureFixture[str], elsewhere: None
) -> None:
    """Each step prints the text of the page, on any number of ranks."""
    run(program)
    if comm.rank == 0:
        printed = capsys.readouterr().out
        if "max_steps=" in program:  # the accuracy of an optimizer depends on the rounding
            number = re.compile(r"\d+\.\d+")
            assert number.sub("", printed) == number.sub("", said)
            assert float(number.findall(printed)[0]) < 2 * float(number.findall(said)[0])
        else:
            assert printed == said


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "index.md").read_text().splitlines()
    missing = {page.stem for page in PAGES[1:]} - {"index"} - set(navigation)
    assert not missing, f"docs/index.md does not lead to {missing}"


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "index.md").read_text()
    for page in (ROOT / "docs" / "decisions").glob("0*.md"):
        assert f"]({page.name}): {page.read_text().partition(': ')[2].splitlines()[0]}" in index


def test_picture_of_the_architecture_is_that_of_the_layers() -> None:
    script = runpy.run_path(str(ROOT / "tools" / "architecture_picture.py"))
    assert script["PICTURE"].read_text() == script["picture"]()


def test_links_and_pictures_are_there() -> None:
    for page in [*PAGES, *PLAIN_PAGES]:
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.ranks(1)
def test_reference_has_one_page_for_each_public_name() -> None:
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    pages = settings["reference_pages"]()
    assert len({page.lower() for page in pages}) == len(pages)
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)]+\.md)\)", text):
            assert os.path.normpath(os.path.join(os.path.dirname(page), target)) in pages, page
    things = {id(entry.thing) for entry in settings["entries"]()}
    assert len(things) == len(pages) - 1 - sum(page.endswith("/index.md") for page in pages)
    assert {"index.md", "mpigrad/sendrecv.md", "mpigrad.sparse/solve.md"} <= set(pages)


def test_no_other_language_escapes() -> None:
    for page in PAGES:
        languages = set(re.findall(r"^```(\w+)$", page.read_text(), re.M))
        cells = {"ipython"} if page.name == "notebooks.md" else set()  # run by test_notebooks.py
        assert languages <= {"python", "sh", "text", *cells}, page


@pytest.mark.launcher
@parametrize("sh")
def test_commands(text: str) -> None:
    """The commands of a block exist as written: targets, options, files."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            dry = subprocess.run(
                ["make", "--dry-run", *words[1:]],
                cwd=ROOT, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert dry.returncode == 0, dry.stderr
        elif words[0] == "mpigrad" and words[1] in ("launch", "doctor"):
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=120,
                env=dict(os.environ),  # without what MPI has set in this process by itself
            )
            assert done.returncode == 0, done.stdout + done.stderr
        elif words[:2] == ["python", "bench"]:
            tables = tomllib.loads((ROOT / "bench" / "tables.toml").read_text())
            assert {word for word in words[2:] if not word.startswith("-")} <= tables.keys()
        elif words[0] in ("python", "mpiexec"):  # a program, whose options are checked
            (path,) = (word for word in words if word.endswith(".py"))
            usage = subprocess.run(
                [sys.executable, path, "--help"],
                cwd=ROOT, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert usage.returncode == 0, usage.stderr
            options = [word for word in words[words.index(path) :] if word.startswith("--")]
            assert all(option in usage.stdout for option in options), usage.stdout
        elif words[0] == "mpigrad":  # long runs: their options are checked, as before a start
            checks = ["--print-script", "slurm"] if words[1] == "run" else ["--help"]
            parsed = subprocess.run(
                [sys.executable, "-m", *words, *checks],
                cwd=ROOT, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            # Files and packages of the user are checked after the options.
            missing = re.search(r"there is no file|is not installed", parsed.stderr)
            assert parsed.returncode == 0 or missing, parsed.stdout + parsed.stderr
        else:
            assert words[0] in ("pip", "apt-get", "git", "cd", "cmake", "export"), (
                f"not tested: {line}"
            )
