"""Shots at a known model: gathers, snapshots, an animation and the report."""

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
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid import Grid
from mpigrad.profiling.progress_bar import Progress
from mpigrad_apps import report
from mpigrad_apps.atomic_write import write_atomically
from mpigrad_apps.output_directory import prepare_output
from mpigrad_apps.shots.experiment import Experiment, make_experiment
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.physics import Physics
from mpigrad_apps.shots.pictures import animate, gather_panel, section
from mpigrad_apps.shots.shot_group import Team, team_of

__all__ = ["Shooting", "shoot"]


@dataclasses.dataclass(frozen=True)
class Shooting:
    """What shots at a model give.

    Attributes
    ----------
    experiment
        The model and all shots.
    gathers
        Shape (n_shots, n_components, n_receivers, steps), of all groups' shots; on rank 0, None
        elsewhere.
    seconds
        Wall-clock time of the time stepping, compiling included.
    report
        Path of the report.
    """

    experiment: Experiment
    gathers: Float[np.ndarray, "shots components receivers steps"] | None
    seconds: float
    report: pathlib.Path


def shoot(
    options: WaveOptions,
    frames: int,
    out: pathlib.Path,
    physics_class: type[Physics],
    physics_on: Callable[[Grid, Experiment], Physics],
    comm: Communicator | None = None,
) -> Shooting:
    """Propagate all shots and write what was seen into `out` (collective).

    Writes report.html and its pictures, gathers.npz (`gathers`, `dt`, `sources`, `receivers`,
    `wavelets`), settings.json, and with `frames` the first shot's wavefield: snapshots.zarr, in
    which each rank writes its chunks, and animation.gif. The shots are propagated in as many
    segments as there are frames; a segment's state is where the next one begins.

    Parameters
    ----------
    physics_on
        Makes the physics of an experiment on a grid.

    Raises
    ------
    ValueError, OSError, RuntimeError
        On every rank, before the first time step, where options, files or the time step make no
        sense.
    """
    comm = resolve(comm)
    with jax.enable_x64(True):
        whole = make_experiment(options, comm, physics_class.complete)
        prepare_output(options, out, comm)
        team = team_of(comm, options.groups, whole, physics_on)
        if comm.rank == 0:
            print(team.announcement(options.__module__.split(".")[-2], whole.n_shots), flush=True)
        begun = time.monotonic()
        gathers, films = _propagate(team, frames)
        seconds = comm.mpi.allreduce(time.monotonic() - begun) / comm.size
        collected = team.collect(gathers)
        drawn = None
        if frames and 0 in team.shots:  # the group of the first shot draws it
            _write_snapshots(out, team, films)
            drawn = _draw_films(out, team, films)
        result = Shooting(whole, collected, seconds, out / "report.html")
        if comm.rank == 0:
            _write_gathers(result)
            _write_report(result, team, drawn)
            print(f"report: {result.report}", flush=True)
        comm.mpi.Barrier()
    return result


Films = list[tuple[float, dict[str, Float[Array, "lx ly"]]]]


def _propagate(
    team: Team, frames: int
) -> tuple[Float[np.ndarray, "shots components receivers steps"], Films]:
    """Segment after segment; the last one is filled up with steps without a source."""
    some, grid, physics = team.experiment, team.grid, team.physics
    segments = max(1, min(frames, some.steps))
    length = -(-some.steps // segments)
    segments = -(-some.steps // length)
    wavelets = np.pad(some.wavelets, [(0, 0), (0, 0), (0, segments * length - some.steps)])
    fields = {name: jnp.asarray(field[grid.slices]) for name, field in some.fields.items()}
    segment = mpigrad.jit(
        lambda fields, wavelets, state: physics.propagate(fields, wavelets, team.survey, state)
    )
    progress = Progress(segments, team.comm.rank)
    state, pieces, films = None, [], []
    for k in range(segments):
        part = jnp.asarray(wavelets[..., k * length : (k + 1) * length])
        gathers, state = segment(fields, part, state)
        pieces.append(np.asarray(gathers))
        if frames:
            films.append((((k + 1) * length - 1) * some.dt, physics.wavefields(state)))
        progress.update(k + 1)
    progress.close()
    return np.concatenate(pieces, axis=-1)[..., : some.steps], films


def _write_snapshots(out: pathlib.Path, team: Team, films: Films) -> None:
    fields = {
        f"{name}_{k:04d}": field
        for k, (_, shot) in enumerate(films)
        for name, field in shot.items()
    }
    report.write_fields(
        out / "snapshots.zarr",
        team.grid,
        fields,
        {"times": [time for time, _ in films], "spacing": list(team.experiment.spacing)},
    )


def _draw_films(
    out: pathlib.Path, team: Team, films: Films
) -> tuple[list[float], list[np.ndarray]] | None:
    """Write the animation of the first wavefield; the frames, on the group's rank 0."""
    name = next(iter(films[0][1]))
    frames = [team.grid.gather(shot[name]) for _, shot in films]
    whole = [frame for frame in frames if frame is not None]
    if not whole:
        return None
    times = [time for time, _ in films]
    background = next(iter(team.experiment.fields.values()))
    animate(out / "animation.gif", np.asarray(background), whole, times, team.experiment.size)
    return times, whole


def _write_gathers(result: Shooting) -> None:
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


def _write_report(
    result: Shooting, team: Team, drawn: tuple[list[float], list[np.ndarray]] | None
) -> None:
    whole, gathers, physics = result.experiment, result.gathers, team.physics
    assert gathers is not None
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
            "What the receivers recorded of the first shot and of one in the middle.",
            [
                gather_panel(f"{component}, shot {shot + 1}", gathers[shot, c], whole.dt)
                for shot in shown
                for c, component in enumerate(physics.components)
            ],
            columns=2,
        ),
    ]
    if drawn is not None:
        times, frames = drawn
        chosen = np.unique(np.linspace(0, len(frames) - 1, 5).astype(int)[1:])
        pictures.insert(
            1,
            report.maps(
                "snapshots",
                "The wavefield of the first shot; animation.gif shows all of them.",
                [
                    section(f"{times[k]:.3f} s", frames[k], whole.size, diverging=True)
                    for k in chosen
                ],
                columns=2,
            ),
        )
    numbers = {
        "cells": f"{whole.shape[0]} x {whole.shape[1]}",
        "of a size of": f"{whole.spacing[0]:.5g} m x {whole.spacing[1]:.5g} m",
        "steps": f"{whole.steps} of {whole.dt:.6g} s",
        "largest stable velocity": f"{team.fastest:.1f} m/s",
        "shots, receivers of a shot": f"{whole.n_shots}, {whole.receivers.shape[1]}",
        "wavelet": whole.wavelet,
        "largest amplitude recorded": f"{np.max(np.abs(gathers)):.4g}",
    }
    parallel = {
        "ranks": team.comm.size,
        "groups": team.count,
        "tiles of a group": f"{team.grid.dims[0]} x {team.grid.dims[1]}",
        "time stepping, compiling included": f"{result.seconds:.1f} s",
    }
    report.write_report(
        out,
        f"{type(physics).__name__.removesuffix('Physics')} waves",
        f"{whole.n_shots} shots at a model of {whole.size[0] / 1e3:.4g} km x "
        f"{whole.size[1] / 1e3:.4g} km, {whole.steps * whole.dt:.4g} s each.",
        pictures,
        [
            report.Table("Experiment", numbers),
            report.Table("Ranks", parallel),
            report.Table("Versions", report.versions()),
        ],
    )
