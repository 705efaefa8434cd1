"""The measurements of gpu.py, as programs that are not yet compiled, and their sizes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

SPACING, DT, FREQUENCY, FASTEST = 10.0, 1e-3, 25.0, 2500.0
PML = {2: 20, 3: 10}  # cells, by the number of axes
FLOAT32, FLOAT64 = 4, 8

# By step: the sizes on a GPU, on the cores of a CPU, and of a trial.
SIZES: dict[str, dict[str, Any]] = {
    "gpu": {
        "stream": 4e9,
        "acoustic": {"volume": (512, 100, 32), "plane": (4000, 200, 100)},
        "elastic": (256, 50, 20),
        "fem": 69,
        "fft": 512,
        "lbfgs": (10**7, 30),
        "krylov": {"operator": (256, 100), "matrix": (128, 100)},
    },
    "cpu": {
        "stream": 2e9,
        "acoustic": {"volume": (256, 40, 20), "plane": (2000, 100, 50)},
        "elastic": (128, 40, 20),
        "fem": 40,
        "fft": 256,
        "lbfgs": (10**7, 10),
        "krylov": {"operator": (128, 60), "matrix": (96, 60)},
    },
    "small": {
        "stream": 6.4e7,
        "acoustic": {"volume": (40, 50, 40), "plane": (200, 60, 50)},
        "elastic": (24, 40, 20),
        "fem": 12,
        "fft": 48,
        "lbfgs": (10**5, 5),
        "krylov": {"operator": (32, 30), "matrix": (16, 30)},
    },
}
Run = Callable[[], Any]
Report = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes
    ----------
    work, unit, unit_bytes
        The units of work of a call, as "cell-steps", and the bytes that a unit reads and writes at
        least.
    prepare
        Make the arrays, and return the call that is timed.
    report
        The entries of the line of JSON that are read off the result of a call.
    traced
        The function and its shapes, for --lower. None if the call is not one compiled program.
    """

    name: str
    work: float
    unit: str
    unit_bytes: float
    prepare: Callable[[], Run]
    report: Callable[[Any], Report] = lambda result: {}
    traced: tuple[Callable[..., Any], Any] | None = None


def program_case(
    name: str,
    work: float,
    unit: str,
    unit_bytes: float,
    function: Callable[..., Any],
    arrays: Callable[..., tuple[Any, ...]],
    inputs: Sequence[Any],
    report: Callable[[Any], Report],
) -> Case:
    """Return the case of one compiled program, whose operands are `arrays(*inputs)`.

    The operands are made on the device. The inputs are operands of that program, because XLA would
    evaluate an array of constants when it compiles.
    """
    import jax

    import mpigrad as mg

    def prepare() -> Run:
        program, operands = mg.jit(function), jax.block_until_ready(jax.jit(arrays)(*inputs))
        return lambda: program(*operands)

    traced = function, jax.eval_shape(arrays, *inputs)
    return Case(name, work, unit, unit_bytes, prepare, report, traced)


def norm(tree: Any, comm: Any) -> float:
    """Return the two-norm over all ranks, summed in double precision."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):
        squares = jax.jit(lambda x: jnp.sum(jnp.square(jnp.abs(x).astype("float64"))))
        own = sum(float(squares(x)) for x in jax.tree.leaves(tree))
    return math.sqrt(comm.mpi.allreduce(own))


def value_and_norm(comm: Any) -> Callable[[Any], Report]:
    """Return the report of a value and its gradient."""
    return lambda result: {"value": float(result[0]), "gradient_norm": norm(result[1], comm)}


# --- fields that are the same on any number of ranks ---


def profiles(grid: Any, seed: int = 0) -> list[np.ndarray]:
    """Return for each axis random numbers from -1 to 1 in this rank's cells along it."""
    generator = np.random.default_rng(seed)
    lines = [generator.uniform(-1, 1, n).astype(np.float32) for n in grid.shape]
    shapes = np.eye(grid.ndim, dtype=int) * -2 + 1  # -1 along the axis, 1 elsewhere
    return [
        line[cells].reshape(shape)
        for line, cells, shape in zip(lines, grid.slices, shapes, strict=True)
    ]


def field(lines: Sequence[Any]) -> Any:
    """Return the field of these profiles, with values from -1 to 1."""
    return sum(lines) / np.float32(len(lines))


def slabs(n: int, axes: int, spacing: float, **more: Any) -> Any:
    """Return a grid of n^axes cells, divided along its first axis."""
    import mpigrad as mg

    size = mg.default_communicator().size
    return mg.Grid((n,) * axes, (spacing,) * axes, dims=(size, *(1,) * (axes - 1)), **more)


# --- the steps ---


def ricker(steps: int, delay: float = 0.03) -> np.ndarray:
    """Return a Ricker wavelet of unit height."""
    a = (np.pi * FREQUENCY * (np.arange(steps) * DT - delay)) ** 2
    return ((1 - 2 * a) * np.exp(-a)).astype(np.float32)


def wave_cells(n: int, axes: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the source, in the middle, and receivers so near that the waves reach them."""
    source = (n // 2,) * axes
    line = range(max(n // 2 - 16, 1), min(n // 2 + 16, n - 1))
    return source, [(i, *source[1:-1], source[-1] - 4) for i in line]


def waves(n: int, axes: int, steps: tuple[int, int], backend: str, physics: str) -> Iterator[Case]:
    """A forward run, and a value with its gradient in all cells."""
    import jax.numpy as jnp

    import mpigrad as mg
    from mpigrad.waves import ElasticMedium, Storage, Survey
    from mpigrad.waves.acoustic import Acoustic
    from mpigrad.waves.elastic import Elastic, lame

    grid = slabs(n, axes, SPACING)
    acoustic = physics == "acoustic"
    shift = (0.5,) * axes if acoustic else (1.0, *(0.5,) * (axes - 1))
    source, receivers = wave_cells(n, axes)
    survey = Survey(*((np.array([p]) + shift) * SPACING for p in ([source], receivers)))

    def arrays(*lines: Any) -> tuple[Any, ...]:
        vp = np.float32(2250) + np.float32(240) * field(lines)
        if acoustic:
            return ((vp,),)
        density = 2000 + 0 * vp
        return ((*lame(vp, vp / np.float32(1.7), density), density),)

    def loss_of(count: int) -> Callable[[Any], Any]:
        common: dict[str, Any] = {"dt": DT, "steps": count, "pml": PML[axes], "backend": backend}
        if acoustic:
            model: Any = Acoustic(grid, order=4, max_velocity=FASTEST, **common)
            height = 1e3
        else:
            # With checkpoints in few steps the program is three times longer to compile.
            common |= {"storage": Storage("all"), "source": "force_x", "components": ("vx",)}
            model = Elastic(grid, frequency=FREQUENCY, **common)
            height = 1e9 * SPACING**axes  # for velocities of about 1
        wavelets = np.float32(height) * ricker(count)[None, None]

        def loss(parameters: Any) -> Any:
            medium = parameters[0] if acoustic else ElasticMedium(*parameters)
            gathers = model.propagate(medium, wavelets, survey).gathers
            return jnp.sum(gathers**2)

        return loss

    forward, backward = steps
    # Read and written once in a step: acoustic w, u, the velocity; elastic 9 fields, 3 parameters.
    step_bytes = 4 * FLOAT32 if acoustic else 21 * FLOAT32
    # And for a gradient: a stored field, the adjoint step that reads it, the sum into the gradient.
    gradient_bytes = 12 * FLOAT32 if acoustic else 21 * 3 * FLOAT32
    name = f"{n}^{axes}" if backend == "xla" else f"{n}^{axes} {backend}"
    cells = n**axes
    yield program_case(
        f"{name} forward", cells * forward, "cell-steps", step_bytes, loss_of(forward), arrays,
        profiles(grid), lambda value: {"value": float(value)},
    )  # fmt: skip
    both = mg.value_and_grad(loss_of(backward), loss="replicated")
    yield program_case(
        f"{name} gradient", cells * backward, "cell-steps", gradient_bytes, both, arrays,
        profiles(grid), value_and_norm(grid.comm),
    )  # fmt: skip


def acoustic(size: Any, backend: str) -> Iterator[Case]:
    """Acoustic waves on three axes and on two."""
    for axes, (n, *steps) in ((3, size["volume"]), (2, size["plane"])):
        yield from waves(n, axes, tuple(steps), backend, "acoustic")


def elastic(size: Any, backend: str) -> Iterator[Case]:
    """Elastic waves on three axes."""
    n, *steps = size
    yield from waves(n, 3, tuple(steps), backend, "elastic")


def fem(size: Any, backend: str) -> Iterator[Case]:
    """The Jacobian of P1 tetrahedra, and the gradient through it."""
    import jax.numpy as jnp

    import mpigrad as mg
    from mpigrad import fem

    start = time.perf_counter()
    mesh = fem.box((size,) * 3, (1.0, 1.0, 1.0), cell_type="tetrahedron")
    form = fem.Energy(fem.Space(mesh), lambda p, k: 0.5 * k * p.grad @ p.grad)
    setup = {"mesh_s": time.perf_counter() - start}
    cells, comm = mesh.n_cells_global, mg.default_communicator()

    def values(k: Any) -> Any:
        return form(fem.PerCell(k)).jacobian().values

    def loss(k: Any) -> Any:
        return jnp.sum(values(k) ** 2)

    def arrays(ids: Any) -> tuple[Any, ...]:
        return (1 + 0.1 * jnp.cos(ids),)

    ids = (np.asarray(mesh.cell_ids, np.float64),)
    # Read: a coefficient, 4 indices and coordinates of 1/6 vertex. Written: 15/6 entries.
    per_cell = FLOAT64 + 4 * 4 + FLOAT64 / 2 + 2.5 * FLOAT64
    yield program_case(
        f"Poisson {cells} assembly", cells, "elements", per_cell, values, arrays, ids,
        lambda v: {"value": norm(v, comm), **setup},
    )  # fmt: skip
    yield program_case(
        f"Poisson {cells} gradient", cells, "elements", 2 * per_cell, mg.value_and_grad(loss),
        arrays, ids, value_and_norm(comm),
    )  # fmt: skip


def fft(size: Any, backend: str) -> Iterator[Case]:
    """A real transform and its inverse, the gradient through a filter, and jnp.fft's transform."""
    import jax.numpy as jnp

    import mpigrad as mg
    from mpigrad import fft

    grid = slabs(size, 3, 2 * math.pi / size, periodic=True)
    wavenumbers = [np.asarray(k, np.float32) for k in fft.Layout(grid, real=True).wavenumbers()]
    cells = size**3
    per_transform = 3 * 2 * FLOAT32  # reads and writes along each axis

    lines = [*profiles(grid), *wavenumbers]

    def arrays(*lines: Any) -> tuple[Any, ...]:
        return field(lines[:3]), sum(jnp.square(k) for k in lines[3:])

    def pair(u: Any, squares: Any) -> Any:
        return fft.irfftn(fft.rfftn(u, grid), grid)

    def plain(u: Any, squares: Any) -> Any:
        return jnp.fft.irfftn(jnp.fft.rfftn(u), u.shape)

    def energy(u: Any, squares: Any) -> Any:
        damping = jnp.exp(np.float32(-1e-4) * squares)
        return jnp.sum(fft.irfftn(damping * fft.rfftn(u, grid), grid) ** 2) / 2

    name, comm = f"{size}^3 float32", grid.comm
    here = (("rfftn and irfftn", pair), *((("jnp.fft", plain),) if comm.size == 1 else ()))
    for label, both in here:
        yield program_case(
            f"{name} {label}", cells, "cells", 2 * per_transform, both, arrays, lines,
            lambda v: {"value": norm(v, comm)},
        )  # fmt: skip
    yield program_case(
        f"{name} gradient", cells, "cells", 4 * per_transform, mg.value_and_grad(energy), arrays,
        lines, value_and_norm(comm),
    )  # fmt: skip


def lbfgs(size: Any, backend: str) -> Iterator[Case]:
    """Iterations of L-BFGS on a cheap function of many unknowns, its evaluations included."""
    import jax
    import jax.numpy as jnp

    import mpigrad as mg
    from mpigrad.optimize import LBFGS, Objective

    (n, iterations), memory = size, 10
    comm = mg.default_communicator()
    first, last = (n * r // comm.size for r in (comm.rank, comm.rank + 1))
    solver = LBFGS(memory=memory)
    progress: dict[str, Any] = {}

    def prepare() -> Run:
        def share(x: Any) -> Any:
            c = 1 + 999 * (jnp.arange(first, last, dtype="float64") / n)
            return jnp.sum(c * (jnp.sqrt(1 + (x - 1) ** 2) - 1))

        own = jnp.zeros(last - first)
        objective = Objective(share, own, sharded=True)
        state = solver.start(objective, objective.unknowns.initial_vector(own))
        for _ in range(memory + 2):  # the memory is full
            state = solver.step(objective, state)

        def run() -> Any:
            now, objective.evaluations = state, 0
            # The memory's arrays are donated, so each round goes on from a copy.
            now = dataclasses.replace(now, pairs=jax.tree.map(jnp.copy, now.pairs))
            for _ in range(iterations):
                now = solver.step(objective, now)
            progress.update(loss=now.loss, evaluations=objective.evaluations)
            return now.x

        return run

    # The memory is read twice, and two rows are written. Then, in vectors: an evaluation reads x
    # and the direction, and writes x and the gradient. The direction reads g and is written. The
    # new rows read the direction and two gradients.
    vectors = 2 * 2 * memory + 2 + 4 + 2 + 3
    yield Case(
        f"{n} unknowns float64", n * iterations, "unknown-iterations", vectors * FLOAT64, prepare,
        lambda x: {
            "value": progress["loss"],
            "evaluations": progress["evaluations"],
            "iterations": iterations,
        },
    )  # fmt: skip


def krylov(size: Any, backend: str) -> Iterator[Case]:
    """A count of steps of conjugate gradients with Jacobi's preconditioner, and the gradient."""
    import jax.numpy as jnp

    import mpigrad as mg
    from mpigrad.grid import halo_exchange
    from mpigrad.sparse import PCG, Jacobi, Matrix, Operator, Pattern, solve

    steps = [tuple(side * (a == b) for b in range(3)) for a in range(3) for side in (-1, 1)]

    def links(grid: Any, kappa: Any) -> list[Any]:
        """Return kappa at the faces of each cell: along each axis before and behind it."""
        padded = halo_exchange(kappa, grid, boundary="edge")
        return [(kappa + shifted(padded, step)) / 2 for step in steps]

    def shifted(padded: Any, step: tuple[int, ...]) -> Any:
        cells = zip(step, padded.shape, strict=True)
        return padded[tuple(slice(1 + s, n - 1 + s) for s, n in cells)]

    for label, (n, count) in size.items():
        grid = slabs(n, 3, 1 / n)
        solver = PCG(
            rtol=1e-14, max_steps=count, preconditioner=Jacobi() if label == "matrix" else None
        )
        pattern = Pattern.from_stencil(grid, [(0, 0, 0), *steps]) if label == "matrix" else None

        def solved(
            kappa: Any, b: Any, grid: Any = grid, pattern: Any = pattern, solver: Any = solver
        ) -> Any:
            around = links(grid, kappa)
            diagonal = sum(around)
            if pattern is not None:
                matrix = Matrix.assemble(pattern, [diagonal, *(-link for link in around)])
                solution = solve(matrix, b.ravel(), solver, throw=False)
                return solution.value.reshape(b.shape), solution.stats["num_steps"]

            def product(v: Any) -> Any:
                padded = halo_exchange(v, grid, boundary=0.0)
                pairs = zip(around, steps, strict=True)
                return diagonal * v - sum(link * shifted(padded, step) for link, step in pairs)

            operator = Operator(product, inverse=lambda r: r / diagonal)
            solution = solve(operator, b, solver, throw=False)
            return solution.value, solution.stats["num_steps"]

        def loss(kappa: Any, b: Any, solved: Any = solved) -> Any:
            x, taken = solved(kappa, b)
            return jnp.sum(x * b), taken

        def forward(kappa: Any, b: Any, loss: Any = loss) -> Any:
            share, taken = loss(kappa, b)
            return mg.allreduce(share), taken

        def arrays(*lines: Any) -> tuple[Any, ...]:
            kappa, b = (field(part).astype("float64") for part in (lines[:3], lines[3:]))
            return 1.5 + kappa, 1 + b

        lines = [*profiles(grid, 1), *profiles(grid, 2)]

        # Vectors in a step: x, r, p, Ap read and written, Az written and read, the diagonal, and
        # the links: 6 of a cell, or the entries with an index of 4 bytes each.
        step_bytes = (8 + 2 + 1) * FLOAT64 + 6 * FLOAT64
        if label == "matrix":
            step_bytes += FLOAT64 + 7 * 4
        comm, unknowns = grid.comm, n**3
        yield program_case(
            f"{label} {n}^3 value", unknowns * count, "unknown-iterations", step_bytes, forward,
            arrays, lines, lambda out: {"value": float(out[0]), "iterations": int(out[1])},
        )  # fmt: skip
        yield program_case(
            f"{label} {n}^3 gradient", 2 * unknowns * count, "unknown-iterations", step_bytes,
            mg.value_and_grad(loss, has_aux=True), arrays, lines,
            lambda out, comm=comm: {
                "value": float(out[0][0]),
                "iterations": int(out[0][1]),
                "gradient_norm": norm(out[1], comm),
            },
        )  # fmt: skip


STEPS: dict[str, Callable[[Any, str], Iterator[Case]]] = {
    "acoustic": acoustic, "elastic": elastic, "fem": fem, "fft": fft, "lbfgs": lbfgs,
    "krylov": krylov,
}  # fmt: skip
