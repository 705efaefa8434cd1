"""Move arrays between the ranks of MPI and the sharded arrays of JAX, without a copy."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import (
    CARRIER,
    Activity,
    concrete_value,
    keep_in_backward,
    outer_carrier,
    primitive,
)
from mpigrad.guard import guard_enabled
from mpigrad.operations import allreduce, bcast

__all__ = ["from_sharded", "to_sharded"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """One sharding over the ranks of a communicator.

    Attributes
    ----------
    owners
        For each rank, the lowest rank that has the same shard.
    replicas
        The ranks with this rank's shard, or None if no shard is replicated.
    """

    sharding: NamedSharding
    device: Any
    size: int
    rank: int
    owners: tuple[int, ...]
    replicas: Communicator | None

    def parts(self, ndim: int) -> tuple[int, ...]:
        """Return the number of shards along each axis."""
        unit = self.sharding.shard_shape((self.size,) * ndim)
        return tuple(self.size // n for n in unit)


@functools.cache  # each split takes a communicator of MPI, and it is collective
def _layout(mesh: Mesh, spec: PartitionSpec, ndim: int, comm: Communicator) -> _Layout:
    sharding = NamedSharding(mesh, spec)
    indices = sharding.devices_indices_map((comm.size,) * ndim)
    keys = [repr(indices[device]) for device in mesh.devices.flat]
    owners = tuple(keys.index(key) for key in keys)
    replicas = None
    if len(set(owners)) == 1 < comm.size:
        replicas = comm
    elif len(set(owners)) < comm.size:
        replicas = comm.split(owners[comm.rank])
    device = mesh.devices.flat[comm.rank]
    return _Layout(sharding, device, comm.size, comm.rank, owners, replicas)


def to_sharded(x: Any, mesh: Mesh, spec: PartitionSpec, comm: Communicator | None = None) -> Any:
    """Return the global `jax.Array` whose shard on this rank is `x` (collective, no copy).

    The processes of `jax.distributed` are the ranks, with one device each. The function runs
    outside of `jax.jit`. It is differentiable: the cotangent of `x` is this rank's shard of the
    cotangent of the result. If a shard is replicated on several ranks, their arrays must be equal,
    and the result is that of the lowest of these ranks, as after a `bcast`. So that rank has the
    gradient, and the others have zeros.

    Parameters
    ----------
    x
        This rank's shard, of the same shape and dtype on all ranks.
    mesh
        A mesh with one device of each rank, in the order of the ranks.
    spec
        The axes of the mesh over which each axis of `x` is divided. Axes of the mesh that it does
        not name have replicas.
    comm
        The ranks. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    jax.Array
        The global array, with `NamedSharding(mesh, spec)`. Each axis is as long as all its shards.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if `jax.distributed` has not been started, the mesh is not one device of each
        rank in the order of ranks, `spec` does not fit the mesh or `x`, `x` differs between ranks
        in shape or dtype, is sharded already, or is traced by `jax.jit` or `vmap`. With
        `MPIGRAD_GUARD=1` also if replicas differ.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from jax.sharding import PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("x",))  # with more ranks after jax.distributed.initialize()
    >>> mg.to_sharded(jnp.arange(3.0), mesh, PartitionSpec("x")).shape
    (3,)
    """
    comm = resolve(comm)
    with raise_on_all_ranks(comm):
        _check_mesh(mesh, comm, "to_sharded")
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                "to_sharded: spec must be a jax.sharding.PartitionSpec, got "
                f"{type(spec).__name__}. Write PartitionSpec('x'), for example."
            )
        device = mesh.devices.flat[comm.rank]
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
        value = _concrete(x, "to_sharded")
        if not isinstance(value, jax.Array):  # an array of NumPy that is differentiated
            x = jax.device_put(x, device)
            value = _concrete(x, "to_sharded")
        if not value.is_fully_addressable:
            raise ValueError(
                f"to_sharded: x must be this rank's array, got a sharded global array of shape "
                f"{x.shape}. Use it as it is, or change its sharding by jax.device_put."
            )
        if value.devices() != {device}:
            raise ValueError(
                f"to_sharded: x is on {', '.join(map(str, value.devices()))}, but the device of "
                f"rank {comm.rank} in the mesh is {device}. Use "
                "jax.device_put(x, mesh.local_devices[0])."
            )
        _check_spec(mesh, spec, x.ndim)
    description = f"shape {x.shape}, dtype {x.dtype}, {spec} and mesh {dict(mesh.shape)}"
    assert_same_on_all_ranks(comm, description, "to_sharded: x, spec and mesh")
    layout = _layout(mesh, spec, x.ndim, comm)
    if layout.replicas is not None and guard_enabled():
        _check_replicas(np.asarray(value), layout, comm)
    return to_sharded_p.bind(x, outer_carrier(), layout=layout)[0]


def from_sharded(x: Any, comm: Communicator | None = None) -> Any:
    """Return this rank's shard of a global `jax.Array` (collective, no copy).

    It runs outside of `jax.jit`, and is differentiable: the shards of the cotangent are the
    cotangents of the ranks. If a shard is replicated on several ranks, their cotangents are added,
    in one `allreduce` of these ranks.

    Parameters
    ----------
    x
        A `jax.Array` with a `NamedSharding` over one device of each rank, in the order of ranks.
    comm
        The ranks. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    jax.Array
        This rank's shard, an array on this rank's device.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if `x` is not an array with such a sharding, differs between ranks in shape,
        dtype or sharding, or is traced by `jax.jit` or `vmap`, or if `jax.distributed` has not been
        started.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from jax.sharding import PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("x",))  # with more ranks after jax.distributed.initialize()
    >>> y = mg.to_sharded(jnp.arange(3.0), mesh, PartitionSpec("x"))
    >>> mg.from_sharded(2 * y)
    Array([0., 2., 4.], dtype=float32)
    """
    comm = resolve(comm)
    with raise_on_all_ranks(comm):
        value = _concrete(x, "from_sharded")
        if not isinstance(value, jax.Array):
            raise TypeError(
                f"from_sharded: expected a jax.Array, got {type(x).__name__}. Make a global array "
                "with mpigrad.to_sharded, for example."
            )
        sharding = value.sharding
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                "from_sharded: expected an array with a NamedSharding, got shape "
                f"{x.shape} with {type(sharding).__name__}. If it is this rank's array, "
                "use it as it is. Otherwise use jax.device_put(x, NamedSharding(mesh, spec))."
            )
        mesh = sharding.mesh
        _check_mesh(mesh, comm, "from_sharded")
    description = f"shape {x.shape}, dtype {x.dtype}, {sharding.spec} and mesh {dict(mesh.shape)}"
    assert_same_on_all_ranks(comm, description, "from_sharded: x and its sharding")
    layout = _layout(mesh, sharding.spec, x.ndim, comm)
    (y,) = from_sharded_p.bind(x, layout=layout)
    if isinstance(y, Tracer):
        keep_in_backward(y)  # a rank that does not use it takes part in the backward pass, too
    return y


# ---- checks ----


def _concrete(x: Any, name: str) -> Any:
    value = concrete_value(x)
    if value is None:
        raise ValueError(
            f"{name}: x must have a value, got one that is traced by jax.jit, vmap, scan, cond or "
            "checkpoint. A compiled program is either of one rank or of all devices. Call "
            f"{name} outside, and compile the parts before and after it by themselves."
        )
    return value


def _check_mesh(mesh: Any, comm: Communicator, name: str) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{name}: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. Make it with "
            "jax.make_mesh((jax.device_count(),), ('x',))."
        )
    if comm.size > 1 and not jax.distributed.is_initialized():
        raise ValueError(
            f"{name}: jax.distributed has not been started, so JAX on rank {comm.rank} of "
            f"{comm.size} sees its own devices only. After import mpigrad call "
            "jax.distributed.initialize(cluster_detection_method='mpi4py'), before other JAX calls."
        )
    processes = [device.process_index for device in mesh.devices.flat]
    if (n_devices := processes.count(jax.process_index())) > 1:
        raise ValueError(
            f"{name}: the mesh must have one device of each rank, got {n_devices} devices of rank "
            f"{comm.rank}. Start one rank for each device, or give each rank one of them with "
            "local_device_ids in jax.distributed.initialize."
        )
    if len(processes) != comm.size:
        raise ValueError(
            f"{name}: the mesh must have one device of each of the {comm.size} ranks, got "
            f"{len(processes)} devices. Give comm= the ranks of the mesh."
        )
    if processes[comm.rank] != jax.process_index():
        raise ValueError(
            f"{name}: the devices of the mesh must be in the order of the ranks, but device "
            f"{comm.rank} is of JAX process {processes[comm.rank]}, and rank {comm.rank} is "
            f"process {jax.process_index()}. Pass process_id=rank to jax.distributed.initialize, "
            "and make the mesh with jax.sharding.Mesh(numpy.reshape(jax.devices(), shape), names)."
        )


def _check_spec(mesh: Mesh, spec: PartitionSpec, ndim: int) -> None:
    try:
        NamedSharding(mesh, spec)
    except ValueError as error:
        raise ValueError(
            f"to_sharded: {spec} does not fit the mesh {dict(mesh.shape)}: {error} Use each axis "
            "of the mesh once at most."
        ) from error
    if len(spec) > ndim:
        raise ValueError(
            f"to_sharded: {spec} has {len(spec)} entries, but x has {ndim} axes. Use an entry for "
            "each axis of x at most."
        )


def _check_replicas(value: np.ndarray, layout: _Layout, comm: Communicator) -> None:
    digests = comm.mpi.allgather(zlib.crc32(np.ascontiguousarray(value).tobytes()))
    for rank, owner in enumerate(layout.owners):
        if digests[rank] != digests[owner]:
            raise ValueError(
                f"to_sharded: {layout.sharding.spec} replicates the shard of rank {owner} on rank "
                f"{rank}, but x differs between them. Use mpigrad.bcast(x) first, or a spec that "
                "names all axes of the mesh."
            )


# ---- the two primitives, and how one is the transpose of the other ----


def _to_global(x: Any, a: Any, *, layout: _Layout) -> list[jax.Array]:
    shape = tuple(n * p for n, p in zip(x.shape, layout.parts(x.ndim), strict=True))
    x = jax.device_put(x, layout.device)  # zeros of a tangent may be elsewhere
    return [jax.make_array_from_single_device_arrays(shape, layout.sharding, [x])]


def _to_local(x: Any, *, layout: _Layout) -> list[jax.Array]:
    if x.is_fully_addressable and layout.size > 1:  # zeros that JAX made on this rank
        return [x[layout.sharding.addressable_devices_indices_map(x.shape)[layout.device]]]
    if not x.sharding.is_equivalent_to(layout.sharding, x.ndim):  # a cotangent that JAX placed
        x = jax.device_put(x, layout.sharding)
    shard = x.addressable_data(0)
    # On one rank the shard of JAX keeps the sharding of the whole.
    alone = SingleDeviceSharding(layout.device)
    return [jax.make_array_from_single_device_arrays(shard.shape, alone, [shard])]


def _global_shape(x: Any, a: Any, *, layout: _Layout) -> list[Any]:
    shape = tuple(n * p for n, p in zip(x.shape, layout.parts(x.ndim), strict=True))
    return [jax.core.ShapedArray(shape, x.dtype, sharding=_explicit(layout.sharding, x.ndim))]


def _explicit(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Return the part of a sharding along the explicit axes of its mesh, as JAX's types have it."""
    mesh = sharding.mesh.abstract_mesh
    explicit = []
    for entry in (*sharding.spec, *(None,) * (ndim - len(sharding.spec))):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        explicit.append(tuple(name for name in names if name in mesh.explicit_axes) or None)
    return NamedSharding(mesh, PartitionSpec(*explicit))


def _local_shape(x: Any, *, layout: _Layout) -> list[Any]:
    shape = tuple(n // p for n, p in zip(x.shape, layout.parts(x.ndim), strict=True))
    return [jax.ShapeDtypeStruct(shape, x.dtype)]


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., list[Any]]]:
    (y,) = to_sharded_p.bind(*operands, **params)
    layout: _Layout = params["layout"]
    x = jax.typeof(operands[0])

    def tangent(residuals: Any, tangents: Sequence[Any]) -> list[Any]:
        t, ta = tangents
        if (t is None and ta is None) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return [None]
        t = jnp.zeros(x.shape, x.dtype) if t is None else t
        ta = jnp.zeros((), CARRIER.dtype) if ta is None else ta
        if layout.replicas is not None:
            t = bcast(t, 0, layout.replicas)
        return to_sharded_p.bind(t, ta, **params)

    return [y], (), tangent


def _to_transpose(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    layout: _Layout = params["layout"]
    back = None
    if linear[0]:
        (back,) = from_sharded_p.bind(cotangents[0], layout=layout)
        if layout.replicas is not None:
            back = jnp.where(layout.owners[layout.rank] == layout.rank, back, 0)
    return [back, jnp.zeros((), CARRIER.dtype)]


def _from_transpose(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    (ct,) = cotangents
    layout: _Layout = params["layout"]
    if layout.replicas is not None:
        ct = allreduce(ct, comm=layout.replicas)
    return to_sharded_p.bind(ct, outer_carrier(), layout=layout)


def _refusal(name: str, by: str) -> Any:
    def refuse(*args: Any, **params: Any) -> Any:
        raise ValueError(
            f"{name}: it cannot be {by}. A compiled program is either of one rank or of "
            f"all devices. Call {name} outside, and compile the parts before and after it."
        )

    return refuse


to_sharded_p = primitive(
    "to_sharded",
    shapes=_global_shape,
    run=_refusal("to_sharded", "compiled by jax.jit"),
    impl=_to_global,
    messages=False,
    differentiate=_differentiate,
    transpose=_to_transpose,
    batch=_refusal("to_sharded", "batched by vmap"),
)
from_sharded_p = primitive(
    "from_sharded",
    shapes=_local_shape,
    run=_refusal("from_sharded", "compiled by jax.jit"),
    impl=_to_local,
    messages=False,
    differentiate="linear",
    transpose=_from_transpose,
    batch=_refusal("from_sharded", "batched by vmap"),
)
