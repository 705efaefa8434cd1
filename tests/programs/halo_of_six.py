"""On 6 ranks: 24 cells on 3 x 2 tiles in one layer of ones, whose corners are other tiles'."""

import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.grid import Grid, halo_exchange

grid = Grid((6, 4), (1.0, 1.0), dims=(3, 2))
whole = np.arange(1, 25).reshape(6, 4)
padded = halo_exchange(jnp.asarray(whole[grid.slices]), grid, 1, 1)
around = tuple(slice(part.start, part.stop + 2) for part in grid.slices)
assert np.array_equal(padded, np.pad(whole, 1, constant_values=1)[around]), padded
mpigrad.barrier()
if grid.comm.rank == 0:
    print(padded.tolist())
