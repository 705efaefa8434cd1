"""Every operation on a GPU beside the CPU: value, gradient and second derivative, in float64.

    mpigrad launch -n RANKS tests/gpu/operations.py [--seconds 40]

The program with messages runs on JAX's default device. The same map on the stack of the operands of
all ranks, without messages, runs on the CPU (tests/helpers.py). Rank 0 prints a line of JSON for
each operation with the largest relative error of all ranks. After `--seconds` no operation begins.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from helpers import CASES, Case, operand

jax.config.update("jax_enable_x64", True)

# First those on which programs depend most; the others follow in the order of the table.
FIRST = (
    *("allreduce", "sendrecv ring with tags", "neighbor_alltoallv", "bcast", "allgather"),
    *("send and recv", "isend and irecv", "alltoallv", "reduce", "gather", "scatter"),
    *("allreduce not of sums", "scan", "reduce_scatter", "recv from anyone"),
    *("one_sided put and get", "gatherv", "scatterv", "allgatherv", "alltoall", "exscan"),
)


def error(got: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest number of the expected array."""
    a, b = np.asarray(got), np.asarray(expected)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(np.max(np.abs(a - b), initial=0) / max(1.0, float(np.max(np.abs(b), initial=0))))


def errors(case: Case, comm: mg.Communicator, cpu: Any) -> list[float]:
    """Return the errors of the value, the gradient and a Hessian-vector product."""
    with jax.default_device(cpu):
        stack = np.asarray(operand(case, comm)[1])
        direction = np.random.default_rng(3).standard_normal(stack.shape)
        simulated = lambda X: jnp.cos(case.simulate(jnp.sin(X)))
        total = lambda X: jnp.sum(simulated(X) ** 3)

        @jax.jit
        def reference(X: Any, V: Any) -> Any:
            return simulated(X), *jax.jvp(jax.grad(total), (X,), (V,))

        expected = [np.asarray(a[comm.rank]) for a in reference(stack, direction)]

    program = lambda x: jnp.cos(case.run(jnp.sin(x), comm))
    loss = lambda x: jnp.sum(program(x) ** 3)

    @mg.jit
    def derivatives(x: Any, v: Any) -> Any:
        return program(x), *mg.jvp(mg.grad(loss), (x,), (v,))

    x, v = (jnp.asarray(a[comm.rank]) for a in (stack, direction))
    got = derivatives(x, v)
    return [error(a, b) for a, b in zip(got, expected, strict=True)]


def main() -> None:
    """Go through the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--cases", type=int, default=len(CASES), help="at most")
    o = parser.parse_args()
    comm, cpu = mg.default_communicator(), jax.devices("cpu")[0]
    rest = [n for n in CASES if not CASES[n].full]
    rest.sort(key=lambda n: "custom" in n)  # last: its Python code runs inside a program
    names = dict.fromkeys([*(n for n in FIRST if n in CASES), *rest])
    start = time.perf_counter()
    for name in list(names)[: o.cases]:
        late = comm.mpi.bcast(time.perf_counter() - start > o.seconds)
        if late:
            break
        begin = time.perf_counter()
        text = ""
        try:
            found = errors(CASES[name], comm, cpu)
        except Exception as failed:  # the other operations are tried all the same
            found, text = [float("inf")] * 3, f"rank {comm.rank}: {failed}"[:600]
        ranks = comm.mpi.allgather((found, text))
        if comm.rank == 0:
            worst = np.max([row for row, _ in ranks], axis=0)
            about = {"case": name, "ranks": comm.size, "platform": jax.default_backend()}
            about |= dict(zip(("value", "gradient", "second"), map(float, worst), strict=True))
            about |= {"ok": bool(np.all(worst <= 1e-12)), "seconds": time.perf_counter() - begin}
            if texts := [text for _, text in ranks if text]:
                about["error"] = texts
            print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main()
