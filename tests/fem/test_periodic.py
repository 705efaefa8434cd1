"""Spaces in which opposite sides are the same."""

import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad import fem

BOTH = {"xmin": "xmax", "ymin": "ymax"}


@pytest.mark.parametrize("degree", [1, 2])
def test_numbers_of_nodes(comm, degree):
    """Each node of a pair of sides counts once, at corners of two pairs, too."""
    mesh = fem.box((4, 3), (2.0, 1.0), comm=comm)
    nx, ny = 4 * degree, 3 * degree
    assert fem.Space(mesh, degree, periodic={"xmin": "xmax"}).nodes.n_global == nx * (ny + 1)
    assert fem.Space(mesh, degree, periodic={"ymax": "ymin"}).nodes.n_global == (nx + 1) * ny
    space = fem.Space(mesh, degree, periodic=BOTH)
    assert space.nodes.n_global == nx * ny
    wave = lambda x: np.sin(np.pi * x[:, 0]) + np.cos(2 * np.pi * x[:, 1])
    u = space.interpolate(wave)
    whole = fem.Space(mesh).interpolate(wave)
    close(space.at_vertices(u), whole, 1e-12)
    assert mg.dot_test(space.at_vertices, jnp.asarray(u), comm=comm).error < 1e-12
    with pytest.raises(ValueError, match="Take space\\.at_vertices"):
        _ = space.vertex_nodes


def test_a_wave_is_found(comm):
    """-∇·(c ∇u) + u = f: a wave across both pairs of sides, and the derivative in c."""
    mesh = fem.box((8, 8), (1.0, 1.0), cell_type="triangle", comm=comm)
    space = fem.Space(mesh, 2, periodic=BOTH)
    k = 2 * np.pi

    def energy(p, c, shift):
        x, y = p.x
        f = (1 + 2 * k**2) * jnp.sin(k * (x + y) + shift)
        return 0.5 * c * p.grad @ p.grad + 0.5 * p.u**2 - f * p.u

    form = fem.Energy(space, energy)

    @mg.jit
    def solution(c, shift):
        return fem.solve(form(fem.PerCell(c), shift), rtol=1e-11).value

    ones = jnp.ones(mesh.n_cells)
    for shift in (0.0, 1.3):
        exact = space.interpolate(lambda x, s=shift: np.sin(k * x.sum(axis=1) + s))
        close(solution(ones, shift), exact, 5e-3)
    u = solution(ones, 0.4)
    assert mg.dot_test(form(fem.PerCell(ones), 0.4).residual, u, comm=comm).error < 1e-12
    along = jnp.asarray(np.cos(3 * mesh.centers().sum(axis=1)))
    loss = lambda c: jnp.sum(solution(c, 0.4) ** 4)
    assert min(mg.taylor_test(loss, ones, along, comm=comm).rates_with) > 1.9


def test_three_axes_and_errors(comm):
    mesh = fem.box((3, 2, 2), (1.0, 1.0, 1.0), cell_type="tetrahedron", comm=comm)
    every = BOTH | {"zmin": "zmax"}
    assert fem.Space(mesh, 2, 3, every).nodes.n_global == 6 * 4 * 4
    assert fem.Space(mesh, 2, 3, every).pattern.near_null is None
    tube = fem.Space(mesh, 1, 3, {"zmin": "zmax"})
    assert tube.pattern.near_null.shape[1] == 1  # about the z axis
    law = lambda p: 0.25 * jnp.sum((p.grad + p.grad.T) ** 2) - jnp.sin(2 * jnp.pi * p.x[2]) * p.u[2]
    free = fem.solve(fem.Energy(tube, law)(), nullspace="rigid motions", rtol=1e-10)
    assert abs(mg.allreduce(jnp.sum(free.value))) < 1e-8
    for sides, error, message in (
        ({"xmin": "ymax"}, ValueError, "must have the same number of nodes, got 9 and 12"),
        ({"xmin": "xmax", "xmax": "xmin"}, ValueError, "must not lead back to themselves"),
        ({"ymin": "zmax"}, ValueError, "has no partner on ymin: the nearest one is"),
        (("xmin", "xmax"), TypeError, "periodic must be a dictionary of tags"),
    ):
        with pytest.raises(error, match=message):
            fem.Space(mesh, periodic=sides)
