"""Arrays on a GPU: the staged handlers, on CPUs, with a stand-in for the driver."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from launching import PROGRAMS, mpigrad
from mpigrad import sparse
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid, halo_exchange

# Bytes that a message of a thousand numbers copies to the host, to the device and on the device.
# One byte keeps the order of programs.
HOST, DEVICE = [8000, 8001, 0], [0, 1, 16000]

Driver = dict[str, str]  # the environment in which it is used


def run(directory: pathlib.Path, **environment: str) -> list[dict[str, Any]]:
    """What each rank has computed, and what was copied."""
    directory.mkdir()
    done = mpigrad("launch", "-n", 2, PROGRAMS / "staged.py", directory, **environment)
    assert done.returncode == 0, done.stderr
    found = []
    for rank in (0, 1):
        counts = directory / f"{rank}.json"
        copied = json.loads(counts.read_text()) if counts.exists() else {}
        found.append({"arrays": dict(np.load(directory / f"{rank}.npz")), **copied})
    return found


@pytest.fixture(scope="module", params=["cuda", "rocm"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A stand-in for the driver of a platform."""
    compiler = shutil.which("cc")
    assert compiler, "no C compiler, with which native/ is built"
    library = tmp_path_factory.mktemp("driver") / "libdriver.so"
    words = [compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-o", str(library)]
    words += ["-DHIP"] * (request.param == "rocm")
    done = subprocess.run([*words, str(PROGRAMS / "driver.c")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return {"MPIGRAD_GPU_LIBRARY": str(library), "MPIGRAD_STAGE": request.param}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("plain") / "out")


@pytest.mark.full("test_programs_are_lowered_for_gpus checks that GPUs call the same handlers")
@pytest.mark.launcher
@pytest.mark.parametrize("aware", ["0", "p2p", "all"])
def test_staged_programs_compute_the_same(
    aware: str, driver: Driver, plain: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    staged = run(tmp_path / "out", **driver, MPIGRAD_GPU_AWARE=aware)
    for rank, (one, other) in enumerate(zip(plain, staged, strict=True)):
        for name, array in one["arrays"].items():
            np.testing.assert_array_equal(other["arrays"][name], array)
            assert other["arrays"][name].tobytes() == array.tobytes()
        assert min(other["copies"][:2]) > 20
        assert (other["copies"][2] > 0) == (other["allocated"] > 0) == (aware != "0")
        assert (other["pinned"] > 0) == (rank == 0)
        # A copy back is under way when a message ends, so the next message waits for it.
        assert min(other["records"], other["waits"]) > 20
        assert other["allreduce"] == (DEVICE if aware == "all" else HOST)
        assert other["sendrecv"] == (HOST if aware == "0" else DEVICE)
        name = "cu" if driver["MPIGRAD_STAGE"] == "cuda" else "hip"
        assert f"rank {rank}: bcast at " in other["error"]
        assert f"staged.py:90: an array on the GPU cannot be passed on: {name}Mem" in other["error"]
        assert "the stand-in fails" in other["error"]


@pytest.mark.launcher
def test_messages_without_device_memory_go_through_the_host(
    driver: Driver, tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "large.py"
    program.write_text(
        "import jax.numpy as jnp, mpigrad as mg\n"
        "other = 1 - mg.default_communicator().rank\n"
        "y = mg.sendrecv(jnp.full(2**20, 3.0), other, other)\n"
        "assert bool(jnp.all(y == 3))\n"
        "mg.allreduce(y)\n"
    )
    limits = {"STAND_IN_DEVICE_BYTES": str(2**21), "MPIGRAD_GPU_AWARE": "all"}
    done = mpigrad("launch", "-n", 2, program, **driver, **limits)
    assert "allreduce at" in done.stderr
    assert "an array on the GPU cannot be passed on: no memory of the device" in done.stderr
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in done.stderr


@pytest.mark.launcher
def test_without_a_driver_there_is_an_error(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "one.py"
    program.write_text("import jax.numpy as jnp, mpigrad as mg\nmg.allreduce(jnp.ones(3))\n")
    nowhere = str(tmp_path / "libcuda.so")
    done = mpigrad("launch", "-n", 1, program, MPIGRAD_STAGE="cuda", MPIGRAD_GPU_LIBRARY=nowhere)
    assert done.returncode != 0
    assert f"no CUDA driver: {nowhere}" in done.stderr


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1", "MPIGRAD_GPU_AWARE must be p2p (messages between two ranks), all"),
        ("all", "would add device addresses up on the CPU. Use a GPU-aware MPI"),
        ("1", "MPIGRAD_CUDA_AWARE is MPIGRAD_GPU_AWARE now"),
        ("p2p", "does not send its messages by a UCX that has loaded libuct_cuda"),
    ],
)
def test_an_mpi_without_gpu_support_is_refused(
    value: str, text: str, tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "one.py"
    program.write_text("import mpigrad.operations\n")
    variable = "MPIGRAD_CUDA_AWARE" if "is MPIGRAD_GPU_AWARE now" in text else "MPIGRAD_GPU_AWARE"
    done = mpigrad("launch", "-n", 1, program, **{variable: value})
    assert done.returncode != 0
    assert text in done.stderr


@pytest.mark.ranks(2)
def test_programs_are_lowered_for_gpus(comm: Communicator) -> None:
    """What XLA would compile for a GPU calls the same handlers; nothing is compiled here."""
    grid = Grid((6, 4), (1.0, 1.0), comm)
    pattern = sparse.Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])

    def loss(v: jax.Array) -> jax.Array:
        A = sparse.Matrix.assemble(pattern, [5 * v, -v, -v, -v, -v])
        x = sparse.solve(A, jnp.ones(grid.n_local)).value
        y = mg.recv(x, MPI.ANY_SOURCE) if comm.rank else x
        if not comm.rank:
            mg.send(x, 1)
        return jnp.sum(halo_exchange(v, grid) ** 2) + jnp.sum(mg.allreduce(y, MPI.MAX))

    v = jnp.ones(grid.local_shape)
    program = jax.jit(mg.grad(loss)).trace(v).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("neighbor_alltoallv", "extremum"):
        assert f"@mpigrad_{name}(" in program
    assert ("@mpigrad_send_to(" if comm.rank else "@mpigrad_recv(") in program
    assert "@mpigrad_multigrid_solve(" in program
    assert "@mpigrad_kernels_contract(" not in program  # products are computed on the device


@pytest.mark.ranks(2)
@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu"])
def test_slices_are_not_fused_with_messages_on_gpus(comm: Communicator, platform: str) -> None:
    """A message's array comes from a barrier, and its result goes into one (record 0102)."""
    other = 1 - comm.rank

    def f(u: jax.Array) -> jax.Array:
        return u.at[1].set(mg.sendrecv(u[0], other, other, comm=comm))

    lowered = jax.jit(f).trace(jnp.ones((4, 64))).lower(lowering_platforms=(platform,))
    lines = [line.split(" : ")[0].strip() for line in lowered.as_text().splitlines()]
    (call,) = [line for line in lines if "@mpigrad_sendrecv(" in line]
    barriers = [line for line in lines if "optimization_barrier" in line]
    operand = call.partition("@mpigrad_sendrecv(")[2].split(")")[0].split(", ")[1]
    result = call.split(":")[0]
    if platform == "cpu":
        assert not barriers
    else:
        assert any(line.startswith(f"{operand} = ") for line in barriers)
        assert any(line.endswith(f"{result}#1") for line in barriers)
