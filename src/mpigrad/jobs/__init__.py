"""A differentiable parallel map over records that stay on the ranks.

>>> from mpigrad import jobs
>>> pool = jobs.pool()
>>> data = pool.put([1.0, 2.0, 3.0])  # once; from rank 0 to the ranks that need them
>>> f = pool.sum(lambda shared, mine, record: (record - shared * mine) ** 2, data)
>>> value = f(2.0, jnp.ones(3))  # doctest: +SKIP
"""

from mpigrad.jobs.failures import Failure, JobError, host_call
from mpigrad.jobs.items import Data
from mpigrad.jobs.pool import Pool, pool
from mpigrad.jobs.root_mode import root_driven
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
    "root_driven",
]
