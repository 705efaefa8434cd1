"""Waves on a drum: finite elements on an unstructured mesh, without a matrix.

A mesh consists of triangles between numbered points. Each rank owns a stripe of the points and some
of the triangles. The corners of its triangles may be points of other ranks. `mg.GhostExchange`
reads these points, and its adjoint adds the contributions of the triangles to the values of the
owners. A finite-element operator needs no other communication. The exchange is differentiable, and
so is the program: it computes the derivative of the sound at a sensor with respect to the speed of
sound in every triangle.

    mpigrad launch -n 4 examples/drum.py drum.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from scipy.spatial import Delaunay

import mpigrad as mg

jax.config.update("jax_enable_x64", True)
rank = MPI.COMM_WORLD.rank

# The mesh: points in a disc, arranged as the seeds of a sunflower. They are numbered from left to
# right, so that a stripe of indices is a strip of the disc with few neighbours. The mesh is small
# enough for every rank to make all of it. A mesh generator and a partitioner make a large mesh in
# pieces.
n = 400
k = np.arange(n) + 0.5
points = np.sqrt(k / n)[:, None] * np.stack([np.cos(2.4 * k), np.sin(2.4 * k)], axis=1)
points = points[np.argsort(points[:, 0])]
mesh = Delaunay(points)
triangles = mesh.simplices

# Gradients of the hat functions of a triangle's three corners, from the edges opposite to them.
p = points[triangles]
edges = np.roll(p, 1, axis=1) - np.roll(p, -1, axis=1)
area = (edges[:, 0, 0] * edges[:, 1, 1] - edges[:, 0, 1] * edges[:, 1, 0]) / 2
hats = np.stack([-edges[..., 1], edges[..., 0]], axis=-1) / (2 * area[:, None, None])
area = np.abs(area)
drum = area.sum()
# The largest eigenvalue of stiffness over mass of any triangle bounds the eigenvalues of the mesh.
step = 1 / np.sqrt(3 * np.sum(hats**2, axis=(1, 2)).max())

# This rank owns a range of the points, and the triangles whose first corner is one of them. The
# boundary points, which lie on the hull, do not move.
own = mg.sparse.local_range(n)
mine = (triangles[:, 0] >= own.start) & (triangles[:, 0] < own.stop)
corners = mg.GhostExchange(len(own), triangles[mine].ravel())
area, hats = area[mine], hats[mine]
free = ~np.isin(own, mesh.convex_hull)


def to_points(per_corner):
    """Add the values at the corners of this rank's triangles, (m, 3), to the points' owners."""
    _, accumulate = mg.vjp(corners.exchange, jnp.zeros(len(own)))
    return accumulate(jnp.ravel(per_corner))[0]


def stiffness(speed, u):
    """Return -div(speed² grad u) times the test functions. Each neighbour gets a message each way.

    `speed` has one value for each triangle of this rank, and `u` one for each point.
    """
    gradient = jnp.einsum("tcx,tc->tx", hats, corners.exchange(u).reshape(-1, 3))
    flux = (speed**2 * area)[:, None] * gradient
    return to_points(jnp.einsum("tcx,tx->tc", hats, flux))


mass = to_points(np.repeat(area[:, None] / 3, 3, axis=1))
at = points[own.start : own.stop]
struck = jnp.exp(-40 * np.sum((at - [-0.4, 0.2]) ** 2, axis=1)) * free
sensor = jnp.exp(-40 * np.sum((at - [0.5, -0.1]) ** 2, axis=1))


@mg.jit
def heard(speed):
    """Return this rank's share of the squared sound at the sensor, summed over time."""

    def tick(state, _):
        before, now = state
        after = 2 * now - before - step**2 * free * stiffness(speed, now) / mass
        return (now, after), jnp.sum(sensor * mass * after)

    _, shares = jax.lax.scan(tick, (struck, struck), None, length=int(1.5 / step))
    return jnp.sum(mg.allreduce(shares) ** 2) / corners.comm.size


# The integral of |grad x|² is the area of the drum. The gradient is exact: <A u', v> = <u', A^T v>
# over all ranks, and the remainder of the Taylor series falls with the square of the step.
speed, x = jnp.ones(len(area)), jnp.asarray(at[:, 0])
np.testing.assert_allclose(mg.allreduce(jnp.vdot(x, stiffness(speed, x))), drum)
mg.dot_test(stiffness, speed, struck)
mg.taylor_test(heard, speed)

# A faster membrane makes the sound louder if it lies between the stroke and the sensor.
loudness, sensitivity = mg.value_and_grad(heard, loss="share")(speed)
centre = points[triangles[mine]].mean(axis=1)
strongest = max(
    MPI.COMM_WORLD.allgather(
        max(zip(np.abs(sensitivity / area).tolist(), centre.tolist(), strict=True))
    )
)
per_area = np.zeros(len(triangles))
per_area[mine] = sensitivity / area
per_area = MPI.COMM_WORLD.allreduce(per_area)  # of all triangles, for a picture
if rank == 0:
    x, y = strongest[1]
    print(f"{n} points, {len(triangles)} triangles, time step {step:.4f}")
    print(f"loudness {loudness:.3e}, most sensitive to the speed at ({x:.2f}, {y:.2f})")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.6, 4.6), layout="constrained")
        axes = figure.add_subplot(aspect="equal")
        largest = np.quantile(np.abs(per_area), 0.99)
        image = axes.tripcolor(*points.T, triangles, per_area, cmap="RdBu_r")
        image.set_clim(-largest, largest)
        figure.colorbar(image, ax=axes, shrink=0.9)
        axes.plot([-0.4, 0.5], [0.2, -0.1], "k.", markersize=9)
        axes.annotate("struck", (-0.4, 0.2), (-0.38, 0.25))
        axes.annotate("heard", (0.5, -0.1), (0.52, -0.05))
        axes.set_title("derivative of the loudness with respect to the speed, per area")
        figure.savefig(sys.argv[-1], dpi=110)
