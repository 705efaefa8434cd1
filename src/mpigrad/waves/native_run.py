"""Runs of the native library as JAX primitives: a run, its tangent, its adjoint."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching
from mpigrad.operations.carrier import CARRIER, carrier, opaque_zero
from mpigrad.operations.native_targets import register_target
from mpigrad.operations.primitive import run_eagerly
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import native_library
from mpigrad.runtime.processor import waves_library
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.options import History
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


_DESCRIPTION_VERSION = 3  # native/waves/description.h


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
        ("source_kind", ctypes.c_int64),
        ("receivers", ctypes.c_int64),
        ("n_components", ctypes.c_int64),
        ("component_kinds", ctypes.POINTER(ctypes.c_int64)),
    )


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run that do not depend on the physics.

    Attributes
    ----------
    reach
        Number of cells that the stencil reaches into a neighbouring tile.
    checkpoints
        As `checkpoints.checkpoint_code` encodes them.
    history
        How the run stores its history.
    fingerprint
        A hash of at most 48 bits, the same on all ranks that do the same run.
    dt
        Time step in s.
    """

    reach: int
    steps: int
    shots: int
    threads: int
    checkpoints: int
    history: History
    fingerprint: int
    dt: float


@dataclasses.dataclass(frozen=True)
class AcousticSettings:
    """The settings of acoustic waves: the largest stable time step times the largest velocity."""

    stable_length: float


@dataclasses.dataclass(frozen=True)
class ElasticSettings:
    """The settings of elastic waves.

    Attributes
    ----------
    source_kind, component_kinds
        Kinds of the driven field and of the recorded ones (native/waves/elastic3d.h).
    receivers
        Number of receivers of each component.
    """

    source_kind: int
    component_kinds: tuple[int, ...]
    receivers: int


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
    ) -> None:
        self.comm: Communicator = tile.grid.comm
        self.shapes = tuple((settings.shots, *shape) for shape in shapes)
        self.gathers = gathers
        self.programs: dict = {}  # eager programs are freed with their run
        lib = library()
        if settings.threads > 1 and self.comm.rank == 0 and not has_openmp(lib):
            warnings.warn(
                f"mpigrad.waves: expected {settings.threads} threads on each rank, but the native "
                "library was built without OpenMP and runs on one thread of each rank. Build "
                "mpigrad with a compiler that has OpenMP.",
                stacklevel=2,
            )
        self.id = _create(lib, _describe(tile, settings, physics))
        for profile in profiles:
            values = np.ascontiguousarray(profile, np.float64)
            lib.mpigrad_waves_profile(self.id, values, values.size)
        for shots, points, table in tables:
            starts, cells = (np.ascontiguousarray(a, np.int64) for a in (table.starts, table.cells))
            weights = np.ascontiguousarray(table.weights, np.float64)
            pointers = (ctypes.c_void_p(a.ctypes.data) for a in (starts, cells, weights))
            lib.mpigrad_waves_points(self.id, shots, points, *pointers)
        weakref.finalize(self, lib.mpigrad_waves_free, self.id)


def _describe(
    tile: WaveTile, settings: RunSettings, physics: AcousticSettings | ElasticSettings
) -> RunDescription:
    ranks = {(face.axis, face.step): face.rank for face in tile.faces}
    axes = native_axes(tile.grid.ndim)
    missing = 3 - len(axes)  # on two axes the third one has one cell
    history = settings.history
    sides = [(axis, step) for axis in axes for step in (-1, 1)]
    layers = [width for axis in axes for width in tile.extension[axis]]
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
        checkpoints=settings.checkpoints,
        memory=default_memory() if history.memory is None else history.memory,
        precision=history.code,
        directory=os.fsencode(history.directory or ""),
        fingerprint=settings.fingerprint,
        dt=settings.dt,
        spacing=(*(tile.grid.spacing[axis] for axis in axes), *(1.0,) * missing),
    )
    if isinstance(physics, AcousticSettings):
        d.stable_length = physics.stable_length
    else:
        d.source_kind = physics.source_kind
        d.receivers = max(physics.receivers, 1)
        d.n_components = len(physics.component_kinds)
        d.component_kinds = (ctypes.c_int64 * d.n_components)(*physics.component_kinds)
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


_Zero: Any = ad.Zero
_TICKET = ShapedArray((), np.dtype("int32"))


def propagate(
    run: Run, models: Sequence[Any], amplitudes: Any, state: Sequence[Any] | None
) -> tuple[Any, list[Any]]:
    """Return this rank's share of the gathers and the last state.

    The sum of the shares over all ranks is the gathers.

    Parameters
    ----------
    models
        This rank's tiles without absorbing layers, of the same dtype as all other arrays.
    amplitudes
        Amplitudes of the sources, shape (n_shots, n_sources, steps).
    state
        Fields of the shapes `run.shapes`. None for waves at rest.
    """
    gathers, _, *last = run_p.bind(
        *models,
        amplitudes,
        *(state or ()),
        carrier(),
        run=run,
        models=len(models),
        rest=state is None,
        save=False,
        site=call_site(),
    )
    return gathers, last


def _primitive(name: str, shapes: Callable[..., list[ShapedArray]]) -> Primitive:
    primitive = Primitive(f"mpigrad_waves_{name}")
    target = register_target(f"mpigrad_waves_{name}", library())

    def attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
        return {
            "site": params["site"],
            "setup": params["run"].id,
            "rest": int(params["rest"]),
            "save": int(params["save"]),
        }

    def lower(ctx: Any, *values: Any, **params: Any) -> Any:
        return compat.lowering(target, len(values) - 1, attributes=attributes)(
            ctx, *values, **params
        )

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        # Each member is a separate run, because it may have its own model.
        n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
        members = [
            primitive.bind(
                *(
                    v if d is None else jax.lax.index_in_dim(v, i, d, keepdims=False)
                    for v, d in zip(args, dims, strict=True)
                ),
                **params,
            )
            for i in range(n)
        ]
        stacked = [jnp.stack(results) for results in zip(*members, strict=True)]
        return stacked, [0] * len(stacked)

    compat.make_effectful(primitive, shapes)
    run_eagerly(primitive, lambda params: params["run"].programs)
    compat.register_lowering(primitive, lower)
    repairs.always_stage(primitive)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _run_shapes(*avals: Any, run: Run, **_: Any) -> list[ShapedArray]:
    dtype = avals[0].dtype
    return [
        ShapedArray(run.gathers, dtype),
        _TICKET,
        *(ShapedArray(shape, dtype) for shape in run.shapes),
    ]


def _tangent_shapes(*avals: Any, run: Run, **_: Any) -> list[ShapedArray]:
    dtype = avals[0].dtype
    return [ShapedArray(shape, dtype) for shape in (run.gathers, *run.shapes)]


def _adjoint_shapes(*avals: Any, run: Run, models: int, rest: bool, **_: Any) -> list[ShapedArray]:
    operands = avals[: models + 1 + (0 if rest else len(run.shapes))]
    return [ShapedArray(x.shape, x.dtype) for x in operands]


# (models, amplitudes, state, carrier) -> gathers, ticket, last state
run_p = _primitive("forward", _run_shapes)
# (models, amplitudes, state, ticket, their tangents, carrier) -> tangents of gathers, last state
tangent_p = _primitive("tangent", _tangent_shapes)
# (models, amplitudes, state, ticket, cotangents of gathers, last state, carrier) -> cotangents
adjoint_p = _primitive("adjoint", _adjoint_shapes)


def _apply(residuals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Return the tangents of all results. Residuals are the operands, ticket and carrier."""
    *operands, ticket, link = residuals
    *moved, ta = tangents
    filled = []
    for x, tx in zip(operands, moved, strict=True):
        # The operand may be active on other ranks: this rank takes part in any case.
        aval = jax.typeof(x)
        if type(tx) is not _Zero:
            filled.append(tx if type(ta) is _Zero else tx + opaque_zero(ta, aval))
        else:
            filled.append(
                jnp.zeros(aval.shape, aval.dtype) if type(ta) is _Zero else opaque_zero(ta, aval)
            )
    gathers, *last = tangent_p.bind(*operands, ticket, *filled, link, **params)
    return [gathers, _Zero(compat.tangent_aval(ticket)), *last]


def _differentiate(primals: Sequence[Any], params: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the results and the residuals of the tangent map."""
    *operands, a = primals
    gathers, ticket, *last = run_p.bind(*primals, **params)
    # The tangent's carrier depends on the results, so it is active whenever they are.
    return [gathers, ticket, *last], [*operands, ticket, a + opaque_zero(gathers, CARRIER)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    results, residuals = _differentiate(primals, params)
    return results, _apply(residuals, tangents, params)


def _linearize(is_vjp: Any, nonzeros: Any, *primals: Any, **params: Any) -> Any:
    results, residuals = _differentiate(primals, {**params, "save": bool(is_vjp)})
    active = [True, False, *(True for _ in results[2:])]

    def tangent(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        return _apply(residuals, tangents, params)

    return results, active, residuals, tangent


def _transpose(cotangents: Any, *args: Any, run: Run, models: int, **params: Any) -> list[Any]:
    n = (len(args) - 2) // 2
    operands, ticket, moved, a = args[:n], args[n], args[n + 1 : -1], args[-1]
    cts = [ad.instantiate_zeros(ct) for ct in cotangents]
    params = {**params, "site": -abs(params["site"])}
    back = adjoint_p.bind(*operands, ticket, *cts, a, run=run, models=models, **params)
    back = [ct if ad.is_undefined_primal(x) else None for ct, x in zip(back, moved, strict=True)]
    return [None] * (n + 1) + back + [None]


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "mpigrad.waves: second derivatives of the native kernels (backend='native') are not "
        "available. Use backend='xla'."
    )


ad.primitive_jvps[run_p] = _jvp
compat.set_linearization(run_p, _linearize)
for _p in (tangent_p, adjoint_p):
    ad.primitive_jvps[_p] = _refuse
    compat.set_linearization(_p, _refuse)
ad.primitive_transposes[tangent_p] = _transpose
