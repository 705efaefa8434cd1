"""The same programs by sharded arrays of JAX and by messages, in one job: docs/sharded.md.

    mpigrad launch -n 2 bench/sharding.py [--rounds 7] [--json FILE]

Each program has one length of code both ways, and the gradient of its loss is timed, in turn. The
sharded arrays use gloo, or MPI if JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processor import processor

import mpigrad as mg

RANK, SIZE = mg.default_communicator().rank, mg.default_communicator().size
if SIZE > 1:
    jax.distributed.initialize(cluster_detection_method="mpi4py")
MESH = jax.make_mesh((SIZE,), ("x",), axis_types=(AxisType.Auto,))
ROWS, COLUMNS, WIDTH, BATCH, CELLS, STEPS = 4096, 1024, 2048, 256, 1024, 100
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def shard(x: np.ndarray, *axes: str | None) -> jax.Array:
    """Return an array of which each device holds a part."""
    sharding = NamedSharding(MESH, PartitionSpec(*axes))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def local(x: np.ndarray, axis: int = 0) -> jax.Array:
    """Return this rank's part of an array."""
    return jnp.asarray(np.array_split(x, SIZE, axis)[RANK])


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, np.float32) / shape[0] ** 0.5


def regression() -> Pair:
    """A linear model, with the rows of the data divided."""
    data, target, weights = numbers(ROWS, COLUMNS), numbers(ROWS), numbers(COLUMNS)

    def loss(w: Any, a: Any, b: Any) -> Any:
        return jnp.mean((a @ w - b) ** 2)

    sharded = jax.jit(jax.grad(loss))
    arrays = shard(weights), shard(data, "x"), shard(target, "x")
    own = local(data), local(target)
    by_messages = mg.jit(mg.grad(lambda w, a, b: loss(w, a, b) / SIZE, replicated=0))
    w = jnp.asarray(weights)
    return lambda: sharded(*arrays), lambda: by_messages(w, *own)


def layers() -> Pair:
    """Two dense layers, whose weights are divided by columns and by rows."""
    x, first, second = numbers(BATCH, WIDTH), numbers(WIDTH, WIDTH), numbers(WIDTH, WIDTH)

    def sharded_loss(weights: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(mg.allreduce(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    sharded = jax.jit(jax.grad(sharded_loss))
    arrays = (shard(first, None, "x"), shard(second, "x", None)), shard(x)
    by_messages = mg.jit(mg.grad(loss, loss="replicated"))
    own = (local(first, 1), local(second, 0)), jnp.asarray(x)
    return lambda: sharded(*arrays), lambda: by_messages(*own)


def heat() -> Pair:
    """Steps of the heat equation, with the rows of the grid divided."""
    start, spec = numbers(CELLS, CELLS), PartitionSpec("x")
    up = [(i, i + 1) for i in range(SIZE - 1)]
    down = [(i + 1, i) for i in range(SIZE - 1)]

    def step(u: Any, before: Any, behind: Any) -> Any:
        v = jnp.pad(jnp.concatenate([before, u, behind]), ((0, 0), (1, 1)))
        return u + 0.2 * (v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4 * u)

    def sharded_step(u: Any) -> Any:
        above = jax.lax.ppermute(u[-1:], "x", up)
        below = jax.lax.ppermute(u[:1], "x", down)
        return step(u, above, below)

    whole_step = jax.shard_map(sharded_step, mesh=MESH, in_specs=spec, out_specs=spec)
    grid = mg.Grid((CELLS, CELLS), (1.0, 1.0), dims=(SIZE, 1))

    def step_by_messages(u: Any) -> Any:
        v = mg.halo_exchange(u, grid, width=((1, 1), (0, 0)), boundary=0.0)
        return step(v[1:-1], v[:1], v[-1:])

    def loss(advance: Callable[[Any], Any], u: Any) -> Any:
        last, _ = jax.lax.scan(lambda u, _: (advance(u), None), u, None, length=STEPS)
        return jnp.sum(last**2)

    sharded = jax.jit(jax.grad(lambda u: loss(whole_step, u)))
    by_messages = mg.jit(mg.grad(lambda u: loss(step_by_messages, u)))
    array, own = shard(start, "x"), local(start)
    return lambda: sharded(array), lambda: by_messages(own)


def seconds(call: Callable[[], Any]) -> float:
    mg.default_communicator().mpi.Barrier()
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for make in (regression, layers, heat):
        sharded, by_messages = make()
        for mine, other in zip(
            jax.tree.leaves(by_messages()), jax.tree.leaves(sharded()), strict=True
        ):
            part = other.addressable_shards[0].data
            np.testing.assert_allclose(mine, part, rtol=0, atol=1e-4 * np.abs(part).max())
        both = [(seconds(sharded), seconds(by_messages)) for _ in range(given.rounds)]
        times = [statistics.median(column) for column in zip(*both, strict=True)]
        ratio = statistics.median(b / a for a, b in both)
        rows.append([inspect.getdoc(make), *times, ratio])
    if RANK:
        return
    print(f"{processor()}, {SIZE} ranks, JAX {jax.__version__}")
    for text, a, b, ratio in rows:
        print(f"{text:<64} {1e3 * a:8.1f} ms sharded {1e3 * b:8.1f} ms messages {ratio:6.2f}")
    if given.json:
        given.json.write_text(json.dumps({"processor": processor(), "rows": rows}))


if __name__ == "__main__":
    main()
