"""Speed of mpigrad on one device: the speed steps of the GPU check, one step per start.

    python -m mpigrad launch -n RANKS bench/gpu.py STEP [--small] [--rounds 3] [--lower]

Rank 0 prints one line of JSON for each finished measurement, at once, so that a kill at a time
limit loses only the missing ones. "seconds" is the median over the rounds of the slowest rank,
"compile_s" the first call without one run, "setup_s" the time before it (meshes, arrays). "rate" is
"work" / "seconds". "floor" is the rate at which the bytes of a unit of work, each read or written
once, pass at the bandwidth that this process measured. "value" and "gradient_norm" are equal on 1
and 2 ranks to 1e-6, relative, in the steps acoustic, elastic and fft. The sizes depend on the
backend: a GPU, the cores of a CPU (started with a rank per core or two), or --small for a trial of
the program itself. --lower lowers the programs of the GPU's sizes for CUDA, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu_cases import (
    DT,
    FASTEST,
    FLOAT32,
    FREQUENCY,
    PML,
    SIZES,
    SPACING,
    STEPS,
    Case,
    Report,
    Run,
    ricker,
    wave_cells,
)

SWEEP = 12.4e9  # cell-steps/s, acoustic, three axes, on one V100
V100 = 0.9e12  # bytes/s, by its data sheet
PATIENCE = 12.0  # seconds of one measurement, after which no round is started

# --- measuring ---


def slowest(call: Run) -> tuple[float, Any]:
    """Return the seconds of the slowest rank, and this rank's result."""
    import jax
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX), result


def bandwidth(total: float, rounds: int, repeats: int = 5) -> list[float]:
    """Return for each round the bytes/s that all ranks together read and write.

    Each rank multiplies its part of `total` bytes in place, `repeats` times.
    """
    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    x = jnp.ones(int(total / FLOAT32 / size), jnp.float32)
    scaled = jax.jit(lambda x: x * np.float32(1.0000001), donate_argnums=0)
    x = jax.block_until_ready(scaled(x))

    def run() -> Any:
        nonlocal x
        for _ in range(repeats):
            x = scaled(x)
        return x

    slowest(run)
    moved = 2 * FLOAT32 * x.size * size * repeats
    return [moved / slowest(run)[0] for _ in range(rounds)]


def peak_bytes() -> int:
    """Return the peak of the device's memory on this rank, of the host's on a CPU."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(stats.get("peak_bytes_in_use", host))


def measure(case: Case, rounds: int) -> Report:
    """Time a case. The first call compiles it."""
    setup = time.perf_counter()
    run = case.prepare()
    setup = time.perf_counter() - setup
    first, result = slowest(run)
    times: list[float] = []
    while len(times) < rounds and (not times or first + sum(times) < PATIENCE):
        seconds, result = slowest(run)
        times.append(seconds)
    middle = statistics.median(times)
    return {
        "seconds": middle,
        "rounds": times,
        "setup_s": setup,
        "compile_s": max(first - middle, 0.0),
        "work": case.work,
        "unit": f"{case.unit}/s",
        "rate": case.work / middle,
        **case.report(result),
    }


def run_step(step: str, cases: Iterator[Case], rounds: int, small: bool) -> None:
    """Measure the cases of a step. On one rank an error of a case is a line of its own."""
    import jax
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    speed = statistics.median(bandwidth(1e8 if small else 1e9, 3))
    for case in cases:
        try:
            line = measure(case, rounds)
        except Exception as error:
            if world.size > 1:  # the other ranks wait in another place
                raise
            line = {"error": f"{type(error).__name__}: {error}"[:600]}
        else:
            floor = speed / case.unit_bytes
            line["floor"] = {
                "bytes_per_unit": case.unit_bytes,
                "bandwidth": speed,
                "rate": floor,
                "fraction": line["rate"] / floor,
            }
            if step == "acoustic" and case.name.endswith("^3 forward"):
                line["reference"] = {
                    "rate": SWEEP * speed / V100,
                    "how": "SWEEP, 12.4e9 on a V100, x bandwidth measured here / 0.9e12 B/s, the "
                    "V100's data sheet",
                }
        line["peak_bytes"] = world.allreduce(peak_bytes(), MPI.MAX)
        emit(step, case.name, jax.default_backend(), jax.devices()[0].device_kind, line)


def emit(step: str, case: str, platform: str, device: str, line: Report) -> None:
    """Print a line on rank 0."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        head = {"step": step, "case": case, "ranks": MPI.COMM_WORLD.size}
        print(json.dumps({**head, "platform": platform, "device": device, **line}), flush=True)


def lower(step: str, cases: Iterator[Case]) -> None:
    """Lower the programs for CUDA, and print the operations that call native code."""
    import jax

    for case in cases:
        if case.traced is None:
            continue
        function, shapes = case.traced
        start = time.perf_counter()
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
        seconds = time.perf_counter() - start
        # Large constants are left out of the text, and counted by the size of the bytecode.
        text = lowered.compiler_ir("stablehlo").operation.get_asm(large_elements_limit=16)
        targets = sorted(set(re.findall(r"custom_call @([\w.]+)", text)))
        line = {"lower_s": seconds, "characters": len(text), "calls": targets}
        emit(step, case.name, "cuda", "lowered only", line)


def deepwave(small: bool, rounds: int) -> None:
    """The acoustic case on three axes by deepwave, on the same card. JAX uses no device here."""
    step = "deepwave"
    try:
        import deepwave
        import torch
    except ImportError as error:
        emit(step, "import", "none", "none", {"skipped": str(error)})
        return
    name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu" and not small:
        small = True  # only the card is of interest
    kind = torch.cuda.get_device_name() if name == "cuda" else "cpu"
    n, *counts = SIZES["small" if small else "gpu"]["acoustic"]["volume"]
    lines = [np.random.default_rng(0).uniform(-1, 1, n).astype(np.float32) for _ in range(3)]
    x, y, z = (torch.tensor(line, device=name) for line in lines)
    velocity = 2250 + 80 * (x[:, None, None] + y[:, None] + z)
    source, receivers = wave_cells(n, 3)
    places = [torch.tensor([p], device=name) for p in ([list(source)], receivers)]

    def loss(v: Any, count: int) -> Any:
        wavelet = torch.tensor(-1e3 * ricker(count) / SPACING**3, device=name)[None, None]
        out = deepwave.scalar(
            v, grid_spacing=SPACING, dt=DT, source_amplitudes=wavelet, source_locations=places[0],
            receiver_locations=places[1], accuracy=4, pml_width=PML[3], pml_freq=FREQUENCY,
            max_vel=FASTEST,
        )  # fmt: skip
        return (out[-1] ** 2).sum()

    def forward() -> Report:
        with torch.no_grad():
            return {"value": float(loss(velocity, counts[0]))}

    def gradient() -> Report:
        v = velocity.clone().requires_grad_()
        value = loss(v, counts[1])
        value.backward()
        return {"value": float(value.detach()), "gradient_norm": float(v.grad.norm())}

    for label, call, count in (("forward", forward, counts[0]), ("gradient", gradient, counts[1])):
        try:
            first, _ = slowest(call)
            times, results = zip(*(slowest(call) for _ in range(rounds)), strict=True)
            middle, result = statistics.median(times), results[-1]
        except Exception as error:
            emit(step, f"{n}^3 {label}", name, kind, {"error": f"{error}"[:600]})
            continue
        rate = n**3 * count / middle
        line = {"seconds": middle, "rounds": times, "compile_s": first - middle}
        line |= {"work": n**3 * count, "unit": "cell-steps/s", "rate": rate, **result}
        emit(step, f"{n}^3 {label}", name, kind, line)


def stream(size: float, rounds: int) -> None:
    """The bandwidth of copies, which bounds the other steps."""
    import jax

    start = time.perf_counter()
    speeds = bandwidth(size, rounds, 10)
    line = {
        "seconds": time.perf_counter() - start,
        "rounds": speeds,
        "unit": "B/s",
        "rate": statistics.median(speeds),
        "value": size,
    }
    device = jax.devices()[0].device_kind
    emit("stream", f"{size:.3g} B float32", jax.default_backend(), device, line)


def main() -> None:
    """Run one step on the ranks of this start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", choices=["stream", *STEPS, "deepwave"])
    parser.add_argument("--small", action="store_true", help="a trial of the program")
    parser.add_argument("--rounds", type=int, help="default: 3, and 1 with --small")
    parser.add_argument("--backend", choices=["xla", "native"], help="of waves, on a CPU")
    parser.add_argument("--lower", action="store_true", help="for CUDA, and run nothing")
    o = parser.parse_args()
    o.rounds = o.rounds or (1 if o.small else 3)
    if o.step == "deepwave":
        deepwave(o.small, o.rounds)
        return
    import jax

    import mpigrad  # noqa: F401  before JAX starts

    if o.step in ("fem", "lbfgs", "krylov"):
        jax.config.update("jax_enable_x64", True)
    on_cpu = jax.default_backend() == "cpu"
    sizes = SIZES["small" if o.small else "cpu" if on_cpu and not o.lower else "gpu"]
    if o.step == "stream":
        stream(sizes["stream"], o.rounds)
        return
    # The CPU's own kernels stand for the CPU, and XLA's program for the device.
    backend = o.backend or ("native" if on_cpu and not o.small and not o.lower else "xla")
    cases = STEPS[o.step](sizes[o.step], backend)
    if o.lower:
        lower(o.step, cases)
    else:
        run_step(o.step, cases, o.rounds, o.small)


if __name__ == "__main__":
    main()
