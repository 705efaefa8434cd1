"""Test functions with bounds: name -> (function, start, lower, upper).

From the driver of L-BFGS-B (Zhu et al. 1997), Moré, Garbow and Hillstrom (1981) with bounds, Hock
and Schittkowski (1981), and MINPACK-2 (Averick et al. 1992).
"""

import jax.numpy as jnp
import numpy as np

INF = np.inf


def chained_rosenbrock(x):
    """The driver of L-BFGS-B: odd unknowns are at least 1."""
    return (x[0] - 1) ** 2 + 16 * jnp.sum((x[1:] - x[:-1] ** 2) ** 2)


def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


def powell(x):
    a, b, c, d = x.reshape(-1, 4).T
    return jnp.sum((a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4)


def wood(x):
    a, b, c, d = x
    return (
        100 * (b - a**2) ** 2 + (1 - a) ** 2 + 90 * (d - c**2) ** 2 + (1 - c) ** 2
        + 10.1 * ((b - 1) ** 2 + (d - 1) ** 2) + 19.8 * (b - 1) * (d - 1)
    )  # fmt: skip


def broyden_tridiagonal(x):
    padded = jnp.pad(x, 1)
    return jnp.sum(((3 - 2 * x) * x - padded[:-2] - 2 * padded[2:] + 1) ** 2)


def brown_almost_linear(x):
    n = len(x)
    return jnp.sum((x[:-1] + jnp.sum(x) - (n + 1)) ** 2) + (jnp.prod(x) - 1) ** 2


def variably_dimensioned(x):
    s = jnp.sum(jnp.arange(1.0, len(x) + 1) * (x - 1))
    return jnp.sum((x - 1) ** 2) + s**2 + s**4


def trigonometric(x):
    n, i = len(x), jnp.arange(1.0, len(x) + 1)
    return jnp.sum((n - jnp.sum(jnp.cos(x)) + i * (1 - jnp.cos(x)) - jnp.sin(x)) ** 2)


def hock_schittkowski_110(x):
    return jnp.sum(jnp.log(x - 2) ** 2 + jnp.log(10 - x) ** 2) - jnp.prod(x) ** 0.2


SIDE = 12  # cells of a side of the two-dimensional problems, with SIDE² unknowns
H = 1 / (SIDE + 1)


def dirichlet(x, weight=1.0):
    """Return ∫ weight |grad u|² / 2 over the unit square, with u = 0 on its boundary."""
    u = jnp.pad(x.reshape(SIDE, SIDE), 1)
    return 0.5 * jnp.sum(weight * (jnp.diff(u, axis=0)[:, :-1] ** 2)) + 0.5 * jnp.sum(
        weight * (jnp.diff(u, axis=1)[:-1, :] ** 2)
    )


def torsion(x):
    return dirichlet(x) - 5.0 * H**2 * jnp.sum(x)


def obstacle(x):
    return dirichlet(x) - H**2 * jnp.sum(x)


def bearing(x):
    """A journal bearing of eccentricity 0.1."""
    angle = 2 * np.pi * H * np.arange(SIDE + 1)[:, None]
    load = 0.1 * np.sin(2 * np.pi * H * np.arange(1, SIDE + 1))[:, None]
    film = (1 + 0.1 * np.cos(angle)) ** 3
    return dirichlet(x, film) - H**2 * jnp.sum(load * x.reshape(SIDE, SIDE))


def _bumps():
    t = np.sin(9.2 * np.arange(1, SIDE + 1) * H)
    return np.maximum(np.outer(t, t), 0).ravel() ** 3


def _distance():
    i = np.minimum(np.arange(1, SIDE + 1), np.arange(SIDE, 0, -1)) * H
    return np.minimum.outer(i, i).ravel()


_odd = np.arange(25) % 2 == 0
_even = np.arange(10) % 2 == 1
FUNCTIONS = {
    "chained Rosenbrock": (
        chained_rosenbrock, np.full(25, 3.0), np.where(_odd, 1.0, -100), np.full(25, 100.0),
    ),
    "Rosenbrock, HS 1": (rosenbrock, np.array([-2.0, 1]), np.array([-INF, -1.5]), np.full(2, INF)),
    "Rosenbrock, HS 2": (rosenbrock, np.array([-2.0, 1.5]), np.array([-INF, 1.5]), np.full(2, INF)),
    "Wood, HS 38": (wood, np.array([-3.0, -1, -3, -1]), np.full(4, -10.0), np.full(4, 10.0)),
    "Powell": (
        powell, np.tile([3.0, -1, 0, 1], 4), np.tile([0.1, -20, -1, -1], 4), np.full(16, 20.0),
    ),
    "Broyden tridiagonal": (
        broyden_tridiagonal, np.full(30, -1.0), np.full(30, -1.0), np.full(30, -0.6),
    ),
    "Brown almost linear": (
        brown_almost_linear, np.full(10, 0.5), np.zeros(10), np.array([0.9] * 5 + [20.0] * 5),
    ),
    "variably dimensioned": (
        variably_dimensioned, 1 - np.arange(1, 11) / 10, np.zeros(10), np.where(_even, 0.8, 3),
    ),
    "trigonometric": (
        trigonometric, np.full(10, 0.1), np.where(_even, 0.07, 0.0), np.full(10, 0.3),
    ),
    "HS 110": (
        hock_schittkowski_110, np.full(10, 9.0), np.full(10, 2.001), np.full(10, 9.999),
    ),
    "torsion": (torsion, np.zeros(SIDE**2), -_distance(), _distance()),
    "obstacle": (obstacle, np.ones(SIDE**2), _bumps(), np.full(SIDE**2, 2000.0)),
    "bearing": (bearing, np.full(SIDE**2, 0.1), np.zeros(SIDE**2), np.full(SIDE**2, INF)),
}  # fmt: skip
