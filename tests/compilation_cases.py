"""Calls of public functions, of which the compiled programs are counted.

mpigrad launch -n 2 tests/compilation_cases.py            the table
mpigrad launch -n 2 tests/compilation_cases.py solve      the programs of these rows, by name
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from mpi4py import MPI

import mpigrad as mg
from compilations import compilations
from mpigrad.communicator import Communicator
from mpigrad.sparse import GMRES, PCG, BoomerAMG, BoxMG, Jacobi
from mpigrad.waves import acoustic

# What is counted: a function of a size.
Case = Callable[[int, Communicator], Any]


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
    model = acoustic.Acoustic(grid, dt=2e-3, steps=n)
    survey = acoustic.Survey(
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
    snapshot = store.load(tree)
    assert snapshot is not None
    return snapshot.tree


def _ring(n: int, comm: Communicator) -> Any:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return mg.sendrecv(_numbers(n), right, left, comm=comm)


def _requests(n: int, comm: Communicator) -> Any:
    received = mg.irecv(_numbers(n), comm.rank, comm=comm)
    return mg.waitall([received, mg.isend(_numbers(n), comm.rank, comm=comm)])


def _energy_of_sum(x: Any, comm: Communicator) -> Any:
    return (mg.allreduce(x, comm=comm) ** 2).sum()


def _value_and_grad(n: int, comm: Communicator) -> Any:
    return mg.value_and_grad(lambda x: _energy_of_sum(x, comm), comm=comm)(_numbers(n))


def _compiled_gradient(n: int, comm: Communicator) -> Any:
    return mg.jit(mg.grad(lambda x: _energy_of_sum(x, comm)))(_numbers(n))


def _jacobian(n: int, comm: Communicator) -> Any:
    return mg.jacobian(lambda x: mg.allreduce(x, comm=comm) ** 2, comm=comm)(_numbers(n))


def _dot_test(n: int, comm: Communicator) -> Any:
    return mg.dot_test(lambda x: mg.allreduce(x, comm=comm), _numbers(n), comm=comm)


def _taylor_test(n: int, comm: Communicator) -> Any:
    return mg.taylor_test(lambda x: _energy_of_sum(x, comm), _numbers(n), comm=comm)


def _scatter_and_gather(n: int, comm: Communicator) -> Any:
    grid = _grid(n, comm)
    return grid.gather(grid.scatter(_numbers(2 * n, n)))


def _halo_exchange(n: int, comm: Communicator) -> Any:
    grid = _grid(n, comm)
    return mg.halo_exchange(_numbers(*grid.local_shape), grid, 1, boundary="edge")


def _apply_stencil(n: int, comm: Communicator) -> Any:
    grid = _grid(n, comm)
    return mg.apply_stencil(lambda u: 2 * u[1:-1, 1:-1], _numbers(*grid.local_shape), grid)


def _fftn(n: int, comm: Communicator) -> Any:
    grid = _grid(n, comm, periodic=True)
    return mg.fft.fftn(_numbers(*grid.local_shape), grid)


def _solve(n: int, comm: Communicator, solver: Any) -> Any:
    return mg.sparse.solve(_matrix(n, comm), _numbers(n), solver)


def _solve_on_a_grid(n: int, comm: Communicator) -> Any:
    A = _multigrid(n, comm)
    solver = PCG(preconditioner=BoxMG())
    return mg.sparse.solve(A, _numbers(A.pattern.n_local), solver)


def _newton(n: int, comm: Communicator) -> Any:
    solver = GMRES(preconditioner=None)
    return mg.sparse.newton(lambda x: x**3 - 2.0, np.ones(n), solver, comm=comm)


CASES: dict[str, Case] = {
    "allreduce": lambda n, c: mg.allreduce(_numbers(n), comm=c),
    "allreduce of MAX": lambda n, c: mg.allreduce(_numbers(n), MPI.MAX, comm=c),
    "allreduce of PROD": lambda n, c: mg.allreduce(_numbers(n), MPI.PROD, comm=c),
    "allreduce of a pytree": lambda n, c: mg.allreduce(_tree(n), comm=c),
    "bcast": lambda n, c: mg.bcast(_numbers(n), comm=c),
    "gather": lambda n, c: mg.gather(_numbers(n), comm=c),
    "gatherv": lambda n, c: mg.gatherv(_numbers(n), [n] * c.size, comm=c),
    "alltoall": lambda n, c: mg.alltoall(_numbers(c.size, n), comm=c),
    "sendrecv": _ring,
    "isend, irecv": _requests,
    "assert_replicated": lambda n, c: mg.assert_replicated(_numbers(n), comm=c),
    "value_and_grad": _value_and_grad,
    "jit of grad": _compiled_gradient,
    "jacobian": _jacobian,
    "dot_test": _dot_test,
    "taylor_test": _taylor_test,
    "Grid": _grid,
    "Grid.scatter, gather": _scatter_and_gather,
    "halo_exchange": _halo_exchange,
    "apply_stencil": _apply_stencil,
    "fft.fftn": _fftn,
    "Pattern": _pattern,
    "Matrix": _matrix,
    "Matrix.assemble": _multigrid,
    "A @ x": lambda n, c: _matrix(n, c) @ _numbers(n),
    "A @ A": lambda n, c: _matrix(n, c) @ _matrix(n, c),
    "A.T + 2 A": lambda n, c: _matrix(n, c).T + 2 * _matrix(n, c),
    "solve, Jacobi": lambda n, c: _solve(n, c, PCG(preconditioner=Jacobi())),
    "solve, BoomerAMG": lambda n, c: _solve(n, c, PCG(preconditioner=BoomerAMG())),
    "solve, GMRES": lambda n, c: _solve(n, c, GMRES()),
    "solve, BoxMG": _solve_on_a_grid,
    "newton": _newton,
    "minimize, LBFGS": lambda n, c: _minimize(mg.optimize.LBFGS(), n, c),
    "minimize, Optax": lambda n, c: _minimize(mg.optimize.Optax(optax.adam(0.1)), n, c),
    "Pool.map": _map,
    "fem.box": lambda n, c: mg.fem.box((n, 4), (2.0, 1.0), comm=c),
    "fem.Space": lambda n, c: _energy(n, c)[0],
    "Equation.residual": _residual,
    "fem.solve": _fem_solve,
    "Acoustic.propagate": _waves,
    "Trainer.step": _train,
    "Store.save, load": _save,
}


def count(name: str, comm: Communicator) -> list[list[str]]:
    """Return the programs of the first call of a row, and of a call with another size."""
    jax.clear_caches()  # so that the numbers do not depend on earlier calls
    result = []
    for n in (34, 46):
        with compilations() as names:
            jax.block_until_ready(jax.tree.leaves(CASES[name](n, comm)))
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
