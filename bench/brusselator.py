"""The Brusselator of SciMLBenchmarks (BrussScaling): a gradient in 4 n² parameters.

    mpigrad launch -n 1 bench/brusselator.py [--cells 17] [--way free]

The Brusselator on n x n periodic cells to t = 1, with rates A and B and two diffusivities in each
cell. The gradient is that of half the sum of (1 - u)² over eleven times, with `rtol=1e-7` and
`atol=1e-5`, as there. Its spacing is 1 / (n - 1), as there. `--way pattern`: with a matrix.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import ode, sparse

jax.config.update("jax_enable_x64", True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=17)
    parser.add_argument("--way", choices=("free", "pattern"), default="free")
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    n, h = a.cells, 1 / (a.cells - 1)
    grid = mg.Grid((n, n), (h, h), periodic=(True, True))
    x, y = np.meshgrid(*(h * np.arange(s.start, s.stop) for s in grid.slices), indexing="ij")
    start = jnp.stack([22 * (y * (1 - y)) ** 1.5, 27 * (x * (1 - x)) ** 1.5], axis=-1)
    hot = 5.0 * ((x - 0.3) ** 2 + (y - 0.6) ** 2 <= 0.01)

    def rate(t: Any, w: Any, p: Any) -> Any:
        q = mg.halo_exchange(w, grid)
        spread = (q[2:, 1:-1] + q[:-2, 1:-1] + q[1:-1, 2:] + q[1:-1, :-2] - 4 * w) / h**2
        u, v = w[..., 0], w[..., 1]
        first = p[..., 1] + u**2 * v - (p[..., 0] + 1) * u + hot * (t >= 1.1)
        return p[..., 2:] * spread + jnp.stack([first, p[..., 0] * u - u**2 * v], axis=-1)

    parameters = jnp.ones((*grid.local_shape, 4)) * jnp.array([3.4, 1.0, 10.0, 10.0])
    pattern = None
    if a.way == "pattern":
        pattern = sparse.find_pattern(lambda w: rate(0.0, w, parameters), start, grid)

    def share(p: Any) -> Any:
        solution = ode.integrate(
            rate, start, jnp.linspace(0, 1, 11), (p,), ode.Kvaerno5(), pattern=pattern,
            rtol=1e-7, atol=1e-5, max_steps=256, solver=sparse.BiCGStab(rtol=1e-8),
        )  # fmt: skip
        return jnp.sum((1 - solution.value) ** 2) / 2, solution.stats

    program = mg.jit(mg.value_and_grad(share, has_aux=True))
    stats, slope, seconds = {}, parameters, []
    for _ in range(a.rounds + 1):
        grid.comm.mpi.Barrier()
        begin = time.perf_counter()
        (_, stats), slope = jax.block_until_ready(program(parameters))
        seconds.append(time.perf_counter() - begin)
    norm = float(jnp.sqrt(mg.allreduce(jnp.sum(slope**2))))
    if grid.comm.rank == 0:
        steps = ", ".join(
            f"{name[4:]} {int(stats[name])}" for name in ("num_steps", "num_newton_steps")
        )
        median = statistics.median(seconds[1:])
        print(f"{4 * n * n} parameters: gradient {median:.3f} s; {steps}; norm {norm:.6f}")


if __name__ == "__main__":
    main()
