"""Poisson's equation on an L-shaped plate with two holes, from a file of gmsh.

The mesh is divided over ranks. First -Δu = f with a known solution on finer and finer meshes: the
error falls with order two for elements of degree 1, and with order three for degree 2. Then the
deflection of a membrane that is held at its outer sides, on the mesh as it is.

    mpigrad launch -n 2 examples/perforated_plate.py plate.png
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import meshio
import numpy as np

import mpigrad as mg
from mpigrad import fem

jax.config.update("jax_enable_x64", True)

comm = mg.default_communicator()
path = pathlib.Path(__file__).with_suffix(".msh")


def refine(points, triangles):
    """Divide each triangle into four, by the middles of its edges."""
    edges = np.sort(triangles[:, [1, 2, 2, 0, 0, 1]].reshape(-1, 2), axis=1)
    edges, middle = np.unique(edges, axis=0, return_inverse=True)
    a, b, c = triangles.T
    p, q, r = len(points) + middle.reshape(-1, 3).T  # opposite to a, b, c
    parts = [(a, r, q), (r, b, p), (q, p, c), (p, q, r)]
    cells = np.concatenate([np.column_stack(part) for part in parts])
    return np.vstack([points, points[edges].mean(axis=1)]), cells


def exact(x):
    """Return the known solution at a point."""
    return jnp.sin(3 * x[0]) * jnp.exp(x[1])


def source(x):
    """Return f = -Δu at a point."""
    return -jnp.trace(jax.hessian(exact)(x))


def error(mesh, degree):
    """Return the L2 norm of the error."""
    space = fem.Space(mesh, degree)
    poisson = fem.Energy(space, lambda p: 0.5 * p.grad @ p.grad - source(p.x) * p.u)
    boundary = space.fixed(mesh.boundary_facets())
    values = jnp.asarray(space.interpolate(jax.vmap(exact)))
    u = fem.solve(poisson(), boundary, values, rtol=1e-10).value
    square = fem.Energy(space, lambda p: (p.u - exact(p.x)) ** 2, degree=2 * degree + 2)
    return float(jnp.sqrt(mg.allreduce(square().integral(u))))


# Only rank 0 has the arrays of the whole mesh.
points, triangles = np.zeros((0, 2)), np.zeros((0, 3), int)
if comm.rank == 0:
    file = meshio.read(path)
    points, triangles = file.points[:, :2], file.cells_dict["triangle"]
errors = {1: [], 2: []}
for _ in range(3):
    finer = fem.distribute_mesh(points, triangles, "triangle")
    for degree, found in errors.items():
        found.append(error(finer, degree))
    if comm.rank == 0:
        points, triangles = refine(points, triangles)
orders = {degree: np.log2(found[-2] / found[-1]) for degree, found in errors.items()}

mesh = fem.read_mesh(path)
space = fem.Space(mesh, degree=2)
membrane = fem.Energy(space, lambda p, load: 0.5 * p.grad @ p.grad - load * p.u)
u = fem.solve(membrane(1.0), space.fixed("sides")).value  # the holes are free
at_vertices = mesh.gather_vertices(u[space.vertex_nodes])  # in the order of the file
rank_of_cell = mesh.gather_cells(jnp.full(mesh.n_cells, comm.rank))

if comm.rank == 0:
    for degree, found in errors.items():
        print(
            f"degree {degree}: errors", *(f"{e:.1e}" for e in found), f"order {orders[degree]:.2f}"
        )
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        points, triangles = file.points[:, :2], file.cells_dict["triangle"]
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.tripcolor(
            *points.T, triangles, facecolors=np.asarray(rank_of_cell), cmap="Set3", ec="w"
        )
        left.set_title("the cells of each rank")
        image = right.tripcolor(*points.T, triangles, np.asarray(at_vertices), shading="gouraud")
        figure.colorbar(image, ax=right)
        right.set_title("deflection")
        for axes in (left, right):
            axes.set_aspect("equal")
        figure.savefig(sys.argv[-1], dpi=110)
assert orders[1] > 1.9 and orders[2] > 2.8
