"""Operations of the tables in one program: values and derivatives, beside the simulation.

Their arrays are longer than MPIGRAD_LARGEST_COUNT, which the test sets. `counted.py NAME ...` takes
these rows of helpers.CASES only.
"""

import itertools
import sys
from typing import Any

import jax
import numpy as np

import mpigrad as mg
from helpers import CASES, operand, reducing
from mpigrad.fft.local import redistribute
from product_space import prove

jax.config.update("jax_enable_x64", True)
comm = mg.default_communicator()
# Of the reductions, those with another handler: the others have rows that are long to compile.
table = {name: case for name, case in CASES.items() if not (case.full or case.heavy)}
table |= {f"allreduce {op}": reducing("allreduce", op) for op in ("PROD", "MAX")}
rows = [table[name] for name in sys.argv[1:] or table]
shapes = [case.shape(comm.size) for case in rows]
ends = list(itertools.accumulate(map(np.prod, shapes), initial=0))


def operands(x: Any, *leading: int) -> list[Any]:
    """Return the operands of the rows, which are parts of one array."""
    bounds = zip(itertools.pairwise(ends), shapes, strict=True)
    return [x[..., i:j].reshape(*leading, *shape) for (i, j), shape in bounds]


def turn(x: Any) -> Any:
    """Divide columns instead of rows: (3, 2 * size) on each rank becomes (3 * size, 2)."""
    return redistribute(x, comm, 0, (3,) * comm.size, 1, (2,) * comm.size, (0, 1))


def turn_simulated(X: Any) -> Any:
    return X.reshape(3 * comm.size, comm.size, 2).swapaxes(0, 1)


stacks = [np.asarray(operand(case, comm)[1]).reshape(comm.size, -1) for case in rows]
prove(
    lambda x: [case.run(part, comm) for case, part in zip(rows, operands(x), strict=True)],
    lambda X: [
        case.simulate(part) for case, part in zip(rows, operands(X, comm.size), strict=True)
    ],
    comm,
    "jit",
    X=jax.device_put(np.concatenate(stacks, axis=1)),
)
prove(turn, turn_simulated, comm, "jit", (3, 2 * comm.size))
print(f"{len(rows)} rows on rank {comm.rank}")
