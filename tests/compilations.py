"""How many programs XLA compiles in a call of a public function.

    mpigrad launch -n 2 tests/compilations.py            the table
    mpigrad launch -n 2 tests/compilations.py solve      the programs of these rows, by name

JAX reports each program that it asks XLA for, also if a cache on disk has it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from mpi4py import MPI

import mpigrad as mg
from mpigrad.communicator import Communicator

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield a list of the names of the programs that are compiled in this context."""
    names: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == _EVENT:
            names.append(str(details.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _numbers(*shape: int) -> Any:
    return np.random.default_rng(5).standard_normal(shape)


def _tree(n: int) -> list[Any]:
    return [_numbers(1 + k % 7) for k in range(n)]


def _grid(n: int, comm: Communicator, *, periodic: bool = False) -> mg.Grid:
    return mg.Grid((2 * n, n), (1.0, 1.0), comm, periodic=periodic)


def _pattern(n: int, comm: Communicator) -> Any:
    row, total = n * comm.rank + np.arange(n), n * comm.size
    left, right = row[row > 0], row[row < total - 1]
    rows = np.concatenate([row, left, right])
    columns = np.concatenate([row, left - 1, right + 1])
    return mg.sparse.Pattern.from_coo(rows, columns, n, comm=comm)


def _matrix(n: int, comm: Communicator) -> Any:
    pattern = _pattern(n, comm)
    return mg.sparse.Matrix(pattern, np.where(_on_diagonal(pattern), 2.5, -1.0))


def _on_diagonal(pattern: Any) -> Any:
    on_diagonal = np.zeros(pattern.nnz, bool)
    on_diagonal[pattern.diagonal] = True
    return on_diagonal


def _multigrid(n: int, comm: Communicator) -> Any:
    grid = _grid(n, comm)
    offsets = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]
    pattern = mg.sparse.Pattern.from_stencil(grid, offsets)
    weight = np.ones(grid.local_shape)
    return mg.sparse.Matrix.assemble(pattern, np.stack([5 * weight, *[-weight] * 4]))


def _bowl(x: Any) -> Any:
    return ((x - 2.0) ** 2).sum()


def _minimize(method: Any, n: int, comm: Communicator) -> Any:
    settings = {"loss": "replicated", "replicated": True, "max_steps": 3, "throw": False}
    return mg.optimize.minimize(_bowl, np.zeros(n), method, comm=comm, **settings)


def _map(n: int, comm: Communicator) -> Any:
    with mg.jobs.pool(comm=comm) as pool:
        data = pool.put(list(_numbers(n, 3)))
        return pool.map(lambda params, item_params, item: params * item, data)(2.0)


def _energy(n: int, comm: Communicator) -> Any:
    space = mg.fem.Space(mg.fem.box((n, 4), (2.0, 1.0), comm=comm))
    return space, mg.fem.Energy(space, lambda p: 0.5 * p.grad @ p.grad - p.u)()


def _fem_solve(n: int, comm: Communicator) -> Any:
    space, energy = _energy(n, comm)
    return mg.fem.solve(energy, space.fixed("xmin")).value


def _residual(n: int, comm: Communicator) -> Any:
    space, energy = _energy(n, comm)
    return energy.residual(space.interpolate(lambda x: x[:, 0]))


def _waves(n: int, comm: Communicator) -> Any:
    grid = mg.Grid((2 * n, n), (10.0, 10.0), comm)
    model = mg.waves.acoustic.Acoustic(grid, dt=2e-3, steps=n)
    survey = mg.waves.acoustic.Survey(
        np.array([[[35.0, 15.0]]]), np.array([[[x, 15.0] for x in (25, 45, 65)]])
    )
    velocity = np.full(grid.local_shape, 1800, np.float32)
    return model.propagate(velocity, np.ones((1, 1, n), np.float32), survey).gathers


def _train(n: int, comm: Communicator) -> Any:
    def loss(params: Any, x: Any, y: Any) -> Any:
        return ((x @ params["w"] + params["b"] - y) ** 2).mean()

    params = {"w": np.zeros((n, 2)), "b": np.zeros(2)}
    trainer = mg.training.trainer(params, optax.adam(1e-2), loss, comm=comm)
    return trainer.step(_numbers(8, n), _numbers(8, 2))


def _save(n: int, comm: Communicator) -> Any:
    directory = comm.mpi.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    store = mg.checkpoint.Store(directory, comm=comm)
    tree = jax.device_put({"x": _numbers(n), "y": _numbers(n, 2)})
    store.save(1, tree)
    return store.load(tree).tree


def _value_and_grad(n: int, comm: Communicator) -> Any:
    f = mg.value_and_grad(lambda x: (mg.allreduce(x, comm=comm) ** 2).sum(), comm=comm)
    return mg.jit(f)(_numbers(n))


def _ring(n: int, comm: Communicator) -> Any:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return mg.sendrecv(_numbers(n), right, left, comm=comm)


# A function of a size -> the most programs of its first call, and of a call with another size.
Case = Callable[[int, Communicator], Any]
CASES: dict[str, tuple[Case, int, int]] = {
    "allreduce": (lambda n, c: mg.allreduce(_numbers(n), comm=c), 99, 99),
    "allreduce of a pytree": (lambda n, c: mg.allreduce(_tree(n), comm=c), 99, 99),
    "bcast": (lambda n, c: mg.bcast(_numbers(n), comm=c), 99, 99),
    "gather": (lambda n, c: mg.gather(_numbers(n), comm=c), 99, 99),
    "gatherv": (lambda n, c: mg.gatherv(_numbers(n), [n] * c.size, comm=c), 99, 99),
    "alltoall": (lambda n, c: mg.alltoall(_numbers(c.size, n), comm=c), 99, 99),
    "MAX": (lambda n, c: mg.allreduce(_numbers(n), MPI.MAX, comm=c), 99, 99),
    "PROD": (lambda n, c: mg.allreduce(_numbers(n), MPI.PROD, comm=c), 99, 99),
    "sendrecv": (_ring, 99, 99),
    "isend, irecv": (
        lambda n, c: mg.waitall(
            [mg.irecv(_numbers(n), c.rank, comm=c), mg.isend(_numbers(n), c.rank, comm=c)]
        ),
        99,
        99,
    ),
    "value_and_grad": (_value_and_grad, 99, 99),
    "eager value_and_grad": (
        lambda n, c: mg.value_and_grad(lambda x: (mg.allreduce(x, comm=c) ** 2).sum(), comm=c)(
            _numbers(n)
        ),
        99,
        99,
    ),
    "jacobian": (
        lambda n, c: mg.jacobian(lambda x: mg.allreduce(x, comm=c) ** 2, comm=c)(_numbers(n)),
        99,
        99,
    ),
    "dot_test": (
        lambda n, c: mg.dot_test(lambda x: mg.allreduce(x, comm=c), _numbers(n), comm=c),
        99,
        99,
    ),
    "taylor_test": (
        lambda n, c: mg.taylor_test(
            lambda x: (mg.allreduce(x, comm=c) ** 2).sum(), _numbers(n), comm=c
        ),
        99,
        99,
    ),
    "assert_replicated": (lambda n, c: mg.assert_replicated(_numbers(n), comm=c), 99, 99),
    "Grid": (lambda n, c: _grid(n, c), 0, 0),
    "Grid.scatter, gather": (
        lambda n, c: _grid(n, c).gather(_grid(n, c).scatter(_numbers(2 * n, n))),
        99,
        99,
    ),
    "halo_exchange": (
        lambda n, c: mg.halo_exchange(
            _numbers(*_grid(n, c).local_shape), _grid(n, c), 1, boundary="edge"
        ),
        99,
        99,
    ),
    "apply_stencil": (
        lambda n, c: mg.apply_stencil(
            lambda u: u[:-2, 1:-1] + u[2:, 1:-1],
            _numbers(*_grid(n, c).local_shape),
            _grid(n, c),
            width=1,
            boundary="edge",
        ),
        99,
        99,
    ),
    "Pattern": (_pattern, 0, 0),
    "Matrix": (_matrix, 99, 99),
    "Matrix.assemble": (_multigrid, 99, 99),
    "A @ x": (lambda n, c: _matrix(n, c) @ _numbers(n), 99, 99),
    "A @ A": (lambda n, c: _matrix(n, c) @ _matrix(n, c), 99, 99),
    "A.T + 2 A": (lambda n, c: _matrix(n, c).T + 2 * _matrix(n, c), 99, 99),
    "solve PCG Jacobi": (
        lambda n, c: mg.sparse.solve(
            _matrix(n, c), _numbers(n), mg.sparse.PCG(preconditioner=mg.sparse.Jacobi())
        ),
        99,
        99,
    ),
    "solve PCG BoomerAMG": (
        lambda n, c: mg.sparse.solve(
            _matrix(n, c), _numbers(n), mg.sparse.PCG(preconditioner=mg.sparse.BoomerAMG())
        ),
        99,
        99,
    ),
    "solve PCG BoxMG": (
        lambda n, c: mg.sparse.solve(
            _multigrid(n, c),
            _numbers(2 * n * n // c.size),
            mg.sparse.PCG(preconditioner=mg.sparse.BoxMG()),
        ),
        99,
        99,
    ),
    "solve GMRES": (
        lambda n, c: mg.sparse.solve(_matrix(n, c), _numbers(n), mg.sparse.GMRES()),
        99,
        99,
    ),
    "newton": (
        lambda n, c: mg.sparse.newton(
            lambda x: x**3 - 2.0, np.ones(n), mg.sparse.GMRES(preconditioner=None)
        ),
        99,
        99,
    ),
    "minimize LBFGS": (lambda n, c: _minimize(mg.optimize.LBFGS(), n, c), 99, 99),
    "minimize Adam": (lambda n, c: _minimize(mg.optimize.Adam(0.1), n, c), 99, 99),
    "jobs.pool map": (_map, 99, 99),
    "fem.box": (lambda n, c: mg.fem.box((n, 4), (2.0, 1.0), comm=c), 0, 0),
    "fem.Space": (lambda n, c: mg.fem.Space(mg.fem.box((n, 4), (2.0, 1.0), comm=c)), 0, 0),
    "fem residual": (_residual, 99, 99),
    "fem.solve": (_fem_solve, 99, 99),
    "fft.fftn": (
        lambda n, c: mg.fft.fftn(
            _numbers(*_grid(n, c, periodic=True).local_shape), _grid(n, c, periodic=True)
        ),
        99,
        99,
    ),
    "Acoustic.propagate": (_waves, 99, 99),
    "Trainer.step": (_train, 99, 99),
    "Store.save, load": (_save, 99, 99),
}


def count(name: str, comm: Communicator) -> list[list[str]]:
    """Return the programs of the first call of a row, and of a call with another size."""
    result = []
    for n in (34, 38):
        with compilations() as names:
            jax.block_until_ready(jax.tree.leaves(CASES[name][0](n, comm)))
        result.append(names)
    return result


def main(rows: list[str]) -> None:
    """Print the table of all rows, or the programs of some."""
    jax.config.update("jax_enable_x64", True)
    comm = mg.default_communicator()
    for name in CASES:
        if rows and not any(word in name for word in rows):
            continue
        try:
            programs = count(name, comm)
        except Exception as error:
            print(name, "ERROR", repr(error)[:300], flush=True)
            continue
        if comm.rank == 0:
            print(f"{name:24}", *(f"{len(names):4}" for names in programs), flush=True)
            if rows:
                print("", *programs, sep="\n  ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
