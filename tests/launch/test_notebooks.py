"""The cells of docs/notebooks.md, run by Jupyter."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.launcher
nbclient = pytest.importorskip("nbclient", reason="make test-files installs Jupyter")
nbformat = pytest.importorskip("nbformat")

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "notebooks.md"
# What Jupyter may print, and a page does not: colours, and the times and numbers of processes.
CODES = re.compile(r"\x1b\[[0-9;]*m")


def sections() -> list[str]:
    """Return the sections of the page with cells."""
    _, *parts = PAGE.read_text().split("\n## ")
    return [part for part in parts if "```ipython" in part]


def cells(section: str) -> list[tuple[str, list[str]]]:
    """Return each cell of a section with the lines that it prints."""
    blocks = re.findall(r"```(ipython|text)\n(.*?)```", section, re.DOTALL)
    found: list[tuple[str, list[str]]] = []
    for kind, text in blocks:
        if kind == "ipython":
            found.append((text, []))
        else:
            found[-1][1].extend(text.splitlines())
    return found


def client(codes: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a notebook of these cells, whose kernel is this Python with this search path."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MPIGRAD_GUARD", "0")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(code) for code in codes]
    return nbclient.NotebookClient(notebook, timeout=60, allow_errors=True, kernel_name="python3")


def printed(cell: Any) -> str:
    """Return all texts of a cell's outputs."""
    texts = []
    for output in cell.outputs:
        texts.append(output.get("text", ""))
        texts.append("\n".join(output.get("traceback", [])))
        texts.append("\n".join(output.get("data", {}).get("text/plain", "").splitlines()))
    return CODES.sub("", "\n".join(texts))


@pytest.mark.parametrize("section", range(2))
def test_the_cells_of_the_page(section: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if section:
        pytest.importorskip("ipyparallel")
    codes = cells(sections()[section])
    run = client([code for code, _ in codes], monkeypatch)
    run.execute()
    for (code, lines), cell in zip(codes, run.nb.cells, strict=True):
        text = printed(cell)
        assert all(line.strip() in text for line in lines), (code, text)
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == any("rror" in line for line in lines), (code, text)


def test_an_interrupt_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter interrupts a kernel by SIGINT."""
    codes = [
        "import mpigrad as mg, jax.numpy as jnp, os, signal, threading; kept = 3",
        "threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "mg.recv(jnp.zeros(3), source=0)",
        "print(kept, mg.allreduce(jnp.ones(2)))",
    ]
    run = client(codes, monkeypatch)
    run.execute()
    _, second, third = map(printed, run.nb.cells)
    assert "KeyboardInterrupt" in second and "deadlock" not in second
    assert third.strip() == "3 [1. 1.]"
