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
    with pytest.raises(ValueError, match="Take space\\.at_vertices"):
        _ = space.vertex_nodes


def test_a_wave_is_found(comm):
    """-Δu + u = f of a periodic wave in 2-D, the derivative of it, and a shift of the wave."""
    mesh = fem.box((8, 8), (1.0, 1.0), cell_type="triangle", comm=comm)
    space = fem.Space(mesh, 2, periodic=BOTH)
    k = 2 * np.pi

    def energy(p, shift):
        x, y = p.x
        f = (1 + 2 * k**2) * jnp.sin(k * (x + y) + shift)
        return 0.5 * p.grad @ p.grad + 0.5 * p.u**2 - f * p.u

    form = fem.Energy(space, energy)

    @mg.jit
    def solution(shift):
        return fem.solve(form(shift), rtol=1e-10).value

    def loss(shift):
        return form(shift).integral(solution(shift))

    for shift in (0.0, 1.3):
        exact = space.interpolate(lambda x, s=shift: np.sin(k * x.sum(axis=1) + s))
        close(solution(shift), exact, 5e-3)
    slope = mg.grad(loss, replicated=0)(0.4)  # all shifts are the same
    assert abs(slope) < 1e-3 * abs(mg.allreduce(loss(0.4)))
    u = solution(0.4)
    assert mg.dot_test(form(0.4).residual, u, comm=comm).error < 1e-12


def test_three_axes_and_errors(comm):
    mesh = fem.box((3, 2, 2), (1.0, 1.0, 1.0), cell_type="tetrahedron", comm=comm)
    every = BOTH | {"zmin": "zmax"}
    assert fem.Space(mesh, 2, 3, every).nodes.n_global == 6 * 4 * 4
    assert fem.Space(mesh, 2, 3, every).pattern.near_null is None
    for sides, error, message in (
        ({"xmin": "ymax"}, ValueError, "must have the same number of nodes, got 9 and 12"),
        ({"xmin": "xmax", "xmax": "xmin"}, ValueError, "must not lead back to themselves"),
        ({"ymin": "zmax"}, ValueError, "has no partner on ymin: the nearest one is"),
        (("xmin", "xmax"), TypeError, "periodic must be a dictionary of tags"),
    ):
        with pytest.raises(error, match=message):
            fem.Space(mesh, periodic=sides)
