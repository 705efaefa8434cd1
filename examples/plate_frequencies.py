"""The frequencies of a plate, and the thicknesses that change them at a fixed mass.

The plate of Reissner and Mindlin has three unknowns at each node: the deflection w and two
rotations. Its modes satisfy K x = ω² M x, and `sparse.eigh` computes the lowest ones. A plate of
equal thickness on simple supports has them in closed form (Mindlin, Schacknow and Deresiewicz
1956). Thin-plate theory, ω = 2π² √(D / (ρ h a⁴)), leaves out the shear: it is 3.5 % higher here.

Then the thickness changes at each node along the derivative of a goal. One plate gets a high first
frequency, and the other one a wide gap after it. The second and the third mode of a square plate
are the same but for a quarter turn. So their frequencies are equal, and neither of them has a
derivative, but their mean has.

    mpigrad launch -n 2 examples/plate_frequencies.py plate.png

`--cells 24` and `--steps 20` give finer plates.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem
from mpigrad.sparse import BoomerAMG, eigh

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser()
parser.add_argument("picture", nargs="?")
parser.add_argument("--cells", type=int, default=12, help="along a side")
parser.add_argument("--steps", type=int, default=10)
options, _ = parser.parse_known_args()

# In units of the side, Young's modulus and the density. A thickness is h t.
h, nu = 0.1, 0.3
shear = 5 / 6 / (2 * (1 + nu))
mesh = fem.box((options.cells, options.cells))
space, thicknesses = fem.Space(mesh, 2, components=3), fem.Space(mesh)
fixed = space.fixed(mesh.boundary_facets(), component=0)
for side, component in (("ymin", 1), ("ymax", 1), ("xmin", 2), ("xmax", 2)):
    fixed |= space.fixed(side, component)  # no rotation along the edge


def strain(p, t):
    """Return the energy of bending and shear."""
    (wx, wy), (ax, ay), (bx, by) = p.grad
    bending = ax**2 + by**2 + 2 * nu * ax * by + (1 - nu) / 2 * (ay + bx) ** 2
    slip = (wx - p.u[1]) ** 2 + (wy - p.u[2]) ** 2
    return 0.5 * (h * t.u) ** 3 / (12 * (1 - nu**2)) * bending + 0.5 * shear * h * t.u * slip


def motion(p, t):
    """Return the kinetic energy of the velocities p.u."""
    w, a, b = p.u
    return 0.5 * h * t.u * w**2 + (h * t.u) ** 3 / 24 * (a**2 + b**2)


stiffness, mass = fem.Energy(space, strain), fem.Energy(space, motion)
area = fem.Energy(thicknesses, lambda p: p.u)().residual(jnp.zeros(thicknesses.shape))


@mg.jit
def modes(t):
    """Return the four lowest pairs."""
    t = fem.Nodal(thicknesses, t)
    K, M = stiffness(t).jacobian(), mass(t).jacobian()
    return eigh(K, M, 4, fixed=fixed, preconditioner=BoomerAMG(unknowns_per_cell=3)).value


def goal(t, weights):
    """Return a weighted sum of the frequencies. Equal frequencies need equal weights."""
    omega = jnp.sqrt(modes(t).values)
    return weights @ omega, omega


def closed_form(m, n):
    """Return the frequency of a plate of thickness h with m and n half waves."""
    q, D = np.pi**2 * (m**2 + n**2), h**3 / (12 * (1 - nu**2))
    K = shear * h * q * np.array([[1, -1], [-1, 1]]) + np.diag([0, D * q**2])
    return np.sqrt(np.linalg.eigvals(K / [[h], [h**3 / 12 * q]]).min())


def update(t, slope, move):
    """Return the next thickness. The multiplier of the mass is found by bisection."""
    slope = slope / area
    slope = slope / jnp.sqrt(mg.allreduce(jnp.sum(area * slope**2)))
    low, high, new = -50.0, 50.0, t
    while high - low > 1e-9:
        middle = (low + high) / 2
        new = jnp.clip(t + move * (slope - middle), 0.5, 1.75)
        low, high = (middle, high) if mg.allreduce(area @ new) > 1 else (low, middle)
    return new


even = jnp.ones(thicknesses.shape)
exact = np.array([closed_form(*waves) for waves in ((1, 1), (1, 2), (2, 1), (2, 2))])
np.testing.assert_allclose(np.sqrt(modes(even).values), exact, rtol=1e-3)

uneven = jnp.asarray(thicknesses.interpolate(lambda x: np.sin(3 * x[:, 0]) * x[:, 1]))
step = mg.value_and_grad(goal, loss="replicated", has_aux=True)
plates = []
for weights in (jnp.array([1.0, 0, 0, 0]), jnp.array([-1.0, 0.5, 0.5, 0])):
    mg.taylor_test(lambda t, w=weights: goal(t, w)[0], even, uneven, loss="replicated")
    t, history = even, []
    for k in range(options.steps):
        (_, omega), slope = step(t, weights)
        history.append(omega)
        t = update(t, slope, 0.2 * 0.85**k)
    last = modes(t)
    history = np.array([*history, jnp.sqrt(last.values)])
    w = last.vectors[:, 0].reshape(space.shape)[space.vertex_nodes, 0]
    plates.append((history, mesh.gather_vertices(t), mesh.gather_vertices(jnp.abs(w))))
(high, thick, mode), (wide, cross, _) = plates
gap = wide[:, 1] - wide[:, 0]

if mesh.comm.rank == 0:
    print(f"thin-plate theory {2 * np.pi**2 * h / np.sqrt(12 * (1 - nu**2)):.4f}")
    for name, omega in (
        ("closed form", exact),
        ("equal thickness", high[0]),
        ("high first frequency", high[-1]),
        ("wide gap", wide[-1]),
    ):
        print(f"{name:20}", *(f"{value:.4f}" for value in omega))
    if (options.picture or "").endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.6, 6.2), layout="constrained")
        (left, right), (below, curves) = figure.subplots(2, 2)
        x = np.linspace(0, 1, options.cells + 1)
        for axes, field, title, colors in (
            (left, thick, "thickness / mean: high first frequency", "viridis"),
            (right, mode / np.max(mode), "deflection in its first mode", "magma"),
            (below, cross, "thickness / mean: wide gap", "viridis"),
        ):
            levels = np.linspace(np.min(field), np.max(field), 11)
            image = axes.contourf(x, x, np.reshape(field, (len(x), -1)), levels, cmap=colors)
            figure.colorbar(image, ax=axes, format="%.2f")
            axes.set(title=title, xticks=[], yticks=[], aspect="equal")
        for history, style, name in ((high, "-", "high first"), (wide, "--", "wide gap")):
            curves.plot(history[:, 1], "C1" + style, label=f"second and third, {name}")
            curves.plot(history[:, 0], "C0" + style, label=f"first, {name}")
        curves.set(xlabel="step", title="frequencies")
        curves.legend(loc="center", bbox_to_anchor=(0.5, 0.55), fontsize="small")
        figure.savefig(options.picture, dpi=90)
assert np.allclose(wide[:, 1], wide[:, 2], rtol=1e-6)
assert high[-1, 0] > 1.15 * high[0, 0] and gap[-1] > 1.2 * gap[0]
