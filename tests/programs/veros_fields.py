"""Ten days of veros's set-up ACC, with its own solver: save its fields, gathered."""

import sys

import numpy as np
import veros
from mpi4py import MPI

from mpigrad.compat.mpi4jax import stand_in

stand_in.install()
settings = veros.runtime_settings
settings.loglevel, settings.backend, settings.linear_solver = "warning", "jax", "scipy"
settings.diskless_mode = True
settings.num_proc = tuple(MPI.Compute_dims(MPI.COMM_WORLD.size, 2))

from veros.distributed import gather
from veros.setups.acc import ACCSetup

setup = ACCSetup(override={"runlen": 10 * 86400.0})
setup.setup()
setup.run(show_progress_bar=False)
variables, dimensions = setup.state.variables, setup.state.dimensions
fields = {k: gather(getattr(variables, k), dimensions, ("xt", "yt")) for k in ("psi", "temp", "u")}
if MPI.COMM_WORLD.rank == 0:
    np.savez(sys.argv[1], **{k: np.asarray(v)[2:-2, 2:-2] for k, v in fields.items()})
