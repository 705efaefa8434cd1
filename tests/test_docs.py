"""Every block of code in the README and the docs runs."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import jax
import pytest

from mpigrad.communicator import Communicator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(name, text) of every block of the language."""
    found = []
    for page in PAGES:
        texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)
        found += [(f"{page.name}-{i}", text) for i, text in enumerate(texts)]
    return found


def parametrize(language: str) -> pytest.MarkDecorator:
    def case(name: str, text: str) -> Any:
        needs_torch = language == "python" and "torch" in text
        return pytest.param(text, id=name, marks=pytest.mark.torch if needs_torch else ())

    return pytest.mark.parametrize("text", [case(*block) for block in blocks(language)])


@parametrize("python")
def test_python(
    text: str, tmp_path: pathlib.Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(comm.mpi.bcast(tmp_path))  # what it writes is in nobody's way
    jax.config.update("jax_enable_x64", False)  # as a user starts
    try:
        exec(compile(text, "<a page>", "exec"), {"__name__": "__main__"})
    finally:
        jax.config.update("jax_enable_x64", True)


def test_links_and_pictures_are_there() -> None:
    for page in PAGES:
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_no_other_language_escapes() -> None:
    for page in PAGES:
        languages = set(re.findall(r"^```(\w+)$", page.read_text(), re.M))
        assert languages <= {"python", "sh", "text"}, page


@pytest.mark.launcher
@parametrize("sh")
def test_commands(text: str) -> None:
    """Commands of a block exist as they are written: targets, options, files."""
    for line in text.splitlines():
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
        elif words[0] == "mpigrad":  # long runs: their options are checked
            parsed = subprocess.run(
                [sys.executable, "-m", *words, "--help"],
                cwd=ROOT, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert parsed.returncode == 0, parsed.stdout + parsed.stderr
        else:
            assert words[0] in ("pip", "apt-get", "git", "cd"), f"not tested: {line}"
