"""Random and damaged files: the declared error that names the file, and never another one."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.io
import zarr
from damage import changed_json, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpigrad.checkpoint import Store, manifest
from mpigrad.launch.hosts import read_hosts
from mpigrad_apps.poisson.observations import _read_and_check
from mpigrad_apps.population import read_patients
from mpigrad_apps.shots.model_files import read_model, read_samples, read_wavelets
from mpigrad_apps.shots.positions import _read_survey

ALL = os.environ.get("MPIGRAD_ALL_TESTS") == "1"
pytestmark = [pytest.mark.ranks(1), pytest.mark.timeout(600)]

# Always the same examples in `make test`, others each time in `make test-faults`.
many = settings(
    max_examples=1500 if ALL else 30,
    deadline=30_000,  # ms: no file takes longer
    derandomize=not ALL,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
MOST = 1 << 30  # bytes of address space that a reader of a small file may take
VP = 1500 + 10.0 * np.arange(20).reshape(5, 4)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let an allocation out of proportion fail, and check what was taken."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST // 2048  # kB


def check(read: Callable[[pathlib.Path], Any], path: pathlib.Path) -> Any:
    """Read a file. The only errors are those that are declared, and they name the file."""
    with little_memory():
        try:
            return read(path)
        except (ValueError, FileNotFoundError) as error:
            assert str(path) in str(error) or path.name in str(error), repr(error)
            return None


def write_mat(path: pathlib.Path) -> None:
    shot = {"ix": 1, "iy": 2, "vec": np.ones((1, 6))}
    line = {"ix": np.array([[0, 4]]), "iy": np.array([[2, 3]])}
    cells = [np.empty((1, 2), object) for _ in range(2)]
    cells[0][0, :], cells[1][0, :] = [shot, shot], [line, line]
    numbers = {"vp": VP, "dx": 10.0, "dy": 5.0, "dt": 1e-3, "nt": 6}
    scipy.io.savemat(path, {**numbers, "source": cells[0], "receiver": cells[1]})


def write_segy(path: pathlib.Path) -> None:
    segyio = pytest.importorskip("segyio")
    spec = segyio.spec()
    spec.samples, spec.tracecount, spec.format = np.arange(4) * 1.0, 5, 5
    with segyio.create(str(path), spec) as file:
        for i, trace in enumerate(VP):
            file.trace[i] = trace.astype(np.float32)


FILES: dict[str, Callable[[pathlib.Path], Any]] = {
    "m.npy": lambda path: np.save(path, VP),
    "m.npz": lambda path: np.savez(path, vp=VP, rho=VP, spacing=[10.0, 5.0], dt=1e-3),
    "m.mat": write_mat,
    "m.sgy": write_segy,
    "data.npz": lambda path: np.savez(
        path, coordinates=np.full((3, 2), 0.5), values=np.ones(3), source=1.0, mask=[True] * 3
    ),
    "survey.npz": lambda path: np.savez(path, sources=np.ones((2, 2)), receivers=np.ones((3, 2))),
}
MODELS = [read_model, read_samples, lambda path: read_wavelets(path, 6, 1e-3)]
READERS: dict[str, list[Callable[[pathlib.Path], Any]]] = {
    "m.npy": MODELS,
    "m.npz": MODELS,
    "m.mat": MODELS,
    "m.sgy": MODELS,
    "data.npz": [lambda path: _read_and_check(path, (4, 4))],
    "survey.npz": [lambda path: _read_survey(path, 2)],
}


def valid_file(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        FILES[name](pathlib.Path(folder) / name)
        return (pathlib.Path(folder) / name).read_bytes()


def assert_valid_model(model: Any) -> None:
    for field in model.fields.values():
        assert field.ndim == 2 and np.all(np.isfinite(field))
    assert model.spacing is None or min(model.spacing) > 0
    if model.acquisition is not None:
        assert model.acquisition.dt > 0 and model.acquisition.steps > 0


@pytest.mark.parametrize("name", FILES)
def test_damaged_arrays(name: str, tmp_path: pathlib.Path) -> None:
    """Each reader of the applications, on files of one kind."""
    data = valid_file(name)

    # A .mat file is read by a process of its own.
    fewer = settings(
        many, max_examples=many.max_examples // 15 if name.endswith(".mat") else many.max_examples
    )

    @fewer
    @given(damaged(data))
    def test(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        for read in READERS[name]:
            found = check(read, tmp_path / name)
            if read is read_model and found is not None:
                assert_valid_model(found)

    test()


def test_arrays_of_all_kinds(tmp_path: pathlib.Path) -> None:
    """Files that are not damaged, with arrays that nobody expects."""
    arrays = st.sampled_from([
        VP, -VP, VP * np.nan, VP[:0], VP[0], np.array("a"), np.array(["x", "yy"]),
        np.ones(3, "M8[s]"), np.ones((2, 2), "c16"), np.zeros((2, 2), [("a", float)]),
        np.array(0.0), np.array(5.0),
        np.array([1.0, 2.0, 3.0]), np.array([], int), np.array(True), np.full((4, 4), 1 << 62),
        np.array(b"\xff"), np.array(np.inf), np.ones((3, 2)), np.ones((0, 2)), np.ones(3, bool),
    ])  # fmt: skip
    names = st.sampled_from([
        "vp", "vs", "rho", "lambda", "mu", "spacing", "dx", "dy", "dt", "nt", "source", "receiver",
        "sources", "receivers", "coordinates", "values", "mask", "wavelets", "t", "units",
    ])  # fmt: skip

    @many
    @given(st.dictionaries(names, arrays, max_size=6))
    def test(content: dict[str, Any]) -> None:
        np.savez(tmp_path / "a.npz", **content)
        for read in (*READERS["m.npz"], *READERS["data.npz"], *READERS["survey.npz"]):
            check(read, tmp_path / "a.npz")
        if len(content) > 1:
            return
        try:  # a .mat file is read by a process of its own, so there are few
            scipy.io.savemat(tmp_path / "a.mat", content)
        except Exception:  # it does not have all dtypes
            return
        for read in READERS["m.mat"] if ALL else (read_model,):
            check(read, tmp_path / "a.mat")

    test()


def test_a_file_that_crashes_its_reader(tmp_path: pathlib.Path) -> None:
    """An element of a type that does not exist is taken for an index by SciPy's reader."""
    write_mat(tmp_path / "m.mat")
    content = bytearray((tmp_path / "m.mat").read_bytes())
    content[0xB0:0xB2] = b"\x09\x9a"  # the type of the first matrix's numbers
    (tmp_path / "m.mat").write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.mat.*(damaged|cannot be read)"):
        read_model(tmp_path / "m.mat")


def test_damaged_zarr(tmp_path: pathlib.Path) -> None:
    valid, path = tmp_path / "valid.zarr", tmp_path / "m.zarr"
    group = zarr.create_group(valid, attributes={"spacing": [10.0, 5.0]})
    for name in ("vp", "rho"):
        group.create_array(name, data=VP, chunks=(3, 2))
    files = sorted(p.relative_to(valid) for p in valid.rglob("*") if p.is_file())

    @many
    @given(st.data())
    def test(draw: st.DataObject) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(valid, path)
        file = path / draw.draw(st.sampled_from(files))
        if file.suffix == ".json" and draw.draw(st.booleans()):
            value = json.loads(file.read_text())
            file.write_text(json.dumps(draw.draw(changed_json(value))))
        else:
            file.write_bytes(draw.draw(damaged(file.read_bytes())))
        for read in READERS["m.npz"]:
            found = check(read, path)
            if read is read_model and found is not None:
                assert_valid_model(found)

    test()


TABLE = b"""ID,TIME,AMT,DV,WT,EVID,MDV,CMT
a,0,100,.,70,1,1,1
a,2,0,1.5,70,0,0,2
b,1,50,,.,1,1,1
b,3.5,.,2e0,81,0,0,2
"""


@many
@given(damaged(TABLE))
def test_damaged_tables_of_patients(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "table.csv"
        path.write_bytes(content)
        cohort = check(read_patients, path)
    for record in cohort.records if cohort else ():
        assert record.weight > 0 and np.all(np.isfinite(record.times))
        assert np.any(record.doses > 0) and np.any(record.concentrations > 0)


@many
@given(damaged(b"# nodes\nnode1 slots=32\nnode2:4\n\nnode-3.lan  # one\nnode1\n"))
def test_damaged_hosts_files(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "hosts"
        path.write_bytes(content)
        hosts = check(read_hosts, path)
    for host in hosts or ():
        assert host.slots >= 1 and not host.name.startswith("-") and host.name.isascii()


# ---- saves ----

STATE = {"x": np.arange(6.0).reshape(3, 2), "w": np.arange(4, dtype=np.int32), "n": 3}
LAYOUT = {"x": True, "w": False, "n": False}


@pytest.fixture
def save(tmp_path: pathlib.Path, comm: Any) -> pathlib.Path:
    """The only save of a directory."""
    return Store(tmp_path / "saves", comm).save(5, STATE, LAYOUT, {"loss": [0.5, None]})


def load_or_reject(save: pathlib.Path, comm: Any) -> None:
    """Load the save as it was written, or reject it by name."""
    with little_memory():
        try:
            saved = Store(save.parent, comm).load(STATE, LAYOUT)
        except ValueError as error:
            assert str(save) in str(error)
            return
    assert saved is not None
    for name, expected in STATE.items():
        assert np.shape(saved.tree[name]) == np.shape(expected)


def write_manifest(save: pathlib.Path, body: Any) -> None:
    """Write a manifest whose hash is right."""
    text = json.dumps({"manifest": body, "sha256": manifest._digest(body)})
    (save / "manifest.json").write_text(text)


def test_damaged_saves(save: pathlib.Path, comm: Any) -> None:
    """Any byte of any file may be wrong: then the save is rejected by name."""

    @many
    @given(st.data())
    def test(draw: st.DataObject) -> None:
        file = draw.draw(st.sampled_from(sorted(save.iterdir())))
        valid = file.read_bytes()
        file.write_bytes(draw.draw(damaged(valid)))
        load_or_reject(save, comm)
        file.write_bytes(valid)

    test()


def test_manifests_that_are_not_believed(save: pathlib.Path, comm: Any) -> None:
    """A right hash does not make names, boxes and kinds right."""
    body = json.loads((save / "manifest.json").read_text())["manifest"]

    @many
    @given(changed_json(body))
    def test(changed: Any) -> None:
        write_manifest(save, changed)
        load_or_reject(save, comm)

    test()


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("files", 0, "name"), "../rank00000.bin", "file '../rank00000.bin' of rank 0"),
        (("files", 0, "name"), "/etc/passwd", "file '/etc/passwd' of rank 0"),
        (("files", 0, "size"), -1, "file 'rank00000.bin' of rank 0"),
        (("files", 0, "size"), 10**6, "its size is 1000000, but its arrays need"),
        (("leaves", 0, "kind"), "object", "kind 'object'"),
        (("leaves", 0, "kind"), "Python list", "kind 'Python list'"),
        (("leaves", 0, "number"), None, "with number None"),
        (("leaves", 2, "boxes"), [[[0, 0], [4, 2]]], r"not \(3, 2\) once"),
        (("leaves", 2, "boxes"), [[[0, 0], [2, 2]]], r"not \(3, 2\) once"),
        (("leaves", 2, "boxes"), [[[0, 0], [3, 2]]] * 2, r"2 pieces that are not \(3, 2\) once"),
        (("leaves", 2, "shape"), [-3, 2], r"shape \[-3, 2\]"),
        (("identity",), "a b", "identity 'a b'"),
        (("step",), 0.5, "step 0.5"),
    ],
    ids=str,
)
def test_a_manifest_is_not_believed(save, comm, where, value, said):
    body = json.loads((save / "manifest.json").read_text())["manifest"]
    assert [leaf["name"] for leaf in body["leaves"]] == ["['n']", "['w']", "['x']"]
    *path, last = where
    inner = body
    for key in path:
        inner = inner[key]
    inner[last] = value
    write_manifest(save, body)
    with pytest.raises(ValueError, match=said):
        Store(save.parent, comm).load(STATE, LAYOUT)


def test_boxes_with_a_gap_and_an_overlap_are_rejected(save, comm):
    """Their sizes add up, but an element is in two pieces and another one in none."""
    body = json.loads((save / "manifest.json").read_text())["manifest"]
    body["leaves"][2]["boxes"] = [[[0, 0], [2, 2]], [[1, 0], [2, 2]]]
    body["files"].append({**body["files"][0], "name": "rank00001.bin"})
    write_manifest(save, body)
    with pytest.raises(ValueError, match=r"2 pieces that are not \(3, 2\) once"):
        Store(save.parent, comm).load(STATE, LAYOUT)
