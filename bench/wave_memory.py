"""Time against memory of the gradient of waves, for each thing that it can keep of the forward run.

    python bench/wave_memory.py [--physics acoustic elastic] [--axes 2] [--cells 1000]
        [--steps 2000] [--keep all memory boundary 60 bfloat16 float16 file file-float16]
        [--budget 3e9] [--ranks 1] [--repeats 2] [--directory DIR]

Each choice is a process of its own (`mpigrad launch`): "all" keeps the history of every step,
"memory" what fits into BUDGET bytes of each rank, a number k one state every k steps, "boundary"
the layers and the cells beside them. "bfloat16" and "float16" keep what fits into BUDGET bytes in
this precision, "file" keeps the history of every step in files of DIR (default: the directory for
temporary files), "file-k" one state every k steps. Printed are the memory that a gradient has
taken at its peak, beside what the forward run takes (the largest of all ranks, by the kernel's
count), and the shortest of some runs. The case is that of bench/wave_programs.py, float32. The last
columns compare the gradients with the first choice's: the norm of the difference by its norm, and 1
minus the cosine, each the largest of all parameters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import wave_programs as case

HERE = __file__
FIELDS = {"acoustic": 1, "elastic": 2.2}  # that the history of a step has


def measure(o: argparse.Namespace) -> None:
    """On ranks: one choice; rank 0 writes what it has found."""
    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    import mpigrad
    from mpigrad.grid import Grid
    from mpigrad.waves import ElasticMedium, Storage, Survey
    from mpigrad.waves.acoustic import Acoustic
    from mpigrad.waves.elastic import Elastic, lame

    (physics,), (keep,) = o.physics, o.keep
    shape, spacing = (o.cells,) * o.axes, (case.SPACING,) * o.axes
    grid = Grid(shape, spacing, dims=(o.ranks, *(1,) * (o.axes - 1)))
    comm = grid.comm
    common: dict[str, Any] = {"dt": case.DT, "steps": o.steps, "pml": case.PML[o.axes]}
    if keep in ("all", "boundary") or keep.isdigit():
        common["storage"] = Storage(int(keep) if keep.isdigit() else keep)  # type: ignore[arg-type]
    if keep == "memory":
        common["storage"] = Storage(memory=int(o.budget))
    place, _, precision = keep.rpartition("-")
    if precision.isdigit() and place:  # states in files
        common["storage"] = Storage(int(precision), directory=o.directory)
    elif keep == "file" or place:
        common["storage"] = Storage(
            precision=precision if place else None,  # type: ignore[arg-type]
            directory=o.directory,
        )
    elif keep in ("bfloat16", "float16"):
        common["storage"] = Storage(memory=int(o.budget), precision=keep)  # type: ignore[arg-type]
    vp = case.random_model(grid.shape)[grid.slices]
    source, height = case.source_cell(shape), 1.0
    receivers = [(i, *source[1:-1], source[-1] - o.cells // 5) for i in range(1, o.cells - 1)]
    shift = (0.5 if physics == "acoustic" else 1.0, *(0.5,) * (o.axes - 1))
    survey = Survey(*((np.array([p]) + shift) * case.SPACING for p in ([source], receivers)))
    if physics == "acoustic":
        model: Any = Acoustic(grid, max_velocity=case.FASTEST, **common)
        values: Any = (jnp.asarray(vp),)
    else:
        height = case.FORCE * case.SPACING**o.axes
        model = Elastic(
            grid, frequency=case.FREQUENCY, source="force_x", components=("vx",), **common
        )
        moduli = lame(vp, case.shear(vp), case.density(vp))
        values = tuple(map(jnp.asarray, (*moduli, case.density(vp))))
    wavelets = height * jnp.asarray(case.ricker(o.steps))[None, None]

    def loss(parameters: Any) -> Any:
        medium = parameters[0] if physics == "acoustic" else ElasticMedium(*parameters)
        share = model.propagate(medium, wavelets, survey, gathers="share").gathers
        return jnp.sum(share**2)

    forward, gradient = mpigrad.jit(loss), mpigrad.jit(mpigrad.grad(loss))

    def peak() -> float:
        with open("/proc/self/status") as lines:
            (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return comm.mpi.allreduce(int(kilobytes) * 1024 / 1e9, op=MPI.MAX)

    def seconds(f: Callable[[Any], Any], times: int) -> tuple[float, Any]:
        best, result = float("inf"), None
        for _ in range(times):
            comm.mpi.Barrier()
            begun = time.perf_counter()
            result = jax.block_until_ready(f(values))
            best = min(best, comm.mpi.allreduce(time.perf_counter() - begun, op=MPI.MAX))
        return best, result

    plain, _ = seconds(forward, o.repeats)
    before = peak()
    spent, slopes = seconds(gradient, o.repeats)
    taken = peak() - before
    whole = [grid.gather(s) for s in slopes]
    if comm.rank == 0:
        np.savez(o.output, *whole)
        print(json.dumps({"forward": plain, "gradient": spent, "memory": taken}))


def available() -> float:
    """Gigabytes that this machine has to spare."""
    with open("/proc/meminfo") as lines:
        found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024 / 1e9


def compare(o: argparse.Namespace) -> None:
    """All choices in turn, as a table."""
    print(
        f"{o.cells}{'²³'[o.axes - 2]} cells, {o.steps} steps, float32, {o.ranks} ranks\n\n"
        "| | kept | memory, GB a rank | gradient, s | by forward | relative error | 1 - cosine |\n"
        "|---|---|---|---|---|---|---|"
    )
    for physics in o.physics:
        first: list[np.ndarray] = []
        for keep in o.keep:
            whole = FIELDS[physics] * o.steps * (o.cells + 2 * case.PML[o.axes]) ** o.axes * 4 / 1e9
            if keep == "all" and whole > available() / 2:
                print(
                    f"| {physics} | {keep} | {whole:.0f}: more than there is | | | | |", flush=True
                )
                continue
            with tempfile.NamedTemporaryFile(suffix=".npz") as file:
                words = [sys.executable, "-m", "mpigrad", "launch", "-n", str(o.ranks)]
                words += ["--timeout", "3000", HERE, "--on-ranks", "--output", file.name]
                words += ["--physics", physics, "--keep", keep, "--cells", str(o.cells)]
                words += ["--steps", str(o.steps), "--budget", str(o.budget)]
                words += ["--ranks", str(o.ranks), "--repeats", str(o.repeats)]
                words += ["--axes", str(o.axes), "--directory", o.directory]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
                if done.returncode:
                    print(f"| {physics} | {keep} | ended with code {done.returncode} | | | | |")
                    continue
                found = json.loads(done.stdout.splitlines()[-1])
                slopes = list(np.load(file.name).values())
            first = first or slopes
            pairs = [(a.astype(float), b.astype(float)) for a, b in zip(slopes, first, strict=True)]
            norm = np.linalg.norm
            apart = max(norm(a - b) / norm(b) for a, b in pairs)
            turned = max(1 - np.vdot(a, b) / norm(a) / norm(b) for a, b in pairs)
            ratio = found["gradient"] / found["forward"]
            print(
                f"| {physics} | {keep} | {found['memory']:.2f} | {found['gradient']:.1f} "
                f"| {ratio:.1f} | {apart:.0e} | {turned:.0e} |",
                flush=True,
            )


def main() -> None:
    """Measure on ranks, or start what does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--physics", nargs="+", default=["acoustic", "elastic"])
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    choices = ["all", "memory", "boundary", "60", "bfloat16", "float16", "file", "file-float16"]
    parser.add_argument("--keep", nargs="+", default=choices)
    parser.add_argument("--axes", type=int, choices=(2, 3), default=2)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--budget", type=float, default=3e9)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    o = parser.parse_args()
    (measure if o.on_ranks else compare)(o)


if __name__ == "__main__":
    main()
