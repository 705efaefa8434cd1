"""Named functions of the literature: Moré, Garbow and Hillstrom, ACM TOMS 7 (1981) 17-41.

Each is a sum of squares, with its residuals, first point, and least sum of squares.
"""

import jax.numpy as jnp
import numpy as np


def rosenbrock(x):
    return jnp.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def freudenstein_roth(x):
    a, b = x
    return jnp.stack([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def beale(x):
    k = jnp.arange(1, 4)
    return jnp.array([1.5, 2.25, 2.625]) - x[0] * (1 - x[1] ** k)


def helical_valley(x):
    angle = jnp.arctan2(x[1], x[0]) / (2 * jnp.pi)
    angle = jnp.where(angle < -0.25, angle + 1, angle)
    return jnp.stack([10 * (x[2] - 10 * angle), 10 * (jnp.hypot(x[0], x[1]) - 1), x[2]])


def box(x):
    t = 0.1 * jnp.arange(1, 11)
    return jnp.exp(-t * x[0]) - jnp.exp(-t * x[1]) - x[2] * (jnp.exp(-t) - jnp.exp(-10 * t))


def powell_singular(x):
    a, b, c, d = x
    return jnp.stack(
        [a + 10 * b, np.sqrt(5) * (c - d), (b - 2 * c) ** 2, np.sqrt(10) * (a - d) ** 2]
    )


def wood(x):
    a, b, c, d = x
    return jnp.stack(
        [
            10 * (b - a**2),
            1 - a,
            np.sqrt(90) * (d - c**2),
            1 - c,
            np.sqrt(10) * (b + d - 2),
            (b - d) / np.sqrt(10),
        ]
    )


def kowalik_osborne(x):
    y = jnp.array([1957, 1947, 1735, 1600, 844, 627, 456, 342, 323, 235, 246]) / 1e4
    u = jnp.array([4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625])
    return y - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def penalty(x):
    return jnp.append(np.sqrt(1e-5) * (x - 1), jnp.sum(x**2) - 0.25)


def variably_dimensioned(x):
    weighted = jnp.sum(jnp.arange(1, x.size + 1) * (x - 1))
    return jnp.concatenate([x - 1, jnp.stack([weighted, weighted**2])])


def trigonometric(x):
    i = jnp.arange(1, x.size + 1)
    return x.size - jnp.sum(jnp.cos(x)) + i * (1 - jnp.cos(x)) - jnp.sin(x)


def broyden_tridiagonal(x):
    left, right = jnp.append(0.0, x[:-1]), jnp.append(x[1:], 0.0)
    return (3 - 2 * x) * x - left - 2 * right + 1


def extended_rosenbrock(x):
    a, b = x[::2], x[1::2]
    return jnp.concatenate([10 * (b - a**2), 1 - a])


FUNCTIONS = {
    rosenbrock: ([-1.2, 1], 0),
    freudenstein_roth: ([0.5, -2], 48.98425367924001),
    beale: ([1, 1], 0),
    helical_valley: ([-1, 0, 0], 0),
    box: ([0, 10, 20], 0),
    powell_singular: ([3, -1, 0, 1], 0),
    wood: ([-3, -1, -3, -1], 0),
    kowalik_osborne: ([0.25, 0.39, 0.415, 0.39], 3.075056038492309e-4),
    penalty: (np.arange(1, 11), 7.0876515e-5),
    variably_dimensioned: (1 - np.arange(1, 11) / 10, 0),
    trigonometric: (np.full(10, 0.1), None),
    broyden_tridiagonal: (-np.ones(20), 0),
    extended_rosenbrock: (np.tile([-1.2, 1], 10), 0),
}
