"""Histories of waves in 16 bits, and in files."""

from __future__ import annotations

import functools
import os
import resource
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpigrad
from launching import PROGRAMS, command, run
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves import Acoustic, Elastic, Storage, Survey, ricker
from mpigrad.waves.elastic.model import make_scheme
from mpigrad.waves.native_run import propagate

KINDS = ("acoustic", "volume", "elastic")
STEPS = 70  # more than between two checks of files
SHOTS = 2
# Bounds of the gradients' relative error (docs/acoustic.md). Buoyancies are correlated with
# differences of the velocities of two steps, which makes their error larger.
BOUNDS = {"bfloat16": 2e-3, "float16": 3e-4}
ELASTIC = 5


def case(comm: Communicator, kind: str, dtype: Any = np.float32, **settings: Any) -> Any:
    """Return a loss of a model, and this rank's arrays of the model."""
    shape = (20, 18, 16) if "volume" in kind else (36, 30)
    grid = Grid(shape, (10.0,) * len(shape), comm)
    extent = 10.0 * np.array(shape)
    survey = Survey(
        np.array([0.3, 0.55])[:, None, None] * extent,
        np.array([[[0.65], [0.8]]]) * extent * np.ones(2)[:, None, None],
    )
    common = {"dt": 1.5e-3, "steps": STEPS, "pml": 6, **settings}
    wavelet = np.array(ricker(15.0, 1.5e-3, STEPS), dtype)[None, None]
    random = np.random.default_rng(comm.rank)
    if "elastic" not in kind:
        acoustic = Acoustic(grid, **common)
        velocity = (2000 + 100 * random.standard_normal(grid.local_shape)).astype(dtype)
        return lambda v: _sum(acoustic.propagate(v, wavelet, survey, gathers="share").gathers), (
            velocity,
        )
    # The native run by itself: programs that average the model take long to compile.
    elastic = Elastic(grid, frequency=15.0, source="force_x", **common)
    scheme = make_scheme(elastic, survey)
    amplitudes = 1e6 * np.broadcast_to(wavelet, (SHOTS, 1, STEPS)).astype(dtype)
    pairs = 3 if "volume" in kind else 1
    media = tuple(
        (value * random.uniform(0.9, 1.1, scheme.tile.shape)).astype(dtype)
        # K, mu, mu at the points of shear stresses, 1/rho at those of velocities
        for value in (5.6e9, 2.4e9, *[2.4e9] * pairs, *[5e-4] * len(shape))
    )
    return lambda *m: _sum(1e9 * propagate(scheme.native, m, amplitudes, None)[0]), media


def _sum(gathers: Any) -> Any:
    return jnp.sum(gathers**2)


def gradient(comm: Communicator, kind: str, **settings: Any) -> list[np.ndarray]:
    loss, models = case(comm, kind, **settings)
    slopes = mpigrad.jit(mpigrad.grad(loss, argnums=tuple(range(len(models)))))(*models)
    return [np.asarray(slope) for slope in slopes]


@functools.cache
def exact(comm: Communicator, kind: str) -> list[np.ndarray]:
    """Return the gradient with the whole history in memory."""
    return gradient(comm, kind, storage=Storage("all"))


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def errors(comm: Communicator, got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the relative error of a gradient, and 1 minus the cosine of both."""
    a, b = got.astype(float), expected.astype(float)
    products = np.array([np.sum((a - b) ** 2), np.sum(a * a), np.sum(b * b), np.sum(a * b)])
    apart, aa, bb, ab = comm.mpi.allreduce(products)
    return float(np.sqrt(apart / bb)), float(1 - ab / np.sqrt(aa * bb))


def files(directory: str) -> list[str]:
    """Return paths through /proc to the open files of histories that were made in a directory."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        name = os.readlink(path) if os.path.islink(path) else ""
        if name.startswith(f"{directory}/mpigrad-history"):
            assert name.endswith("(deleted)")
            found.append(path)
    return found


@pytest.fixture
def scratch(comm: Communicator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = comm.mpi.bcast(str(tmp_path_factory.mktemp("scratch")))
    yield directory
    comm.mpi.Barrier()
    assert os.listdir(directory) == []  # nothing is left


@pytest.mark.cases("float16-*", "bfloat16-acoustic", reason="kernels differ, and both conversions")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_error_of_gradients_from_16_bits(comm: Communicator, kind: str, precision: Any) -> None:
    got = gradient(comm, kind, storage=Storage(precision=precision))
    for slope, expected in zip(got, exact(comm, kind), strict=True):
        apart, turned = errors(comm, slope, expected)
        bound = BOUNDS[precision] * (ELASTIC if kind == "elastic" else 1)
        assert 1e-5 < apart < bound
        assert turned < bound**2


@pytest.mark.parametrize("settings", [{"keep": 9}, {"memory": 1}, {"threads": 2}])
def test_16_bits_of_steps_that_are_computed_again(comm: Communicator, settings: Any) -> None:
    """They are converted in any case, so the gradient has the same bits."""
    expected = gradient(comm, "acoustic", storage=Storage(precision="float16"))
    threads = settings.pop("threads", None)
    storage = Storage(precision="float16", **settings)
    assert equal(gradient(comm, "acoustic", storage=storage, threads=threads), expected)


@pytest.mark.cases(
    "acoustic-settings[012]", "elastic-settings5", "*volume-settings[36]",
    reason="each kind, and files of steps, of states and of two threads",
)  # fmt: skip
@pytest.mark.parametrize(("kind", "settings"), [
    ("acoustic", {}), ("acoustic", {"keep": 9}), ("acoustic", {"threads": 2}),
    ("volume", {}), ("elastic", {}), ("elastic", {"keep": 9}), ("elastic volume", {}),
    ("elastic volume", {"keep": 9}),
])  # fmt: skip
def test_files_give_the_same_bits_as_memory(
    comm: Communicator, kind: str, settings: Any, scratch: str
) -> None:
    """The force of elastic volumes changes the history of the step before for a moment."""
    storage = Storage(settings.pop("keep", None), directory=scratch)
    got = gradient(comm, kind, storage=storage, **settings)
    assert equal(got, exact(comm, kind))


@pytest.mark.cases("elastic", reason="the files of both are the same")
@pytest.mark.parametrize("kind", ["volume", "elastic"])
def test_16_bits_in_files(comm: Communicator, kind: str, scratch: str) -> None:
    got = gradient(comm, kind, storage=Storage(precision="float16", directory=scratch))
    assert equal(got, gradient(comm, kind, storage=Storage(precision="float16")))


@pytest.mark.parametrize("keep", [None, 9])
def test_gradients_after_the_file_was_given_away(
    comm: Communicator, keep: int | None, scratch: str
) -> None:
    """A pull-back that is called twice, and after another run has taken its file."""
    loss, models = case(comm, "acoustic", storage=Storage(keep, directory=scratch))
    _, first = mpigrad.vjp(loss, *models)
    _, second = mpigrad.vjp(loss, *models)
    assert len(files(scratch)) == 2
    one = jnp.float32(1)
    assert equal(first(one), exact(comm, "acoustic"))
    assert equal(first(one), exact(comm, "acoustic"))
    mpigrad.vjp(loss, *models)
    assert equal(first(one), exact(comm, "acoustic"))
    assert equal(second(one), exact(comm, "acoustic"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stored_bytes(comm: Communicator, dtype: Any, scratch: str) -> None:
    """They are the values of a run in full precision, rounded to the nearest, to even in ties."""
    stored: dict[str | None, np.ndarray] = {}
    for precision in (None, "bfloat16", "float16"):
        storage: Any = Storage(precision=precision, directory=scratch)
        gradient(comm, "acoustic", dtype=dtype, storage=storage)  # the file before it is given back
        (path,) = files(scratch)
        stored[precision] = np.fromfile(path, np.uint8).reshape(SHOTS * STEPS, -1)
    rows, columns, page = 48, 64, 4096  # with layers and margins. Items are whole pages
    size = rows * columns
    pages = [items.shape[1] // page for items in stored.values()]
    assert pages == [size * np.dtype(dtype).itemsize // page, 2, 2]
    values = stored[None].view(dtype)
    assert np.count_nonzero(values) > 0.5 * SHOTS * STEPS * size
    rounded = values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    narrow = stored["bfloat16"][:, : 2 * size].copy().view(np.uint16)
    normal = np.abs(values) >= 2.0**-126  # XLA's threads flush others to zero
    assert np.count_nonzero(normal) > 0.5 * np.count_nonzero(values)
    np.testing.assert_array_equal(narrow[normal], rounded[normal])

    items, blocks = stored["float16"], size // 256
    scales = items[:, : 2 * blocks].copy().view(np.int16)
    scaled = np.ldexp(values.reshape(len(values), blocks, 256), scales[:, :, None])
    largest = np.max(np.abs(scaled), axis=2)
    # In float32 the largest scale is 2^126.
    assert np.all((largest == 0) | (largest < 2**15) & ((largest >= 2**14) | (scales == 126)))
    halves = items[:, 64 : 64 + 2 * size].copy().view(np.uint16)
    rounded = scaled.astype(np.float32).astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(halves, rounded.reshape(len(values), size))


def flip(path: str) -> None:
    """Change one bit in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize(("damage", "keep", "text"), [
    (flip, None, "was damaged: the checksum of an item differs"),
    (cut, 9, "the file is too short"),
])  # fmt: skip
def test_a_damaged_file(
    comm: Communicator, scratch: str, damage: Any, keep: int | None, text: str
) -> None:
    """The file of one rank, and all ranks get the error."""
    storage = Storage(directory=scratch)
    gradient(comm, "volume", storage=storage)  # one file is open then
    loss, models = case(comm, "volume", storage=Storage(keep, directory=scratch))
    _, pull_back = mpigrad.vjp(loss, *models)
    if comm.rank == comm.size - 1:
        for path in files(scratch):
            damage(path)
    with pytest.raises(Exception, match=f"rank {comm.size - 1} .*{text}") as raised:
        pull_back(jnp.float32(1))
    assert f"'{scratch}'" in str(raised.value)
    assert equal(gradient(comm, "volume", storage=storage), exact(comm, "volume"))


def test_a_write_that_fails(comm: Communicator, scratch: str) -> None:
    storage = Storage(directory=scratch)
    expected = gradient(comm, "acoustic", storage=storage)  # its file is used again, as it is
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        size = os.path.getsize(*files(scratch)) // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(Exception, match="cannot write a history to a file in") as raised:
            gradient(comm, "acoustic", storage=storage)
        assert f"rank {comm.size - 1} " in str(raised.value)
        # Now a new file is needed, whose space is not there.
        with pytest.raises(
            Exception, match=f"rank {comm.size - 1} needs .* bytes.* in '{scratch}'"
        ):
            gradient(comm, "volume", storage=storage)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal(gradient(comm, "acoustic", storage=storage), expected)


def test_directories_that_cannot_be_used(comm: Communicator, scratch: str) -> None:
    """On one rank only, and all ranks get the error before the first step."""
    missing = f"{scratch}/none" if comm.rank == comm.size - 1 else scratch
    with pytest.raises(Exception, match=f"rank {comm.size - 1} cannot create a file in") as raised:
        gradient(comm, "elastic", storage=Storage(directory=missing))
    assert f"'{scratch}/none': No such file or directory" in str(raised.value)
    with pytest.raises(Exception, match="'/proc': "):
        gradient(comm, "elastic", storage=Storage(directory="/proc"))


@pytest.mark.long("two ranks start and compile; test_a_write_that_fails is short")
@pytest.mark.launcher
def test_a_full_disk() -> None:
    """All ranks refuse a run before its first step, and a smaller one succeeds."""
    program = PROGRAMS / "wave_history.py"
    mount = "mount -t tmpfs -o size=6m tmpfs /mnt"
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace of their own")
    words = shlex.join(command("launch", "-n", 2, program, "/mnt"))
    done = run([*alone, f"{mount} && exec {words}"])
    assert done.returncode == 0, done.stderr + done.stdout
    for rank in range(2):
        assert f"rank {rank}: refused, then equal, nothing left" in done.stdout


@pytest.mark.ranks(2)
def test_ranks_with_different_histories(comm: Communicator) -> None:
    storage = Storage(precision="float16" if comm.rank else None)
    expected = "storage: precision must be .* got None on rank 0; float16 on rank 1"
    with pytest.raises(ValueError, match=expected):
        gradient(comm, "acoustic", storage=storage)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("make", "text"), [
    (lambda: Storage(precision="float8"), "precision"),  # type: ignore[arg-type]
    (lambda: Storage(memory=-1), "at least 0 bytes"),
    (lambda: Storage(memory=1, directory="/tmp"), "Give one of both"),
])  # fmt: skip
def test_rejects_invalid_histories(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):  # types are checked in tests
        make()


@pytest.mark.ranks(1)
def test_a_limit_of_memory(comm: Communicator) -> None:
    storage = Storage(memory=10_000)
    assert equal(gradient(comm, "acoustic", storage=storage), exact(comm, "acoustic"))
