"""Forward modelling of shots at a known model: gathers, snapshots, animation and report."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import mpigrad
from mpigrad import checkpoint
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid import Grid
from mpigrad.profiling import Progress
from mpigrad.runtime import write_atomically
from mpigrad_apps import report
from mpigrad_apps.field_files import write_field_files
from mpigrad_apps.grace import hold_grace_time
from mpigrad_apps.output_directory import prepare_output
from mpigrad_apps.shots.experiment import Experiment, make_experiment
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.physics import Physics
from mpigrad_apps.shots.pictures import animate, gather_panel, section
from mpigrad_apps.shots.shot_group import ShotGroup, make_shot_group
from mpigrad_apps.shots.units import warn_of_units

__all__ = ["ForwardRun", "forward_model"]

_SEGMENTS = 20  # of a run without frames, after each of which it can stop


@dataclasses.dataclass(frozen=True)
class ForwardRun:
    """Result of forward modelling.

    Attributes
    ----------
    experiment
        The model and all shots.
    gathers
        Gathers of all shots on rank 0, shape (n_shots, n_components, n_receivers, steps). None on
        other ranks. They have fewer steps if the run was stopped.
    seconds
        Wall-clock time of the time stepping, including compilation.
    report
        Path of the report.
    """

    experiment: Experiment
    gathers: Float[np.ndarray, "shots components receivers steps"] | None
    seconds: float
    report: pathlib.Path


def forward_model(
    options: WaveOptions,
    frames: int,
    out: pathlib.Path,
    physics_class: type[Physics],
    make_physics: Callable[[Grid, Experiment], Physics],
    comm: Communicator | None = None,
    vtk: bool = False,
) -> ForwardRun:
    """Propagate all shots and write the results into `out` (collective).

    The files are report.html and its pictures, gathers.npz (`gathers`, `dt`, `sources`,
    `receivers`, `wavelets`) and settings.json. With `frames` also the wavefield of the first shot:
    snapshots.zarr, to which each rank writes its chunks, and animation.gif. The shots are
    propagated in as many segments as there are frames. Each segment continues from the state of
    the segment before.

    Parameters
    ----------
    make_physics
        Makes the physics of an experiment on a grid.
    vtk
        Write the snapshots for ParaView, too: snapshots.pvd and the directory snapshots-vtk.

    Raises
    ------
    ValueError, OSError, RuntimeError
        On every rank, before the first time step, if options, files or the time step are not
        valid.
    """
    comm = resolve(comm)
    with jax.enable_x64(True):
        whole = make_experiment(options, comm, physics_class.complete)
        if comm.rank == 0:
            warn_of_units(whole)
        prepare_output(options, out, comm)
        group = make_shot_group(comm, options.groups, whole, make_physics)
        if comm.rank == 0:
            print(group.summary(options.__module__.split(".")[-2], whole.n_shots), flush=True)
        started = time.monotonic()
        # Nothing is saved before the report, so the launcher waits for a segment, too.
        with checkpoint.listen() as stop, hold_grace_time(comm):
            gathers, films = _propagate(group, frames, stop, comm)
            seconds = comm.mpi.allreduce(time.monotonic() - started) / comm.size
            result = _write_results(out, group, whole, gathers, films, seconds, comm, vtk)
    return result


Films = list[tuple[float, dict[str, Float[Array, "lx ly"]]]]
Drawn = tuple[str, list[float], list[np.ndarray]]  # quantity, times and frames


def _write_results(
    out: pathlib.Path,
    group: ShotGroup,
    whole: Experiment,
    gathers: Float[np.ndarray, "shots components receivers steps"],
    films: Films,
    seconds: float,
    comm: Communicator,
    vtk: bool,
) -> ForwardRun:
    collected = group.gather_shots(gathers)
    drawn = None
    with raise_on_all_ranks(comm):
        if films and 0 in group.shots:  # the group of the first shot draws the films
            _write_snapshots(out, group, films, vtk)
            drawn = _draw_films(out, group, films)
    result = ForwardRun(whole, collected, seconds, out / "report.html")
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            _write_gathers(result)
            _write_report(result, group, drawn)
            print(f"report: {result.report}", flush=True)
    return result


def _propagate(
    group: ShotGroup, frames: int, stop: checkpoint.Interruption, comm: Communicator
) -> tuple[Float[np.ndarray, "shots components receivers steps"], Films]:
    """Propagate segment after segment. Their numbers of steps differ by at most one.

    When asked to stop, it returns the gathers so far.
    """
    some, grid, physics = group.experiment, group.grid, group.physics
    segments = np.array_split(np.arange(some.steps), max(1, min(frames or _SEGMENTS, some.steps)))
    fields = {name: jnp.asarray(field[grid.slices]) for name, field in some.fields.items()}
    segment = mpigrad.jit(
        lambda fields, wavelets, state: physics.propagate(fields, wavelets, group.survey, state)
    )
    progress = Progress(len(segments), group.comm.rank)
    state, pieces, films = None, [], []
    for k, steps in enumerate(segments):
        part = jnp.asarray(some.wavelets[..., steps[0] : steps[-1] + 1])
        gathers, state = segment(fields, part, state)
        pieces.append(np.asarray(gathers))
        if frames:
            films.append((float(steps[-1] * some.dt), physics.wavefields(state)))
        progress.update(k + 1)
        if any(comm.mpi.allgather(stop.requested())):
            break
    progress.close()
    return np.concatenate(pieces, axis=-1), films


def _write_snapshots(out: pathlib.Path, group: ShotGroup, films: Films, vtk: bool) -> None:
    units = dict.fromkeys(films[0][1], group.physics.unit) | {"x": "m", "y": "m", "time": "s"}
    write_field_files(
        out / "snapshots",
        group.grid,
        {},
        {"spacing": list(group.experiment.spacing)},
        vtk=vtk,
        snapshots=dict(films),
        units=units,
    )


def _draw_films(out: pathlib.Path, group: ShotGroup, films: Films) -> Drawn | None:
    """Write the animation of the first wavefield and return the frames on the group's rank 0."""
    name = next(iter(films[0][1]))
    frames = [group.grid.gather(shot[name]) for _, shot in films]
    whole = [frame for frame in frames if frame is not None]
    if not whole:
        return None
    times = [time for time, _ in films]
    background = next(iter(group.experiment.fields.values()))
    quantity = f"{name} ({group.physics.unit})"
    size = group.experiment.size
    animate(out / "animation.gif", np.asarray(background), whole, times, size, quantity)
    return quantity, times, whole


def _write_gathers(result: ForwardRun) -> None:
    whole, gathers = result.experiment, result.gathers
    assert gathers is not None
    write_atomically(
        result.report.parent / "gathers.npz",
        lambda file: np.savez(
            file,
            gathers=gathers,
            dt=whole.dt,
            sources=whole.sources,
            receivers=whole.receivers,
            wavelets=whole.wavelets,
        ),
    )


def _write_report(result: ForwardRun, group: ShotGroup, drawn: Drawn | None) -> None:
    whole, gathers, physics = result.experiment, result.gathers, group.physics
    assert gathers is not None
    done = gathers.shape[-1]
    stopped = "" if done == whole.steps else f", stopped after step {done}"
    out = result.report.parent
    shown = list(dict.fromkeys([0, whole.n_shots // 2]))
    pictures = [
        report.maps(
            "model",
            "The model.",
            [section(name, np.asarray(field), whole.size) for name, field in whole.fields.items()],
        ),
        report.maps(
            "gathers",
            "Recordings of the first shot and of a shot in the middle.",
            [
                gather_panel(
                    f"{component}, shot {shot + 1}",
                    gathers[shot, c],
                    whole.dt,
                    whole.receivers[shot % len(whole.receivers)],
                    f"{component} ({physics.unit})",
                )
                for shot in shown
                for c, component in enumerate(physics.components)
            ],
            columns=2,
        ),
    ]
    if drawn is not None:
        quantity, times, frames = drawn
        chosen = np.unique(np.linspace(0, len(frames) - 1, 5).astype(int)[1:])
        pictures.insert(
            1,
            report.maps(
                "snapshots",
                "The wavefield of the first shot, for a wavelet in SI units. animation.gif shows "
                "all snapshots.",
                [
                    section(
                        f"{times[k]:.3f} s",
                        frames[k],
                        whole.size,
                        diverging=True,
                        quantity=quantity,
                    )
                    for k in chosen
                ],
                columns=2,
            ),
        )
    numbers = {
        "cells": f"{whole.shape[0]} x {whole.shape[1]}",
        "size of a cell": f"{whole.spacing[0]:.5g} m x {whole.spacing[1]:.5g} m",
        "steps": f"{whole.steps} of {whole.dt:.6g} s{stopped}",
        "largest stable velocity": f"{group.physics.max_stable_velocity:.1f} m/s",
        "shots, receivers of a shot": f"{whole.n_shots}, {whole.receivers.shape[1]}",
        "wavelet": whole.wavelet,
        "largest amplitude recorded": f"{np.max(np.abs(gathers)):.4g}",
    }
    parallel = {
        "ranks": group.comm.size,
        "groups": group.n_groups,
        "tiles of a group": f"{group.grid.dims[0]} x {group.grid.dims[1]}",
        "time stepping, including compilation": f"{result.seconds:.1f} s",
    }
    report.write_report(
        out,
        f"{type(physics).__name__.removesuffix('Physics')} waves",
        f"{whole.n_shots} shots at a model of {whole.size[0] / 1e3:.4g} km x "
        f"{whole.size[1] / 1e3:.4g} km, {done * whole.dt:.4g} s each{stopped}.",
        pictures,
        [
            report.Table("Experiment", numbers),
            report.Table("Ranks", parallel),
            report.Table("Versions", report.versions()),
        ],
    )
