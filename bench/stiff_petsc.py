"""Gray and Scott's equations by PETSc's ARKIMEX and TSAdjoint, for bench/stiff.py.

    mpiexec -n 2 python bench/stiff_petsc.py --cells 512 --end 20 --out result.npz

It needs petsc4py, numpy and mpi4py only. Slopes and Jacobian are written by hand, as PETSc needs
them. The objective is the sum of squares of the last state.
"""

import argparse
import json
import sys
import time

import petsc4py

petsc4py.init(["stiff_petsc"])
import numpy as np  # noqa: E402
from petsc4py import PETSc  # noqa: E402

D1, D2, FEED, KILL, SIDE = 8e-5, 4e-5, 0.024, 0.06, 2.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=512)
    parser.add_argument("--end", type=float, default=20.0)
    parser.add_argument("--dt", type=float, default=0.5)
    parser.add_argument("--fixed", action="store_true", help="steps of dt, tight solves")
    parser.add_argument("--rtol", type=float, default=1e-4)
    parser.add_argument("--atol", type=float, default=1e-6)
    parser.add_argument("--scheme", default="4")
    parser.add_argument("--pc", default="bjacobi")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="")
    return parser.parse_args()


class GrayScott:
    """The equations on a periodic DMDA with two unknowns in each cell."""

    def __init__(self, n: int) -> None:
        self.n, self.h = n, SIDE / n
        self.da = PETSc.DMDA().create(
            [n, n], dof=2, stencil_width=1, boundary_type=(3, 3), stencil_type=0
        )
        self.local = self.da.createLocalVec()
        (x0, x1), (y0, y1) = self.da.getRanges()
        self.shape = (y1 - y0, x1 - x0)
        self.x, self.y = (np.arange(a, b) * self.h for a, b in ((x0, x1), (y0, y1)))
        self.da.setMatType("aij")
        self.J = self.da.createMat()
        self._structure()

    def first(self) -> PETSc.Vec:
        u = self.da.createGlobalVec()
        X, Y = np.meshgrid(self.x, self.y)
        inside = (X >= 1) & (X <= 1.5) & (Y >= 1) & (Y <= 1.5)
        v = np.where(inside, 0.25 * np.sin(4 * np.pi * X) ** 2 * np.sin(4 * np.pi * Y) ** 2, 0)
        u.setArray(np.stack([1 - 2 * v, v], axis=-1).ravel())
        return u

    def fields(self, U: PETSc.Vec) -> np.ndarray:
        self.da.globalToLocal(U, self.local)
        ny, nx = self.shape
        return self.local.array_r.reshape(ny + 2, nx + 2, 2)

    def ifunction(self, ts, t, U, Udot, F) -> None:
        p = self.fields(U)
        c = p[1:-1, 1:-1]
        lap = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * c
        u, v = c[..., 0], c[..., 1]
        uvv = u * v * v
        k = 1 / self.h**2
        f = F.array.reshape(*self.shape, 2)
        dot = Udot.array_r.reshape(*self.shape, 2)
        f[..., 0] = dot[..., 0] - (D1 * k * lap[..., 0] - uvv + FEED * (1 - u))
        f[..., 1] = dot[..., 1] - (D2 * k * lap[..., 1] + uvv - (FEED + KILL) * v)

    def _structure(self) -> None:
        """Prepare the rows and columns of the matrix: six entries in each row."""
        ny, nx = self.shape
        lgmap = self.da.getLGMap().indices.reshape(ny + 2, nx + 2, 2)
        c = lgmap[1:-1, 1:-1]
        around = [lgmap[2:, 1:-1], lgmap[:-2, 1:-1], lgmap[1:-1, 2:], lgmap[1:-1, :-2]]
        columns = np.stack([c[..., ::-1], c, *around], axis=-1)  # the other field first
        self.indptr = np.arange(0, columns.size + 1, 6, dtype=np.int32)
        self.columns = columns.reshape(-1).astype(np.int32)

    def ijacobian(self, ts, t, U, Udot, a, J, P) -> bool:
        w = U.array_r.reshape(*self.shape, 2)
        u, v = w[..., 0], w[..., 1]
        k = 1 / self.h**2
        values = np.empty((*self.shape, 2, 6))
        values[..., 0, 0] = 2 * u * v
        values[..., 1, 0] = -v * v
        values[..., 0, 1] = a + 4 * D1 * k + v * v + FEED
        values[..., 1, 1] = a + 4 * D2 * k - 2 * u * v + FEED + KILL
        values[..., 0, 2:] = -D1 * k
        values[..., 1, 2:] = -D2 * k
        P.setValuesCSR(self.indptr, self.columns, values.ravel())
        P.assemble()
        return True


def main() -> None:
    a = arguments()
    options = PETSc.Options()
    options["ts_trajectory_type"] = "memory"
    options["ts_trajectory_solution_only"] = 0
    options["ts_arkimex_fully_implicit"] = 1
    options["pc_type"] = a.pc
    options["sub_pc_type"] = "ilu"
    model = GrayScott(a.cells)
    times = {"forward": [], "gradient": []}
    for _ in range(a.repeats):
        for what, seconds in times.items():
            ts = PETSc.TS().create()
            ts.setDM(model.da)
            ts.setProblemType(PETSc.TS.ProblemType.NONLINEAR)
            ts.setType("arkimex")
            ts.setARKIMEXType(a.scheme)
            ts.setIFunction(model.ifunction, model.da.createGlobalVec())
            ts.setIJacobian(model.ijacobian, model.J)
            ts.setTime(0)
            ts.setTimeStep(a.dt)
            ts.setMaxTime(a.end)
            ts.setMaxSteps(10000)
            ts.setExactFinalTime(PETSc.TS.ExactFinalTime.MATCHSTEP)
            if a.fixed:
                options["ts_adapt_type"] = "none"
                ts.getSNES().setTolerances(rtol=1e-12, atol=1e-14, stol=0)
                ts.getSNES().getKSP().setTolerances(rtol=1e-12)
            else:
                ts.setTolerances(rtol=a.rtol, atol=a.atol)
            if what == "gradient":
                ts.setSaveTrajectory()
            ts.setFromOptions()
            U = model.first()
            PETSc.COMM_WORLD.barrier()
            start = time.perf_counter()
            ts.solve(U)
            if what == "gradient":
                lam = U.duplicate()
                U.copy(lam)
                lam.scale(2.0)
                ts.setCostGradients([lam], None)
                ts.adjointSolve()
            PETSc.COMM_WORLD.barrier()
            seconds.append(time.perf_counter() - start)
            stats = {
                "steps": ts.getStepNumber(), "rejected": ts.getStepRejections(),
                "newton": ts.getSNESIterations(), "linear": ts.getKSPIterations(),
            }  # fmt: skip
            if what == "gradient":
                value, gradient = U.dot(U), lam
            else:
                forward = stats
            ts.destroy()
    natural = model.da.createNaturalVec()
    model.da.globalToNatural(gradient, natural)
    scatter, whole = PETSc.Scatter.toZero(natural)
    scatter.scatter(natural, whole)
    if PETSc.COMM_WORLD.rank == 0:
        if a.out:
            np.savez(a.out, value=value, gradient=whole.array.reshape(a.cells, a.cells, 2))
        print(json.dumps({"value": value, "times": times, **forward}))
        sys.stdout.flush()


main()
