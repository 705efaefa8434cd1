"""The hypre inside mpigrad does not meet the system's hypre, which another package has loaded."""

from __future__ import annotations

import ctypes.util
import pathlib

import pytest

from launching import mpigrad
from mpigrad.runtime.native_path import ANY_MPI, hypre_built_with, native_path

PROGRAM = """
import ctypes
ctypes.CDLL({system!r}, mode=ctypes.RTLD_GLOBAL)
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
from mpigrad import sparse
from mpigrad.grid import Grid
grid = Grid((30, 20), (1.0, 1.0))
pattern = sparse.Pattern.from_stencil(grid, ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)))
weights = jnp.array([4.5, -1, -1, -1, -1])[:, None, None]
values = pattern.assemble(weights * jnp.ones(grid.local_shape))
A, b = sparse.Matrix(pattern, values), jnp.ones(grid.n_local)
for preconditioner in (sparse.BoomerAMG(), sparse.PFMG()):
    x = sparse.solve(A, b, sparse.PCG(rtol=1e-10, preconditioner=preconditioner)).value
    assert jnp.allclose(A @ x, b, atol=1e-8)
    print("solved")
"""


@pytest.mark.launcher
def test_hypre_of_the_system_stays_apart(tmp_path: pathlib.Path) -> None:
    module = native_path("mpigrad_hypre")
    system = ctypes.util.find_library("HYPRE")
    if module is None or hypre_built_with(module) != ANY_MPI or system is None:
        pytest.skip("needs a hypre inside mpigrad, as in the wheel, and one of the system")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(system=system))
    done = mpigrad("launch", "-n", 2, program)
    assert done.stdout.count("solved") == 4, done.stdout + done.stderr
