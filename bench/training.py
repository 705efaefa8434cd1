"""Data-parallel training beside PyTorch's DDP over gloo and a loop of Allreduce over the layers.

    python bench/training.py [--parameters 1e6 25e6] [--rounds 11] [--json FILE] [--picture FILE]

A perceptron of equal layers, float32, 32 samples on each of 2 ranks, SGD with momentum. Every
contender trains its own copy of the same model on the same samples; in one job they take turns, so
that a drift of the machine meets all alike. Times are of the slowest rank, medians over rounds.

- step: forward, backward, the exchange of gradients, the update.
- exposed: what a step takes beyond one of the same model without messages.
- exchange: the gradients of all layers after a backward pass, with nothing else to do.

Then the parameter server: updates and gradients per second with 1 server and 3 workers, which need
more cores than two. `--picture` draws when layers are ready and when their buckets travel.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve()
SAMPLES = 32  # of a rank
SHAPES = {1e4: (2, 64), 1e6: (4, 512), 25e6: (6, 2048)}  # layers and their width, by parameters
STEPS = {1e4: 100, 1e6: 20, 25e6: 3}  # in a round
BUCKET = 25 << 20  # bytes, as DDP's and ours

Step = Callable[[int], float]  # number of the step -> seconds of its exchange alone, or 0


def perceptron(parameters: float) -> Any:
    """Layers of width x width; the same on all ranks."""
    import torch

    torch.manual_seed(0)
    layers, width = SHAPES[parameters]
    parts: list[Any] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


def batches(parameters: float, rank: int) -> Callable[[int], tuple[Any, Any]]:
    """This rank's samples of a step."""
    import torch

    width = SHAPES[parameters][1]
    generator = torch.Generator().manual_seed(1 + rank)
    x, y = (torch.randn(8, SAMPLES, width, generator=generator) for _ in range(2))
    return lambda step: (x[step % 8], y[step % 8])


def loss(model: Any, x: Any, y: Any) -> Any:
    """Mean square."""
    return ((model(x) - y) ** 2).mean()


def contenders(parameters: float, world: Any) -> dict[str, tuple[Any, Step]]:
    """For each its model, and what makes a step."""
    import torch
    from mpi4py import MPI
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from mpigrad.training import Synchronous, trainer

    batch = batches(parameters, world.rank)

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), 1e-2, 0.9)

    def plain(exchange: Callable[[list[Any]], None] | None, wrap: Any = lambda model: model) -> Any:
        """The loop that everybody writes; gradients are exchanged after backward."""
        model = perceptron(parameters)
        optimizer, wrapped = sgd(model), wrap(model)

        def step(number: int) -> float:
            optimizer.zero_grad(set_to_none=False)
            loss(wrapped, *batch(number)).backward()
            seconds = 0.0
            if exchange is not None:
                world.Barrier()  # what a rank waits for the other is not the exchange's
                begun = time.perf_counter()
                exchange([p.grad for p in model.parameters()])
                seconds = time.perf_counter() - begun
            optimizer.step()
            return seconds

        return model, step

    def by_layer(gradients: list[Any]) -> None:
        for gradient in gradients:
            world.Allreduce(MPI.IN_PLACE, gradient.numpy())
            gradient.div_(world.size)

    def by_gloo(gradients: list[Any]) -> None:
        """As DDP does where nothing overlaps: buckets, all under way at once."""
        groups: list[list[Any]] = [[]]
        for gradient in reversed(gradients):
            if groups[-1] and sum(g.nbytes for g in groups[-1]) + gradient.nbytes > BUCKET:
                groups.append([])
            groups[-1].append(gradient)
        flat = [torch.cat([g.ravel() for g in group]) for group in groups]
        for work in [distributed.all_reduce(bucket, async_op=True) for bucket in flat]:
            work.wait()
        for group, bucket in zip(groups, flat, strict=True):
            start = 0
            for g in group:
                torch.div(bucket[start : start + g.numel()].view_as(g), world.size, out=g)
                start += g.numel()

    def ours(strategy: Any) -> Any:
        model = perceptron(parameters)
        training = trainer(model, sgd(model), loss, strategy)
        return model, lambda number: training.step(*batch(number)).communication

    def ddp(model: Any) -> Any:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    return {
        "no messages": plain(None),
        "mpigrad": ours(Synchronous()),
        "mpigrad, no overlap": ours(Synchronous(overlap=False)),
        "DDP, gloo": plain(None, ddp),
        "gloo, no overlap": plain(by_gloo),
        "Allreduce by layer": plain(by_layer),
    }


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each contender; on 2 ranks."""
    import numpy as np
    import torch
    from mpi4py import MPI
    from torch import distributed

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = world.bcast(free.getsockname()[1])
    distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size
    )
    for parameters in options.parameters:
        candidates = contenders(parameters, world)
        count = STEPS[parameters]
        for _, step in candidates.values():
            for number in range(2):  # buckets are arranged after the first
                step(number)
        times: dict[str, list[float]] = {name: [] for name in candidates}
        exchanges: dict[str, list[float]] = {name: [] for name in candidates}
        for turn in range(options.rounds):
            for name, (_, step) in candidates.items():
                world.Barrier()
                begun, apart = time.perf_counter(), 0.0
                for number in range(count):
                    apart += step(2 + turn * count + number)
                taken = (time.perf_counter() - begun) / count
                times[name].append(world.allreduce(taken, op=MPI.MAX))
                exchanges[name].append(world.allreduce(apart / count, op=MPI.MAX))
        weights = {
            name: torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
            for name, (model, _) in candidates.items()
        }
        for name in list(candidates)[2:]:  # they have trained the same
            np.testing.assert_allclose(weights[name], weights["mpigrad"], rtol=1e-3, atol=1e-5)
        base = times["no messages"]
        for name in candidates:
            exposed = [a - b for a, b in zip(times[name], base, strict=True)]
            yield {
                "parameters": parameters,
                "name": name,
                "step": statistics.median(times[name]),
                "exposed": statistics.median(exposed),
                "exchange": statistics.median(exchanges[name]),
                "times": times[name],
                "exchanges": exchanges[name],
            }
        candidates.clear()  # memory
    distributed.destroy_process_group()


def server(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model; on 4 ranks, one of which is the server."""
    import torch
    from mpi4py import MPI

    from mpigrad.training import ParameterServer, trainer

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    for parameters in (1e4, *options.parameters):
        for bound in (0, 8):
            model = perceptron(parameters)
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            training = trainer(model, optimizer, loss, ParameterServer(staleness=bound))
            batch = batches(parameters, world.rank)
            count = 3 * STEPS[parameters]
            training.run([batch(i) for i in range(3)])
            world.Barrier()
            begun = time.perf_counter()
            records = training.run(batch(i) for i in range(count)).records
            taken = time.perf_counter() - begun
            updates = records[-1].step - records[0].step
            gradients = 3 * count  # of three workers
            stale = [s for record in records for s in record.staleness]
            yield {
                "parameters": parameters,
                "bound": bound,
                "updates per second": updates / taken,
                "gradients per second": gradients / taken,
                "mean staleness": sum(stale) / max(1, gradients),
            }


def timelines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Record one step of the largest model on 2 ranks, with and without overlap."""
    import torch
    from mpi4py import MPI

    from mpigrad.training import Synchronous, trainer

    world, parameters = MPI.COMM_WORLD, max(options.parameters)
    torch.set_num_threads(1)
    batch = batches(parameters, world.rank)
    for overlap in (True, False):
        model = perceptron(parameters)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, 0.9)
        training = trainer(model, optimizer, loss, Synchronous(overlap=overlap))
        for number in range(5):
            world.Barrier()
            training.step(*batch(number))
        spans = [dataclasses.astuple(span) for span in training.spans]
        start = min(world.allgather(min(begun for _, begun, _ in spans)))
        mine = [(name, begun - start, end - start) for name, begun, end in spans]
        yield {"overlap": overlap, "parameters": parameters, "ranks": world.allgather(mine)}


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Two steps, one above the other, on one scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    last = max(end for row in rows for spans in row["ranks"] for _, _, end in spans)
    figure, panels = plt.subplots(len(rows), 1, figsize=(9, 4.6), sharex=True)
    for row, axes in zip(rows, panels, strict=True):
        ticks: dict[float, str] = {}
        for rank, spans in enumerate(row["ranks"]):
            own = {"gradient": "#4477aa", "update": "#66ccee"}
            for name, begun, end in spans:
                bucket = name not in own
                y = 3 * rank + (1 + 0.16 * (int(name.split()[-1]) % 5) if bucket else 0)
                axes.barh(
                    y, 1e3 * (end - begun), left=1e3 * begun, height=0.13 if bucket else 0.7,
                    align="edge", color="#cc6677" if bucket else own[name],
                )  # fmt: skip
            ticks |= {3 * rank + 0.35: f"rank {rank}", 3 * rank + 1.4: "buckets"}
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02e3 * last)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        title = "buckets leave during the backward pass" if row["overlap"] else "after it"
        axes.set_title(title, fontsize=10, loc="left")
    panels[-1].set_xlabel(
        "milliseconds (dark blue: forward and backward; light blue: the update; red: a bucket)"
    )
    figure.savefig(path, dpi=110, bbox_inches="tight")


def serve(options: argparse.Namespace) -> None:
    """On every rank: rank 0 prints rows as JSON."""
    from mpi4py import MPI

    for row in {"steps": steps, "server": server, "timelines": timelines}[options.serve](options):
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(row), flush=True)


def asked(ranks: int, what: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a job, as they come."""
    command = [
        sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), str(HERE), "--serve", what,
        "--rounds", str(options.rounds), "--parameters", *map(str, options.parameters),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", file=sys.stderr)
    if job.returncode:
        sys.exit(job.returncode)


def ratio(row: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """Median over rounds of one's times over the other's."""
    return statistics.median(a / b for a, b in zip(row[key], other[key], strict=True))


def print_steps(rows: list[dict[str, Any]]) -> None:
    """The table of one size."""
    by_name = {row["name"]: row for row in rows}
    ours, apart = by_name["mpigrad"], by_name["mpigrad, no overlap"]
    print(
        f"\n{rows[0]['parameters'] / 1e6:g} M parameters, milliseconds; ours / theirs in brackets"
    )
    print("| | step | exposed | exchange alone |\n|---|---|---|---|")
    for name, row in by_name.items():
        theirs = "mpigrad" not in name and name != "no messages"
        cells = [f"{1e3 * row[key]:.2f}" for key in ("step", "exposed", "exchange")]
        if theirs:
            cells[0] += f" ({ratio(ours, row, 'times'):.2f})"
            cells[1] += f" ({ours['exposed'] / row['exposed']:.2f})"
        if theirs and row["exchange"]:
            cells[2] += f" ({ratio(apart, row, 'exchanges'):.2f})"
        if not row["exchange"] or name == "mpigrad":
            cells[2] = ""
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Start the jobs, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=float, nargs="+", default=[1e6, 25e6])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument("--serve", choices=["steps", "server", "timelines"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not set(options.parameters) <= set(SHAPES):
        parser.error(f"--parameters: of {', '.join(f'{size:g}' for size in SHAPES)}")
    if options.serve:
        serve(options)
        return
    found: dict[str, Any] = {"steps": list(asked(2, "steps", options))}
    for size in options.parameters:
        print_steps([row for row in found["steps"] if row["parameters"] == size])
    print(
        "\n1 server, 3 workers\n| parameters | bound | updates/s | gradients/s | mean staleness |"
    )
    print("|---|---|---|---|---|")
    found["server"] = []
    for row in asked(4, "server", options):
        found["server"].append(row)
        print(
            f"| {row['parameters']:g} | {row['bound']} | {row['updates per second']:.1f} | "
            f"{row['gradients per second']:.1f} | {row['mean staleness']:.2f} |",
            flush=True,
        )
    if options.picture:
        draw(list(asked(2, "timelines", options)), options.picture)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
