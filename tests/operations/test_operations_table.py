"""The tables of the docs are those that the code makes."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "operations_table.py"


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


@pytest.mark.ranks(1)
def test_the_tables_are_up_to_date(tool: dict[str, Any]) -> None:
    assert tool["PAGE"].read_text() == tool["page"](), "run: python tools/operations_table.py"


@pytest.mark.ranks(1)
def test_every_operation_has_a_row_with_an_adjoint(tool: dict[str, Any]) -> None:
    rows = {line.split("(")[0].strip("| `"): line for line in tool["table"]().splitlines()[2:]}
    assert {"bcast", "allreduce", "send", "recv", "barrier", "custom_operation"} <= set(rows)
    silent = [name for name, row in rows.items() if "none: it carries no values" in row]
    assert silent == ["barrier"]
    assert all("reverse" in row for name, row in rows.items() if name != "barrier")


@pytest.mark.ranks(1)
def test_every_reduction_has_a_row_with_its_dtypes_and_modes(tool: dict[str, Any]) -> None:
    lines = [line.strip("| ").split(" | ") for line in tool["reductions"]().splitlines()]
    rows = {line[0].strip("`"): line[1:] for line in lines[2:]}
    names = ("SUM", "PROD", "MAX", "MIN", "MAXLOC", "MINLOC", "LAND", "LOR", "LXOR")
    assert set(rows) == {
        *(f"MPI.{name}" for name in (*names, "BAND", "BOR", "BXOR")),
        "mpigrad.reduction(fn, derivative)",
    }
    assert rows["MPI.SUM"][0] == "integers, float32/64, complex64/128"
    assert rows["MPI.MAXLOC"][0] == "integers, float32/64"
    assert (rows["MPI.LAND"][0], rows["MPI.BOR"][0]) == ("bool, integers", "integers")
    none = {name for name, row in rows.items() if row[1].startswith("none")}
    assert none == {f"MPI.{b}{op}" for b in "LB" for op in ("AND", "OR", "XOR")}
    for name, row in rows.items():
        assert row[2] == ("batched" if name in none else "forward, reverse, batched")


@pytest.mark.ranks(1)
def test_communicators_have_their_rows(tool: dict[str, Any]) -> None:
    rows = tool["communicators"]().splitlines()[2:]
    names = [row.split("`")[1].partition("(")[0] for row in rows]
    assert names == [
        *("comm = mpigrad.Communicator", "with comm:", "comm.split", "comm.dup", "comm.free"),
        "comm.cartesian",
        *("grid.shift", "grid.rank_at", "grid.dims", "grid.periods", "grid.coords"),
        "grid.neighbors",
    ]
    assert all(len(row.split("|")[2].split()) > 3 for row in rows)
