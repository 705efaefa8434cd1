"""Faults in each part of mpigrad: the job ends in time and says why, or goes on if it is legal.

The table in docs/reliability.md has the seconds that these jobs took. Each test prints its row.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import re
import subprocess
import time

import pytest

from launching import PROGRAMS, command, idling, no_orphans, outside
from mpigrad.sparse.solvers.libraries import hypre_available

pytestmark = [pytest.mark.launcher, pytest.mark.waits]

LIMIT = 12.0  # seconds that an operation may wait
PATIENT = 300.0  # the same while programs are compiled
PARTS = (
    "fem",
    "boomeramg",
    "boxmg",
    "fft",
    "waves2d",
    "waves3d",
    "particles",
    "thread",
    "requests",
)
# What the output says of each fault. An error of sizes or options names a rank and a line.
REASONS = {
    "kill": r"SIGKILL",
    "stop": r"rank 1: .* at .*fault_in_part\.py:\d+.*, and its process is stopped \(SIGSTOP\)",
    "raise": r"fault_in_part\.py\", line \d+(?s:.*)ValueError: rank 1 has had enough"
    r"(?s:.*)mpigrad: rank 1 of 2 failed",
    "sizes": r"fault_in_part\.py(:|\", line )\d+(?s:.*)rank 1",
    "options": r"fault_in_part\.py(:|\", line )\d+(?s:.*)rank 1",
}
LEGAL = {
    ("fft", "options"): "the norm is applied on each rank",
    ("particles", "sizes"): "each rank has a room of its own",
}


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of a job: its exit code, its seconds after the fault, and its output."""

    code: int
    seconds: float
    output: str


def run(part: str, fault: str, folder: pathlib.Path) -> Done:
    """Run one job with one fault."""
    words = command("launch", "-n", 2, PROGRAMS / "fault_in_part.py", part, fault)
    settings = idling() | {
        "MPIGRAD_TIMEOUT": f"{PATIENT if fault == 'none' else LIMIT:g}",
        # The jobs of a part share compiled programs: rank 1 compiles no others while rank 0 waits.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    output = folder / f"{part}-{fault}.txt"
    with (
        no_orphans() as mark,
        output.open("w") as file,
        subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=outside() | mark | settings
        ) as process,
    ):
        try:
            code = process.wait(timeout=300)
        finally:
            process.kill()
        end = time.time()
    text = output.read_text()
    begin = re.search(r"fault at ([\d.]+)", text)
    assert begin or fault == "none", text
    return Done(code, end - float(begin[1]) if begin else 0.0, text)


def check(part: str, fault: str, done: Done) -> None:
    """Raise an AssertionError if a job did not end as it has to."""
    what = f"{part}, {fault}: exit code {done.code} after {done.seconds:.1f} s\n{done.output}"
    if (part, fault) in LEGAL or fault == "none":
        assert done.code == 0, what
        assert "rank 1 has done its steps" in done.output, what
        assert "mpigrad:" not in done.output, what
        return
    assert done.code != 0, what
    assert re.search(REASONS[fault], done.output), what
    # The limit, the report, and a machine that is busy. Other sizes and options are there from the
    # start: the packages of the part are imported, and its programs are traced.
    slack = 15 if fault in ("kill", "stop", "raise") else 60
    assert done.seconds < 2 * LIMIT + slack, what


@pytest.mark.full("test_stopped_solves.py runs one of these jobs")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_faults_in_a_part(part: str, tmp_path: pathlib.Path) -> None:
    if part in ("fem", "boomeramg") and not hypre_available():
        pytest.skip("no hypre")
    check(part, "none", run(part, "none", tmp_path))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = {fault: pool.submit(run, part, fault, tmp_path) for fault in REASONS}
    row = [part]
    for fault, job in jobs.items():
        done = job.result()
        check(part, fault, done)
        row.append("goes on" if (part, fault) in LEGAL else f"{done.seconds:.1f}")
    print(f"| {' | '.join(row)} |")


def test_the_table_of_the_docs_has_all_parts() -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    head = f"| part | {' | '.join(REASONS)} |\n"
    rows = re.findall(r"^\| (\w+) \|", text.partition(head)[2].partition("\n\n")[0], re.M)
    assert tuple(rows) == PARTS
    assert text.count("goes on |") == len(LEGAL)
