"""SolCx: a Stokes flow with a jump of the viscosity, by its formula.

The problem is that of Zhong (Geophys. J. Int. 124, 1996) and of Duretz et al. (Geochem. Geophys.
Geosyst. 12, 2011): a unit square, free slip at all sides, the viscosity eta[0] for x < x_c and
eta[1] for x > x_c, and the force (0, sin(kz) cos(mx)) with k = n_z π and m = n_x π.

The velocity is (U(x) cos(kz), W(x) sin(kz)) and the pressure P(x) cos(kz). Incompressibility gives
W = -U'/k, and the vertical balance gives P = eta (U''' - k² U')/k² - cos(mx)/k. The horizontal
balance is then eta (U'''' - 2k² U'' + k⁴ U) = -m k sin(mx), so that in each half U is a multiple of
sin(mx) and four terms exp(±kx), x exp(±kx). Their eight factors follow from U = 0 and no shear
stress at x = 0 and 1, and from the continuity of U, W, the shear stress and the normal stress.
"""

import numpy as np


class SolCx:
    """The flow for two viscosities, and its values at points."""

    def __init__(self, eta, x_c=0.5, n_x=1, n_z=1):
        self.eta, self.x_c = eta, x_c
        self.m, self.k = n_x * np.pi, n_z * np.pi
        # U, W, P, shear stress, normal stress: which one, where, and on which sides of x_c.
        conditions = [(q, x, [side]) for side, x in enumerate((0.0, 1.0)) for q in (0, 3)]
        conditions += [(q, x_c, [0, 1]) for q in (0, 1, 3, 4)]
        A, b = np.zeros((8, 8)), np.zeros(8)
        for row, (quantity, x, sides) in enumerate(conditions):
            for side, sign in zip(sides, (1, -1), strict=False):
                given, *terms = self._terms(np.array(x), side)[quantity]
                A[row, 4 * side : 4 * side + 4] = sign * np.array(terms)
                b[row] -= sign * given
        sizes = np.abs(A).max(axis=1)  # stresses in the stiff half are large
        self.factors = np.linalg.solve(A / sizes[:, None], b / sizes).reshape(2, 4)

    def _terms(self, x, side):
        """Return U, W, P and both stresses of the five terms, shape (5, 5, ...).

        The first term is that of the force. Exponentials are 1 at one end of the half.
        """
        k, m, eta = self.k, self.m, self.eta[side]
        ends = ((0.0, self.x_c), (self.x_c, 1.0))[side]

        def derivative(n):
            values = [-m * k / eta / (m**2 + k**2) ** 2 * m**n * np.sin(m * x + n * np.pi / 2)]
            for rate, end in zip((-k, k), ends, strict=True):
                t = x - end
                decay = rate**n * np.exp(rate * t)
                values += [decay, (t + n / rate) * decay]
            return np.stack(values)

        U, U1, U2, U3 = (derivative(n) for n in range(4))
        P = eta * (U3 - k**2 * U1) / k**2
        P[0] -= np.cos(m * x) / k
        return np.stack([U, -U1 / k, P, -eta * (k * U + U2 / k), 2 * eta * U1 - P])

    def __call__(self, points):
        """Return both velocities and the pressure at points, shape (..., 3)."""
        x, z = np.moveaxis(points, -1, 0)
        halves = [
            np.einsum("qt...,t->q...", self._terms(x, side), [1.0, *self.factors[side]])[:3]
            for side in (0, 1)
        ]
        U, W, P = np.where(x < self.x_c, *halves)
        cos, sin = np.cos(self.k * z), np.sin(self.k * z)
        return np.stack([U * cos, W * sin, P * cos], axis=-1)
