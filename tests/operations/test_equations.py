"""Programs with messages are small: what each message adds to the program that JAX compiles."""

import collections

import jax
import jax.numpy as jnp
import pytest

import mpigrad as mg
from mpigrad.grid import Grid, halo_exchange
from mpigrad.grid.halo_exchange import HaloLayout

MESSAGES = 10


def equations(f, x):
    """Count the equations of a program by primitive, those of nested functions included."""
    counts: collections.Counter[str] = collections.Counter()

    def count(jaxpr):
        for eqn in jaxpr.eqns:
            counts[eqn.primitive.name] += 1
            if "jaxpr" in eqn.params:
                count(eqn.params["jaxpr"].jaxpr)

    count(jax.make_jaxpr(f)(x).jaxpr)
    return counts


def chain(message):
    def f(x):
        for _ in range(MESSAGES):
            x = message(x)
        return jnp.sum(x)

    return f


@pytest.mark.parametrize("name", ["allreduce", "sendrecv"])
def test_a_message_and_its_adjoint_are_five_equations(comm, name):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    message = {"allreduce": mg.allreduce, "sendrecv": lambda x: mg.sendrecv(x, right, left)}[name]
    counts = equations(mg.grad(chain(message)), jnp.ones(3))
    nothing = equations(mg.grad(chain(lambda x: x)), jnp.ones(3))
    assert counts[f"mpigrad_{name}"] == 2 * MESSAGES
    assert sum(counts.values()) - sum(nothing.values()) <= 5 * MESSAGES


def test_the_local_parts_of_a_halo_exchange_are_traced_once(comm, monkeypatch):
    grid = Grid((8 * comm.size,), spacing=(1.0,))
    traced = []
    plain = HaloLayout.padded

    def padded(*args):
        traced.append(None)
        return plain(*args)

    monkeypatch.setattr(HaloLayout, "padded", padded)
    program = chain(lambda x: halo_exchange(x, grid, width=2)[2:-2])
    for transformed in (program, mg.grad(program), mg.grad(lambda x: program(x) ** 2)):
        jax.make_jaxpr(transformed)(jnp.ones(8))
    assert len(traced) == 1
