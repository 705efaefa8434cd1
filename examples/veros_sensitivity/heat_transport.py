"""How the northward heat transport of an ocean depends on its temperature and on the wind.

The model is veros, in its set-up ACC: an Atlantic with a circumpolar current. The gradient goes
backwards through its time steps, on any number of ranks (docs/veros.md):

    mpigrad launch -n 4 examples/veros_sensitivity/heat_transport.py --picture sensitivity.png
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("MPIGRAD_MPI4JAX_ADJOINTS", "exact")

import jax
import jax.numpy as jnp
import numpy as np
import veros
from mpi4py import MPI

from mpigrad.compat.mpi4jax import stand_in

stand_in.install()  # before veros imports mpi4jax
veros.runtime_settings.loglevel = "warning"

import differentiable_veros as ocean

ocean.configure()

from veros import distributed
from veros.setups.acc import ACCSetup
from veros.setups.acc_basic import ACCBasicSetup

SETUPS = {"acc": ACCSetup, "acc_basic": ACCBasicSetup}

HEAT = 1024.0 * 3992.0 / 1e15  # density times heat capacity, in PW s / (K m3)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--setup", choices=SETUPS, default="acc")
    parser.add_argument("--override", nargs="*", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--steps", type=int, default=50, help="steps of half a day")
    parser.add_argument("--spin-up", type=int, default=200, help="steps before them")
    parser.add_argument("--latitude", type=float, default=20.0)
    parser.add_argument("--taylor", action="store_true", help="check the gradient")
    parser.add_argument("--save", metavar="FILE.npz")
    parser.add_argument("--picture", metavar="FILE.png")
    return parser.parse_args()


def heat_transport(state: ocean.State, latitude: float) -> jax.Array:
    """Return this rank's share of the heat that flows north across a latitude, in PW."""
    inner = slice(2, -2)
    now = state["tau"]
    v, temperature = state["v"][inner, inner, :, now], state["temp"][inner, 2:, :, now]
    between = 0.5 * (temperature[:, :-2] + temperature[:, 1:-1])
    on_section = jnp.abs(state["yu"][inner] - latitude) < 1e-6
    width = state["dxt"][inner, None] * (state["cosu"][inner] * on_section)
    area = width[:, :, None] * state["dzt"] * state["maskV"][inner, inner]
    return HEAT * jnp.sum(v * between * area)


def smooth_direction(state: ocean.State) -> tuple[jax.Array, jax.Array]:
    """Return a change of temperature (K) and wind stress (N/m2) that is the same on any tiles."""
    x, y = jnp.radians(state["xt"])[:, None], jnp.radians(state["yt"])
    wave = jnp.sin(3 * x + 1) * jnp.cos(4 * y)
    temperature = wave[:, :, None] * jnp.exp(state["zt"] / 500) * state["maskT"]
    return temperature, 0.05 * wave * state["maskU"][:, :, -1]


def main() -> None:
    options = parse()
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    pairs = (pair.split("=") for pair in options.override)
    setup = SETUPS[options.setup](override={name: json.loads(value) for name, value in pairs})
    setup.setup()
    model = ocean.Model(setup)
    wind = model.parameters
    state = model.run(model.initial, wind, options.spin_up)
    temperature = state["temp"][..., int(state["tau"])]

    def objective(state: ocean.State) -> jax.Array:
        return heat_transport(state, options.latitude)

    def sweep() -> Any:
        return jax.block_until_ready(
            model.value_and_gradient(objective, state, temperature, wind, options.steps)
        )

    compiling = -time.perf_counter()
    sweep()
    compiling += time.perf_counter()
    seconds = -time.perf_counter()
    value, (by_temperature, by_wind) = sweep()
    seconds += time.perf_counter()
    gradient = (by_temperature, by_wind["surface_taux"])
    if rank == 0:
        print(f"heat transport after {options.steps} steps: {float(value):.12f} PW")
        print(f"value and gradient: {seconds:.1f} s on {size} ranks (first {compiling:.1f} s)")

    if options.taylor:
        controls = (temperature, wind["surface_taux"])

        def forward(controls: tuple[jax.Array, jax.Array]) -> jax.Array:
            start = model.start(state, controls[0])
            last = model.run(start, {"surface_taux": controls[1]}, options.steps)
            return objective(model.constants | last)

        direction = smooth_direction(model.constants)
        check_taylor(forward, controls, gradient, direction)

    whole = [distributed.gather(g, setup.state.dimensions, ("xt", "yt")) for g in gradient]
    if rank == 0:
        in_temperature, in_wind = (np.asarray(g)[2:-2, 2:-2] for g in whole)
        if options.save:
            np.savez(options.save, value=value, temperature=in_temperature, wind=in_wind)
        if options.picture:
            draw(in_temperature.sum(2), 0.1 * in_wind, options)


def check_taylor(f: Any, x: Any, gradient: Any, direction: Any) -> None:
    """Print the remainders of a Taylor expansion along a direction, over all ranks."""

    def total(share: Any) -> float:
        return MPI.COMM_WORLD.allreduce(float(share))

    slope = total(sum(jnp.vdot(g, d) for g, d in zip(gradient, direction, strict=True)))
    value = total(f(x))
    for h in (8e-3, 4e-3, 2e-3, 1e-3, 5e-4):
        there = total(f(jax.tree.map(lambda a, d, h=h: a + h * d, x, direction)))
        change = there - value
        if MPI.COMM_WORLD.rank == 0:
            print(f"taylor {h:.1e} {change:+.6e} {change - h * slope:+.3e}", flush=True)


def draw(temperature: np.ndarray, wind: np.ndarray, options: argparse.Namespace) -> None:
    """Draw both sensitivities."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.0, 4.6), sharey=True, layout="constrained")
    titles = ("1 K more in a column", "0.1 N/m² more zonal wind on a cell")
    for ax, field, title in zip(axes, (temperature, wind), titles, strict=True):
        limit = 1e3 * np.quantile(np.abs(field), 0.995)
        image = ax.imshow(
            1e3 * field.T, origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit,
            extent=(0, 60, -40, 44), aspect="auto",
        )  # fmt: skip
        ax.axhline(options.latitude, color="black", linestyle="--", linewidth=1)
        ax.set(title=title, xlabel="longitude")
        figure.colorbar(image, ax=ax, label="TW")
    axes[0].set_ylabel("latitude")
    figure.suptitle(
        f"change of the heat transport across the line, {options.steps / 2:g} days later"
    )
    figure.savefig(options.picture, dpi=90)


if __name__ == "__main__":
    main()
