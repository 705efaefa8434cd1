"""Each call in native/ that may wait for another rank is in a table of docs/reliability.md."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.ranks(1)
ROOT = pathlib.Path(__file__).resolve().parents[2]
# Calls that may wait: those of MPI, of hypre (which calls MPI), and of this library. `any_mpi` only
# passes the calls of hypre on, and `one_rank` is an MPI.
WAITING = re.compile(
    r"""runtime\.mpi\.(?!I|Test|Cancel|Get_|Op_|Error_)[A-Z]\w*
    |\bMPI_(?!Comm_rank|Comm_size|Wtime|Get_|Finalized)[A-Z]\w*\(
    |\b(?:HYPRE|hypre)_\w*(?:Create|Assemble|Setup|Solve|Matvec|InnerProd|Destroy|Init|Finalize)\(
    |\b(?:await_request|cancel_request|await|sched_yield|nanosleep|synchronize|callback)\(
    |\.(?:wait|wait_for|join)\(""",
    re.VERBOSE,
)
ROW = re.compile(r"^\| `native/([\w/.]+)` \| (\d+) \| .+ \| .+ \|$", re.MULTILINE)


def waits(text: str) -> int:
    """Count the calls that may wait in a source text."""
    return len(WAITING.findall(re.sub(r"//.*", "", text)))


def test_every_wait_is_in_the_table():
    files = {
        str(path.relative_to(ROOT / "native")): waits(path.read_text())
        for path in (ROOT / "native").rglob("*")
        if path.suffix in (".h", ".cc") and not {"any_mpi", "one_rank"} & {*path.parts}
    }
    found = {name: count for name, count in files.items() if count}
    table = {
        name: int(count)
        for name, count in ROW.findall((ROOT / "docs" / "reliability.md").read_text())
    }
    assert found == table, "docs/reliability.md: give each new wait a record, and its file a row"


@pytest.mark.parametrize("line", [
    "call(runtime.mpi.Probe, source, tag, comm.handle);",
    "MPI_Barrier(comm_);",
    "while (!there) sched_yield();",
    "HYPRE_ParCSRMatrixMatvec(1.0, a, x, 0.0, y);",
])  # fmt: skip
def test_a_new_wait_is_counted(line):
    assert waits(line) == 1
