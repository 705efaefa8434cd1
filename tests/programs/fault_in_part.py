"""A part of mpigrad in a loop, in which rank 1 has a fault: `fault_in_part.py PART FAULT`.

`kill`, `stop` and `raise` happen while the loop runs. With `sizes` or `options`, rank 1 has other
ones from the start. Then the loop ends after a few steps if the program is legal, as with `none`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg

jax.config.update("jax_enable_x64", True)
PART, FAULT = sys.argv[1:]
RANK = mg.default_communicator().rank
# 1 on the rank that has other sizes or options, else 0.
SIZES, OPTIONS = (int(RANK == 1 and fault == FAULT) for fault in ("sizes", "options"))
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STEPS = 5  # of a legal program
Step = Callable[[], Any]


def fem() -> Step:
    """Solve an elliptic equation on triangles by hypre, with gradients."""
    from mpigrad import fem

    mesh = fem.box((24, 12 + 2 * SIZES), (2.0, 1.0), cell_type="triangle")
    space = fem.Space(mesh, degree=1 + OPTIONS)
    stiffness = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad)
    inflow = fem.Energy(space, lambda p, q: -q * p.u, on=mesh.facets("xmax"))
    cold = space.fixed("xmin")

    def loss(k, q):
        u = fem.solve(stiffness(fem.PerCell(k)) + inflow(q), cold).value
        return jnp.sum(u**2)

    run = mg.jit(mg.value_and_grad(loss, argnums=(0, 1), replicated=1))
    k = jnp.full(mesh.n_cells, 2.0)
    return lambda: run(k, 1.0)


def solver(preconditioner: Any) -> Step:
    """Set up and solve other values in each step."""
    from mpigrad.sparse import PCG, Matrix, Pattern, solve

    grid = mg.Grid((200 + 6 * SIZES, 150), (1.0, 1.0))
    pattern = Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
    method = PCG(preconditioner=preconditioner, rtol=1e-4 if OPTIONS else 1e-10)
    b, w = jnp.ones(grid.n_local), jnp.full(grid.local_shape, 2000.0)
    run = mg.jit(lambda w: solve(Matrix.assemble(pattern, [1 + 4 * w, *[-w] * 4]), b, method).value)
    count = iter(range(10**9))
    return lambda: run(w + next(count))


def boomeramg() -> Step:
    """A solve by hypre."""
    from mpigrad.sparse import BoomerAMG

    return solver(BoomerAMG())


def boxmg() -> Step:
    """A solve by mpigrad's own multigrid."""
    from mpigrad.sparse import BoxMG

    return solver(BoxMG())


def fft() -> Step:
    """Redistribute a grid, and back. The norm is applied locally."""
    from mpigrad import fft

    grid = mg.Grid((64, 48 + 16 * SIZES), spacing=(0.1, 0.1), periodic=True)
    norm = "ortho" if OPTIONS else None
    run = mg.jit(lambda u: fft.irfftn(fft.rfftn(u, grid, norm=norm), grid, norm=norm))
    u = jnp.ones(grid.local_shape)
    return lambda: run(u)


def waves(shape: tuple[int, ...], threads: int) -> Step:
    """A run of acoustic waves and its adjoint."""
    from mpigrad.waves import Acoustic, Survey

    grid = mg.Grid((shape[0] + 4 * SIZES, *shape[1:]), (10.0,) * len(shape))
    steps = 60 + 20 * OPTIONS
    model = Acoustic(grid, dt=1e-3, steps=steps, pml=6, threads=threads)
    wavelet = jnp.exp(-(((jnp.arange(steps) * 1e-3 - 0.04) * 80) ** 2))[None, None]
    survey = Survey(np.full((1, 1, len(shape)), 95.0), np.full((1, 1, len(shape)), 105.0))

    def energy(c):
        return jnp.sum(model.propagate(c, wavelet, survey, gathers="share").gathers ** 2)

    run, c = mg.jit(mg.grad(energy)), jnp.full(grid.local_shape, 2000.0)
    return lambda: run(c)


def particles() -> Step:
    """Send particles to the ranks that own them. Each rank may have another room for them."""
    from mpigrad.grid import exchange_particles, rank_at_position

    grid = mg.Grid((40, 30), spacing=(0.1, 0.1), periodic=True)
    corner = jnp.array([c.min() for c in grid.centers()])
    x = corner + jnp.array([[0.1, 0.1], [0.7, 0.5], *[[0.0, 0.0]] * (1 + SIZES)])
    alive = jnp.array([True, True, *[False] * (1 + SIZES)])

    @mg.jit
    def run(x):
        y = x - 0.3
        return exchange_particles((y,), rank_at_position(y, grid), alive, most=3 - OPTIONS)

    return lambda: run(x)


def thread() -> Step:
    """Sums in a second thread, for which the main thread waits."""
    op = MPI.MAX if OPTIONS else MPI.SUM
    x = jnp.ones(1000 + SIZES)
    return lambda: mg.allreduce(x, op)


def requests() -> Step:
    """Posted messages, and an epoch of one-sided operations."""
    other, tag = 1 - RANK, 3 + OPTIONS

    @mg.jit
    def run(x):
        sent = mg.isend(x, other, tag)
        y, _ = mg.waitall([mg.irecv(x, other, 3), sent])
        window, _ = mg.one_sided(y[:4, None], accumulate=[(y[:1, None], other, 0)])
        return window

    x = jnp.ones(5000 + SIZES)
    return lambda: run(x)


PARTS: dict[str, Callable[[], Step]] = {
    "fem": fem,
    "boomeramg": boomeramg,
    "boxmg": boxmg,
    "fft": fft,
    "waves2d": lambda: waves((60, 50), 1),
    "waves3d": lambda: waves((24, 20, 22), 2),
    "particles": particles,
    "thread": thread,
    "requests": requests,
}


def note_fault() -> None:
    """Print when the fault is."""
    print(f"fault at {time.time()}", flush=True)


def interrupt() -> None:
    """Kill or stop this rank."""
    note_fault()
    os.kill(os.getpid(), SIGNALS[FAULT])


def loop() -> None:
    """Run the part, with the fault."""
    ends = FAULT in ("sizes", "options", "none")
    if RANK == 1 and FAULT in ("sizes", "options"):
        note_fault()
    step = PARTS[PART]()
    jax.block_until_ready(step())
    if ends:
        for _ in range(STEPS):
            jax.block_until_ready(step())
        print(f"rank {RANK} has done its steps", flush=True)
        return
    if RANK == 1 and FAULT in SIGNALS:
        threading.Timer(0.3, interrupt).start()
    for number in range(10**9):
        if RANK == 1 and FAULT == "raise" and number == 3:
            note_fault()
            raise ValueError("rank 1 has had enough")
        jax.block_until_ready(step())


if PART != "thread":
    loop()
else:
    errors: list[BaseException] = []

    def catch() -> None:
        """Run the loop and keep its error for the main thread."""
        try:
            loop()
        except BaseException as error:
            errors.append(error)

    second = threading.Thread(target=catch)
    second.start()
    second.join()
    if errors:
        raise errors[0]
