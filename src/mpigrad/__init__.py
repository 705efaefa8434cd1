"""mpigrad: MPI programs that can be differentiated.

A message is a node of the computational graph, and its derivative is another message.
"""

from mpigrad.joining import refuse_children as _refuse_children
from mpigrad.launcher import in_command

__version__ = "0.1.0"

_refuse_children()

# The `mpigrad` command only starts ranks: its own process needs neither MPI nor JAX.
if not in_command():
    from mpigrad.joining import joining as _joining

    with _joining(__path__):
        from mpi4py import MPI as _MPI  # first: it initialises MPI with MPI_THREAD_MULTIPLE

    from mpigrad.launcher import check_world as _check_world

    if not _MPI.Is_initialized() or _MPI.Is_finalized():
        raise ImportError(
            "mpigrad: MPI is not initialised here. Leave mpi4py.rc.initialize as it is, or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) before mpigrad is imported."
        )
    _check_world(_MPI.COMM_WORLD.size)

    from mpigrad import guard as _guard

    _guard.end_all_on_errors()  # those of what is imported here, too

    from mpigrad import trace as _trace
    from mpigrad.communicator import Communicator
    from mpigrad.communicator import default as _default
    from mpigrad.custom_rules import custom_jvp, custom_vjp
    from mpigrad.jacobians import jacobian
    from mpigrad.norms import max_norm, rms_norm
    from mpigrad.operations import (
        _jax_compat,
        _jax_private,
        allgather,
        allgatherv,
        allreduce,
        alltoall,
        alltoallv,
        barrier,
        bcast,
        custom_operation,
        exscan,
        gather,
        gatherv,
        irecv,
        isend,
        neighbor_alltoallv,
        one_sided,
        recv,
        recv_with_status,
        reduce,
        reduce_scatter,
        reduce_scatterv,
        reduction,
        require,
        scan,
        scatter,
        scatterv,
        send,
        sendrecv,
        wait,
        wait_with_status,
        waitall,
    )
    from mpigrad.transformations import grad, jit, jvp, linearize, value_and_grad, vjp, vmap
    from mpigrad.verify import assert_replicated, dot_test, taylor_test

    _jax_private.check_version(_MPI.COMM_WORLD.rank)
    _jax_compat.configure_backend(_MPI.COMM_WORLD.size)
    _guard.install()
    _default()  # here, where every rank is: making it is collective, a first message need not be
    _trace.start()

__all__ = [
    "Communicator",
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "assert_replicated",
    "barrier",
    "bcast",
    "custom_jvp",
    "custom_operation",
    "custom_vjp",
    "dot_test",
    "exscan",
    "gather",
    "gatherv",
    "grad",
    "irecv",
    "isend",
    "jacobian",
    "jit",
    "jvp",
    "linearize",
    "max_norm",
    "neighbor_alltoallv",
    "one_sided",
    "recv",
    "recv_with_status",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "reduction",
    "require",
    "rms_norm",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "taylor_test",
    "value_and_grad",
    "vjp",
    "vmap",
    "wait",
    "wait_with_status",
    "waitall",
]
