"""The arrays of an inversion of a volume. Each rank reads the cells that it holds."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool
from mpi4py import MPI

from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad_apps.fwi.inputs import (
    BLUR,
    PHYSICS,
    Inputs,
    blurred,
    depth,
    read_data,
    require_active,
    require_spacing,
)
from mpigrad_apps.fwi.layout import TileLayout, Window, relative, wider
from mpigrad_apps.fwi.memory import check_memory
from mpigrad_apps.fwi.parametrization import cut_off
from mpigrad_apps.fwi.settings import Settings
from mpigrad_apps.shots.experiment import (
    Experiment,
    Fields,
    Speeds,
    experiment_of,
    require_distances,
    spacing_of,
    speeds_of,
)
from mpigrad_apps.shots.model_files import read_array
from mpigrad_apps.shots.positions import survey_positions
from mpigrad_apps.shots.shot_group import split_ranks
from mpigrad_apps.shots.units import warn_of_units
from mpigrad_apps.shots.volumes import ThrustVolume, Volume, open_volume

__all__ = ["Volumes", "find_volumes", "read_volume_inputs"]

Split = tuple[int, Communicator]  # index of a rank's group, and the group's communicator


class Volumes(NamedTuple):
    """The volumes of an inversion, without their arrays.

    Attributes
    ----------
    model
        The true model if it is known, else the start.
    initial
        The start, None if it is the model or made of it.
    mask
        The cells that may change, None for no file.
    has_truth
        Whether the true model is known.
    """

    model: Volume
    initial: Volume | None
    mask: Volume | None
    has_truth: bool


def find_volumes(settings: Settings) -> Volumes | None:
    """Return the volumes of the settings, None if the model has two axes (on one rank).

    Raises
    ------
    ValueError, OSError
        If a setting or the header of a file is not valid.
    """
    settings.check()
    model = None if settings.model is None else open_volume(settings.model)
    initial = None if settings.initial is None else open_volume(settings.initial)
    has_truth = settings.data is None or settings.model is not None
    if settings.model is None and settings.data is None and len(settings.cells) == 3:
        model = ThrustVolume(None, settings.cells, None)
    if model is None and initial is None:
        return None
    if settings.physics != "acoustic":
        raise ValueError(
            f"--physics: expected acoustic waves for a model with three axes, got "
            f"{settings.physics}. Extract a section for elastic waves."
        )
    if not has_truth:
        assert initial is not None
        model, initial = initial, None
    if model is None or (settings.initial is not None and has_truth and initial is None):
        raise ValueError(
            "--model, --initial: expected two volumes, got one volume and one model with two axes. "
            "Give --cells with three numbers for the default volume."
        )
    if initial is not None:
        initial.require_shape(model.shape, "--initial")
        assert settings.initial is not None
        spacing = spacing_of(settings, model)
        require_spacing(settings.initial, initial.spacing, spacing)
        require_distances("--initial", settings.initial, initial, spacing)
    mask = None
    if settings.mask is not None:
        mask = open_volume(settings.mask, "mask")
        if mask is None:
            raise ValueError(
                f"--mask: expected a volume in {settings.mask} (.npy, .zarr or SEG-Y), as the "
                f"model has three axes, got shape {read_array(settings.mask, 'mask').shape}. Give "
                "one value for each cell."
            )
        mask.require_shape(model.shape, "--mask")
    return Volumes(model, initial, mask, has_truth)


def read_volume_inputs(
    settings: Settings, volumes: Volumes, comm: Communicator
) -> tuple[Inputs, Split]:
    """Read the tiles of this rank's group, check them, and make the experiment (collective).

    Raises
    ------
    ValueError, OSError
        On every rank: if a setting or a file is not valid, or the volume does not fit into the
        memory.
    """
    model = volumes.model

    def place() -> tuple[tuple[float, ...], int]:
        spacing = spacing_of(settings, model)
        return spacing, len(survey_positions(settings, None, spacing, model.shape)[0])

    spacing, n_shots = call_on_root(comm, place)
    split = split_ranks(comm, settings.groups, n_shots)
    with raise_on_all_ranks(comm):
        grid = Grid(model.shape, spacing, split[1])
    # `parameters` is the same grid with one group, so that nothing is sent.
    parameters = grid if settings.groups == 1 else Grid(model.shape, spacing, comm)
    margin = cut_off(settings.smoothing)
    layout = TileLayout(grid, parameters, margin, first=split[0] == 0)
    check_memory(settings, layout, grid, comm)
    layout.prepare()
    window = layout.held
    if volumes.has_truth and volumes.initial is None:
        window = wider(window, model.shape, cut_off(BLUR))
    whole, speeds = _read(model, window, comm)
    empty = call_on_root(comm, lambda: _experiment(settings, model, speeds))
    inner = relative(layout.held, window, model.shape)
    fields = {name: field[inner] for name, field in whole.items()}
    experiment = dataclasses.replace(empty, fields=fields)
    active = _active_cells(experiment, layout, settings.water, volumes.mask, comm)
    start: Fields = fields
    if volumes.initial is not None:
        start, speeds = _read(volumes.initial, layout.held, comm)
        if comm.rank == 0:
            warn_of_units(dataclasses.replace(experiment, fields=start, speeds=speeds))
    elif volumes.has_truth:
        start = blurred(whole, window, layout.held, experiment, settings.water)
    truth = fields if volumes.has_truth else None
    data, file = None, settings.data
    if file is not None:
        components = len(PHYSICS[settings.physics].components)
        data = call_on_root(comm, lambda: read_data(file, components, experiment))
    return Inputs(experiment, start, active, truth, data, layout), split


def _experiment(settings: Settings, model: Volume, speeds: Speeds) -> Experiment:
    experiment = experiment_of(settings, model, {}, speeds)
    warn_of_units(experiment)
    return experiment


def _read(volume: Volume, window: Window, comm: Communicator) -> tuple[Fields, Speeds]:
    """Read a window, and return it with the velocities of the whole volume (collective)."""
    fields: Fields = {}
    with raise_on_all_ranks(comm):
        fields = PHYSICS["acoustic"].complete(volume.read(window))
    local_speeds = speeds_of(fields)
    fastest, slowest, limiting = zip(*comm.mpi.allgather(local_speeds), strict=True)
    return fields, Speeds(max(fastest), min(slowest), max(limiting))


def _active_cells(
    experiment: Experiment,
    layout: TileLayout,
    water: float,
    mask: Volume | None,
    comm: Communicator,
) -> Bool[np.ndarray, "*held"]:
    """Return the mask of the held cells below the water for which the mask in the file is not 0."""
    shape = tuple(part.stop - part.start for part in layout.held)
    active = np.array(np.broadcast_to(depth(experiment)[layout.held[-1]] > water, shape))
    if mask is not None:
        with raise_on_all_ranks(comm):
            arrays = mask.read_arrays(layout.held)
            active &= np.asarray(next(iter(arrays.values()))) != 0
    some = comm.mpi.allreduce(bool(active.any()), MPI.LOR)
    require_active(some)
    return active
