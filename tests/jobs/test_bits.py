"""Optimised programs give the same bits on any number of ranks."""

import pytest

from launching import mpigrad

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.full("slow: four runs; test_jobs compares the bits of unoptimised programs"),
]

PROGRAM = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import mpigrad
from mpigrad import jobs

jax.config.update("jax_enable_x64", True)
generator = np.random.default_rng(0)
n = 23
items = [generator.uniform(0, 2, 7) for _ in range(n)]
params = {
    "matrix": jnp.asarray(generator.standard_normal((5, 8))),
    "vector": jnp.asarray(generator.standard_normal(8)),
    "number": jnp.asarray(1.3),
}
item_params = jnp.asarray(generator.standard_normal((n, 4)))


def job(params, item_params, times):
    inputs = jnp.append(item_params, params["number"])
    hidden = jnp.tanh(inputs @ params["matrix"] + params["vector"])
    curve = jnp.exp(-jnp.abs(hidden[0]) * times) * params["number"]
    curve += jnp.sin(times[:, None] * hidden).sum(1) / 3
    return jnp.stack([curve.sum(), (curve**2).mean(), jnp.prod(curve)])


pool = jobs.pool()
total = pool.sum(job, pool.put(items))
found = mpigrad.jit(
    jax.value_and_grad(lambda *xs: jnp.sum(jnp.sin(total(*xs)) * 2 + 1), (0, 1))
)(params, item_params)
if pool.comm.rank == 0:
    numbers = hashlib.md5()
    for leaf in jax.tree.leaves(found):
        numbers.update(np.ascontiguousarray(leaf).tobytes())
    print(numbers.hexdigest())
"""


def test_values_and_gradients_have_the_same_bits(tmp_path):
    program = tmp_path / "bits.py"
    program.write_text(PROGRAM)
    # Without the options that make the compilation of other tests quick.
    runs = {n: mpigrad("launch", "-n", n, program, XLA_FLAGS="") for n in (1, 2, 3, 4)}
    assert all(run.returncode == 0 for run in runs.values()), runs
    bits = {n: run.stdout for n, run in runs.items()}
    assert len(set(bits.values())) == 1, bits
    assert bits[1].strip()
