"""The body of a given area with the least drag in a Stokes flow: Borrvall and Petersson (2003).

Each cell has a porosity between 0 (the body) and 1 (fluid). The friction α(porosity) |u|²/2 is
added to the dissipation of the flow, which has the velocity (1, 0) at the boundary of the box. The
gradient of the dissipated power goes through the solve on all ranks. The mean porosity is given,
and the optimality criteria lower the power. A cloud around the middle becomes a rugby ball.

    mpigrad launch -n 2 examples/obstacle_flow.py obstacle.png

`--cells 64` and `--steps 60` give a finer one.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem
from mpigrad.sparse import GMRES, BlockTriangular, BoomerAMG, Jacobi

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser()
parser.add_argument("picture", nargs="?")
parser.add_argument("--cells", type=int, default=24, help="along each side")
parser.add_argument("--steps", type=int, default=12)
options, _ = parser.parse_known_args()

n = options.cells
mesh = fem.box((n, n), (1.0, 1.0), cell_type="triangle")
V, Q = fem.Space(mesh, 2, components=2), fem.Space(mesh)
flow = fem.Mixed(velocity=V, pressure=Q)
boundary = V.fixed(mesh.boundary_facets())
values = {"velocity": V.interpolate(lambda x: [1.0, 0.0] + 0 * x)}
fluid, friction, q = 0.9, 2.5e4, 0.1  # the mean porosity, α of the body, and its penalty


def alpha(porosity):
    """Return the friction of a cell: 0 in the fluid."""
    return friction * q * (1 - porosity) / (q + porosity)


def dissipation(p, porosity):
    """Return the density of the functional that the flow makes stationary, with viscosity 1."""
    v = p.velocity
    power = 0.5 * jnp.sum(v.grad**2) + 0.5 * alpha(porosity) * jnp.sum(v.u**2)
    return power - p.pressure.u * jnp.trace(v.grad)


brinkman = fem.Energy(flow, dissipation)
# The Schur complement is that of Stokes flow in the fluid, and of Darcy's law in the body.
schur = fem.Energy(Q, lambda p, porosity: 0.5 * p.u**2 / (1 + alpha(porosity) / (10 * n**2)))
blocks = BlockTriangular(BoomerAMG(unknowns_per_cell=2), Jacobi())
solver = GMRES(rtol=1e-9, restart=150, preconditioner=blocks)


@mg.jit
def power_and_velocity(porosity):
    """Return this rank's share of the dissipated power, and the velocity."""
    porosity = fem.PerCell(porosity)
    u = fem.solve(
        brinkman(porosity), {"velocity": boundary}, values, schur=schur(porosity), solver=solver,
        nullspace={"pressure": "constants"},
    ).value  # fmt: skip
    return brinkman(porosity).integral(u), u.velocity


def update(porosity, slope):
    """Return the next porosities: the multiplier of the mean is found by bisection."""
    low, high, new = 0.0, 1e9, porosity
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        new = porosity * jnp.sqrt(jnp.maximum(-slope, 0) / middle)
        new = jnp.clip(new, jnp.maximum(porosity - 0.2, 1e-3), jnp.minimum(porosity + 0.2, 1.0))
        mean = float(mg.allreduce(jnp.sum(new))) / mesh.n_cells_global
        low, high = (middle, high) if mean > fluid else (low, middle)
    return new


middle = mesh.points[mesh.cells].mean(axis=1) - 0.5
cloud = np.exp(-8 * np.sum(middle**2, axis=1))  # porous, around the middle of the box
porosity = 1 - (1 - fluid) * cloud * mesh.n_cells_global / mg.allreduce(cloud.sum())
mg.taylor_test(lambda porosity: power_and_velocity(porosity)[0], porosity)
step = mg.value_and_grad(power_and_velocity, has_aux=True)  # which is compiled already
history = []
for k in range(options.steps):
    (value, _), slope = step(porosity)
    history.append(float(value))
    porosity = update(porosity, slope)
    if mesh.comm.rank == 0:
        print(f"step {k}: power {history[-1]:.3f}")

value, velocity = power_and_velocity(porosity)
history.append(float(mg.allreduce(value)))
corners = mesh.gather_cells(mesh.points[mesh.cells])
whole_porosity = mesh.gather_cells(porosity)
whole = mesh.gather_vertices(velocity[V.vertex_nodes])
if mesh.comm.rank == 0 and (options.picture or "").endswith(".png"):
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    cells = PolyCollection(
        list(np.asarray(corners)), array=np.asarray(whole_porosity), cmap="Blues_r"
    )
    cells.set_edgecolor("face")
    left.add_collection(cells)
    axis, u = np.linspace(0, 1, n + 1), np.reshape(whole, (n + 1, n + 1, 2))
    width = np.linalg.norm(u, axis=-1)
    u = np.where(width[..., None] < 0.05, np.nan, u)  # no lines in the body
    left.streamplot(axis, axis, u[..., 0], u[..., 1], color="0.3", linewidth=width, density=0.8)
    left.set(aspect="equal", xlim=(0, 1), ylim=(0, 1), title="body of least drag, and the flow")
    right.plot(history, "o-")
    right.set(xlabel="step", ylim=(0, None), title="dissipated power")
    figure.savefig(options.picture, dpi=110)
assert history[-1] < history[0] / 7
