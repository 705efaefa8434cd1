"""Compare stiff steps in time with PETSc's: Gray and Scott's equations on a periodic square.

    python bench/stiff.py --petsc "mpiexec -n {ranks} python3 bench/stiff_petsc.py" [--cells 512]
        [--ranks 1 2] [--rounds 3] [--output FILE]

Both take ARK4(3)6L[2]SA (`KenCarp4`, PETSc's ARKIMEX 4, all slopes implicit) with the same
tolerances, and compute the sum of squares of the last state and its gradient with respect to the
first state. PETSc solves by GMRES with block Jacobi and ILU(0), from a Jacobian written by hand.
mpigrad solves by BiCGStab: with Jacobi's preconditioner and a matrix whose pattern it has found
("matrix"), and without a matrix ("free"). The jobs take turns. Times are medians of the rounds,
after a first one. At the end both take the same fixed steps with tight solves, and the gradients
are compared. Without --petsc only mpigrad runs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

FEED, KILL, SIDE = 0.024, 0.06, 2.5
HERE = pathlib.Path(__file__).resolve()
WAYS = ("matrix", "free")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--petsc", default="", help="the command of bench/stiff_petsc.py")
    parser.add_argument("--folder", default="", help="where PETSc's job may write, if not /tmp")
    parser.add_argument("--cells", type=int, default=512)
    parser.add_argument("--end", type=float, default=20.0)
    parser.add_argument("--rtol", type=float, default=1e-4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fixed", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(a: argparse.Namespace) -> None:
    """Run on each rank: print times and statistics, or save the gradient of fixed steps."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpigrad as mg
    from mpigrad import ode, sparse

    jax.config.update("jax_enable_x64", True)
    n, h = a.cells, SIDE / a.cells
    grid = mg.Grid((n, n), (h, h), periodic=(True, True))
    i, j = (h * np.arange(s.start, s.stop) for s in grid.slices)
    y, x = np.meshgrid(i, j, indexing="ij")
    inside = (x >= 1) & (x <= 1.5) & (y >= 1) & (y <= 1.5)
    drop = np.where(inside, 0.25 * np.sin(4 * np.pi * x) ** 2 * np.sin(4 * np.pi * y) ** 2, 0)
    start = jnp.stack([1 - 2 * drop, drop], axis=-1)

    def rate(t: Any, w: Any) -> Any:
        p = mg.halo_exchange(w, grid)
        spread = (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * w) / h**2
        u, v = w[..., 0], w[..., 1]
        eaten = u * v * v
        growth = jnp.stack([FEED * (1 - u) - eaten, eaten - (FEED + KILL) * v], axis=-1)
        return jnp.array([8e-5, 4e-5]) * spread + growth

    pattern, preconditioner = None, None
    if a.worker == "matrix":
        pattern = sparse.find_pattern(lambda w: rate(0.0, w), start, grid)
        preconditioner = sparse.Jacobi()
    steps = (
        {"rtol": 1e-11, "atol": 1e-13, "linear_rtol": 1e-6, "dt0": 0.5, "adaptive": False}
        if a.fixed
        else {"rtol": a.rtol, "atol": a.rtol / 100, "dt0": 0.5}
    )
    solver = sparse.BiCGStab(rtol=1e-12 if a.fixed else 1e-5, preconditioner=preconditioner)

    def share(w: Any) -> Any:
        end = ode.integrate(
            rate, w, jnp.array([0.0, 2.0 if a.fixed else a.end]), method=ode.KenCarp4(),
            pattern=pattern, solver=solver, max_steps=32, **steps,
        )  # fmt: skip
        return jnp.sum(end.value[-1] ** 2), end.stats

    gradient = mg.jit(mg.value_and_grad(share, has_aux=True))
    if a.fixed:
        (value, _), slope = gradient(start)
        whole = grid.gather(slope)
        if whole is not None:
            np.savez(a.fixed, value=value, gradient=whole)
        return
    times: dict[str, list[float]] = {"forward": [], "gradient": []}
    stats: Any = {}
    for name, program in (("forward", mg.jit(share)), ("gradient", gradient)):
        for _ in range(a.rounds + 1):
            grid.comm.mpi.Barrier()
            begin = time.perf_counter()
            result = jax.block_until_ready(program(start))
            grid.comm.mpi.Barrier()
            times[name].append(time.perf_counter() - begin)
        if name == "forward":
            stats = result[1]
    if grid.comm.rank == 0:
        numbers = {name: float(number) for name, number in stats.items()}
        print(json.dumps({"times": {k: v[1:] for k, v in times.items()}, **numbers}))


def run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def main() -> None:
    a = arguments()
    if a.worker:
        work(a)
        return
    common = ["--cells", str(a.cells), "--end", str(a.end), "--rtol", str(a.rtol)]
    record: dict[str, Any] = {}
    print(f"{a.cells} x {a.cells} cells, to t = {a.end}, rtol = {a.rtol}")
    for ranks in a.ranks:
        launch = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), str(HERE)]
        jobs = {way: [*launch, "--worker", way, "--rounds", str(a.rounds), *common] for way in WAYS}
        petsc = shlex.split(a.petsc.format(ranks=ranks))
        if petsc:
            more = ["--atol", str(a.rtol / 100), "--repeats", str(a.rounds + 1)]
            jobs["PETSc"] = [*petsc, *common, *more]
        results = {name: run(command) for name, command in jobs.items()}
        for name, result in results.items():
            times = result["times"]
            if name == "PETSc":
                times = {what: seconds[1:] for what, seconds in times.items()}
            medians = {what: statistics.median(seconds) for what, seconds in times.items()}
            record[f"{name}, {ranks}"] = {**result, "medians": medians}
            text = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in medians.items())
            print(f"{ranks} ranks, {name}: {text}")
            if petsc and name != "PETSc":
                others = results["PETSc"]["times"]
                ratios = [medians[k] / statistics.median(others[k][1:]) for k in medians]
                print("    of PETSc: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))
    if a.petsc:
        print(f"largest difference of the gradients: {difference(a):.1e} of the largest entry")
    if a.output:
        pathlib.Path(a.output).write_text(json.dumps(record, indent=1))


def difference(a: argparse.Namespace) -> float:
    """Return the difference of the gradients of the same fixed steps on 64 x 64 cells."""
    import numpy as np

    with tempfile.TemporaryDirectory(dir=a.folder or None) as folder:
        ours, theirs = (pathlib.Path(folder) / name for name in ("ours.npz", "theirs.npz"))
        launch = [sys.executable, "-m", "mpigrad", "launch", "-n", "2", str(HERE)]
        run([*launch, "--worker", "matrix", "--cells", "64", "--fixed", str(ours)])
        shown = "/" + str(theirs.relative_to(a.folder)) if a.folder else str(theirs)
        petsc = shlex.split(a.petsc.format(ranks=2))
        more = ["--cells", "64", "--end", "2", "--fixed", "--repeats", "1", "--out", shown]
        run([*petsc, *more])
        one, other = (np.load(file)["gradient"] for file in (ours, theirs))
    return float(np.max(np.abs(one - other)) / np.max(np.abs(other)))


if __name__ == "__main__":
    main()
