"""Where the seconds of a start go, by the number of ranks: docs/benchmarks.md.

    python bench/starts.py [--ranks 2 4 8 16 32 64 100] [--hosts 4] [--json FILE]

Each job imports mpigrad, adds one number over all ranks, and ends. A stage is given in processor
seconds, the median of the ranks. `Python` includes NumPy, and `first array` starts XLA. `end` is
everything else: the launcher, its daemons, and the end of Python. Ranks that share cores take at
least the sum of their processor seconds, divided by the cores.

With --hosts the ranks are on so many hosts, network namespaces of this machine (as root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGES = ("Python", "MPI", "JAX", "mpigrad", "first array", "first sum")
WORKER = "MPIGRAD_BENCH_STARTS"
LIMIT = 600.0  # seconds


def processor_seconds() -> float:
    """Return the processor seconds of this process until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory() -> float:
    """Return this process's own memory in MB."""
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def be_a_rank() -> None:
    """Start in stages, and write what each has needed from rank 0."""
    marks = [0.0]
    import numpy as np

    marks.append(processor_seconds())
    from mpi4py import MPI

    marks.append(processor_seconds())
    import jax
    import jax.numpy as jnp

    marks.append(processor_seconds())
    import mpigrad as mg

    comm = mg.default_communicator()
    marks.append(processor_seconds())
    x = jax.block_until_ready(jnp.ones(1))
    marks.append(processor_seconds())
    assert mg.allreduce(x)[0] == comm.size
    marks.append(processor_seconds())
    threads = len(os.listdir("/proc/self/task"))
    all_ranks = MPI.COMM_WORLD.gather([*np.diff(marks), memory(), threads])
    if all_ranks:
        pathlib.Path(os.environ[WORKER]).write_text(json.dumps(np.median(all_ranks, 0).tolist()))


def busy_seconds() -> float:
    """Return the seconds that the processors of this machine were busy."""
    user, nice, system, _, _, irq, softirq = (
        int(x) for x in pathlib.Path("/proc/stat").read_text().split()[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


Start = Callable[[list[str], dict[str, str]], "subprocess.Popen[str]"]


def measure(ranks: int, options: list[str], start: Start) -> dict[str, float]:
    """Start a job, and return its seconds, those of each stage of a rank, memory and threads."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        file = pathlib.Path(folder) / "rank0.json"
        words = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), *options, __file__]
        begin, busy = time.perf_counter(), busy_seconds()
        job = start(words, os.environ | {WORKER: str(file)})
        try:
            if job.wait(LIMIT):
                sys.exit(job.returncode)
        finally:
            job.terminate()  # the launcher ends its ranks
        seconds = time.perf_counter() - begin
        busy = busy_seconds() - busy
        *stages, megabytes, threads = json.loads(file.read_text())
    row = {"ranks": float(ranks), "seconds": seconds} | dict(zip(STAGES, stages, strict=True))
    row |= {"end": busy / ranks - sum(stages), "busy": busy / seconds / (os.cpu_count() or 1)}
    return row | {"MB": megabytes, "threads": threads}


@contextlib.contextmanager
def hosts(number: int) -> Iterator[tuple[list[str], Start]]:
    """Make hosts, and return the launcher's options for them and what starts a process there."""
    if not number:
        yield [], lambda words, around: subprocess.Popen(words, env=around, text=True)
        return
    sys.path.insert(0, str(ROOT / "tests" / "hosts"))
    from network import Network  # pyright: ignore[reportMissingImports]

    names = [f"node{i}" for i in range(1, number + 1)]
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        file = pathlib.Path(folder) / "hosts.txt"
        with Network(names, pathlib.Path(folder)) as network:
            shell = {"OMPI_MCA_plm_rsh_agent": network.shell, "TMPDIR": "/dev/shm"}
            host = network[names[0]]
            yield ["--hosts", str(file)], lambda words, around: host.start(words, around | shell)


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 100])
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    inside = "MPIGRAD_BENCH_INSIDE"
    if given.hosts and inside not in os.environ:
        apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = [*apart, "sh", "-c", 'ip link set lo up && exec "$@"', "up", sys.executable]
        sys.exit(subprocess.call([*words, *sys.argv], env=os.environ | {inside: "1"}))
    from processor import processor

    rows = []
    print(f"{processor()}, {os.cpu_count()} cores, {given.hosts or 1} hosts")
    with hosts(given.hosts) as (options, start):
        for ranks in given.ranks:
            if given.hosts:
                slots = -(-ranks // given.hosts)
                each = [f"node{i + 1} slots={slots}\n" for i in range(given.hosts)]
                pathlib.Path(options[1]).write_text("".join(each))
            rows.append(measure(ranks, options, start))
            if ranks == given.ranks[0]:
                print(" | ".join(rows[0]))
            print(" | ".join(f"{x:.2f}".removesuffix(".00") for x in rows[-1].values()), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"processor": processor(), "rows": rows}))


if __name__ == "__main__":
    be_a_rank() if WORKER in os.environ else main()
