"""The population problem: mpigrad on 1 and 2 ranks, and plain blackjax on one process.

    python bench/population.py [--patients 100] [--chains 4] [--warmup 200] [--draws 200]
        [--ranks 1 2] [--output FILE]

The same patients, the same model, the same sampler from around the same mode. "plain": all patients
in one jitted vmap of one process, no message. A "gradient" is the log density of all unknowns and
its gradient; ESS: bulk effective sample size of the worst of the eleven numbers that all share.
Runs come one after the other; each prints its row when it is done.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve()


def plain_likelihood(model: Any, records: Any) -> Callable[..., Any]:
    """The sum over patients without mpigrad: those of one shape in one vmap."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    groups: dict[Any, list[int]] = {}
    for place, record in enumerate(records):
        groups.setdefault(tuple(np.shape(leaf) for leaf in record), []).append(place)
    each = jax.vmap(model.log_likelihood, in_axes=(None, 0, 0))
    stacked = [
        (
            np.array(places),
            jax.tree.map(lambda *leaves: np.stack(leaves), *(records[i] for i in places)),
        )
        for places in groups.values()
    ]

    def likelihood(shared: Any, effects: Any) -> Any:
        return sum(jnp.sum(each(shared, effects[places], group)) for places, group in stacked)

    return likelihood


def measure(
    options: argparse.Namespace, likelihood: Callable[..., Any], model: Any
) -> dict[str, Any]:
    """Time of a gradient, and draws of all chains; the figures of one row."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpigrad
    from mpigrad import optimize
    from mpigrad_apps.population import NUTS, log_density, summarize

    density = log_density(model, likelihood)
    start = model.prior.start(options.patients)
    gradient = mpigrad.jit(jax.value_and_grad(density))
    jax.block_until_ready(gradient(start))
    times = []
    for turn in range(options.turns):
        moved = jax.tree.map(lambda leaf: leaf + 1e-3 * turn, start)  # noqa: B023
        begun = time.perf_counter()
        jax.block_until_ready(gradient(moved))
        times.append(time.perf_counter() - begun)
    row: dict[str, Any] = {"gradient": statistics.median(times)}
    if options.draws:
        generator = np.random.default_rng(0)

        def around(leaf: Any) -> Any:
            return leaf + 0.1 * jnp.asarray(generator.normal(size=(options.chains, *leaf.shape)))

        # Far from the mode trajectories run into patients whose kinetics take thousands of steps.
        mode = optimize.minimize(
            lambda unknowns: -density(unknowns),
            start,
            replicated=True,
            loss="replicated",
            rtol=1e-4,
        )
        starts = jax.tree.map(around, mode.value)
        drawn = NUTS(options.warmup, options.draws).sample(
            density, starts, seed=0, scales=model.prior.scales(options.patients)
        )
        assert drawn is not None
        sizes = [known.ess for known in summarize(drawn.unknowns.shared).values()]
        row |= {
            "seconds": drawn.seconds,
            "warm-up": drawn.warmup_seconds,
            "steps": int(np.sum(drawn.steps)),
            "ESS": min(sizes),
            "ESS/s": min(sizes) / drawn.seconds,
            "divergent": int(np.sum(drawn.divergent)),
        }
    return row


def serve(options: argparse.Namespace) -> None:
    """One row: in this process alone, or as one of several ranks; rank 0 prints it as JSON."""
    import jax

    from mpigrad import jobs
    from mpigrad_apps.population import Kinetics, Model, put_patients, simulate

    jax.config.update("jax_enable_x64", True)
    model = Model(Kinetics(rtol=1e-5))
    cohort, _ = simulate(options.patients, 0, model.kinetics)
    if options.serve == "plain":
        print(json.dumps(measure(options, plain_likelihood(model, cohort.records), model)))
        return
    with jobs.pool(throw=False) as pool:  # a failed integration is a divergence
        data = put_patients(pool, cohort)
        row = measure(options, pool.sum(model.log_likelihood, data), model)
        if pool.comm.rank == 0:
            print(json.dumps(row))


def main() -> None:
    """Run each case in processes of its own, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patients", type=int, default=100)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--draws", type=int, default=200, help="0: gradients alone")
    parser.add_argument("--turns", type=int, default=30, help="gradients that are timed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--serve", choices=["plain", "pool"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    same = [
        f"--{name}={getattr(options, name)}"
        for name in ("patients", "chains", "warmup", "draws", "turns")
    ]
    launch = [sys.executable, "-m", "mpigrad", "launch", "-n"]
    cases = {"plain, 1 process": [sys.executable, str(HERE), "--serve=plain", *same]}
    for ranks in options.ranks:
        cases[f"mpigrad, {ranks} rank{'s' * (ranks > 1)}"] = [
            *launch, str(ranks), str(HERE), "--serve=pool", *same,
        ]  # fmt: skip
    rows = {}
    print(f"{'':18} gradient (ms)  draws (s)  gradients   ESS  ESS/s  divergent")
    for name, command in cases.items():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        row = rows[name] = json.loads(done.stdout.splitlines()[-1])
        text = f"{name:18} {1e3 * row['gradient']:13.2f}"
        if options.draws:
            text += (
                f"  {row['seconds']:9.1f}  {row['steps']:9d}  {row['ESS']:4.0f}  "
                f"{row['ESS/s']:5.2f}  {row['divergent']:9d}"
            )
        print(text, flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
