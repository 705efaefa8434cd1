"""Run a program for which `import mpi4jax` gives mpigrad's module.

`python -m mpigrad.compat.mpi4jax program.py` or `python -m mpigrad.compat.mpi4jax -m module`.
"""

from mpigrad.compat.mpi4jax.stand_in import run

run()
