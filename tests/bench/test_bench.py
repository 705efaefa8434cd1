"""`python bench`: its tables, what it refuses, and its page."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import ratios
import suite

from launching import outside

pytestmark = pytest.mark.launcher
BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"

PROGRAM = """
import json, sys
print("a table")
json.dump({"rows": []}, open(sys.argv[1], "w"))
"""
TABLES = """
[good]
about = "a program that ends well"
command = ["bench/good.py", "{json}"]
[bad]
about = "a program that fails"
command = ["bench/good.py"]
peers = ["no-such-package-at-all/"]
"""


def test_every_table_has_its_program() -> None:
    for table in suite.tables(BENCH).values():
        (program,) = (word for word in table.command if word.endswith(".py"))
        assert (BENCH.parent / program).exists()
        assert table.about


def test_rejects_unknown_tables() -> None:
    command = [sys.executable, str(BENCH), "operations", "wavs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=outside())
    assert done.returncode == 2
    assert "no table wavs; it has operations, sizes, poisson" in done.stderr


def test_other_tables_are_made_after_a_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs, out = tmp_path / "bench", tmp_path / "out"
    programs.mkdir()
    (programs / "tables.toml").write_text(TABLES)
    (programs / "good.py").write_text(PROGRAM)
    (programs / "report_page.py").write_text("print('the page')")
    monkeypatch.setattr(suite, "PROGRAMS", programs)
    assert suite.run(["bad", "good"], out, peers=False) == 1
    said = capfd.readouterr().out
    assert "bad failed; the other tables go on" in said
    assert "the page" in said
    assert (out / "good.txt").read_text() == "a table\n"
    assert json.loads((out / "good.json").read_text()) == {"rows": []}
    assert json.loads((out / "machine.json").read_text())["cores"] >= 1


@pytest.mark.full("it is about bench/ and not the library")
def test_page_of_results(tmp_path: pathlib.Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps({"cores": 2}))
    (tmp_path / "missing.json").write_text(json.dumps({"devito": "no compiler"}))
    row = {"label": "bcast 8 B", "ratio": {"mpi4py": [0.9, 1.0, 1.2]}}
    (tmp_path / "operations.json").write_text(json.dumps({"rows": [row]}))
    cells = {"what": "value", "cells": [9, 9], "ranks": 2, "ratio": 1.1}
    (tmp_path / "poisson.json").write_text(json.dumps([cells | {"ratio_quartiles": [1, 1.2]}]))
    waves = {"what": "acoustic forward mpigrad 1 rank / deepwave", "ratio": 0.6}
    (tmp_path / "waves.json").write_text(json.dumps([waves | {"quartiles": [0.5, 0.7]}]))
    command = [sys.executable, str(BENCH / "report_page.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, env=outside())
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 3
    assert "no compiler" in page
    assert (tmp_path / "operations.png").stat().st_size > 5000


def test_cause_of_a_failed_installation() -> None:
    output = """
      warning: a warning of the compiler
      bridge.cpp:7:10: fatal error: cuda_runtime.h: No such file or directory
      error: command 'mpicc' failed with exit code 1
      [end of output]
    hint: See above for details.
    """
    assert suite._cause(output).startswith("bridge.cpp:7:10: fatal error: cuda_runtime.h")
    assert suite._cause("only this line\n\n") == "only this line"


def test_other_libraries_are_built_without_cuda(tmp_path: pathlib.Path) -> None:
    """mpi4jax takes an existing CUDA_PATH before nvcc's, and builds for CPUs without headers."""
    cuda = pathlib.Path(suite.Peers(tmp_path)._without_cuda()["CUDA_PATH"])
    assert cuda.is_dir()
    assert not any(cuda.iterdir())


def test_best_and_worst_ratio_to_each_library(tmp_path: pathlib.Path) -> None:
    rows = [
        {"label": "bcast 8 B", "ratio": {"mpi4py": [0.4, 0.5, 0.6], "torch": [0.1, 0.2, 0.3]}},
        {"label": "bcast 8 MiB", "ratio": {"mpi4py": [1.0, 1.1, 1.2]}},
        {"label": "eager 8 B", "ratio": {"mpi4py": [20, 24, 30]}},
    ]
    (tmp_path / "operations.json").write_text(json.dumps({"rows": rows}))
    found = {other: (best, worst) for _, other, best, worst in ratios.ranges(tmp_path)}
    assert [r.label for r in found["mpi4py"]] == ["bcast 8 B", "bcast 8 MiB"]
    assert [r.middle for r in found["torch"]] == [0.2, 0.2]
    assert [r.middle for r in found["mpi4py, one call at a time"]] == [24, 24]
