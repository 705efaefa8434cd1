"""A rubber block under large load, and its two moduli from displacements.

A neo-Hookean block is fixed at one end and pulled sideways at the other one, in load steps, each
with Newton's method. The displacements of nine points, with noise, give the shear and the bulk
modulus: L-BFGS with one gradient through the last Newton solve.

    mpigrad launch -n 2 examples/hyperelastic_block.py block.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem, loops, optimize

jax.config.update("jax_enable_x64", True)

shape, lengths = (10, 3, 3), (3.0, 1.0, 1.0)
mesh = fem.box(shape, lengths)
space = fem.Space(mesh, components=3)
fixed = space.fixed("xmin")


def neo_hooke(p, shear, bulk):
    """Return the stored energy of a compressible neo-Hookean body."""
    F = jnp.eye(3) + p.grad
    J = jnp.linalg.det(F)
    return 0.5 * shear * (jnp.sum(F**2) - 3 - 2 * jnp.log(J)) + 0.5 * bulk * (J - 1) ** 2


body = fem.Energy(space, neo_hooke)
pull = fem.Energy(space, lambda p, force: -force @ p.u, on=mesh.facets("xmax"))
force = jnp.array([0.06, 0.0, 0.05])  # per area of the end


def displacement(moduli):
    """Return the displacement under the whole load."""
    shear, bulk = jnp.exp(moduli)

    def more(u, load):
        equation = body(shear, bulk) + pull(load * force)
        return fem.solve(equation, fixed, 0.0, u, rtol=1e-9).value, None

    return loops.scan(more, jnp.zeros(space.shape), 3, jnp.array([0.4, 0.7, 1.0]))[0]


grid = np.linspace(0.2, 0.8, 3)
observe = fem.Observation(space, [[x, y, 0.5] for x in 1 + 2 * grid for y in grid])
true = jnp.log(jnp.array([1.0, 4.0]))
u = mg.jit(displacement)(true)
noise = 1e-4 * np.random.default_rng(0).normal(size=(9, 3))
data = observe.local(u) + noise[observe.indices]


def misfit(moduli):
    """Return this rank's share of the sum of squares."""
    return jnp.sum((observe.local(displacement(moduli)) - data) ** 2)


start = jnp.log(jnp.array([2.0, 2.0]))
found = optimize.minimize(misfit, start, replicated=True, max_steps=25)
shear, bulk = np.exp(found.value)
length = mg.allreduce(fem.Energy(space, lambda p: p.u[2], on=mesh.facets("xmax"))().integral(u))
moved = mesh.gather_vertices(u)

if mesh.comm.rank == 0:
    print(f"the end moves by {float(length):.2f} sideways")
    print(f"shear modulus {shear:.3f} (true 1), bulk modulus {bulk:.3f} (true 4)")
    if sys.argv[-1].endswith(".png"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        nx, ny, nz = (n + 1 for n in shape)
        axes_of = [np.linspace(0, length, n + 1) for length, n in zip(lengths, shape, strict=True)]
        z, y, x = np.meshgrid(*axes_of[::-1], indexing="ij")
        now = np.stack([x, y, z], axis=-1) + np.reshape(moved, (nz, ny, nx, 3))
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.add_subplot(projection="3d")
        size = np.linalg.norm(now - np.stack([x, y, z], axis=-1), axis=-1)
        colours = colormaps["viridis"](size / size.max())
        for k in (0, -1):
            for face in (np.s_[k], np.s_[:, k], np.s_[:, :, k]):
                axes.plot_surface(
                    *np.moveaxis(now[face], -1, 0), facecolors=colours[face], edgecolor="w",
                    linewidth=0.3, rstride=1, cstride=1, shade=False,
                )  # fmt: skip
        axes.set_aspect("equal")
        axes.set_title("block under load, coloured by displacement")
        figure.savefig(sys.argv[-1], dpi=110)
assert abs(shear - 1) < 0.02 and abs(bulk - 4) < 0.3
