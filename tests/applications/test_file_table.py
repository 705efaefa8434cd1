"""Readers apply what a file says of its numbers, or raise an error that names it.

Each row has a file, the statement in it, and the result of its reader. The files are made by the
programs that users make them with. Rows of programs that are not installed are skipped.
"""

from __future__ import annotations

import base64
import importlib
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.io
import zarr
from segy_files import write_segy

from mpigrad import fem
from mpigrad_apps.fwi.inputs import read_data
from mpigrad_apps.poisson import read_data as read_observations
from mpigrad_apps.poisson import unit_square
from mpigrad_apps.poisson.parametrization import CellValues
from mpigrad_apps.population import read_patients
from mpigrad_apps.shots.experiment import experiment_of, spacing_of
from mpigrad_apps.shots.model_files import ModelFile, read_array, read_model, read_wavelets
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.positions import survey_positions
from mpigrad_apps.shots.volumes import open_volume

pytestmark = pytest.mark.ranks(1)

VP = 1500 + 10.0 * np.arange(35).reshape(7, 5)
CUBE = 1500.0 + np.arange(120.0).reshape(5, 4, 6)
DT, STEPS = 1e-3, 6
GATHERS = 1.0 + np.arange(2 * 3 * STEPS).reshape(2, 3, STEPS)  # shots, receivers, steps
CENTERS: dict[str, Any] = {"x": 5.0 + 10.0 * np.arange(7), "z": 2.5 + 5.0 * np.arange(5)}
POINTS = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
TRIANGLES = [("triangle", np.array([[0, 1, 2], [0, 2, 3]]))]
KM, MS = {"units": "km"}, {"units": "ms"}

Write = Callable[[pathlib.Path], object]


class Row(NamedTuple):
    """One file.

    Attributes
    ----------
    name
        Its name. The ending is its format.
    says
        What it says of its numbers.
    write
        path -> None.
    expected
        What the reader returns, or a text of its error.
    """

    name: str
    says: str
    write: Write
    expected: Any


# ---- programs that write files ----


def npz(**arrays: Any) -> Write:
    return lambda path: np.savez(path, **arrays)


def mat(**arrays: Any) -> Write:
    return lambda path: scipy.io.savemat(path, arrays)


def npy(array: Any) -> Write:
    return lambda path: np.save(path, array)


def cut(path: pathlib.Path) -> None:
    """A volume in .npy without its last number."""
    np.save(path, CUBE)
    path.write_bytes(path.read_bytes()[:-8])


def text(content: str) -> Write:
    return lambda path: path.write_text(content, encoding="utf-8")


def group(
    field: str, values: Any, names: tuple[str, ...] | None = None, *, about: Any = None,
    attributes: Any = None, version: Any = 3, **others: Any,
) -> Write:  # fmt: skip
    """A zarr group, with coordinates as values or pairs (values, attributes)."""

    def write(path: pathlib.Path) -> None:
        made = zarr.create_group(path, attributes=attributes or {}, zarr_format=version)
        own = dict(about or {})
        if version == 2 and names:  # as xarray writes it
            own["_ARRAY_DIMENSIONS"] = list(names)
        made.create_array(
            field, data=values, attributes=own, dimension_names=names if version == 3 else None
        )
        for name, given in others.items():
            array, more = given if isinstance(given, tuple) else (given, {})
            made.create_array(name, data=array, attributes=more)

    return write


def plane(names: tuple[str, str] = ("x", "z"), values: Any = VP, **more: Any) -> Write:
    """A section with its cell centres."""
    steps = {"x": 10.0, "X": 10.0}
    centers = {
        name: steps.get(name, 5.0) * (0.5 + np.arange(n))
        for name, n in zip(names, values.shape, strict=True)
    }
    return group("vp", values, names, **(centers | more))


def xarray(path: pathlib.Path) -> None:
    """A section that xarray writes, in km and km/s."""
    module = pytest.importorskip("xarray")
    coordinates = {n: (n, c / 1000, {"units": "km"}) for n, c in CENTERS.items()}
    vp = (("z", "x"), VP.T / 1000, {"units": "km/s"})
    module.Dataset({"vp": vp}, coordinates).to_zarr(path, consolidated=False)


def packed(path: pathlib.Path) -> None:
    """xarray writes integers, with a scale, an offset and a fill value."""
    module = pytest.importorskip("xarray")
    encoding = {"vp": {"dtype": "int16", "scale_factor": 0.5, "add_offset": 1500.0,
                       "_FillValue": -1}}  # fmt: skip
    module.Dataset({"vp": (("x", "z"), VP)}, CENTERS).to_zarr(
        path, encoding=encoding, consolidated=False
    )


def segy(traces: Any = VP, **more: Any) -> Write:
    return lambda path: write_segy(path, traces, **more)


def obspy(path: pathlib.Path) -> None:
    module = pytest.importorskip("obspy")
    traces = [
        module.Trace(trace.astype(np.float32), {"delta": DT}) for trace in GATHERS.reshape(6, STEPS)
    ]
    with warnings.catch_warnings(action="ignore"):  # it makes trace headers
        module.Stream(traces).write(str(path), format="SEGY", data_encoding=5)


def meshio(**more: Any) -> Write:
    def write(path: pathlib.Path) -> None:
        module = pytest.importorskip("meshio")
        points, cells = more.pop("points", POINTS), more.pop("cells", TRIANGLES)
        module.Mesh(points, cells, **more).write(path)

    return write


def gmsh(path: pathlib.Path) -> None:
    """A square of gmsh itself, whose right side is the group "inlet"."""
    try:
        module = importlib.import_module("gmsh")
    except (ImportError, OSError):
        pytest.skip("gmsh is not installed")
    module.initialize(interruptible=False)
    module.option.setNumber("General.Terminal", 0)
    surface = module.model.occ.addRectangle(0, 0, 0, 1, 1)
    module.model.occ.synchronize()
    (side,) = (tag for _, tag in module.model.getEntitiesInBoundingBox(0.9, -1, -1, 1.1, 2, 1, 1))
    module.model.addPhysicalGroup(1, [side], 7, "inlet")
    module.model.addPhysicalGroup(2, [surface], 8, "plate")
    module.model.mesh.generate(2)
    module.write(str(path))
    module.finalize()


def vtu(order: str = "LittleEndian", pieces: int = 1) -> Write:
    """A VTU file of base64, with a byte order, and several pieces."""
    sign = "<" if order == "LittleEndian" else ">"

    def array(values: Any, dtype: str, about: str) -> str:
        data = np.asarray(values).astype(np.dtype(dtype).newbyteorder(sign)).tobytes()
        head = np.array([len(data)], np.dtype("u4").newbyteorder(sign)).tobytes()
        return (
            f'<DataArray {about} format="binary">{base64.b64encode(head + data).decode()}'
            "</DataArray>"
        )

    piece = (
        '<Piece NumberOfPoints="4" NumberOfCells="2"><Points>'
        + array(POINTS, "f8", 'type="Float64" Name="Points" NumberOfComponents="3"')
        + "</Points><Cells>"
        + array(TRIANGLES[0][1], "i8", 'type="Int64" Name="connectivity"')
        + array([3, 6], "i8", 'type="Int64" Name="offsets"')
        + array([5, 5], "u1", 'type="UInt8" Name="types"')
        + "</Cells></Piece>"
    )
    return text(
        f'<VTKFile type="UnstructuredGrid" version="0.1" byte_order="{order}"><UnstructuredGrid>'
        f"{piece * pieces}</UnstructuredGrid></VTKFile>"
    )


def xdmf(topology: str = "", indices: str = "0 1 2 0 2 3", item: str = "") -> Write:
    return text(
        '<Xdmf Version="3.0"><Domain><Grid Name="Grid"><Geometry GeometryType="XY">'
        f'<DataItem DataType="Float" Dimensions="4 2" Format="XML" Precision="8"{item}>'
        "0 0 1 0 1 1 0 1</DataItem></Geometry>"
        f'<Topology TopologyType="Triangle" NumberOfElements="2"{topology}>'
        f'<DataItem DataType="Int" Dimensions="2 3" Format="XML" Precision="8">{indices}</DataItem>'
        "</Topology></Grid></Domain></Xdmf>"
    )


def patients(header: str, *rows: str) -> Write:
    return text("\n".join((header, *rows)) + "\n")


# ---- models with two axes: the reader returns the spacing, and vp is VP ----


def model(path: pathlib.Path) -> Any:
    found = read_model(path)
    np.testing.assert_allclose(found.fields["vp"], VP, rtol=1e-6)
    return found.spacing


NAN = base64.b64encode(np.float64(np.nan).tobytes()).decode()  # as xarray writes it
SCALED = {"scale_factor": 10.0, "add_offset": 1500.0, "_FillValue": -1}
INTEGERS = ((VP - 1500) / 10).astype(np.int16)
MODELS = [
    Row("x.npy", "an array of vp", npy(VP), None),
    Row("x.npz", "dx and dz", npz(vp=VP, dx=10.0, dz=5.0), (10.0, 5.0)),
    Row("x.npz", "dx and dy", npz(vp=VP, dx=10.0, dy=5.0), (10.0, 5.0)),
    Row("x.npz", "cell centres", npz(vp=VP, **CENTERS), (10.0, 5.0)),
    Row("x.npz", "both, the same", npz(vp=VP, **CENTERS, dx=10.0, dz=5.0), (10.0, 5.0)),
    Row("x.npz", "dx alone", npz(vp=VP, dx=10.0), "as dx and one of dy and dz, got dx"),
    Row("x.npz", "three steps", npz(vp=VP, dx=1.0, dy=1.0, dz=1.0), "got dx, dy, dz"),
    Row("x.npz", "several dx", npz(vp=VP, dx=[1.0, 2.0], dz=1.0), "dx as one number, got 2"),
    Row("x.npz", "complex dx", npz(vp=VP, dx=10 + 1j, dz=5.0), "dx as one number, .* complex128"),
    Row("x.npz", "complex spacing", npz(vp=VP, spacing=[10 + 1j, 5]), "real numbers, got complex"),
    Row("x.npz", "two spacings", npz(vp=VP, **CENTERS, dx=9.0, dz=5.0), r"got \(9.0, 5.0\) in the"),
    Row("x.npz", "spacing and dx", npz(vp=VP, spacing=[10, 4], dx=10.0, dz=5.0), "and dx and dz"),
    Row("x.npz", "too few centres", npz(vp=VP, x=CENTERS["x"], z=np.arange(4.0)), "5 cell centres"),
    Row("x.npz", "a unit", npz(vp=VP, units="km/s"), "SI units, got the array units with km/s"),
    Row("x.npz", "a negative vp", npz(vp=VP - 1600), r"cell \(0, 0\), but it must be positive"),
    Row("x.npz", "no field", npz(other=VP), "expected one of the fields vp, vs, rho"),
    Row("x.npz", "rho of another shape", npz(vp=VP, rho=VP[1:]), "7 x 5 cells, got rho of 6 x 5"),
    Row("x.npy", "three axes", npy(np.ones((2, 3, 4))), r"vp of shape \(nx, ny\), got .* fwi as"),
    Row("x.npy", "words", npy(np.array([["a"]])), "expected real numbers in vp, got"),
    Row("x.hdf", "nothing", text(""), "the file has an unknown format"),
    Row("x.mat", "dx and dz", mat(vp=VP, dx=10.0, dz=5.0), (10.0, 5.0)),
    Row("x.mat", "several dx", mat(vp=VP, dx=[1.0, 2.0], dz=1.0), "dx as one number, got 2 of"),
    Row("x.zarr", "axes, a unit, a fill value",
        plane(about={"_FillValue": NAN, "units": "m s-1"}), (10.0, 5.0)),
    Row("x.zarr", "depth first", plane(("z", "x"), VP.T), (10.0, 5.0)),
    Row("x.zarr", "depth first, other names", plane(("Depth", "X"), VP.T), (10.0, 5.0)),
    Row("x.zarr", "depth first, format 2", plane(("z", "x"), VP.T, version=2), (10.0, 5.0)),
    Row("x.zarr", "y downwards", plane(("x", "y")), (10.0, 5.0)),
    Row("x.zarr", "y is horizontal if there is z", plane(("y", "z")), (5.0, 5.0)),
    Row("x.zarr", "km/s", plane(values=VP / 1000, about={"units": "km/s"}), (10.0, 5.0)),
    Row("x.zarr", "ft/s", plane(values=VP / 0.3048, about={"units": "ft/s"}), (10.0, 5.0)),
    Row("x.zarr", "centres in km",
        plane(x=(CENTERS["x"], KM), z=(CENTERS["z"], KM)), (10e3, 5e3)),
    Row("x.zarr", "scale and offset", plane(values=INTEGERS, about=SCALED), (10.0, 5.0)),
    Row("x.zarr", "an attribute, too", plane(attributes={"spacing": [10.0, 5.0]}), (10.0, 5.0)),
    Row("x.zarr", "an attribute alone",
        group("vp", VP.T, ("z", "x"), attributes={"spacing": [10.0, 5.0]}), (10.0, 5.0)),
    Row("x.zarr", "xarray, km and km/s", xarray, (10.0, 5.0)),
    Row("x.zarr", "xarray, integers", packed, (10.0, 5.0)),
    Row("x.zarr", "an axis of time", plane(("x", "twt")), "got x, twt. Convert the axis twt to"),
    Row("x.zarr", "two depths", plane(("depth", "z")), "got depth, z. Rename the horizontal"),
    Row("x.zarr", "slowness", plane(about={"units": "s/m"}), "of the units m/s, .* got 's/m'"),
    Row("x.zarr", "depths in ms", plane(z=(CENTERS["z"], MS)), "units m, km, ft, got 'ms'"),
    Row("x.zarr", "heights",
        plane(z=(CENTERS["z"], {"scale_factor": -1.0})), "centres z that increase, got -2.5, -7.5"),
    Row("x.zarr", "missing values", plane(about={"_FillValue": 1500.0}), r"vp is nan in cell \(0"),
    Row("x.zarr", "two spacings", plane(attributes={"spacing": 10.0}), r"one spacing, got \(10.0,"),
    Row("x.zarr", "centres of one axis",
        group("vp", VP, ("x", "z"), x=CENTERS["x"]), "5 cell centres z for 7 x 5 cells, got none"),
    Row("x.sgy", "feet", segy(VP / 0.3048, binary={3255: 2}), None),
    Row("x.sgy", "metres", segy(binary={3255: 1}), None),
    Row("x.sgy", "the same inlines and crosslines", segy(lines=[(k, k) for k in range(7)]), None),
    Row("x.sgy", "an oblique line", segy(lines=[(k // 2, k) for k in range(7)]), None),
    Row("x.sgy", "little-endian", segy(endian="little"), None),
    Row("x.sgy", "a start at depth", segy(words={109: 100}), None),
    Row("x.sgy", "a volume",
        segy(VP[:6], lines=[(i, k) for i in (1, 2) for k in (1, 2, 3)]), "2 inlines and 3 cross"),
    Row("x.sgy", "an unknown system", segy(binary={3255: 7}), "got 7 in bytes 3255-3256"),
    Row("x.sgy", "weights", segy(words={169: 3}), r"got 3 in bytes 169-170 .* by 2\^-3"),
    Row("x.sgy", "no SEG-Y", text("nothing"), "cannot be read as .sgy"),
]  # fmt: skip

# ---- sections of SEG-Y, with the coordinates of traces: the spacing with --spacing 12.5 5 ----


def section(path: pathlib.Path) -> Any:
    options = WaveOptions(model=path, spacing=(12.5, 5.0))
    return spacing_of(options, read_model(path))


X = 125 * np.arange(7)
SECTIONS = [
    Row("x.sgy", "no coordinates", segy(), (12.5, 5.0)),
    Row("x.sgy", "CDP_X in decimetres", segy(words={181: X, 71: -10}), (12.5, 5.0)),
    Row("x.sgy", "CDP_X and CDP_Y, rounded",
        segy(words={181: 70_000 + np.rint(0.6 * 12.5 * np.arange(7)),
                    185: np.rint(0.8 * 12.5 * np.arange(7))}), (12.5, 5.0)),
    Row("x.sgy", "CDP_X in feet",
        segy(words={181: np.rint(X / 0.3048), 71: -10}, binary={3255: 2}), (12.5, 5.0)),
    Row("x.sgy", "another distance",
        segy(words={181: 2 * X, 71: -10}), "--spacing: expected 25 m, the distance of the traces"),
    Row("x.sgy", "uneven distances",
        segy(words={181: X**2, 71: -10}), "traces at one distance, got 1562.5 m between the first"),
    Row("x.sgy", "degrees", segy(words={181: X, 89: 3}), "in units of length, got degrees in"),
]  # fmt: skip

# ---- volumes: the reader returns the spacing, and vp is CUBE ----


def volume(path: pathlib.Path) -> Any:
    found = open_volume(path)
    assert found is not None
    whole = tuple(slice(0, n) for n in found.shape)
    np.testing.assert_allclose(found.read(whole)["vp"], CUBE, rtol=1e-6)
    if found.distances:
        return tuple(d and d[0] for d in found.distances)
    return found.spacing


LINES = [(10 + 2 * i, 5 + k) for i in range(5) for k in range(4)]
COLUMNS = CUBE.reshape(20, 6)
UNITS = {"scale_factor": 0.001, "add_offset": 1.0, "units": "km/s"}
AXES: dict[str, Any] = {"x": np.arange(5.0), "y": np.arange(4.0), "z": np.arange(6.0)}
VOLUMES = [
    Row("x.sgy", "feet", segy(COLUMNS / 0.3048, lines=LINES, binary={3255: 2}), (None, None)),
    Row("x.sgy", "CDP_X and CDP_Y",
        segy(COLUMNS, lines=LINES, words={181: [25 * i for i, _ in LINES],
                                          185: [30 * k for _, k in LINES]}), (50.0, 30.0)),
    Row("x.sgy", "uneven numbers",
        segy(COLUMNS, lines=[(10 + i * i, k) for i, k in LINES]), "inline numbers at one distance"),
    Row("x.sgy", "a trace is missing",
        segy(COLUMNS[1:], lines=LINES[1:]), "got 19 traces: inline 10, crossline 5 has none"),
    Row("x.sgy", "a trace twice",
        segy(COLUMNS[:-1], lines=LINES[:-2] + LINES[:1]), "inline 18, crossline 7 has none"),
    Row("x.zarr", "scale, offset and units",
        group("vp", CUBE - 1000, ("x", "y", "depth"), about=UNITS, x=AXES["x"], y=AXES["y"],
              depth=(AXES["z"], KM)), (1.0, 1.0, 1000.0)),
    Row("x.zarr", "depth first", group("vp", CUBE.T, ("z", "y", "x")), "axes x, y, z .* got z, y"),
    Row("x.zarr", "y first", group("vp", CUBE, ("y", "x", "depth")), "got y, x, depth"),
    Row("x.zarr", "two shapes", group("vp", CUBE, rho=CUBE[1:]), "same .* cells in all fields"),
    Row("x.zarr", "bent axes",
        group("vp", CUBE, **{**AXES, "x": AXES["x"] ** 2}), "centres x at one distance, got 0, 1"),
    Row("x.zarr", "a spacing of 0",
        group("vp", CUBE, attributes={"spacing": [1.0, 0.0, 1.0]}), "a positive spacing of three"),
    Row("x.zarr", "centres of two axes",
        group("vp", CUBE, x=AXES["x"], y=AXES["y"]), "6 cell centres z for 5 x 4 x 6 cells, got"),
    Row("x.zarr", "heights",
        group("vp", CUBE, **{**AXES, "z": -AXES["z"]}), "centres z that increase, got -0, -1"),
    Row("x.zarr", "two spacings",
        group("vp", CUBE, attributes={"spacing": [1.0, 1.0, 2.0]}, **AXES), "as an attribute and"),
    Row("x.zarr", "slowness",
        group("vp", CUBE, about={"units": "s/km"}), "m/s, mm/s, km/s, ft/s, got 's/km'"),
    Row("x.npy", "no cells", npy(CUBE[:0]), r"shape \(nx, ny, nz\), got shape \(0, 4, 6\)"),
    Row("x.npy", "less numbers than it says", cut, "cannot be read as .npy"),
    Row("x.sgy", "no SEG-Y", text("nothing"), "cannot be read as .sgy"),
    Row("x.npy", "no array", text("\x93NUMPY nothing"), "cannot be read as .npy"),
]  # fmt: skip

# ---- gathers: the reader returns those of a run with 6 steps of 1 ms ----


def run_of(model_file: ModelFile) -> Any:
    options = WaveOptions(dt=DT, steps=STEPS, shots=2, receivers=3)
    return experiment_of(options, model_file, dict(model_file.fields))


def gathers(path: pathlib.Path) -> Any:
    return read_data(path, 1, run_of(ModelFile({"vp": VP})))[:, 0]


TIMES = DT * np.arange(STEPS)
LABELS = ("shot", "receiver", "time")
GATHER_FILES = [
    Row("x.npz", "dt", npz(gathers=GATHERS, dt=DT), GATHERS),
    Row("x.npz", "times", npz(gathers=GATHERS, t=TIMES), GATHERS),
    Row("x.npz", "another dt", npz(gathers=GATHERS, dt=2 * DT), "samples every 0.002 s, this run"),
    Row("x.npz", "a late start", npz(gathers=GATHERS, t=TIMES + 0.1), "first one at 0.1 s in t"),
    Row("x.npz", "dt and times", npz(gathers=GATHERS, t=TIMES, dt=2 * DT), "one interval, got dt"),
    Row("x.npz", "too few times", npz(gathers=GATHERS, t=TIMES[1:]), r"6 times .* shape \(5,\)"),
    Row("x.zarr", "times in s", group("gathers", GATHERS, LABELS, time=TIMES), GATHERS),
    Row("x.zarr", "times in ms",
        group("gathers", GATHERS, LABELS, time=(1e3 * TIMES, MS)), GATHERS),
    Row("x.zarr", "times in single precision",
        group("gathers", GATHERS, LABELS, time=TIMES.astype(np.float32)), GATHERS),
    Row("x.zarr", "time first",
        group("gathers", GATHERS.T, ("time", "receiver", "shot"), time=TIMES), GATHERS),
    Row("x.zarr", "kPa", group("gathers", GATHERS / 1e3, about={"units": "kPa"}), GATHERS),
    Row("x.zarr", "another interval",
        group("gathers", GATHERS, LABELS, time=(TIMES, MS)), "has samples every 1e-06 s"),
    Row("x.zarr", "a late start",
        group("gathers", GATHERS, LABELS, time=TIMES + 0.1), "from 0 s, got the first one at 0.1"),
    Row("x.zarr", "uneven times",
        group("gathers", GATHERS, LABELS, time=TIMES**2), "samples time at one distance, got 0"),
    Row("x.zarr", "falling times",
        group("gathers", GATHERS, LABELS, time=-TIMES), "samples time that increase"),
    Row("x.zarr", "dates",
        group("gathers", GATHERS, LABELS, time=(TIMES, {"units": "seconds since 2020-01-01"})),
        "expected time in one of the units s, ms, us, ns, got 'seconds since"),
    Row("x.zarr", "time first, unknown names",
        group("gathers", GATHERS.T, ("time", "east", "north")), "Rename or transpose"),
    Row("x.zarr", "velocities",
        group("gathers", GATHERS, about={"units": "m/s"}), "units Pa, kPa, MPa, GPa, got 'm/s'"),
    Row("x.sgy", "the interval", segy(GATHERS.reshape(6, STEPS)), GATHERS),
    Row("x.sgy", "obspy", obspy, GATHERS),
    Row("x.sgy", "another interval",
        segy(GATHERS.reshape(6, STEPS), milliseconds=2.0), "samples every 0.002 s"),
    Row("x.sgy", "a late start",
        segy(GATHERS.reshape(6, STEPS), words={109: 100}), "got 0.1 s in bytes 109-110"),
]  # fmt: skip

# ---- other arrays of `mpigrad run` ----


def wavelet(path: pathlib.Path) -> Any:
    return read_wavelets(path, STEPS, DT)[0, 0]


def survey(path: pathlib.Path) -> Any:
    return survey_positions(WaveOptions(survey=path), None, (10.0, 5.0), (7, 5))[0]


def mask(path: pathlib.Path) -> Any:
    return read_array(path, "mask")


def kappa(path: pathlib.Path) -> Any:
    values = CellValues(unit_square((7, 5)))
    return values.kappa(values.load(path))


def observations(path: pathlib.Path) -> Any:
    return read_observations(path, unit_square((4, 4))).values


def cohort(path: pathlib.Path) -> Any:
    (record,) = read_patients(path).records
    seen = np.isfinite(record.concentrations)
    return np.array([record.weight, *record.doses, *record.times[seen],
                     *record.concentrations[seen]])  # fmt: skip


POSITIONS: Any = {"sources": np.ones((2, 2)), "receivers": np.ones((3, 2))}
SEEN: Any = {"coordinates": [[0.3, 0.4]], "values": [2.0], "source": 1.0}
PATIENT = np.array([70.0, 100.0, 2.0, 1.5])
EVENTS = ("a,0,100,.,70", "a,2,0,1.5,70")
WAVELETS = [
    Row("x.npz", "dt", npz(wavelets=TIMES, dt=DT), TIMES),
    Row("x.npz", "another dt", npz(wavelets=TIMES, dt=2 * DT), "--wavelet: .* every 0.002 s"),
    Row("x.zarr", "a late start", group("wavelets", TIMES, ("time",), time=TIMES - 0.1), "at -0.1"),
]
SURVEYS = [
    Row("x.npz", "positions", npz(**POSITIONS, dt=1.0), np.ones((2, 1, 2))),
    Row("x.npz", "a unit", npz(**POSITIONS, units="km"), "units is not applied; leave it out"),
    Row("x.npz", "complex positions",
        npz(**{**POSITIONS, "sources": np.ones((2, 2)) * 1j}), "real numbers, got complex128"),
]  # fmt: skip
MASKS = [Row("x.zarr", "depth first", group("mask", VP.T, ("z", "x")), VP),
         Row("x.sgy", "feet, but no velocities", segy(binary={3255: 2}), VP)]  # fmt: skip
KAPPAS = [
    Row("x.npy", "Fortran's order and byte order", npy(np.asfortranarray(VP).astype(">f4")), VP),
    Row("x.npy", "complex numbers", npy(VP * (1 + 0j)), "expected real numbers, got complex128"),
    Row("x.npz", "two arrays", npz(a=VP, b=VP), "expected one array, got the arrays a, b"),
]
OBSERVATIONS = [
    Row("x.npz", "values", npz(**SEEN), np.array([2.0])),
    Row("x.npz", "weights", npz(**SEEN, weights=[1.0]), "got weights, which is not applied"),
]
TABLES = [
    Row("x.csv", "no units", patients("id,time,amt,dv,wt", *EVENTS), PATIENT),
    Row("x.csv", "units in the header",
        patients("ID,TIME (min),AMT [g],DV (ng/mL),WT", "a,0,0.1,.,70", "a,120,0,1500,70"),
        PATIENT),
    Row("x.csv", "units in a column",
        patients("id,time,amt,dv,wt,dvu", "a,0,100,.,70,.", "a,2,0,1500,70,µg/L"), PATIENT),
    Row("x.csv", "an unknown unit",
        patients("id,time,amt,dv (nmol/L),wt", *EVENTS), "one of the units mg/l, .* got 'nmol/l'"),
    Row("x.csv", "a unit of no column",
        patients("id,time,amt,dv,unit", *EVENTS), "such as dvu, got a column unit"),
    Row("x.csv", "dates",
        patients("id,time,amt,dv,date", "a,0,100,.,2020-01-01"), "date: expected times in h since"),
    Row("x.csv", "a row to be left out",
        patients("id,time,amt,dv,c", "a,0,100,.,C"), "c = C marks a row to be left out"),
    Row("x.csv", "semicolons",
        patients("id;time;amt;dv", "a;0;100;."), "no column id, .* Separate the values by commas"),
    Row("x.csv", "decimal commas",
        patients("id,time,amt,dv", 'a,0,"100,5",.'), "amt: expected a number, got '100,5'"),
]  # fmt: skip

# ---- meshes of the unit square: the names of tags ----


def mesh(path: pathlib.Path) -> Any:
    found = fem.read_mesh(path)
    a, b, c = (found.points[found.cells[:, k]] for k in range(3))
    (u, v), (s, t) = (b - a).T, (c - a).T
    assert np.abs(u * t - v * s).sum() == pytest.approx(2.0)
    return [*found.cell_groups, *found.facet_groups]


TAGGED = {"tags": [np.array([1.0, 2.0])]}
MESHES = [
    Row("x.vtu", "integers as floats", meshio(cell_data=TAGGED), ["1", "2"]),
    Row("x.vtu", "big-endian", vtu("BigEndian"), []),
    Row("x.vtu", "little-endian", vtu(), []),
    Row("x.vtu", "fractions as tags",
        meshio(cell_data={"tags": [np.array([1.5, 2.0])]}), "must be 2 integers, got dtype float"),
    Row("x.vtu", "two pieces", vtu(pieces=2), "one piece with cells in .*, got 2 pieces. Merge"),
    Row("x.vtu", "ghost cells",
        meshio(cell_data={"vtkGhostType": [np.array([0, 1], np.uint8)]}), "got 1 of them by"),
    Row("x.vtu", "a height",
        meshio(points=POINTS + [[0, 0, 1]] * np.arange(4)[:, None]), "z, got z from 0 to 3"),
    Row("x.xdmf", "plain", xdmf(), []),
    Row("x.xdmf", "meshio, in HDF5", meshio(cell_data=TAGGED), ["1", "2"]),
    Row("x.xdmf", "indices from 1", xdmf(' BaseOffset="1"', "1 2 3 1 3 4"), 'BaseOffset="1"'),
    Row("x.xdmf", "big-endian", xdmf(item=' Endian="Big"'), 'Endian="Big", which the reader does'),
    Row("x.xdmf", "a part of an array", xdmf(item=' ItemType="HyperSlab"'), 'ItemType="HyperSlab"'),
    Row("x.msh", "gmsh, named groups", gmsh, ["plate", "inlet"]),
]  # fmt: skip

READERS: dict[Callable[[pathlib.Path], Any], list[Row]] = {
    model: MODELS, section: SECTIONS, volume: VOLUMES, gathers: GATHER_FILES, wavelet: WAVELETS,
    survey: SURVEYS, mask: MASKS, kappa: KAPPAS, observations: OBSERVATIONS, cohort: TABLES,
    mesh: MESHES,
}  # fmt: skip
CASES = [
    pytest.param(reader, row, id=f"{reader.__name__}-{row.name}-{row.says}")
    for reader, rows in READERS.items()
    for row in rows
]


@pytest.mark.filterwarnings("error")  # of NumPy, for complex numbers
@pytest.mark.parametrize(("reader", "row"), CASES)
def test_a_file_is_applied_or_named(reader: Any, row: Row, directory: pathlib.Path) -> None:
    path = directory / row.name
    row.write(path)
    if isinstance(row.expected, str):
        with pytest.raises(ValueError, match=row.expected) as error:
            reader(path)
        assert path.name in str(error.value) or reader is mesh
        return
    found = reader(path)
    if isinstance(row.expected, np.ndarray):
        np.testing.assert_allclose(found, row.expected, rtol=1e-6)
    elif row.expected and isinstance(row.expected[0], float):
        assert found == pytest.approx(row.expected, rel=1e-3)
    else:
        assert found == row.expected
