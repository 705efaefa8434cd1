"""What mpigrad does on one GPU, in a few minutes.

    python tests/gpu/check.py --part 1 --output DIR

Each step is a job with its own time limit, in the order of their worth, so that a job that hangs
costs one line. DIR gets check-PART.json, with all rows and the output of each step, and
check-PART.txt, one page. Part 1 needs mpigrad and an MPI; part 2 also needs what `make gpu-bundle`
brings: a UCX with CUDA, and mpi4jax's tests. --cpu runs all of it on a machine without a GPU, with
small cases and a replacement for the CUDA driver (tests/programs/driver.c), which measures nothing
of interest.
"""

from __future__ import annotations

import argparse
import atexit
import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUNDLE = ROOT / "build" / "gpu"
UCX = {
    "LD_LIBRARY_PATH": str(BUNDLE / "ucx" / "lib"),
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_pml_ucx_tls": "any",
    "OMPI_MCA_pml_ucx_devices": "any",
}
P2P = UCX | {"MPIGRAD_GPU_AWARE": "p2p"}
HOST = ("mpigrad", "halo", "mpigrad halo", "numpy")  # ways of messages.py that need no CuPy
# Folders of its own, with short names, because sockets have no long ones.
MPS_FOLDERS = f"{tempfile.gettempdir()}/mpigrad-mps-{os.getuid()}"
MPS = {
    "CUDA_MPS_PIPE_DIRECTORY": f"{MPS_FOLDERS}-pipe",
    "CUDA_MPS_LOG_DIRECTORY": f"{MPS_FOLDERS}-log",
}
DEEPWAVE = BUNDLE / "deepwave"
DEEPWAVE_LIBRARY = DEEPWAVE / "deepwave" / "libdeepwave_C.so"


@dataclass(frozen=True)
class Step:
    """A job of the check.

    Attributes
    ----------
    name
        Its name in the report.
    words
        A program of this folder and its arguments, or a whole command if `ranks` is 0.
    ranks
        The number of ranks.
    limit
        Seconds, after which the job is killed.
    beside
        Steps with the same text run at the same time, because they measure no time.
    environment
        Variables.
    small
        What is appended on CPUs.
    expected
        Texts in the output of a job that must fail; without them the job must succeed.
    needs
        A path, or a module, without which the step is left out.
    """

    name: str
    words: tuple[str, ...]
    ranks: int = 1
    limit: float = 30.0
    beside: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    small: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    needs: pathlib.Path | str = ROOT

    def missing(self) -> str:
        """Return what the step needs and does not have."""
        if isinstance(self.needs, str):
            return "" if importlib.util.find_spec(self.needs) else f"the module {self.needs}"
        return "" if self.needs.exists() else f"{self.needs} (make gpu-bundle)"


def speed(name: str, ranks: int, limit: float, **environment: str) -> Step:
    """Return a step of bench/gpu.py."""
    title = f"{name}, {ranks} rank{'s' * (ranks > 1)}"
    return Step(title, ("../../bench/gpu.py", name), ranks, limit, "", environment, ("--small",))


def cpu_cores(name: str, ranks: int = 16, limit: float = 60.0) -> Step:
    """Return a step of bench/gpu.py on the CPU cores of the machine."""
    words = ("../../bench/gpu.py", name)
    environment = {"JAX_PLATFORMS": "cpu"}
    return Step(f"{name} on CPU cores", words, ranks, limit, "", environment, ("--small",))


VALUES = ("tests/operations/test_operations.py", "-k", "test_values_and_derivatives")
WHOLE = (sys.executable, "tests/run.py", "-n", "2", *VALUES)
PEERS = BUNDLE / "mpi4jax-0.9.1.post2"
MPI4JAX = (sys.executable, "tests/peers/run.py", "-n", "2", "--source", str(PEERS))


def messages(title: str, by: str, ranks: int, limit: float, **environment: str) -> Step:
    """Return a step of messages.py."""
    words, needs = ("messages.py", "--by", *by.split()), "mpi4py" if by in HOST else "cupy"
    return Step(title, words, ranks, limit, "", environment, ("--small",), needs=needs)


PARTS: dict[str, tuple[Step, ...]] = {
    "1": (
        Step("versions", (sys.executable, str(HERE / "versions.py")), 0, 30, "values"),
        Step("operations", ("operations.py",), 1, 60, "values", {}, ("--cases", "5")),
        Step("operations", ("operations.py",), 2, 70, "values", {}, ("--cases", "20")),
        Step("tests/operations", WHOLE, 0, 160, "values", {}, ("-k", "scan")),
        messages("messages", "mpigrad", 2, 30),
        messages("halo exchanges", "halo", 2, 20),
        speed("stream", 1, 15),
        speed("acoustic", 1, 50),
        speed("acoustic", 2, 60),
        speed("fft", 1, 20),
        speed("fft", 2, 25),
        Step("deepwave, 1 rank", ("../../bench/gpu.py", "deepwave"), 1, 30, "",
             {"PYTHONPATH": str(DEEPWAVE)}, ("--small",), needs=DEEPWAVE_LIBRARY),
        speed("lbfgs", 1, 20),
        speed("fem", 1, 60),
        speed("krylov", 1, 90),
        speed("elastic", 1, 150),
    ),
    "2": (
        messages("copies", "copies", 1, 20),
        messages("messages to itself", "mpigrad", 1, 20),
        messages("messages on the host", "numpy", 2, 15),
        messages("messages, MPS", "mpigrad halo", 2, 25, **MPS),
        messages("mpi4py and CuPy", "cupy", 2, 20, **UCX),
        messages("messages, p2p", "mpigrad halo", 2, 25, **P2P),
        messages("messages, p2p, MPS", "mpigrad halo", 2, 25, **P2P, **MPS),
        Step("operations, p2p", ("operations.py", "--cases", "20"), 2, 60, "faults", P2P),
        Step("a rank raises", ("faults.py", "raises"), 2, 40, "faults",
             expected=("ValueError: rank 1 has found bad input", "rank 1 of 2 failed")),
        Step("all ranks receive", ("faults.py", "deadlock"), 2, 40, "faults",
             {"MPIGRAD_TIMEOUT": "5"}, expected=("rank 0: has waited 5 s in recv", "faults.py:")),
        Step("a rank ends", ("faults.py", "apart"), 2, 40, "faults",
             {"MPIGRAD_TIMEOUT": "5"}, expected=("rank 0: has waited 5 s in recv", "has ended")),
        Step("mpi4jax's tests", MPI4JAX, 0, 240, "faults", needs=PEERS),
        Step("doctor", (sys.executable, "-m", "mpigrad", "doctor"), 0, 90, "faults"),
        messages("memory of XLA", "xla", 2, 15, **UCX),
        speed("acoustic", 2, 40, **MPS),
        speed("acoustic", 4, 40, **MPS),
        cpu_cores("acoustic"),
        cpu_cores("fft"),
        cpu_cores("krylov"),
        cpu_cores("fem"),
        cpu_cores("elastic"),
    ),
}  # fmt: skip


def command(step: Step, on_cpu: bool) -> list[str]:
    """Return the words of a step."""
    small = list(step.small) * on_cpu
    if not step.ranks:
        return [*step.words, *small]
    program, *rest = step.words
    ranks = min(step.ranks, os.cpu_count() or 1) if "CPU" in step.name else step.ranks
    launch = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks)]
    return [*launch, str(HERE / program), *rest, *small]


def run(step: Step, base: dict[str, str], on_cpu: bool) -> dict[str, Any]:
    """Run a step for at most its limit, and return what it has printed."""
    environment = base | step.environment
    paths = [step.environment.get("LD_LIBRARY_PATH"), base.get("LD_LIBRARY_PATH")]
    if joined := ":".join(path for path in paths if path):
        environment["LD_LIBRARY_PATH"] = joined
    start = time.perf_counter()
    job = subprocess.Popen(
        command(step, on_cpu), cwd=ROOT, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    late = False
    try:
        output, _ = job.communicate(timeout=step.limit)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
    rows, lines = [], []
    for line in output.splitlines():
        try:
            found = json.loads(line) if line.startswith("{") else None
        except json.JSONDecodeError:
            found = None
        if isinstance(found, dict):
            rows.append(found)
        else:
            lines.append(line)
    wrong = [row for row in rows if row.get("ok") is False]
    if step.expected:
        passed = not late and bool(job.returncode) and all(e in output for e in step.expected)
    else:
        passed = not late and job.returncode == 0 and not wrong
    return {
        "step": step.name, "ranks": step.ranks, "passed": passed,
        "seconds": round(time.perf_counter() - start, 1), "limit": step.limit,
        "code": None if late else job.returncode, "environment": step.environment,
        "rows": rows, "output": lines if len(lines) <= 90 else [*lines[:50], "…", *lines[-40:]],
    }  # fmt: skip


def groups(steps: Iterable[Step]) -> list[list[Step]]:
    """Return the steps, those that run at the same time together."""
    found: list[list[Step]] = []
    for step in steps:
        if step.beside and found and found[-1][0].beside == step.beside:
            found[-1].append(step)
        else:
            found.append([step])
    return found


def line(result: dict[str, Any]) -> str:
    """Return the line of a step on the page."""
    state = "passed" if result["passed"] else "FAILED"
    why = "" if result["code"] == 0 else f" (code {result['code']})"
    if result["code"] is None:
        why = f" (stopped at its limit of {result['limit']:.0f} s)"
    wrong = [str(row.get("case")) for row in result["rows"] if row.get("ok") is False]
    parts = [
        f"{result['step']:<28} {result['ranks'] or '':>2} {result['seconds']:6.1f} s  {state}{why}"
    ]
    parts.append(f"{len(result['rows'])} rows" + (f", wrong: {', '.join(wrong)}" if wrong else ""))
    return "  ".join(parts)


def figures(row: dict[str, Any]) -> str:
    """Return the numbers of a row, without lists."""
    return "    " + " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in row.items()
        if not isinstance(value, (list, dict)) and key != "platform"
    )


def stand_in(folder: pathlib.Path) -> dict[str, str]:
    """Build the replacement for the driver, and return the environment that uses it."""
    library = folder / "libdriver.so"
    source = HERE.parent / "programs" / "driver.c"
    words = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(words, check=True)
    return {
        "JAX_PLATFORMS": "cpu", "MPIGRAD_STAGE": "cuda", "MPIGRAD_GPU_LIBRARY": str(library),
    }  # fmt: skip


def main() -> int:
    """Run the steps of a part, and write what they found after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--cpu", action="store_true", help="try the check without a GPU")
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--seconds", type=float, default=1e9, help="no step begins later")
    o = parser.parse_args()
    o.output.mkdir(parents=True, exist_ok=True)
    base = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    base |= {"OMP_NUM_THREADS": "1"}
    if o.cpu:
        base |= stand_in(o.output)
    steps = [s for part in PARTS if o.part in (part, "all") for s in PARTS[part]]
    if o.only:
        steps = [s for s in steps if s.name in o.only]
    if any(MPS.items() <= s.environment.items() for s in steps) and not o.cpu:
        start_mps()
    start, results = time.perf_counter(), []
    page = o.output / f"check-{o.part}.txt"
    page.write_text("")
    for group in groups(steps):
        for step in list(group):
            if missing := step.missing():  # now: the machine may have built it meanwhile
                print(f"{step.name}: left out, because it needs {missing}")
                group.remove(step)
        if not group:
            continue
        if time.perf_counter() - start > o.seconds:
            break
        with concurrent.futures.ThreadPoolExecutor(len(group)) as pool, page.open("a") as out:
            for result in pool.map(lambda step: run(step, base, o.cpu), group):
                results.append(result)
                (o.output / f"check-{o.part}.json").write_text(json.dumps(results, indent=1))
                text = [line(result), *map(figures, result["rows"])]
                output = result["output"]
                if not result["passed"]:
                    text += ["    | " + x for x in [*output[:8], "…", *output[-8:]]]
                elif not result["rows"]:
                    text += ["    | " + x for x in output[-3:]]
                print(line(result), flush=True)
                out.write("\n".join(text) + "\n")
    failed = [r["step"] for r in results if not r["passed"]]
    print(f"{len(results)} of {len(steps)} steps in {time.perf_counter() - start:.0f} s, "
          f"{len(failed)} failed")  # fmt: skip
    return bool(failed)


def start_mps() -> None:
    """Start NVIDIA's MPS, if it is there: kernels of several ranks run at the same time."""
    if not (daemon := shutil.which("nvidia-cuda-mps-control")):
        return
    for folder in MPS.values():
        pathlib.Path(folder).mkdir(exist_ok=True)
    environment = os.environ | MPS
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([daemon, "-d"], env=environment, check=False, timeout=20)
    stop = functools.partial(
        subprocess.run,
        [daemon],
        input="quit\n",
        text=True,
        env=environment,
        check=False,
        timeout=20,
    )
    atexit.register(stop)


if __name__ == "__main__":
    sys.exit(main())
