"""Acoustic and elastic waves beside deepwave and devito, on one and two cores: one run, one table.

    python bench/waves.py [--peer-python PYTHON] [--parts acoustic elastic ...] [--rounds 9]
        [--cells 1000] [--elastic-cells 500] [--steps 100] [--before SRC] [--output FILE]

deepwave and devito are measured where PYTHON has them: a virtual environment with
`pip install torch deepwave devito scipy matplotlib pytest` (devito's examples import the last
three; the CPU build of torch is enough) and a C compiler. All programs of a part run at the same
time and are asked in turn, so that a slow phase of the machine meets all of them; the one that
waits sleeps. Printed and written are medians over the rounds, of the seconds and of the ratios
within each round, with quartiles.

Parts:

    stream      the bandwidth of memory (bench/stream.c), and what bounds the kernels by it
    acoustic    forward, and forward with gradient: 1 rank, 2 ranks, 1 rank x 2 threads; peers with
                1 and 2 threads
    acoustic3d  the same on three axes beside devito
    elastic     the same beside deepwave, gradient in lambda, mu and rho
    elastic3d   the same on three axes beside deepwave, devito (forward only) and the JAX program of
                mpigrad
    scaling     acoustic, 1 and 2 ranks by themselves: the same cells, and twice as many; the median
                of three calls in each turn
    scaling3d   the same on three axes
    halo        2 ranks with and without their neighbour: the same tiles, kernels and cores, on one
                grid or on a grid each
    halo3d      the same on three axes
    similarity  cosine of the gradients of mpigrad and deepwave, on a homogeneous model with an
                anomaly
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import interleave

HERE = pathlib.Path(__file__).resolve().parent
CALLS = 3  # of a program in its turn, where one number of ranks is compared with another
PARTS = (
    "stream", "acoustic", "acoustic3d", "elastic", "elastic3d", "scaling", "scaling3d", "halo",
    "halo3d", "similarity",
)  # fmt: skip
PML = {2: 20, 3: 10}  # by the number of axes, as the next one
POWERS = {2: "²", 3: "³"}
# Bytes that a step moves for each point at least, in float32. Acoustic: both fields, one of which
# is replaced, and the velocity; for a gradient also one value written to the history and read
# again, the same three in the adjoint and the gradient itself, twice. Elastic: five fields that are
# replaced and read again by the other half of the step, three parameters; the velocities that a
# gradient's run writes are its history, which is read again, and there are three gradients. Elastic
# on three axes: nine fields that are replaced, and eight parameters. The adjoint adds three
# velocities of the history and eight gradients, which are replaced.
BYTES = {
    ("acoustic", "forward"): 16,
    ("acoustic", "gradient"): 16 + 4 + 16 + 4 + 8,
    ("elastic", "forward"): 72,
    ("elastic", "gradient"): 72 + 72 + 8 + 24,
    ("elastic3d", "forward"): 104,
    ("elastic3d", "gradient"): 104 + 104 + 12 + 64,
}
BYTES |= {
    ("acoustic3d", command): BYTES["acoustic", command] for command in ("forward", "gradient")
}
AIMS = {
    "acoustic forward mpigrad 1 rank / deepwave": 0.6,
    "acoustic forward mpigrad 1 rank / devito": 1.1,
    "acoustic gradient mpigrad 1 rank / deepwave": 0.27,
    "acoustic gradient mpigrad 1 rank / devito": 1.0,
    "acoustic3d forward mpigrad 1 rank / devito": 0.75,
    "acoustic3d gradient mpigrad 1 rank / devito": 0.75,
    "acoustic3d forward mpigrad 2 ranks / devito 2 threads": 0.75,
    "acoustic3d gradient mpigrad 2 ranks / devito 2 threads": 0.75,
    "acoustic gradient mpigrad 2 ranks / deepwave 2 threads": 0.25,
    "acoustic gradient mpigrad 2 ranks / devito 2 threads": 0.8,
    "elastic gradient mpigrad 1 rank / deepwave": 0.35,
    "elastic3d forward mpigrad 1 rank / devito": 0.8,
}


class Missing(Exception):
    """A library that cannot be measured, and why."""


@dataclass(frozen=True)
class Entrant:
    """A program to be measured."""

    name: str
    library: str
    ranks: int = 1
    threads: int = 1
    path: str = ""  # where mpigrad is imported from, if not from here
    backend: str = ""  # of mpigrad's waves, if not the default


class Program:
    """A running bench/wave_programs.py."""

    def __init__(self, entrant: Entrant, python: str, options: list[str]) -> None:
        words = [python, str(HERE / "wave_programs.py"), entrant.library, *options]
        words += ["--threads", str(entrant.threads)]
        is_ours = entrant.library == "mpigrad"
        environment = {"OMP_NUM_THREADS": str(entrant.threads)}
        if not is_ours or entrant.path:
            environment["PYTHONPATH"] = entrant.path
        if is_ours and entrant.threads > 1:
            environment["OMPI_MCA_hwloc_base_binding_policy"] = "none"  # more than a core
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
        self.program = interleave.Program(
            words, entrant.ranks if is_ours else None, environment, self.log
        )
        try:
            self._checked(self.program.answer)
        except BaseException:
            self.end()
            raise

    def _checked(self, answer: Callable[[], str]) -> dict[str, Any]:
        try:
            said = json.loads(answer())
        except interleave.Ended as end:
            self.log.seek(0)
            last = [text for text in self.log.read().splitlines() if text.strip()][-3:]
            raise Missing("it ended: " + " | ".join(last)) from end
        if "missing" in said:
            raise Missing(said["missing"])
        return said  # type: ignore[no-any-return]

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command, and wait for its answer."""
        return self._checked(lambda: self.program.ask(command))

    def end(self) -> None:
        """Let it end; it has no other choice."""
        self.program.end()


class Bench:
    """The options of a run, and what it has found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: list[dict[str, Any]] = []

    def start(
        self, entrants: list[Entrant], physics: str, cells: tuple[int, ...], *more: str
    ) -> dict[str, Program]:
        """The programs that can be started."""
        o = self.options
        found: dict[str, Program] = {}
        for entrant in entrants:
            python = sys.executable if entrant.library == "mpigrad" else o.peer_python
            if python is None:
                print(f"  without {entrant.name}: no --peer-python", flush=True)
                continue
            words = ["--physics", physics, "--cells", *map(str, cells), *more]
            backend = entrant.backend or o.backend
            words += ["--backend", backend] if backend and entrant.library == "mpigrad" else []
            try:
                found[entrant.name] = Program(entrant, python, words)
            except Missing as why:
                print(f"  without {entrant.name}: {why}", flush=True)
        return found

    def measure(self, programs: dict[str, Program], commands: list[str]) -> dict[str, Any]:
        """Seconds of all rounds: {command: {name: [seconds]}}; who goes first rotates."""
        seconds: dict[str, dict[str, list[float]]] = {}
        for command in commands:
            taken: dict[str, list[float]] = {name: [] for name in programs}
            values: dict[str, float] = {}
            for k in range(self.options.rounds + 1):  # the first one compiles and warms up
                names = list(taken)
                for name in names[k % len(names) :] + names[: k % len(names)] if names else []:
                    try:
                        answer = programs[name].ask(command)
                    except (Missing, OSError) as why:
                        print(f"  {command} without {name}: {why}", flush=True)
                        del taken[name]
                        continue
                    values[name] = answer["value"]
                    if k:
                        taken[name].append(answer["seconds"])
            self._compare_values(command, values)
            seconds[command] = taken
        return seconds

    def _compare_values(self, command: str, values: dict[str, float]) -> None:
        """Programs of one library should have computed the same."""
        by_library: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            by_library.setdefault(name.split()[0], {})[name] = value
        for group in by_library.values():
            low, high = min(group.values()), max(group.values())
            if not high - low <= 1e-3 * abs(high):
                print(f"  {command}: DIFFERENT RESULTS: {group}", flush=True)
                self.note(f"{command}: different results", values=group)

    def compare(
        self, title: str, ours: list[float], theirs: list[float], inverse: bool = False
    ) -> None:
        """Note and print the ratio of two programs in the same rounds."""
        if not ours or not theirs:
            return
        ratios = [b / a if inverse else a / b for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = quartiles(ratios)
        aim = AIMS.get(title)
        self.results.append(
            {"what": title, "ratio": middle, "quartiles": [low, high], "aim": aim,
             "seconds": [ours, theirs]}
        )  # fmt: skip
        asked = f"   aim {aim}" if aim else ""
        print(f"  {title:56s} {middle:6.3f}  ({low:.3f} to {high:.3f}){asked}", flush=True)

    def note(self, what: str, **values: Any) -> None:
        """Note a result that is no ratio."""
        self.results.append({"what": what, **values})


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


# --- the parts ---


def physics_part(
    bench: Bench, physics: str, n: int, triad: dict[int, float], axes: int = 2
) -> None:
    """Forward and gradient of all programs."""
    title = physics if axes == 2 else f"{physics}{axes}d"
    entrants = [
        Entrant("mpigrad 1 rank", "mpigrad"),
        Entrant("mpigrad 2 ranks", "mpigrad", ranks=2),
        Entrant("mpigrad 1 rank x 2 threads", "mpigrad", threads=2),
    ]
    peers = {"acoustic3d": ["devito"], "elastic": ["deepwave"]}.get(title, ["deepwave", "devito"])
    for library in peers:
        entrants += [Entrant(library, library), Entrant(f"{library} 2 threads", library, 1, 2)]
    if title == "elastic3d":
        entrants.append(Entrant("mpigrad 1 rank xla", "mpigrad", backend="xla"))
    if bench.options.before:
        before = {"library": "mpigrad", "path": bench.options.before}
        entrants += [Entrant("mpigrad 1 rank before", **before)]
        entrants += [Entrant("mpigrad 2 ranks before", ranks=2, **before)]
    steps = bench.options.steps
    print(f"{physics}, {n}{POWERS[axes]}, {steps} steps")
    programs = bench.start(entrants, physics, (n,) * axes, "--steps", str(steps))
    try:
        seconds = bench.measure(programs, ["forward", "gradient"])
    finally:
        for program in programs.values():
            program.end()
    points = (n + 2 * PML[axes]) ** axes * steps
    for command, taken in seconds.items():
        for name, times in taken.items():
            median = statistics.median(times)
            bound = triad.get(2 if "2" in name else 1)
            share = BYTES[title, command] * points / (bound * 1e9) / median if bound else None
            ours = f"   {share:.2f} of the STREAM bound" if share and "mpigrad" in name else ""
            print(
                f"  {command:8s} {name:28s} {median:8.3f} s {median / points * 1e9:7.3f} ns per "
                f"point and step{ours}",
                flush=True,
            )
            bench.note(
                f"{title} {command} {name}", seconds=times, nanoseconds=median / points * 1e9,
                stream_share=share,
            )  # fmt: skip
    for command, taken in seconds.items():
        pairs = [("mpigrad 1 rank", peer) for peer in peers]
        for name in ("mpigrad 2 ranks", "mpigrad 1 rank x 2 threads"):
            pairs += [(name, f"{peer} 2 threads") for peer in peers]
        pairs.append(("mpigrad 1 rank x 2 threads", "mpigrad 2 ranks"))
        pairs.append(("mpigrad 1 rank", "mpigrad 1 rank xla"))
        pairs += [
            (f"mpigrad {ranks}", f"mpigrad {ranks} before") for ranks in ("1 rank", "2 ranks")
        ]
        for ours, theirs in pairs:
            both = taken.get(ours, []), taken.get(theirs, [])
            bench.compare(f"{title} {command} {ours} / {theirs}", *both)
        bench.compare(
            f"{title} {command} speed-up on 2 ranks",
            taken.get("mpigrad 2 ranks", []), taken.get("mpigrad 1 rank", []), inverse=True,
        )  # fmt: skip


def scaling_part(bench: Bench, n: int, axes: int = 2) -> None:
    """The same cells, and twice as many, on twice the ranks."""
    steps = ["--steps", str(bench.options.steps)]
    cells, other = f"{n}{POWERS[axes]}", (n,) * (axes - 1)
    print(f"from 1 to 2 ranks, {cells}, and {cells} a rank")
    one = Entrant("mpigrad 1 rank", "mpigrad")
    two = Entrant("mpigrad 2 ranks", "mpigrad", ranks=2)
    twice = Entrant("mpigrad 2 ranks, twice the cells", "mpigrad", ranks=2)
    programs = bench.start([one, two], "acoustic", (n, *other), *steps)
    programs |= bench.start([twice], "acoustic", (2 * n, *other), *steps)
    try:
        for command in ("forward", "gradient"):
            seconds = {name: [] for name in programs}
            for k in range(2 * bench.options.rounds + 1):
                for name in list(programs)[:: 1 - 2 * (k % 2)]:
                    # In a row, as in an inversion: the first finds the caches full of another's.
                    calls = [programs[name].ask(command)["seconds"] for _ in range(CALLS)]
                    if k:
                        seconds[name].append(statistics.median(calls))
            alone, together, larger = seconds.values()
            bench.compare(
                f"acoustic {cells} {command} speed-up from 1 to 2 ranks",
                together,
                alone,
                inverse=True,
            )
            # Tiles at the end of a row have layers on one side less.
            per_rank = (n + PML[axes]) / (n + 2 * PML[axes])
            bench.compare(
                f"weak efficiency {cells} {command}, per point with layers",
                larger, [t * per_rank for t in alone], inverse=True,
            )  # fmt: skip
    finally:
        for program in programs.values():
            program.end()


def halo_part(bench: Bench, n: int, axes: int = 2) -> None:
    """The same tiles with and without a neighbour."""
    cells, aim = f"{n}{POWERS[axes]}", {2: "5 %", 3: "6 %"}[axes]
    print(f"halo exchange, {cells} cells a rank")
    words = ["--steps", str(bench.options.steps), "--apart"]
    for physics in ("acoustic", "elastic"):
        entrant = [Entrant("mpigrad 2 ranks", "mpigrad", ranks=2)]
        programs = bench.start(entrant, physics, (2 * n, *(n,) * (axes - 1)), *words)
        try:
            for program in programs.values():
                for command in ("forward", "gradient"):
                    times: dict[str, list[float]] = {command: [], f"{command}-apart": []}
                    for k in range(bench.options.rounds + 1):
                        for which in list(times)[:: 1 - 2 * (k % 2)]:
                            answer = program.ask(which)
                            if k:
                                times[which].append(answer["seconds"])
                    together, apart = times.values()
                    shares = [1 - b / a for a, b in zip(together, apart, strict=True)]
                    low, middle, high = quartiles(shares)
                    title = f"{physics} {cells} {command}: share of the halo exchange"
                    print(f"  {title:56s} {middle:6.1%}  ({low:.1%} to {high:.1%})   aim {aim}")
                    bench.note(title, share=middle, quartiles=[low, high], seconds=times)
        finally:
            for program in programs.values():
                program.end()


def similarity_part(bench: Bench, n: int) -> None:
    """Gradients of the same misfit."""
    import numpy as np

    steps = 5 * n  # across the model and back
    print(f"cosine similarity of gradients with deepwave's, {n}², {steps} steps")
    entrants = [Entrant("mpigrad 2 ranks", "mpigrad", ranks=2), Entrant("deepwave", "deepwave")]
    with tempfile.TemporaryDirectory() as directory:
        for physics in ("acoustic", "elastic"):
            programs = bench.start(entrants, physics, (n, n), "--steps", str(steps))
            try:
                if len(programs) < 2:
                    continue
                found = []
                for k, program in enumerate(programs.values()):
                    path = pathlib.Path(directory) / f"{physics}{k}.npz"
                    program.ask(f"similarity {path}")
                    found.append(dict(np.load(path)))
            finally:
                for program in programs.values():
                    program.end()
            names = ["velocity"] if physics == "acoustic" else ["lambda", "mu", "rho"]
            labels = {"data": "gather"} | {f"arr_{k}": name for k, name in enumerate(names)}
            for key, label in labels.items():
                a, b = (f[key].astype(np.float64) for f in found)
                if key != "data":  # within the layers' reach the two schemes differ
                    a, b = (g[4:-4, 4:-4] for g in (a, b))
                cosine = float(np.sum(a * b) / np.sqrt(np.sum(a**2) * np.sum(b**2)))
                print(f"  {physics} {label:10s} {cosine:9.6f}", flush=True)
                bench.note(f"{physics} similarity {label}", cosine=cosine)


def stream_part(bench: Bench) -> dict[int, float]:
    """10^9 bytes per second of 1 and 2 threads, in arrays larger than the caches."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("  without STREAM: no C compiler")
        return {}
    triad: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        program = str(pathlib.Path(directory) / "stream")
        flags = ["-O3", "-march=native", "-fopenmp"]
        subprocess.run([compiler, *flags, str(HERE / "stream.c"), "-o", program], check=True)
        large = bench.options.stream
        for threads in (1, 2):
            lines = subprocess.run(
                [program, "12", str(large)],
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                check=True, capture_output=True, text=True,
            ).stdout.splitlines()  # fmt: skip
            for line in lines:
                size, speed = map(float, line.split())
                print(f"  STREAM triad, {threads} threads, {size:5g} MB: {speed:6.1f} GB/s")
                bench.note(f"triad {threads} threads {size:g} MB", gigabytes_per_second=speed)
                triad[threads] = speed  # of the last size, the large one
    return triad


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peer-python", help="the Python that has deepwave and devito")
    parser.add_argument("--cells", type=int, default=1000, help="acoustic, per side")
    parser.add_argument("--volume-cells", type=int, default=160, help="acoustic3d, per side")
    parser.add_argument("--elastic-cells", type=int, default=500, help="per side")
    parser.add_argument("--elastic-volume-cells", type=int, default=120, help="per side")
    parser.add_argument("--rank-cells", type=int, default=500, help="per side and rank, for halo")
    parser.add_argument("--rank-volume-cells", type=int, default=100, help="the same for halo3d")
    parser.add_argument("--similarity-cells", type=int, default=120, help="per side")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stream", type=float, default=768, help="10^6 bytes of STREAM's arrays")
    parser.add_argument("--backend", choices=["native", "xla"], help="of mpigrad's waves")
    parser.add_argument("--before", help="src of another checkout, whose mpigrad is measured too")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "waves.json")
    options = parser.parse_args()
    bench = Bench(options)
    print("machine:", shlex.join(os.uname()[:3]), f"{os.cpu_count()} cores", flush=True)
    triad = stream_part(bench) if "stream" in options.parts else {}
    parts = {
        "acoustic": lambda: physics_part(bench, "acoustic", options.cells, triad),
        "acoustic3d": lambda: physics_part(bench, "acoustic", options.volume_cells, triad, 3),
        "elastic": lambda: physics_part(bench, "elastic", options.elastic_cells, triad),
        "elastic3d": lambda: physics_part(bench, "elastic", options.elastic_volume_cells, triad, 3),
        "scaling": lambda: scaling_part(bench, options.cells),
        "scaling3d": lambda: scaling_part(bench, options.volume_cells, 3),
        "halo": lambda: halo_part(bench, options.rank_cells),
        "halo3d": lambda: halo_part(bench, options.rank_volume_cells, 3),
        "similarity": lambda: similarity_part(bench, options.similarity_cells),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        if name in options.parts:
            part()
            # After each part: a long run that ends early leaves what it has found.
            options.output.write_text(json.dumps(bench.results, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
