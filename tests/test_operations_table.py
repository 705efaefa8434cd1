"""The table of operations in the docs is the one that the code makes."""

from __future__ import annotations

import pathlib
import runpy

import pytest

TOOL = pathlib.Path(__file__).parent.parent / "tools" / "operations_table.py"


@pytest.mark.ranks(1)
def test_the_table_is_up_to_date() -> None:
    tool = runpy.run_path(str(TOOL))
    assert tool["PAGE"].read_text() == tool["page"](), "run: python tools/operations_table.py"


@pytest.mark.ranks(1)
def test_every_operation_has_a_row_with_an_adjoint() -> None:
    tool = runpy.run_path(str(TOOL))
    rows = {line.split("(")[0].strip("| `"): line for line in tool["table"]().splitlines()[2:]}
    assert {"bcast", "allreduce", "send", "recv", "barrier"} <= set(rows)
    silent = [name for name, row in rows.items() if "none: it carries no values" in row]
    assert silent == ["barrier"]
    assert all("reverse" in row for name, row in rows.items() if name != "barrier")
