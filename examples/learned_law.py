"""The law of a rubber, learned by a network inside the solve.

A sheet is pulled with four forces, and the displacements of its nodes are the data. Its stored
energy W(a), with the strain a = |F|² - 2 - 2 log J, is unknown. A convex network stands for it. The
gradient of the misfit in its weights goes through Newton's method on all ranks. Then the learned
law predicts a load that it has not seen: shear.

    mpigrad launch -n 2 examples/learned_law.py law.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem, loops, optimize

jax.config.update("jax_enable_x64", True)

mesh = fem.box((10, 5), (2.0, 1.0))
space = fem.Space(mesh, components=2)
fixed = space.fixed("xmin")
loads = jnp.array([0.15, 0.4, 0.7, 1.0])


def true_energy(a, _):
    """Return the energy of a rubber that becomes stiffer (Yeoh)."""
    return 0.5 * a + 0.15 * a**2


def network(a, weights):
    """Return a sum of soft ramps, which is zero at a = 0."""
    slope, steepness = jnp.exp(weights["slope"]), jnp.exp(weights["steepness"])
    ramps = jax.nn.softplus(steepness * a + weights["shift"]) - jax.nn.softplus(weights["shift"])
    return slope @ ramps


def body(law):
    """Return the energy of the sheet with a law of the strain a."""

    def energy(p, weights):
        F = jnp.eye(2) + p.grad
        J = F[0, 0] * F[1, 1] - F[0, 1] * F[1, 0]
        return law(jnp.sum(F**2) - 2 - 2 * jnp.log(J), weights) + 2.0 * (J - 1) ** 2

    return fem.Energy(space, energy)


force = fem.Energy(space, lambda p, f: -f @ p.u, on=mesh.facets("xmax"))


def displacements(form, weights, direction):
    """Return the fields under all loads: each is the first guess of the next one."""

    def more(u, load):
        u = fem.solve(form(weights) + force(load * direction), fixed, 0.0, u, rtol=1e-9).value
        return u, u

    return loops.scan(more, jnp.zeros(space.shape), len(loads), loads)[1]


pull, shear = jnp.array([1.0, 0.0]), jnp.array([0.0, 0.35])
true, learned = body(true_energy), body(network)
data = mg.jit(lambda: displacements(true, None, pull))()


def misfit(weights):
    """Return this rank's share of the loss."""
    return jnp.sum((displacements(learned, weights, pull) - data) ** 2)


key = jax.random.key(1)
start = {
    "slope": jnp.full(4, -2.5),
    "steepness": jnp.array([-0.5, 0.0, 0.3, 0.6]),
    "shift": jax.random.normal(key, (4,)),
}
first = mg.allreduce(mg.jit(misfit)(start))
found = optimize.minimize(misfit, start, replicated=True, max_steps=60, rtol=1e-6)
weights = found.value
last = mg.allreduce(mg.jit(misfit)(weights))

# The law has never seen this load.
expected = mg.jit(lambda: displacements(true, None, shear))()
predicted = mg.jit(lambda w: displacements(learned, w, shear))(weights)
squares = mg.allreduce(jnp.stack([jnp.sum((predicted - expected) ** 2), jnp.sum(expected**2)]))
error = float(jnp.sqrt(squares[0] / squares[1]))

if mesh.comm.rank == 0:
    print(
        f"loss {float(first):.1e} -> {float(last):.1e}, error of another load {100 * error:.1f} %"
    )
moved = mesh.gather_vertices(jnp.stack([expected[-1], predicted[-1]], axis=-1))
if mesh.comm.rank == 0 and sys.argv[-1].endswith(".png"):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    a = jnp.linspace(0, 1.5, 60)
    true_slope, slope = (jax.vmap(jax.grad(law), (0, None)) for law in (true_energy, network))
    left.plot(a, true_slope(a, None), "k", label="true")
    left.plot(a, slope(a, start), ":", label="at the start")
    left.plot(a, slope(a, weights), "--", label="learned")
    left.set(xlabel="strain a", ylabel="dW/da", title="law")
    left.legend()
    y, x = np.meshgrid(np.linspace(0, 1, 6), np.linspace(0, 2, 11), indexing="ij")
    for k, style, name in ((0, "k-", "true law"), (1, "r--", "learned law")):
        now = np.reshape(moved[..., k], (6, 11, 2)) + np.stack([x, y], axis=-1)
        right.plot(*np.moveaxis(now, -1, 0), style, lw=0.8)
        lines = right.plot(*np.moveaxis(now.transpose(1, 0, 2), -1, 0), style, lw=0.8)
        lines[0].set_label(name)
    right.set_aspect("equal")
    right.set_title("sheet in shear")
    right.legend()
    figure.savefig(sys.argv[-1], dpi=110)
assert last < 1e-3 * first and error < 0.03
