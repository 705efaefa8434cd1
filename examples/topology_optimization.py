"""The stiffest bracket of a given mass: topology optimisation in three dimensions.

Each cell has a density. A filter, which is a solve itself (Lazarov and Sigmund 2011), makes it
smooth, and the stiffness is that of SIMP, E = E0 + (1 - E0) ρ³ (Bendsøe and Sigmund 2003). The
gradient of the compliance goes through the elastic solve and the filter on all ranks. The densities
follow the optimality criteria.

    mpigrad launch -n 2 examples/topology_optimization.py bracket.png

`--cells 48` and `--steps 60` give a finer one.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser()
parser.add_argument("picture", nargs="?")
parser.add_argument("--cells", type=int, default=12, help="along the bracket")
parser.add_argument("--steps", type=int, default=10)
options, _ = parser.parse_known_args()

nx = options.cells
shape = (nx, nx // 3, nx // 2)
mesh = fem.box(shape, (2.0, 2.0 / 3.0, 1.0))
space, densities = fem.Space(mesh, components=3), fem.Space(mesh)
fixed = space.fixed("xmin")
volume, radius = 0.3, 2.0 / nx


def elastic(p, density):
    """Return the energy of a body with Poisson's ratio 0.3 and SIMP's stiffness."""
    E = 1e-3 + (1 - 1e-3) * density.u**3
    strain = 0.5 * (p.grad + p.grad.T)
    return E * (0.29 * jnp.trace(strain) ** 2 + 0.385 * jnp.sum(strain**2))


body = fem.Energy(space, elastic)
edge = mesh.facets(lambda x: (x[:, 0] == 2.0) & (x[:, 2] <= 2.0 / nx + 1e-9))
load = fem.Energy(space, lambda p: p.u[2], on=edge)()  # downwards
blur = fem.Energy(
    densities, lambda p, rho: 0.5 * radius**2 * p.grad @ p.grad + 0.5 * p.u**2 - rho * p.u
)


def compliance(rho):
    """Return this rank's share of the work of the load."""
    smooth = fem.solve(blur(fem.PerCell(rho)), rtol=1e-8).value
    u = fem.solve(body(fem.Nodal(densities, smooth)) + load, fixed, rtol=1e-8).value
    return -load.integral(u)


def update(rho, slope):
    """Return the next densities: the multiplier of the mass is found by bisection."""
    low, high, new = 0.0, 1e9, rho
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        new = rho * jnp.sqrt(jnp.maximum(-slope, 0) / middle)
        new = jnp.clip(new, jnp.maximum(rho - 0.2, 0.01), jnp.minimum(rho + 0.2, 1.0))
        mass = float(mg.allreduce(jnp.sum(new))) / mesh.n_cells_global
        low, high = (middle, high) if mass > volume else (low, middle)
    return new


rho = jnp.full(mesh.n_cells, volume)
mg.taylor_test(mg.jit(compliance), rho)
step = mg.jit(mg.value_and_grad(compliance))
history = []
for k in range(options.steps):
    value, slope = step(rho)
    history.append(float(mg.allreduce(value)))
    rho = update(rho, slope)
    if mesh.comm.rank == 0:
        print(f"step {k}: compliance {history[-1]:.2f}")

whole = mesh.gather_cells(rho)
if mesh.comm.rank == 0 and (options.picture or "").endswith(".png"):
    from matplotlib.figure import Figure

    solid = np.reshape(whole, shape[::-1]).T > 0.5
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(projection="3d")
    axes.voxels(solid, facecolor="#5a86ad", edgecolor="#2a4a66", linewidth=0.2)
    axes.set_box_aspect(shape)
    axes.view_init(22, -60)
    axes.set_title(f"compliance {history[0]:.1f} -> {history[-1]:.1f}")
    figure.savefig(options.picture, dpi=110)
assert history[-1] < 0.6 * history[0]
