"""The viscosities of three layers, from the flow at the surface above sinking spheres.

Spheres (discs in two dimensions), a million times stiffer than the fluid around them, sink in three
layers of fluid. The sides and the bottom let the fluid slip, and the top is free. Stokes' equations
are solved with Taylor-Hood elements (Taylor and Hood 1973) and GMRES: multigrid for the velocities,
and the mass of the pressure divided by the viscosity in place of the Schur complement. L-BFGS finds
the logarithms of the three viscosities from the velocities at the surface. The flow hardly
changes with the viscosity of the spheres, which move as if they were rigid.

    mpigrad launch -n 2 examples/sinking_spheres.py spheres.png

`--cells 32` gives a finer mesh. `--dim 3` has spheres, by default in 5³ boxes, and no picture.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem, optimize
from mpigrad.sparse import GMRES, BlockTriangular, BoomerAMG, Jacobi

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser()
parser.add_argument("picture", nargs="?")
parser.add_argument("--dim", type=int, choices=(2, 3), default=2)
parser.add_argument("--cells", type=int, help="along each side")
options, _ = parser.parse_known_args()

dim = options.dim
n = options.cells or {2: 16, 3: 5}[dim]
mesh = fem.box((n,) * dim, (1.0,) * dim, cell_type="triangle" if dim == 2 else "tetrahedron")
V, Q = fem.Space(mesh, 2, components=dim), fem.Space(mesh)
flow = fem.Mixed(velocity=V, pressure=Q)
side_names = ("xmin", "xmax", "ymin", "ymax")[: 2 * dim - 2]
slip = [V.fixed(name, component=k // 2) for k, name in enumerate(side_names)]
slip = np.any([*slip, V.fixed("ymin" if dim == 2 else "zmin", component=dim - 1)], axis=0)

radius, centers = 0.13, np.array([[0.3, 0.75], [0.7, 0.5], [0.35, 0.25]])
if dim == 3:
    centers = np.insert(centers, 1, 0.5, axis=1)
x = mesh.points[mesh.cells].mean(axis=1)
inside = (np.linalg.norm(x[:, None] - centers, axis=-1) < radius).any(axis=1)
layer = np.digitize(x[:, -1], [1 / 3, 2 / 3])


def dissipation(p, eta, weight):
    """Return the density of the functional that a Stokes flow makes stationary."""
    v = p.velocity
    strain = 0.5 * (v.grad + v.grad.T)
    return eta * jnp.sum(strain**2) - p.pressure.u * jnp.trace(v.grad) + weight * v.u[-1]


stokes = fem.Energy(flow, dissipation)
mass = fem.Energy(Q, lambda p, eta: 0.5 * p.u**2 / eta)
multigrid = BoomerAMG(unknowns_per_cell=dim, near_null=True)  # rotations of the spheres, too
# Rows of the size 1e6 allow residuals of about 1e-8, because of rounding.
solver = GMRES(rtol=1e-7, restart=200, preconditioner=BlockTriangular(multigrid, Jacobi()))
weight = fem.PerCell(100.0 * inside)


@mg.jit
def velocity(log_viscosity):
    """Return the velocity of the flow."""
    eta = fem.PerCell(jnp.where(inside, 1e6, jnp.exp(log_viscosity)[layer]))
    equation, schur = stokes(eta, weight), mass(eta)
    return fem.solve(equation, {"velocity": slip}, schur=schur, solver=solver).value.velocity


places = np.linspace(0.05, 0.95, 10)
stations = np.stack(np.meshgrid(*[places] * (dim - 1), [1.0]), axis=-1).reshape(-1, dim)
observe = fem.Observation(V, stations)
true = jnp.array([1.0, -1.0, 0.5])  # from the bottom to the top
truth = velocity(true)
data = observe.local(truth)


def misfit(log_viscosity):
    """Return this rank's share of the sum of squares."""
    return jnp.sum((observe.local(velocity(log_viscosity)) - data) ** 2)


start = jnp.ones(3)
mg.taylor_test(misfit, start, replicated=True, step=0.2, halvings=3)
slope = mg.value_and_grad(misfit, replicated=0)  # `velocity` is compiled already
found = optimize.minimize(None, start, value_and_grad=slope, replicated=True, rtol=1e-5)
error = float(jnp.max(jnp.abs(jnp.exp(found.value - true) - 1)))
curves = [observe(u)[:, -1] for u in (truth, velocity(start), velocity(found.value))]
whole = mesh.gather_vertices(truth[V.vertex_nodes])

if mesh.comm.rank == 0:
    print("viscosities", np.exp(found.value).round(3), "true", np.exp(true).round(3))
    print(f"largest error {100 * error:.3f} % after {found.stats['evaluations']} gradients")
    if (options.picture or "").endswith(".png") and dim == 2:
        from matplotlib.figure import Figure
        from matplotlib.patches import Circle

        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        axis, u = np.linspace(0, 1, n + 1), np.reshape(whole, (n + 1, n + 1, 2))
        speed = left.contourf(axis, axis, np.linalg.norm(u, axis=-1), 24, cmap="viridis")
        left.streamplot(axis, axis, u[..., 0], u[..., 1], color="w", linewidth=0.6, density=0.7)
        for center in centers:
            left.add_patch(Circle(tuple(center), radius, fill=False, color="w", lw=2))
        left.hlines([1 / 3, 2 / 3], 0, 1, "w", ":")
        left.set(aspect="equal", title="three layers, and what sinks in them")
        figure.colorbar(speed, ax=left, label="speed")
        for curve, style, name in zip(
            curves, ("ko", "C0:", "C1-"), ("measured", "at the start", "found"), strict=True
        ):
            right.plot(places, curve, style, label=name)
        right.set(xlabel="x", title="vertical velocity of the surface")
        right.legend()
        figure.savefig(options.picture, dpi=110)
assert error < 0.01
