"""A differentiable parallel map over items whose data stay on the ranks.

Examples
--------
>>> import jax.numpy as jnp
>>> from mpigrad import jobs
>>> pool = jobs.pool()
>>> data = pool.put([1.0, 2.0, 3.0])  # sent once, from rank 0 to the ranks that need it
>>> f = pool.sum(lambda params, item_params, item: (item - params * item_params) ** 2, data)
>>> print(f(2.0, jnp.ones(3)))
2.0
"""

from mpigrad.jobs.failures import Failure, JobError, host_call
from mpigrad.jobs.items import Data
from mpigrad.jobs.pool import Pool, pool
from mpigrad.jobs.root_mode import root_pool
from mpigrad.jobs.schedules import Dynamic, Static, Weighted

__all__ = [
    "Data",
    "Dynamic",
    "Failure",
    "JobError",
    "Pool",
    "Static",
    "Weighted",
    "host_call",
    "pool",
    "root_pool",
]
