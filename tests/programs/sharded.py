"""Sharded arrays of JAX and messages in one program, on ranks with two devices each."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpigrad as mg

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(cluster_detection_method="mpi4py")
comm = mg.default_communicator()
rank, size = comm.rank, comm.size
firsts = [next(d for d in jax.devices() if d.process_index == p) for p in range(size)]
mesh = Mesh(np.array(firsts), ("x",), axis_types=(AxisType.Auto,))
explicit = Mesh(np.array(firsts), ("x",), axis_types=(AxisType.Explicit,))
x = jnp.arange(1.0, 4) + rank


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), a, b)


def shard_map(f, mesh, inputs, outputs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs))


# ---- no copy ----

whole = mg.to_sharded(x, mesh, P("x"))
assert whole.shape == (3 * size,)
assert whole.sharding == NamedSharding(mesh, P("x"))
back = mg.from_sharded(whole)
assert back.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
assert back.devices() == x.devices()

# ---- derivatives: the sharded program and the same by messages ----


def weighted(v):
    return v * jax.lax.psum(jnp.sum(v**2), "x")


@mg.jit
def by_messages(x):
    return x * mg.allreduce(jnp.sum(x**2))


@mg.jit
def total_times(x):
    return x * mg.allreduce(jnp.sum(x))


def divided(mesh):
    f = shard_map(weighted, mesh, P("x"), P("x"))
    return lambda x: total_times(mg.from_sharded(f(mg.to_sharded(x, mesh, P("x")))))


def growing(v):  # from a replicated array to shards
    return v * (1.0 + jax.lax.axis_index("x"))


def added(v):  # from shards to a replicated array
    return jax.lax.psum(v**2, "x")


to_shards = shard_map(growing, mesh, P(), P("x"))
to_sum = shard_map(added, mesh, P("x"), P())
CASES = {
    "divided": (divided(mesh), lambda x: total_times(by_messages(x))),
    "explicit": (divided(explicit), lambda x: total_times(by_messages(x))),
    "replicated argument": (
        lambda x: mg.from_sharded(to_shards(mg.to_sharded(x, mesh, P()))),
        lambda x: mg.bcast(x) * (1.0 + rank),
    ),
    "replicated result": (
        lambda x: mg.from_sharded(to_sum(mg.to_sharded(x, mesh, P("x")))) * (1.0 + rank),
        lambda x: mg.allreduce(x**2) * (1.0 + rank),
    ),
}

for name, (f, g) in CASES.items():
    start = jnp.arange(1.0, 4) if name == "replicated argument" else x
    tangent = jnp.cos(7 * start + rank)
    value, out_tangent = mg.jvp(f, (start,), (tangent,))
    close((value, out_tangent), mg.jvp(g, (start,), (tangent,)))
    cotangent = jnp.sin(3 * value + rank)
    _, pull = mg.vjp(f, start)
    close(pull(cotangent), mg.vjp(g, start)[1](cotangent))
    dots = jnp.vdot(out_tangent, cotangent), jnp.vdot(tangent, pull(cotangent)[0])
    close(*mg.allreduce(dots))

f, g = (lambda x, h=h: jnp.sum(h(x) ** 2) for h in CASES["divided"])
close(*(mg.jvp(mg.grad(h), (x,), (jnp.cos(x),)) for h in (f, g)))  # second derivatives
parts = [jnp.arange(1.0, 4) + r for r in range(size)]
serial = lambda w: w * jnp.sum(w**2) * jnp.sum(w) * jnp.sum(w**2)  # on one rank
of_whole = jax.grad(lambda w: jnp.sum(serial(w) ** 2))(np.concatenate(parts))
close(mg.grad(f)(x), of_whole[3 * rank : 3 * rank + 3])

# ---- activity is collective: a constant on rank 0, a result that rank 1 does not use ----


def one_sided(convert):
    def share(x):
        mine = jnp.ones(3) if rank == 0 else x
        y = convert(mine)
        return jnp.sum(y**2) if rank == 0 else 0.0 * x[0]

    return share


sharded = shard_map(weighted, mesh, P("x"), P("x"))
through = lambda x: mg.from_sharded(sharded(mg.to_sharded(x, mesh, P("x"))))
close(mg.grad(one_sided(through))(x), mg.grad(one_sided(by_messages))(x))

# ---- errors, on every rank ----


def refused(text, f, *args):
    try:
        f(*args)
    except (TypeError, ValueError) as error:
        assert text in str(error), f"{text!r} not in {error}"
    else:
        raise AssertionError(f"expected an error with {text!r}")


refused(
    "must be in the order of the ranks",
    mg.to_sharded,
    x,
    Mesh(np.array(firsts[::-1]), ("x",)),
    P("x"),
)
refused("got 2 devices of rank", mg.to_sharded, x, Mesh(np.array(jax.devices()), ("x",)), P("x"))
refused("does not fit the mesh", mg.to_sharded, x, mesh, P("y"))
refused("has 2 entries, but x has 1 axes", mg.to_sharded, x, mesh, P("x", None))
refused("must be the same on all ranks", mg.to_sharded, jnp.ones(2 + rank), mesh, P("x"))
refused("got a sharded global array", mg.to_sharded, whole, mesh, P("x"))
refused("x differs between them", mg.to_sharded, x, mesh, P())
refused("expected a jax.Array", mg.from_sharded, np.ones(3))
refused("NamedSharding", mg.from_sharded, x)
refused("traced by jax.jit", jax.jit(lambda x: mg.to_sharded(x, mesh, P("x"))), x)
refused("traced by jax.jit", jax.jit(mg.from_sharded), whole)
refused("traced by jax.jit", mg.grad(mg.jit(lambda x: jnp.sum(through(x)))), x)
refused("must be on one device", mg.allreduce, whole)
inside = shard_map(lambda v: mg.allreduce(v), mesh, P("x"), P("x"))
refused("not supported for more than 1 device", inside, whole)
other = jax.local_devices()[1]
refused("Use jax.device_put", mg.to_sharded, jax.device_put(x, other) if rank else x, mesh, P("x"))
unconverted = lambda a: jnp.sum(mg.from_sharded(whole * a))
refused("grad: argument 0 is this rank's array", mg.grad(unconverted), 3.0)
refused("vjp: argument 0 is this rank's array", mg.vjp(unconverted, jnp.float64(3.0))[1], 1.0)
weight = lambda a: jnp.sum(mg.from_sharded(whole * mg.to_sharded(a, mesh, P())))
close(mg.grad(weight, replicated=0)(3.0), jnp.sum(whole))
whole_loss = lambda x: jnp.sum(mg.to_sharded(x, mesh, P("x")) ** 2)
refused("returned a global array", mg.grad(whole_loss), x)
refused("returned a global array", mg.value_and_grad(whole_loss, loss="replicated"), x)
close(mg.grad(lambda x: mg.from_sharded(whole_loss(x)), loss="replicated")(x), 2 * x)
refused("of the 1 ranks", mg.from_sharded, whole, comm.split(rank))
print(f"rank {rank}: right")
