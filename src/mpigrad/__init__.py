"""MPI programs that can be differentiated.

A message is a node of the computational graph, and its derivative is another message. The usual
import is `import mpigrad as mg`.
"""

from typing import TYPE_CHECKING

from mpigrad import _lazy
from mpigrad._start import start_later as _start_later
from mpigrad._start import starts_at_import as _starts_at_import
from mpigrad._version import __version__ as __version__
from mpigrad.runtime.world import forbid_child_import as _forbid_child_import

if TYPE_CHECKING:
    from mpigrad import checkpoint as checkpoint
    from mpigrad import extend as extend
    from mpigrad import fem as fem
    from mpigrad import fft as fft
    from mpigrad import grid as grid
    from mpigrad import io as io
    from mpigrad import jobs as jobs
    from mpigrad import loops as loops
    from mpigrad import ode as ode
    from mpigrad import optimize as optimize
    from mpigrad import sparse as sparse
    from mpigrad import torch as torch
    from mpigrad import training as training
    from mpigrad import waves as waves
    from mpigrad.autodiff.custom_rules import custom_jvp as custom_jvp
    from mpigrad.autodiff.custom_rules import custom_vjp as custom_vjp
    from mpigrad.autodiff.gradient_checks import dot_test as dot_test
    from mpigrad.autodiff.gradient_checks import rank_test as rank_test
    from mpigrad.autodiff.gradient_checks import taylor_test as taylor_test
    from mpigrad.autodiff.jacobian import jacobian as jacobian
    from mpigrad.autodiff.transforms import grad as grad
    from mpigrad.autodiff.transforms import jvp as jvp
    from mpigrad.autodiff.transforms import linearize as linearize
    from mpigrad.autodiff.transforms import value_and_grad as value_and_grad
    from mpigrad.autodiff.transforms import vjp as vjp
    from mpigrad.autodiff.transforms import vmap as vmap
    from mpigrad.communicator import Communicator as Communicator
    from mpigrad.communicator import default_communicator as default_communicator
    from mpigrad.grid.grid import Grid as Grid
    from mpigrad.grid.halo_exchange import halo_exchange as halo_exchange
    from mpigrad.grid.stencil import apply_stencil as apply_stencil
    from mpigrad.operations.checks import assert_replicated as assert_replicated
    from mpigrad.operations.checks import require as require
    from mpigrad.operations.collectives import allgather as allgather
    from mpigrad.operations.collectives import allreduce as allreduce
    from mpigrad.operations.collectives import alltoall as alltoall
    from mpigrad.operations.collectives import barrier as barrier
    from mpigrad.operations.collectives import bcast as bcast
    from mpigrad.operations.collectives import exscan as exscan
    from mpigrad.operations.collectives import gather as gather
    from mpigrad.operations.collectives import reduce as reduce
    from mpigrad.operations.collectives import reduce_scatter as reduce_scatter
    from mpigrad.operations.collectives import scan as scan
    from mpigrad.operations.collectives import scatter as scatter
    from mpigrad.operations.custom import custom_operation as custom_operation
    from mpigrad.operations.jit import jit as jit
    from mpigrad.operations.nonblocking import Request as Request
    from mpigrad.operations.nonblocking import irecv as irecv
    from mpigrad.operations.nonblocking import isend as isend
    from mpigrad.operations.nonblocking import wait as wait
    from mpigrad.operations.nonblocking import wait_with_status as wait_with_status
    from mpigrad.operations.nonblocking import waitall as waitall
    from mpigrad.operations.norms import max_norm as max_norm
    from mpigrad.operations.norms import rms_norm as rms_norm
    from mpigrad.operations.one_sided import one_sided as one_sided
    from mpigrad.operations.point_to_point import recv as recv
    from mpigrad.operations.point_to_point import recv_with_status as recv_with_status
    from mpigrad.operations.point_to_point import send as send
    from mpigrad.operations.reduce_operators import Reduction as Reduction
    from mpigrad.operations.reduce_operators import reduction as reduction
    from mpigrad.operations.sendrecv import sendrecv as sendrecv
    from mpigrad.operations.v_collectives import allgatherv as allgatherv
    from mpigrad.operations.v_collectives import alltoallv as alltoallv
    from mpigrad.operations.v_collectives import gatherv as gatherv
    from mpigrad.operations.v_collectives import neighbor_alltoallv as neighbor_alltoallv
    from mpigrad.operations.v_collectives import reduce_scatterv as reduce_scatterv
    from mpigrad.operations.v_collectives import scatterv as scatterv
    from mpigrad.sharding import from_sharded as from_sharded
    from mpigrad.sharding import to_sharded as to_sharded
    from mpigrad.sparse.matrix.ghost_exchange import GhostExchange as GhostExchange

_NAMES = {
    "Communicator": "communicator",
    "GhostExchange": "sparse.matrix.ghost_exchange",
    "Grid": "grid.grid",
    "Reduction": "operations.reduce_operators",
    "Request": "operations.nonblocking",
    "allgather": "operations.collectives",
    "allgatherv": "operations.v_collectives",
    "allreduce": "operations.collectives",
    "alltoall": "operations.collectives",
    "alltoallv": "operations.v_collectives",
    "apply_stencil": "grid.stencil",
    "assert_replicated": "operations.checks",
    "barrier": "operations.collectives",
    "bcast": "operations.collectives",
    "checkpoint": "",
    "custom_jvp": "autodiff.custom_rules",
    "custom_operation": "operations.custom",
    "custom_vjp": "autodiff.custom_rules",
    "default_communicator": "communicator",
    "dot_test": "autodiff.gradient_checks",
    "exscan": "operations.collectives",
    "extend": "",
    "fem": "",
    "fft": "",
    "from_sharded": "sharding",
    "gather": "operations.collectives",
    "gatherv": "operations.v_collectives",
    "grad": "autodiff.transforms",
    "grid": "",
    "halo_exchange": "grid.halo_exchange",
    "io": "",
    "irecv": "operations.nonblocking",
    "isend": "operations.nonblocking",
    "jacobian": "autodiff.jacobian",
    "jit": "operations.jit",
    "jobs": "",
    "jvp": "autodiff.transforms",
    "linearize": "autodiff.transforms",
    "loops": "",
    "max_norm": "operations.norms",
    "neighbor_alltoallv": "operations.v_collectives",
    "ode": "",
    "one_sided": "operations.one_sided",
    "optimize": "",
    "rank_test": "autodiff.gradient_checks",
    "recv": "operations.point_to_point",
    "recv_with_status": "operations.point_to_point",
    "reduce": "operations.collectives",
    "reduce_scatter": "operations.collectives",
    "reduce_scatterv": "operations.v_collectives",
    "reduction": "operations.reduce_operators",
    "require": "operations.checks",
    "rms_norm": "operations.norms",
    "scan": "operations.collectives",
    "scatter": "operations.collectives",
    "scatterv": "operations.v_collectives",
    "send": "operations.point_to_point",
    "sendrecv": "operations.sendrecv",
    "sparse": "",
    "taylor_test": "autodiff.gradient_checks",
    "to_sharded": "sharding",
    "torch": "",
    "training": "",
    "value_and_grad": "autodiff.transforms",
    "vjp": "autodiff.transforms",
    "vmap": "autodiff.transforms",
    "wait": "operations.nonblocking",
    "wait_with_status": "operations.nonblocking",
    "waitall": "operations.nonblocking",
    "waves": "",
}


def _start() -> None:
    from mpigrad._start import start

    start()


__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES, _start)

_forbid_child_import()
if _starts_at_import():
    _start()
else:
    _start_later()
