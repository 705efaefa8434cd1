"""One wave program of mpigrad, deepwave or devito, which bench/waves.py starts and asks.

Every library has the same case: a random model between 2000 and 2500 m/s, cells of 10 m, steps of
1 ms, one 10 Hz Ricker source in the middle, a line of receivers in cell 3, float32, layers of 20
cells that absorb (10 on three axes), fourth order in space. It is given one command a line
(interleave.py):

    forward       the shot gather
    gradient      the gather, the sum of its squares, and the gradient in every cell of the model
                  (elastic: of lambda, mu and rho)
    similarity FILE   the gradient of a misfit, to be compared between libraries

and answers with one line of JSON: seconds, and the sum of squares as value.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from interleave import commands

SPACING, DT, FREQUENCY = 10.0, 1e-3, 10.0
PML = {2: 20, 3: 10}  # by the number of axes
FASTEST = 2500.0
ANOMALY = 200.0  # m/s
FORCE = 1e9  # for velocities of about 1, far from what underflows
Answer = dict[str, Any]
Calls = dict[str, Callable[[], float]]


def ricker(steps: int, delay: float = 0.1) -> np.ndarray:
    """A Ricker wavelet of unit height, sampled at n DT."""
    a = (np.pi * FREQUENCY * (np.arange(steps) * DT - delay)) ** 2
    return ((1 - 2 * a) * np.exp(-a)).astype(np.float32)


def random_model(shape: tuple[int, ...]) -> np.ndarray:
    """P velocities, m/s."""
    return (2000 + 500 * np.random.default_rng(0).random(shape)).astype(np.float32)


def anomaly_model(shape: tuple[int, int], height: float) -> np.ndarray:
    """2000 m/s everywhere, more or less around the middle."""
    x, y = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    return (2000 + height * np.exp(-(x**2 + y**2) / 0.08)).astype(np.float32)


def shear(vp: Any) -> Any:
    """S velocities that belong to P velocities."""
    return vp / 1.7


def density(vp: Any) -> Any:
    """Densities that belong to P velocities, kg/m^3."""
    return 2000 + 0 * vp


def source_cell(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The cell of the source when times are taken."""
    return tuple(n // 2 for n in shape)


def receiver_cells(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The cells of the receivers when times are taken."""
    return [(i, *(n // 2 for n in shape[1:-1]), 3) for i in range(1, shape[0] - 1)]


def similarity_cells(shape: tuple[int, int]) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """A source, and receivers on the other side of the anomaly."""
    line = shape[1] - shape[1] // 6
    return (shape[0] // 2, shape[1] // 6), [(i, line) for i in range(4, shape[0] - 4)]


# --- mpigrad ---


def mpigrad_calls(o: argparse.Namespace) -> tuple[Calls, Callable[[str], None]]:
    """The calls of this rank; with `apart`, the same work for each rank on a grid of its own."""
    import jax
    import jax.numpy as jnp

    import mpigrad
    from mpigrad.grid import Grid
    from mpigrad.waves import ElasticMedium, Survey
    from mpigrad.waves.acoustic import Acoustic

    world = mpigrad.default_communicator()
    shape, axes = tuple(o.cells), len(o.cells)

    def setting(comm: Any, shape: tuple[int, ...], pml: Any, steps: int) -> Any:
        """(model parameters of a P velocity, misfit of them and data) on a grid of `comm`."""
        grid = Grid(shape, (SPACING,) * axes, comm, dims=(comm.size, *(1,) * (axes - 1)))
        common: dict[str, Any] = {"dt": DT, "steps": steps, "pml": pml}
        if o.backend:
            common["backend"] = o.backend
        if o.backend != "xla":
            common["threads"] = o.threads
        height = 1.0 if o.physics == "acoustic" else FORCE * SPACING**axes
        wavelets = height * jnp.asarray(ricker(steps))[None, None]
        if o.physics == "acoustic":
            model: Any = Acoustic(grid, order=4, max_velocity=FASTEST, **common)
            parameters = lambda vp: (vp,)
        else:
            from mpigrad.waves.elastic import Elastic, lame

            model = Elastic(
                grid, frequency=FREQUENCY, source="force_x", components=("vx",), **common
            )
            parameters = lambda vp: (*lame(vp, shear(vp), density(vp)), density(vp))

        def gathers(parameters: Any, survey: Survey) -> Any:
            medium = parameters[0] if o.physics == "acoustic" else ElasticMedium(*parameters)
            return model.propagate(medium, wavelets, survey).gathers

        return grid, parameters, gathers

    def points(cells: list[tuple[int, ...]]) -> np.ndarray:
        """Centres of cells; of velocities along x the places behind them, half a cell further."""
        shift = (0.5,) * axes if o.physics == "acoustic" else (1.0, *(0.5,) * (axes - 1))
        return (np.asarray(cells, float) + shift)[None] * SPACING

    calls: Calls = {}

    def add(name: str, comm: Any, shape: tuple[int, ...], pml: Any) -> None:
        grid, parameters, gathers = setting(comm, shape, pml, o.steps)
        survey = Survey(points([source_cell(shape)]), points(receiver_cells(shape)))
        values = tuple(map(jnp.asarray, parameters(random_model(shape)[grid.slices])))
        loss = lambda p: jnp.sum(gathers(p, survey) ** 2)
        forward = mpigrad.jit(loss)
        both = mpigrad.value_and_grad(loss, loss="replicated", comm=comm)
        gradient = mpigrad.jit(both)
        calls[f"forward{name}"] = lambda: float(forward(values))
        calls[f"gradient{name}"] = lambda: float(jax.block_until_ready(gradient(values))[0])

    add("", world, shape, PML[axes])
    if o.apart:
        part = world.split(world.rank)
        first, last = world.rank == 0, world.rank == world.size - 1
        width = PML[axes]
        sides = ((width * first, width * last), *((width, width),) * (axes - 1))
        add("-apart", part, (shape[0] // world.size, *shape[1:]), sides)

    def similarity(path: str) -> None:
        grid, parameters, gathers = setting(world, shape, PML[axes], o.steps)
        source, receivers = similarity_cells(shape)
        survey = Survey(points([source]), points(receivers))
        tile = lambda height: tuple(
            map(jnp.asarray, parameters(anomaly_model(shape, height)[grid.slices]))
        )
        data = mpigrad.jit(lambda p: gathers(p, survey))(tile(0.0))
        misfit = lambda p: jnp.sum((gathers(p, survey) - data) ** 2)
        slopes = mpigrad.jit(mpigrad.grad(misfit, loss="replicated"))(tile(ANOMALY))
        whole = [grid.gather(g) for g in slopes]
        if world.rank == 0:
            np.savez(path, *whole, data=np.asarray(data))

    return calls, similarity


# --- deepwave ---


def deepwave_calls(o: argparse.Namespace) -> tuple[Calls, Callable[[str], None]]:
    """The calls of deepwave; its first axis, which it calls y or z, is our first, x."""
    import deepwave
    import torch

    torch.set_num_threads(o.threads)
    shape, axes = tuple(o.cells), len(o.cells)
    first = "y" if axes == 2 else "z"

    def parameters(vp: np.ndarray) -> list[Any]:
        v = torch.tensor(vp)
        if o.physics == "acoustic":
            return [v]
        rho = density(v)
        mu = rho * shear(v) ** 2
        return [rho * v**2 - 2 * mu, mu, rho]

    def gathers(parameters: list[Any], source: Any, receivers: Any) -> Any:
        wavelet = torch.tensor(ricker(o.steps))[None, None]
        places = torch.tensor([[source]]), torch.tensor([receivers])
        common = {
            "grid_spacing": SPACING, "dt": DT, "accuracy": 4, "pml_width": PML[axes],
            "pml_freq": FREQUENCY, "max_vel": FASTEST,
        }  # fmt: skip
        if o.physics == "acoustic":
            # Its source is on the other side of the equation, and not divided by the cell's area.
            out = deepwave.scalar(
                *parameters, source_amplitudes=-wavelet / SPACING**2,
                source_locations=places[0], receiver_locations=places[1], **common,
            )  # fmt: skip
            return out[-1]
        lam, mu, rho = parameters
        out = deepwave.elastic(
            lam, mu, 1 / rho, **common,
            **{
                f"source_amplitudes_{first}": FORCE * wavelet,
                f"source_locations_{first}": places[0],
                f"receiver_locations_{first}": places[1],
            },
        )  # fmt: skip
        return out[-axes]

    case = (source_cell(shape), receiver_cells(shape))
    values = parameters(random_model(shape))

    def forward() -> float:
        with torch.no_grad():
            return float((gathers(values, *case) ** 2).sum())

    def gradient() -> float:
        unknowns = [v.clone().requires_grad_() for v in values]
        loss = (gathers(unknowns, *case) ** 2).sum()
        loss.backward()
        assert all(v.grad is not None for v in unknowns)
        return float(loss.detach())

    def similarity(path: str) -> None:
        case = similarity_cells(shape)
        with torch.no_grad():
            data = gathers(parameters(anomaly_model(shape, 0.0)), *case)
        unknowns = [v.requires_grad_() for v in parameters(anomaly_model(shape, ANOMALY))]
        ((gathers(unknowns, *case) - data) ** 2).sum().backward()
        np.savez(path, *(v.grad.numpy() for v in unknowns), data=data.numpy())

    return {"forward": forward, "gradient": gradient}, similarity


# --- devito ---


def devito_calls(o: argparse.Namespace) -> tuple[Calls, Callable[[str], None]]:
    """The calls of devito's example solvers: damping layers in the place of a PML.

    The gradient is its operator for one, after a forward run that saves the field. A forward run
    goes on from the last one's field, so that emptying it takes no time. The elastic solver has no
    gradient, an explosive source, and records a stress and the divergence of the velocity.
    """
    os.environ |= {
        "DEVITO_LOGGING": "ERROR",
        "DEVITO_ARCH": "gcc",
        "DEVITO_LANGUAGE": "openmp" if o.threads > 1 else "C",
        "OMP_NUM_THREADS": str(o.threads),
    }
    from devito import Function, TensorTimeFunction, TimeFunction, VectorTimeFunction
    from examples.seismic import AcquisitionGeometry, Model
    from examples.seismic.acoustic import AcousticWaveSolver
    from examples.seismic.elastic import ElasticWaveSolver

    shape, axes = tuple(o.cells), len(o.cells)
    vp, elastic = random_model(shape) / 1000, o.physics == "elastic"
    more = {"vs": shear(vp), "b": 1 / (density(vp) / 1000)} if elastic else {}
    model = Model(
        vp=vp, origin=(0.0,) * axes, shape=shape, spacing=(SPACING,) * axes, space_order=4,
        nbl=PML[axes], bcs="mask" if elastic else "damp", dtype=np.float32, **more,
    )  # fmt: skip
    dt = 1000 * DT  # ms
    geometry = AcquisitionGeometry(
        model, np.array(receiver_cells(shape)) * SPACING, np.array([source_cell(shape)]) * SPACING,
        0.0, dt * (o.steps - 1), f0=FREQUENCY / 1000, src_type="Ricker",
    )  # fmt: skip
    geometry.resample(dt)

    def similarity(path: str) -> None:
        raise NotImplementedError(path)

    if elastic:
        solver = ElasticWaveSolver(model, geometry, space_order=4)
        places: dict[str, Any] = {"grid": model.grid, "space_order": 4, "time_order": 1}
        fields = {
            "v": VectorTimeFunction(name="v", **places),
            "tau": TensorTimeFunction(name="tau", **places),
        }

        def elastic_forward() -> float:
            gather = solver.forward(dt=dt, **fields)[0]
            return float((np.asarray(gather.data, np.float64) ** 2).sum())

        return {"forward": elastic_forward}, similarity

    solver = AcousticWaveSolver(model, geometry, space_order=4)
    field = {"grid": model.grid, "time_order": 2, "space_order": 4}
    rolling = TimeFunction(name="u", **field)
    kept: list[Any] = []

    def forward() -> float:
        gather = solver.forward(u=rolling, dt=dt)[0]
        return float((np.asarray(gather.data, np.float64) ** 2).sum())

    def gradient() -> float:
        if not kept:
            kept.extend(
                (
                    TimeFunction(name="u", save=geometry.nt, **field),
                    TimeFunction(name="v", **field),
                    Function(name="grad", grid=model.grid),
                )
            )
        saved, adjoint, slope = kept
        gather = solver.forward(u=saved, save=True, dt=dt)[0]
        adjoint.data.fill(0)
        slope.data.fill(0)
        solver.jacobian_adjoint(gather, saved, v=adjoint, grad=slope, dt=dt)
        return float((np.asarray(gather.data, np.float64) ** 2).sum())

    return {"forward": forward, "gradient": gradient}, similarity


# --- questions and answers ---


def serve(o: argparse.Namespace) -> None:
    """Answer commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries have things to say on the standard output
    world = None
    if o.library == "mpigrad":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    first = world is None or world.rank == 0

    def say(answer: Answer) -> None:
        if first:
            print(json.dumps(answer), file=answers, flush=True)

    make = {"mpigrad": mpigrad_calls, "deepwave": deepwave_calls, "devito": devito_calls}
    try:
        calls, similarity = make[o.library](o)
    except ImportError as error:
        say({"missing": str(error)})
        return
    say({"ready": True})
    for line in commands(world.rank if world else 0):
        command, *words = line.split()
        if world is not None:
            world.Barrier()
        start = time.perf_counter()
        if command != "similarity" and command not in calls:
            say({"missing": f"{o.library} has no {command} of {o.physics} waves"})
            continue
        value = similarity(words[0]) if command == "similarity" else calls[command]()
        if world is not None:
            world.Barrier()
        say({"seconds": time.perf_counter() - start, "value": value})


def main() -> None:
    """Read the case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("library", choices=["mpigrad", "deepwave", "devito"])
    parser.add_argument("--physics", choices=["acoustic", "elastic"], default="acoustic")
    parser.add_argument("--cells", type=int, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", choices=["native", "xla"])
    parser.add_argument("--apart", action="store_true")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
