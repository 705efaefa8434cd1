"""Stokes flow around spheres in 3-D beside PETSc's fieldsplit on the same matrices (petsc4py).

    python -m mpigrad launch -n 2 bench/stokes.py [--cells 8 16] [--contrast 1e3] [--rounds 2]

Taylor-Hood elements on tetrahedra. Viscous heavy spheres sink in a box with free slip. Both methods
are GMRES to a relative residual of 1e-8 with a block triangular preconditioner: one cycle of
BoomerAMG with the same options for the velocities, and the pressure's mass divided by the viscosity
in place of the Schur complement. Each takes turns, with a set-up for new values in each round. The
assembly is not part of the times. Without petsc4py only the first is run.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem
from mpigrad.sparse import GMRES, Blocks, BlockTriangular, BoomerAMG, Jacobi, Matrix, solve

RTOL, RESTART = 1e-8, 300
RADIUS = 0.15
CENTERS = np.array([[0.3, 0.35, 0.6], [0.7, 0.4, 0.35], [0.45, 0.7, 0.45]])
OPTIONS = (
    "-st_ksp_type gmres -st_ksp_pc_side right -st_ksp_norm_type unpreconditioned "
    "-st_ksp_gmres_cgs_refinement_type refine_always "
    f"-st_ksp_rtol {RTOL} -st_ksp_gmres_restart {RESTART} -st_ksp_max_it 900 "
    "-st_pc_type fieldsplit -st_pc_fieldsplit_type schur -st_pc_fieldsplit_schur_fact_type upper "
    "-st_pc_fieldsplit_schur_precondition user -st_fieldsplit_0_ksp_type preonly "
    "-st_fieldsplit_0_pc_type hypre -st_fieldsplit_0_pc_hypre_type boomeramg "
    "-st_fieldsplit_0_pc_hypre_boomeramg_coarsen_type HMIS "
    "-st_fieldsplit_0_pc_hypre_boomeramg_interp_type ext+i "
    "-st_fieldsplit_0_pc_hypre_boomeramg_P_max 4 "
    "-st_fieldsplit_0_pc_hypre_boomeramg_strong_threshold 0.25 "
    "-st_fieldsplit_0_pc_hypre_boomeramg_relax_type_all l1scaled-SOR/Jacobi "
    "-st_fieldsplit_0_pc_hypre_boomeramg_no_CF true "
    "-st_fieldsplit_1_ksp_type preonly -st_fieldsplit_1_pc_type jacobi"
)


def dissipation(p: Any, eta: Any, weight: Any) -> jax.Array:
    v, q = p.velocity, p.pressure
    strain = (v.grad + v.grad.T) / 2
    return eta * jnp.sum(strain**2) - q.u * jnp.trace(v.grad) + weight * v.u[2]


class Flow:
    """Blocks, right-hand side and Schur complement of one mesh."""

    def __init__(self, n: int, contrast: float) -> None:
        self.mesh = fem.box((n, n, n), (1.0, 1.0, 1.0), cell_type="tetrahedron")
        self.V = fem.Space(self.mesh, 2, components=3)
        self.Q = fem.Space(self.mesh)
        self.contrast = contrast
        walls = np.zeros(self.V.shape, bool)
        for axis, name in enumerate("xyz"):
            for side in ("min", "max"):
                walls |= self.V.fixed(name + side, component=axis)
        self.masks = [walls.reshape(-1), np.zeros(self.Q.shape, bool)]
        self.flow = fem.Energy(fem.Mixed(velocity=self.V, pressure=self.Q), dissipation)
        self.mass = fem.Energy(self.Q, lambda p, eta: 0.5 * p.u**2 / eta)
        away = np.linalg.norm(self.mesh.centers()[:, None] - CENTERS, axis=2).min(axis=1)
        self.inside = away < RADIUS

    def viscosity(self, scale: Any) -> fem.PerCell:
        return fem.PerCell(scale * jnp.where(self.inside, self.contrast, 1.0))

    def system(self, scale: float) -> tuple[Blocks, tuple[jax.Array, ...]]:
        @mg.jit
        def assembled(scale: Any) -> Any:
            eta = self.viscosity(scale)
            equation = self.flow(eta, fem.PerCell(jnp.asarray(self.inside, float)))
            zero = equation.space.zeros()
            b = [-v.reshape(-1) for v in equation.residual(zero)]
            K = Blocks(equation.jacobian(zero).blocks, self.mass(eta).jacobian())
            return K.at_boundary(self.masks, b)

        return assembled(scale)


def ours(K: Blocks) -> Callable[..., Any]:
    cycle = BoomerAMG(unknowns_per_cell=3)
    solver = GMRES(RTOL, 900, BlockTriangular(cycle, Jacobi()), RESTART)
    null = tuple(jnp.full(n, float(k)) for k, n in enumerate(K.local_sizes))
    run = mg.jit(lambda K, b: solve(K, b, solver, nullspace=null))

    def solved(K: Blocks, b: Any) -> tuple[Any, int]:
        solution = jax.block_until_ready(run(K, b))
        return solution.value, int(solution.stats["num_steps"])

    return solved


def petsc_rows(A: Matrix, PETSc: Any) -> Any:
    """Return a matrix of PETSc with these values."""
    pattern = A.pattern
    values = np.asarray(A.values)
    values = values if pattern.is_ordered else values[np.asarray(pattern.order)]
    sizes = (pattern.n_local, None), (pattern.n_local_columns, None)
    rows = (pattern.row_starts.astype(np.int32), pattern.columns.astype(np.int32), values)
    return PETSc.Mat().createAIJ(sizes, csr=rows)


def peer(K: Blocks, PETSc: Any) -> Callable[..., Any]:
    options = PETSc.Options()
    words = OPTIONS.split()
    for name, value in zip(words[::2], words[1::2], strict=True):
        options[name[1:]] = value
    assert K.schur is not None

    def solved(system: Any, b: Any) -> tuple[Any, int]:
        matrix, schur, null = system
        ksp = PETSc.KSP().create()
        ksp.setOptionsPrefix("st_")
        ksp.setOperators(matrix)
        ksp.setFromOptions()
        rows, _ = matrix.getNestISs()
        ksp.getPC().setFieldSplitIS(("0", rows[0]), ("1", rows[1]))
        ksp.getPC().setFieldSplitSchurPreType(PETSc.PC.SchurPreType.USER, schur)
        matrix.setNullSpace(null)
        x, rhs = matrix.createVecs()
        rhs.setArray(np.concatenate([np.asarray(v) for v in b]))
        ksp.solve(rhs, x)
        if ksp.getConvergedReason() < 0:
            raise RuntimeError(f"PETSc: {ksp.getConvergedReason()}")
        steps, found = ksp.getIterationNumber(), x.getArray().copy()
        matrix.mult(x, residual := rhs.duplicate())
        residual.axpy(-1, rhs)
        relative = residual.norm() / rhs.norm()
        if relative > 2 * RTOL and matrix.comm.rank == 0:
            print(f"PETSc: |b - A x| / |b| = {relative:.1e}")
        ksp.destroy()
        return K.split(jnp.asarray(found)), steps

    return solved


def petsc_system(K: Blocks, PETSc: Any) -> Any:
    (A, B), (C, _) = K.blocks
    assert K.schur is not None
    made: list[Any] = [None if m is None else petsc_rows(m, PETSc) for m in (A, B, C, -1 * K.schur)]
    made[0].setBlockSize(3)
    matrix = PETSc.Mat().createNest([[made[0], made[1]], [made[2], None]])
    matrix.setUp()
    constant = matrix.createVecRight()
    n, m = K.local_sizes
    constant.setArray(np.concatenate([np.zeros(n), np.ones(m)]))
    constant.normalize()
    return matrix, made[3], PETSc.NullSpace().create(vectors=[constant])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[8, 12])
    parser.add_argument("--contrast", type=float, nargs="+", default=[1.0, 1e3, 1e6])
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    comm = mg.default_communicator()
    try:
        petsc: Any = importlib.import_module("petsc4py")
        petsc.init([])
        PETSc: Any = importlib.import_module("petsc4py.PETSc")
    except ImportError:
        PETSc = None
    for n in given.cells:
        for contrast in given.contrast:
            flow = Flow(n, contrast)
            lines: dict[str, list[tuple[float, int]]] = {}
            methods: dict[str, Callable[..., Any]] = {}
            for k in range(given.rounds + 1):  # the first round compiles
                K, b = jax.block_until_ready(flow.system(1 + k / 10))
                methods = methods or {"solve": ours(K)} | (
                    {"PETSc": peer(K, PETSc)} if PETSc else {}
                )
                found = []
                for name, method in methods.items():
                    system = K if name == "solve" else petsc_system(K, PETSc)
                    comm.mpi.barrier()
                    start = time.perf_counter()
                    x, steps = method(system, b)
                    lines.setdefault(name, []).append((time.perf_counter() - start, steps))
                    found.append(x[0])
                away = [jnp.sum((v - found[0]) ** 2) for v in found]
                away = np.sqrt(mg.allreduce(jnp.stack([*away, jnp.sum(found[0] ** 2)])))
                assert (away[:-1] < 1e-2 * away[-1]).all(), away
            unknowns = K.shape[0]
            if comm.rank == 0:
                first = float(np.median([s for s, _ in next(iter(lines.values()))[1:]]))
                for name, pairs in lines.items():
                    seconds = float(np.median([s for s, _ in pairs[1:]]))
                    print(
                        f"{unknowns:8} unknowns, contrast {contrast:.0e}, {comm.size} ranks: "
                        f"{name:6}{pairs[-1][1]:4} steps {seconds:7.2f} s "
                        f"(first call {pairs[0][0]:.1f} s), ratio {first / seconds:.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
