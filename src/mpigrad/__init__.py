"""mpigrad: MPI programs that can be differentiated.

A message is a node of the computational graph, and its derivative is another message.
"""

from mpigrad.launcher import in_command

__version__ = "0.1.0"

# The `mpigrad` command only starts ranks: its own process needs neither MPI nor JAX.
if not in_command():
    from mpi4py import MPI as _MPI  # first: it initialises MPI with MPI_THREAD_MULTIPLE

    from mpigrad.launcher import check_world as _check_world

    _check_world(_MPI.COMM_WORLD.size)

    from mpigrad import guard as _guard
    from mpigrad import trace as _trace
    from mpigrad.communicator import Communicator
    from mpigrad.communicator import default as _default
    from mpigrad.operations import (
        _jax_compat,
        allreduce,
        barrier,
        bcast,
        gather,
        neighbor_alltoallv,
        recv,
        reduce,
        require,
        scatter,
        send,
        sendrecv,
    )
    from mpigrad.transformations import grad, jit, jvp, linearize, value_and_grad, vjp, vmap
    from mpigrad.verify import assert_replicated, dot_test, taylor_test

    _jax_compat.configure_backend(_MPI.COMM_WORLD.size)
    _guard.install()
    _default()  # here, where every rank is: making it is collective, a first message need not be
    _trace.start()

__all__ = [
    "Communicator",
    "allreduce",
    "assert_replicated",
    "barrier",
    "bcast",
    "dot_test",
    "gather",
    "grad",
    "jit",
    "jvp",
    "linearize",
    "neighbor_alltoallv",
    "recv",
    "reduce",
    "require",
    "scatter",
    "send",
    "sendrecv",
    "taylor_test",
    "value_and_grad",
    "vjp",
    "vmap",
]
