"""Runs of the native library as JAX primitives: a run, its tangent, its adjoint."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.extend import (
    CARRIER,
    Activity,
    NativeCall,
    Primitive,
    call_site,
    carrier,
    native_library,
    opaque_zero,
    primitive,
)
from mpigrad.runtime import waves_library
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.options import Storage
from mpigrad.waves.survey import PointTable

__all__ = [
    "AcousticSettings",
    "ElasticSettings",
    "Run",
    "RunDescription",
    "RunSettings",
    "default_memory",
    "has_openmp",
    "library",
    "native_axes",
    "propagate",
]

# ---- Descriptions of runs for the native library ----


_DESCRIPTION_VERSION = 5  # native/waves/description.h


class RunDescription(ctypes.Structure):
    """The description of a run, as native/waves/description.h lays it out."""

    _fields_ = (
        ("version", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("physics", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("cells", ctypes.c_int64 * 3),
        ("layers", ctypes.c_int64 * 6),
        ("neighbors", ctypes.c_int64 * 6),
        ("reach", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("shots", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("checkpoints", ctypes.c_int64),
        ("memory", ctypes.c_int64),
        ("precision", ctypes.c_int64),
        ("directory", ctypes.c_char_p),
        ("fingerprint", ctypes.c_int64),
        ("dt", ctypes.c_double),
        ("spacing", ctypes.c_double * 3),
        ("stable_length", ctypes.c_double),
        ("density", ctypes.c_int64),
        ("source_kind", ctypes.c_int64),
        ("receivers", ctypes.c_int64),
        ("n_components", ctypes.c_int64),
        ("component_kinds", ctypes.POINTER(ctypes.c_int64)),
        ("surface", ctypes.c_int64),
        ("mechanisms", ctypes.c_int64),
    )


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run that do not depend on the physics.

    Attributes
    ----------
    reach
        Number of cells that the stencil reaches into a neighbouring tile.
    storage
        What the run stores for its gradient, and how.
    fingerprint
        A hash of at most 48 bits, the same on all ranks that do the same run.
    dt
        Time step in s.
    """

    reach: int
    steps: int
    shots: int
    threads: int
    storage: Storage
    fingerprint: int
    dt: float


@dataclasses.dataclass(frozen=True)
class AcousticSettings:
    """The settings of acoustic waves.

    Attributes
    ----------
    stable_length
        The largest stable time step times the largest velocity. Infinite: checked before the run.
    density
        Whether the models after the velocity are buoyancies.
    """

    stable_length: float
    density: bool = False


@dataclasses.dataclass(frozen=True)
class ElasticSettings:
    """The settings of elastic waves.

    Attributes
    ----------
    source_kind, component_kinds
        Kinds of the driven field and of the recorded ones (native/waves/elastic.h).
    receivers
        Number of receivers of each component.
    surface
        The axis with a free surface. The last profile has its table.
    mechanisms
        Number of mechanisms of attenuation. Their constants are the profile after those of the
        axes.
    """

    source_kind: int
    component_kinds: tuple[int, ...]
    receivers: int
    surface: int | None = None
    mechanisms: int = 0


class Run:
    """A run of the native time loop: all its inputs but the arrays. A static parameter of programs.

    Parameters
    ----------
    profiles
        Profiles of the absorbing layers along one axis each, as the physics needs them.
    tables
        Tables of the sources and of the receivers: (shots, points of a shot, table).
    shapes
        Shapes of the arrays of a state, without their axis of shots.
    gathers
        Shape of the gathers.
    mirrored
        An axis along which the library gets everything in reverse order. The profiles are in it.

    Raises
    ------
    ImportError
        If the native library was built for another version of mpigrad.
    """

    def __init__(
        self,
        tile: WaveTile,
        settings: RunSettings,
        physics: AcousticSettings | ElasticSettings,
        *,
        profiles: Sequence[np.ndarray],
        tables: Sequence[tuple[int, int, PointTable]],
        shapes: Sequence[tuple[int, ...]],
        gathers: tuple[int, ...],
        mirrored: int | None = None,
    ) -> None:
        self.comm: Communicator = tile.grid.comm
        self.shapes = tuple((settings.shots, *shape) for shape in shapes)
        self.gathers = gathers
        self.flip = None if mirrored is None else mirrored - tile.grid.ndim  # counted from the last
        self.programs: dict = {}  # eager programs are freed with their run
        lib = library()
        if settings.threads > 1 and self.comm.rank == 0 and not has_openmp(lib):
            warnings.warn(
                f"mpigrad.waves: expected {settings.threads} threads on each rank, but the native "
                "library was built without OpenMP and runs on one thread of each rank. Build "
                "mpigrad with a compiler that has OpenMP.",
                stacklevel=2,
            )
        self.id = _create(lib, _describe(tile, settings, physics, mirrored))
        for profile in profiles:
            values = np.ascontiguousarray(profile, np.float64)
            lib.mpigrad_waves_profile(self.id, values, values.size)
        for shots, points, table in tables:
            cells = table.cells
            if mirrored is not None:
                places = list(np.unravel_index(cells, tile.shape))
                places[mirrored] = tile.shape[mirrored] - 1 - places[mirrored]
                cells = np.ravel_multi_index(places, tile.shape)
            starts, cells = (np.ascontiguousarray(a, np.int64) for a in (table.starts, cells))
            weights = np.ascontiguousarray(table.weights, np.float64)
            pointers = (ctypes.c_void_p(a.ctypes.data) for a in (starts, cells, weights))
            lib.mpigrad_waves_points(self.id, shots, points, *pointers)
        weakref.finalize(self, lib.mpigrad_waves_free, self.id)


def _describe(
    tile: WaveTile,
    settings: RunSettings,
    physics: AcousticSettings | ElasticSettings,
    mirrored: int | None,
) -> RunDescription:
    ranks = {(face.axis, face.step): face.rank for face in tile.faces}
    axes = native_axes(tile.grid.ndim)
    missing = 3 - len(axes)  # on two axes the third one has one cell
    storage = settings.storage
    turns = {axis: -1 if axis == mirrored else 1 for axis in axes}
    sides = [(axis, step) for axis in axes for step in (-turns[axis], turns[axis])]
    layers = [width for axis in axes for width in tile.extension[axis][:: turns[axis]]]
    d = RunDescription(
        version=_DESCRIPTION_VERSION,
        size=ctypes.sizeof(RunDescription),
        physics=_physics(physics, tile.grid.ndim),
        slot=tile.grid.comm.slot,
        cells=(*(tile.grid.local_shape[axis] for axis in axes), *(1,) * missing),
        layers=(*layers, *(0, 0) * missing),
        neighbors=(*(ranks.get(side, -1) for side in sides), *(-1, -1) * missing),
        reach=settings.reach,
        steps=settings.steps,
        shots=settings.shots,
        threads=settings.threads,
        checkpoints=storage.keep_code,
        memory=default_memory() if storage.memory is None else storage.memory,
        precision=storage.precision_code,
        directory=os.fsencode(storage.directory or ""),
        fingerprint=settings.fingerprint,
        dt=settings.dt,
        spacing=(*(turns[axis] * tile.grid.spacing[axis] for axis in axes), *(1.0,) * missing),
        surface=-1,
    )
    if isinstance(physics, AcousticSettings):
        d.stable_length = physics.stable_length
        d.density = physics.density
    else:
        d.source_kind = physics.source_kind
        d.receivers = max(physics.receivers, 1)
        d.n_components = len(physics.component_kinds)
        d.component_kinds = (ctypes.c_int64 * d.n_components)(*physics.component_kinds)
        d.mechanisms = physics.mechanisms
        if physics.surface is not None:
            d.surface = axes.index(physics.surface)
    return d


def native_axes(ndim: int) -> tuple[int, ...]:
    """Return the axes of a grid in the order of native/waves/tile.h: x, last, middle."""
    return (0, 1) if ndim == 2 else (0, 2, 1)


def _physics(physics: AcousticSettings | ElasticSettings, ndim: int) -> int:
    return isinstance(physics, ElasticSettings) + (0 if ndim == 2 else 2)


def _create(lib: ctypes.CDLL, description: RunDescription) -> int:
    """Create a run in the native library and return its id."""
    run_id = ctypes.c_int64()
    error = lib.mpigrad_waves_create_run(ctypes.byref(description), ctypes.byref(run_id))
    if error is not None:
        raise ImportError(
            "mpigrad.waves: the native library was built for another version of mpigrad: "
            f"{error.decode()}. Build it again with `make setup`, or `pip install .`."
        )
    return run_id.value


def has_openmp(lib: ctypes.CDLL) -> bool:
    """Return whether a native library links the run-time library of OpenMP."""
    return hasattr(lib, "omp_get_num_threads")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library of waves for this processor."""
    lib = native_library(waves_library())
    assert lib is not None
    reals = np.ctypeslib.ndpointer(np.float64, flags="C")
    size, data = ctypes.c_int64, ctypes.c_void_p
    lib.mpigrad_waves_create_run.argtypes = [
        ctypes.POINTER(RunDescription),
        ctypes.POINTER(ctypes.c_int64),
    ]
    lib.mpigrad_waves_create_run.restype = ctypes.c_char_p
    lib.mpigrad_waves_profile.argtypes = [size, reals, size]
    lib.mpigrad_waves_points.argtypes = [size, size, size, data, data, data]
    lib.mpigrad_waves_free.argtypes = [size]
    return lib


@functools.cache
def default_memory() -> int:
    """Return half of the memory that is available to each rank of this host, in bytes."""
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
        spare = int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        spare = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as text:
                spare = min(spare, int(text.read()))
        except (OSError, ValueError):
            pass  # memory is not limited
    return spare // 2 // _ranks_of_this_host()


def _ranks_of_this_host() -> int:
    """Return the number of ranks on this host as the launcher gives it, else that of all ranks."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return MPI.COMM_WORLD.size


# ---- The native time loops of waves as JAX primitives: a run, its tangent, its adjoint ----
#
# Each is one operation in the order of the program's messages. It does all steps of all shots and
# exchanges the halos. The operands of a run are the models, the amplitudes of the sources, the
# state (no operands for waves at rest) and the carrier. The results are this rank's share of the
# gathers, a ticket and the last state. The ticket is the id of the history that the run stores
# for its adjoint in this process. Memory is limited: if the history was dropped, the adjoint
# computes the run again.


_TICKET = jax.ShapeDtypeStruct((), np.dtype("int32"))


def propagate(
    run: Run, models: Sequence[Any], amplitudes: Any, state: Sequence[Any] | None
) -> tuple[Any, list[Any]]:
    """Return this rank's share of the gathers and the last state.

    The sum of the shares over all ranks is the gathers.

    Parameters
    ----------
    models
        This rank's tiles, those of elastic waves with the absorbing layers, of the dtype of all
        other arrays.
    amplitudes
        Amplitudes of the sources, shape (n_shots, n_sources, steps).
    state
        Fields of the shapes `run.shapes`. None for waves at rest.
    """

    def turned(arrays: Iterable[Any]) -> list[Any]:
        return [x if run.flip is None else jnp.flip(x, run.flip) for x in arrays]

    gathers, _, *last = run_p.bind(
        *turned(models),
        amplitudes,
        *turned(state or ()),
        carrier(),
        run=run,
        models=len(models),
        rest=state is None,
        save=False,
        site=call_site(),
    )
    return gathers, turned(last)


def _primitive(name: str, shapes: Callable[..., list[Any]], **rules: Any) -> Primitive:
    return primitive(
        f"waves_{name}",
        shapes=shapes,
        native=NativeCall(
            f"mpigrad_waves_{name}",
            library=library,
            attributes=lambda params: {
                "site": params["site"],
                "setup": params["run"].id,
                "rest": int(params["rest"]),
                "save": int(params["save"]),
            },
        ),
        programs=lambda params: params["run"].programs,
        batch="unroll",  # each member is a separate run, because it may have its own model
        **rules,
    )


def _run_shapes(*avals: Any, run: Run, **_: Any) -> list[Any]:
    dtype = avals[0].dtype
    return [
        jax.ShapeDtypeStruct(run.gathers, dtype),
        _TICKET,
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in run.shapes),
    ]


def _tangent_shapes(*avals: Any, run: Run, **_: Any) -> list[Any]:
    dtype = avals[0].dtype
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in (run.gathers, *run.shapes)]


def _adjoint_shapes(*avals: Any, run: Run, models: int, rest: bool, **_: Any) -> list[Any]:
    operands = avals[: models + 1 + (0 if rest else len(run.shapes))]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., list[Any]]]:
    """Return the results, the residuals of the tangent map, and the tangent map."""
    *values, a = operands
    gathers, ticket, *last = run_p.bind(*operands, **{**params, "save": activity.reverse})
    # The tangent's carrier depends on the results, so it is active whenever they are.
    link = a + opaque_zero(gathers, CARRIER)

    def tangent(residuals: Any, tangents: Sequence[Any]) -> list[Any]:
        *values, ticket, link = residuals
        *moved, ta = tangents
        filled = []
        for x, tx in zip(values, moved, strict=True):
            # The operand may be active on other ranks: this rank takes part in any case.
            zero = None if ta is None else opaque_zero(ta, jax.typeof(x))
            if tx is None:
                filled.append(jnp.zeros(x.shape, x.dtype) if zero is None else zero)
            else:
                filled.append(tx if zero is None else tx + zero)
        gathers, *last = tangent_p.bind(*values, ticket, *filled, link, **params)
        return [gathers, None, *last]

    return [gathers, ticket, *last], [*values, ticket, link], tangent


def _transpose(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    n = (len(operands) - 2) // 2
    values, ticket, a = operands[:n], operands[n], operands[-1]
    back = adjoint_p.bind(*values, ticket, *cotangents, a, **params)
    return [*[None] * (n + 1), *back, None]


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "mpigrad.waves: second derivatives of the native kernels (backend='native') are not "
        "available. Use backend='xla'."
    )


# (models, amplitudes, state, carrier) -> gathers, ticket, last state
run_p = _primitive("forward", _run_shapes, differentiate=_differentiate, undifferentiated=(1,))
# (models, amplitudes, state, ticket, their tangents, carrier) -> tangents of gathers, last state
tangent_p = _primitive("tangent", _tangent_shapes, differentiate=_refuse, transpose=_transpose)
# (models, amplitudes, state, ticket, cotangents of gathers, last state, carrier) -> cotangents
adjoint_p = _primitive("adjoint", _adjoint_shapes, differentiate=_refuse)
