"""One process of another library: torch (gloo) or JAX's shard_map (gloo, or JAX's own MPI).

`bench/operations.py` starts it beside each of its ranks, in a Python of its own, so that the loops
of all libraries take turns in one job. It connects to the port of its rank, reads one task a line,
{"operation", "mode", "n", "count"}, and answers with the seconds that the loop has taken.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

Loop = Callable[[], Any]


def torch_loops(rank: int, size: int, port: int) -> Callable[[str, str, int, int], Loop]:
    """Loops of torch.distributed on kept tensors."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional as with_gradient

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    right, left = (rank + 1) % size, (rank - 1) % size

    def loop(operation: str, mode: str, n: int, count: int) -> Loop:
        x, y = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        ones = torch.ones(n, dtype=torch.float64)

        def exchange() -> None:
            both = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
            for request in dist.batch_isend_irecv(both):
                request.wait()

        forward = {
            "allreduce": lambda: dist.all_reduce(x),
            "bcast": lambda: dist.broadcast(x, 0),
            "sendrecv": exchange,
        }
        differentiable = {
            "allreduce": with_gradient.all_reduce,
            "bcast": lambda v: with_gradient.broadcast(v, 0),
        }

        def both_ways() -> None:
            v = x.clone().requires_grad_()
            differentiable[operation](v).backward(ones)

        if mode == "gradient" and operation not in differentiable:
            raise NotImplementedError(f"{operation} has no gradient on gloo")
        return repeated(forward[operation] if mode == "forward" else both_ways, count)

    return loop


def shard_map_loops(
    rank: int, size: int, port: int, collectives: str = "gloo"
) -> Callable[[str, str, int, int], Loop]:
    """Loops inside one compiled program over all processes."""
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", collectives)
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, local_device_ids=[0])
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    shift = [(r, (r + 1) % size) for r in range(size)]
    operations: dict[str, Callable[[Any], Any]] = {
        "allreduce": lambda x: jax.lax.psum(x, "ranks"),
        "bcast": lambda x: jax.lax.psum(x * (jax.lax.axis_index("ranks") == 0), "ranks"),
        "sendrecv": lambda x: jax.lax.ppermute(x, "ranks", shift),
    }

    def loop(operation: str, mode: str, n: int, count: int) -> Loop:
        f = operations[operation]

        def both_ways(x: Any) -> Any:
            y, back = jax.vjp(f, x)
            return back(y)[0]

        step = f if mode == "forward" else both_ways
        program = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.fori_loop(0, count, lambda i, x: step(x), x, unroll=2),
                mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False,
            )
        )  # fmt: skip
        sharding = NamedSharding(mesh, P("ranks"))
        x = jax.make_array_from_process_local_data(sharding, np.zeros(n))
        return lambda: jax.block_until_ready(program(x))

    return loop


def repeated(f: Loop, count: int) -> Loop:
    """`f`, `count` times."""

    def run() -> None:
        for _ in range(count):
            f()

    return run


MAKERS = {
    "torch": torch_loops,
    "shard_map": shard_map_loops,
    "shard_map_mpi": lambda *args: shard_map_loops(*args, collectives="mpi"),
}


def main() -> None:
    """Answer until the input ends."""
    library, rank, port, *ports = sys.argv[1], *map(int, sys.argv[2:])
    if rank < 0:  # started by mpiexec
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    stream = socket.create_connection(("127.0.0.1", ports[rank])).makefile("rw")
    os.dup2(2, 1)  # gloo has things to say on the standard output
    kept: dict[str, Loop] = {}
    try:
        make = MAKERS[library](rank, len(ports), port)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=stream, flush=True)
        return
    print(json.dumps({"ready": True}), file=stream, flush=True)
    for line in stream:
        task = json.loads(line)
        try:
            if line not in kept:
                kept[line] = make(task["operation"], task["mode"], task["n"], task["count"])
            start = time.perf_counter()
            kept[line]()
            answer = {"seconds": time.perf_counter() - start}
        except NotImplementedError as error:
            answer = {"missing": str(error)}
        print(json.dumps(answer), file=stream, flush=True)
    os._exit(
        0
    )  # JAX frees communicators behind MPI_Finalize, and Open MPI ends the job with an error


if __name__ == "__main__":
    main()
