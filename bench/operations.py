"""Operations beside mpi4py, mpi4jax, torch (gloo) and shard_map (gloo, MPI): one table, one run.

    mpigrad launch -n 2 bench/operations.py [--json FILE] [--torch-python PYTHON]

Forward, and forward with backward. Loops of each library take turns within one job, so that a drift
of the machine meets all of them alike; figures are medians over rounds, with the smallest and the
largest ratio of the pairs. A library that is not there, or has no gradient, is left out and named.
mpi4jax has to be in this environment; torch may be in one of its own. JAX's own collectives on MPI
need MPIwrapper (https://github.com/eschnett/MPIwrapper), built for this Open MPI: set
MPITRAMPOLINE_LIB to its libmpiwrapper.so.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg

jax.config.update("jax_enable_x64", True)

try:
    import mpi4jax
except ImportError:
    mpi4jax = None

SIZES = {"8 B": 1, "8 KiB": 1 << 10, "1 MiB": 1 << 17, "8 MiB": 1 << 20}
# Long enough that the copy of the argument, and first touches, don't count.
LOOP = {1: 2000, 1 << 10: 1000, 1 << 17: 300, 1 << 20: 50}
PEERS_SHORTER = 10  # loops of libraries in other processes, which are slow
ROUNDS = 15
world = MPI.COMM_WORLD
right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size


class Peer:
    """A library in a process of its own beside each rank (bench/worker.py)."""

    def __init__(self, library: str, python: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = world.bcast(free.getsockname()[1])
        # Not a rank of this job: it must not find what the launcher has set for its ranks.
        own = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "JAX_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        program = str(pathlib.Path(__file__).with_name("worker.py"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(60)
            ports = world.allgather(server.getsockname()[1])
            words = [python, program, library, str(world.rank), str(port), *map(str, ports)]
            self._process: subprocess.Popen[bytes] | None = None
            self._stream: IO[str] | None = None
            if library == "shard_map_mpi":  # a job of its own
                words[3] = "-1"
                words = [
                    shutil.which("mpiexec") or "mpiexec",
                    "--quiet",
                    "-n",
                    str(world.size),
                    *words,
                ]
                environment |= {
                    "OMPI_ALLOW_RUN_AS_ROOT": "1",
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "OMPI_MCA_rmaps_base_oversubscribe": "1",
                    "OMPI_MCA_orte_abort_on_non_zero_status": "1",
                }
            if library != "shard_map_mpi" or world.rank == 0:
                self._process = subprocess.Popen(words, env=environment)
            try:
                self._stream = server.accept()[0].makefile("rw")
                answer = self._answer()
            except TimeoutError:
                answer = {"missing": "it did not start within 60 s"}
        answers = world.allgather(answer)
        self.missing = next((a["missing"] for a in answers if "missing" in a), "")

    def _answer(self) -> dict[str, Any]:
        assert self._stream is not None
        line = self._stream.readline()
        return json.loads(line) if line else {"missing": "it ended"}

    def ask(self, **task: Any) -> float | None:
        """Return the seconds of its loop on this rank, or None if it lacks the operation."""
        assert self._stream is not None
        self._stream.write(json.dumps(task) + "\n")
        self._stream.flush()
        return self._answer().get("seconds")

    def end(self) -> None:
        """Let it end."""
        if self._stream is not None:
            self._stream.close()
        if self._process is not None:
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:  # mpiexec, whose ranks did not start
                self._process.kill()


def seconds(f: Callable[[], Any]) -> float:
    """The slowest rank's seconds. A loop in another process tells its own."""
    world.Barrier()
    start = time.perf_counter()
    told = f()
    taken = told if isinstance(told, float) else time.perf_counter() - start
    return world.allreduce(taken, op=MPI.MAX)


def measure(loops: dict[str, tuple[Callable[[], Any], int]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each loop in each round; the loops take turns."""
    for f, _ in loops.values():
        f()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, (f, count) in loops.items():
            times[name].append(seconds(f) / count * 1e6)
    return times


def in_loop(operation: Callable[[Any], Any], x: Any, count: int, jit: Any) -> Callable[[], None]:
    """A loop whose memory is donated, so that the next call goes on in it without a copy."""
    step = lambda i, x: operation(x)
    program = jit(lambda x: jax.lax.fori_loop(0, count, step, x, unroll=2), donate_argnums=0)
    x = x + 0

    def run() -> None:
        nonlocal x
        x = jax.block_until_ready(program(x))

    return run


def of_the_same(operation: Callable[[Any], Any], x: Any, count: int, jit: Any) -> Callable[[], Any]:
    """A loop that sends the same array each time, as a loop on kept buffers does."""
    program = jit(lambda x: jax.lax.fori_loop(0, count, lambda i, y: operation(x), x))
    return lambda: jax.block_until_ready(program(x))


def repeated(f: Callable[[], Any], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            f()

    return run


def both_ways(operation: Callable[[Any], Any], vjp: Any) -> Callable[[Any], Any]:
    """The operation, and its adjoint of what it gave."""

    def step(x: Any) -> Any:
        y, back = vjp(operation, x)
        return back(y)[0]

    return step


def loops(
    n: int, mode: str, peers: dict[str, Peer], shorter: int
) -> dict[str, dict[str, tuple[Callable[[], Any], int]]]:
    """For each operation the loops of all libraries; `mode` is "forward" or "gradient"."""
    # Written to: fresh zeros that are only read are one page of the system's, in the cache.
    a, b = np.full(n, 0.0), np.full(n, 0.0)
    x, count = jnp.zeros(n), max(2, LOOP[n] // shorter)

    # sendrecv: the same array each time, or what has come is sent on; the others work in place.
    ahead = of_the_same if mode == "forward" else in_loop

    def exchanged() -> None:
        world.Sendrecv(a, right, 0, b, left, 0)
        world.Sendrecv(b, left, 0, a, right, 0)

    buffers = [a, b]

    # As in the loops of the others, what is sent is what the last call gave. (The same array each
    # time, which the root has not written, takes a fifth less at 1 MiB: it stays in the caches.)
    def cast_and_reduced() -> None:
        world.Bcast(buffers[0], 0)
        world.Reduce(buffers[0], buffers[1], root=0)
        buffers.reverse()

    def reduced_twice() -> None:
        world.Allreduce(a, b)
        world.Allreduce(b, a)

    raw = {
        "forward": {
            "allreduce": lambda: world.Allreduce(a, b),
            "sendrecv": lambda: world.Sendrecv(a, right, 0, b, left, 0),
            "bcast": lambda: world.Bcast(a, 0),
        },
        "gradient": {
            "allreduce": reduced_twice, "sendrecv": exchanged, "bcast": cast_and_reduced,
        },
    }[mode]  # fmt: skip

    def reduced_in_place() -> None:
        for _ in range(1 if mode == "forward" else 2):
            world.Allreduce(MPI.IN_PLACE, a)

    ours = {
        "allreduce": mg.allreduce,
        "sendrecv": lambda x: mg.sendrecv(x, right, left),
        "bcast": mg.bcast,
    }
    step = {op: f if mode == "forward" else both_ways(f, mg.vjp) for op, f in ours.items()}
    table: dict[str, dict[str, tuple[Callable[[], Any], int]]] = {
        op: {
            "mpi4py": (repeated(raw[op], count), count),
            "mpigrad": (
                (ahead if op == "sendrecv" else in_loop)(step[op], x, count, mg.jit),
                count,
            ),
        }
        for op in raw
    }
    table["allreduce"]["mpi4py in place"] = (repeated(reduced_in_place, count), count)
    if mpi4jax is not None:
        theirs = {
            "allreduce": lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=world),
            "sendrecv": lambda x: mpi4jax.sendrecv(x, x, left, right, comm=world),
            "bcast": lambda x: mpi4jax.bcast(x, 0, comm=world),
        }
        for op, f in theirs.items():
            if mode == "gradient" and op == "bcast":
                continue  # not differentiable
            g = f if mode == "forward" else both_ways(f, jax.vjp)
            loop = ahead if op == "sendrecv" else in_loop
            table[op]["mpi4jax"] = (loop(g, x, count, jax.jit), count)
    fewer = max(2, count // PEERS_SHORTER)
    for name, peer in peers.items():
        for op, candidates in table.items():
            task = {"operation": op, "mode": mode, "n": n, "count": fewer}
            # The first answer tells whether there is such a loop, and compiles it.
            if all(t is not None for t in world.allgather(peer.ask(**task))):
                candidates[name] = (lambda p=peer, t=task: p.ask(**t), fewer)
    return table


def dispatch() -> dict[str, tuple[Callable[[], Any], int]]:
    """One call of 8 bytes at a time: jitted, and eager."""
    x = jnp.zeros(1)
    a, b = np.zeros(1), np.zeros(1)
    jitted, plain = mg.jit(mg.allreduce), jax.jit(lambda x: x + 1)
    rows: dict[str, tuple[Callable[[], Any], int]] = {
        "mpi4py": (repeated(lambda: world.Allreduce(a, b), 1000), 1000),
        "jax.jit without messages": (repeated(lambda: plain(x).block_until_ready(), 500), 500),
        "mpigrad.jit": (repeated(lambda: jitted(x).block_until_ready(), 500), 500),
        "mpigrad eager": (repeated(lambda: mg.allreduce(x).block_until_ready(), 200), 200),
    }
    if mpi4jax is not None:
        f = lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=world)
        g = jax.jit(f)
        rows["mpi4jax under jax.jit"] = (repeated(lambda: g(x).block_until_ready(), 200), 200)
        rows["mpi4jax eager"] = (repeated(lambda: f(x).block_until_ready(), 3), 3)
    return rows


def row(label: str, times: dict[str, list[float]], base: str = "mpigrad") -> dict[str, Any]:
    ours = times[base]
    record: dict[str, Any] = {"label": label, "microseconds": {}, "ratio": {}}
    text = f"{label:27s}"
    for name, values in times.items():
        record["microseconds"][name] = statistics.median(values)
        text += f"  {name} {statistics.median(values):10.2f}"
        if name != base:
            ratios = sorted(m / t for m, t in zip(ours, values, strict=True))
            record["ratio"][name] = [ratios[0], statistics.median(ratios), ratios[-1]]
            text += f" (x{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f})"
    if world.rank == 0:
        print(text, flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shorter", type=int, default=1, help="divide the loops' lengths by this")
    parser.add_argument(
        "--peers", nargs="*", default=["torch", "shard_map", "shard_map_mpi"], help="or none"
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch")
    arguments = parser.parse_args()
    pythons = {"torch": arguments.torch_python}
    if without_wrapper := "MPITRAMPOLINE_LIB" not in os.environ:
        arguments.peers = [name for name in arguments.peers if name != "shard_map_mpi"]
    started = {name: Peer(name, pythons.get(name, sys.executable)) for name in arguments.peers}
    peers = {name: peer for name, peer in started.items() if not peer.missing}
    if world.rank == 0:
        print(
            f"{world.size} ranks, {MPI.Get_library_version().splitlines()[0].split(',')[0]}, "
            f"JAX {jax.__version__}, mpi4jax "
            f"{getattr(mpi4jax, '__version__', 'not installed')}\n"
            "microseconds per operation, medians; in brackets mpigrad's time over the other's",
            flush=True,
        )
        if without_wrapper:
            print("shard_map_mpi: left out (MPITRAMPOLINE_LIB is not set)", flush=True)
        for name, peer in started.items():
            if peer.missing:
                print(f"{name}: left out ({peer.missing})", flush=True)
    records = []
    for label in arguments.sizes:
        for mode in ("forward", "gradient"):
            candidates = loops(SIZES[label], mode, peers, arguments.shorter)
            for op, fs in candidates.items():
                title = f"{op} {label}" + (" and back" if mode == "gradient" else "")
                records.append(row(title, measure(fs, arguments.rounds)))
    calls = measure(dispatch(), arguments.rounds)
    records.append(
        row("dispatch 8 B", {k: v for k, v in calls.items() if "eager" not in k}, "mpigrad.jit")
    )
    records.append(
        row("eager 8 B", {k: v for k, v in calls.items() if "jit" not in k}, "mpigrad eager")
    )
    if arguments.json and world.rank == 0:
        with open(arguments.json, "w") as file:
            json.dump({"ranks": world.size, "python": sys.version, "rows": records}, file, indent=1)
    for peer in started.values():
        peer.end()


if __name__ == "__main__":
    main()
