"""Meshes read from files, and fields written for ParaView."""

import re
import struct

import numpy as np
import pytest
from mesh_cases import SHAPES, assert_same_mesh, facets_in_file, in_file_order, mixed_up

from mpigrad import fem
from mpigrad.fem.cells import reference_cell

meshio = pytest.importorskip("meshio")
pytestmark = pytest.mark.ranks(1, 2, 3)
KINDS = list(SHAPES)


def contents(kind, alone):
    """A mesh as meshio has it, with cells, facets and their tags in separate blocks."""
    arrays = mixed_up(kind, alone)
    names = reference_cell(kind).names
    points = np.zeros((len(arrays["points"]), 3))
    points[:, : arrays["points"].shape[1]] = arrays["points"]
    cells = arrays["cells"][:, names.vtk_order]
    facets = arrays["facets"]
    if names.facet == "quad":  # around the face
        facets = np.stack([_around(arrays["points"][face], face) for face in facets])
    tags = arrays["facet_tags"]
    blocks, block_tags = [], []
    for tag in np.unique(tags):
        blocks.append((names.facet, facets[tags == tag]))
        block_tags.append(np.full((tags == tag).sum(), tag))
    blocks.append((names.meshio, cells))
    block_tags.append(arrays["cell_tags"])
    dim = arrays["points"].shape[1]
    groups = {"left": [3, dim], "inlet": [11, dim - 1], "interface": [12, dim - 1]}
    return meshio.Mesh(
        points,
        blocks,
        cell_data={"gmsh:physical": block_tags, "gmsh:geometrical": [t.copy() for t in block_tags]},
        field_data={name: np.array(value) for name, value in groups.items()},
    ), arrays


def _around(points, face):
    center = points.mean(axis=0)
    u, v = np.linalg.svd(points - center)[2][:2]
    angle = np.arctan2((points - center) @ v, (points - center) @ u)
    return face[np.argsort(angle)]


@pytest.mark.parametrize("kind", KINDS)
def test_gmsh(kind, comm, alone, directory):
    content, arrays = contents(kind, alone)
    path = directory / "mesh.msh"
    if comm.rank == 0:
        meshio.write(path, content, "gmsh22", binary=False)
    mesh = fem.read_mesh(path)
    assert_same_mesh(mesh, fem.distribute_mesh(**arrays, comm=alone))
    assert mesh.facets("inlet").n_global == (arrays["facet_tags"] == 11).sum()


@pytest.mark.parametrize("kind", ["triangle", "hexahedron"])
def test_vtk(kind, comm, alone, directory):
    content, arrays = contents(kind, alone)
    path = directory / "mesh.vtu"
    if comm.rank == 0:
        content.cell_data = {"zone": content.cell_data["gmsh:physical"]}
        content.field_data = {}
        meshio.write(path, content)
    mesh = fem.read_mesh(path, tags="zone")
    unnamed = arrays | {"cell_groups": {}, "facet_groups": {}}
    assert_same_mesh(mesh, fem.distribute_mesh(**unnamed, comm=alone))
    assert mesh.facet_groups == {"11": 11, "12": 12}
    with pytest.raises(ValueError, match=r"name 'region' in .*, got 'zone'"):
        fem.read_mesh(path, tags="region")
    assert fem.read_mesh(path).facet_groups == {}


XDMF = """<Xdmf Version="3.0"><Domain><Grid Name="Grid"><Geometry GeometryType="XY">
<DataItem DataType="Float" Dimensions="4 2" Format="XML" Precision="8">
0 0 1 0 1 1 0 1</DataItem></Geometry>
<Topology TopologyType="Triangle" NumberOfElements="2" NodesPerElement="3">
<DataItem DataType="Int" Dimensions="2 3" Format="XML" Precision="8">0 1 2 0 2 3</DataItem>
</Topology><Attribute Name="cell_tags" AttributeType="Scalar" Center="Cell">
<DataItem DataType="Int" Dimensions="2" Format="XML" Precision="8">4 6</DataItem></Attribute>
</Grid></Domain></Xdmf>
"""


@pytest.mark.ranks(1, 2)
def test_xdmf(comm, directory):
    pytest.importorskip("h5py")
    path = directory / "square.xdmf"
    if comm.rank == 0:
        path.write_text(XDMF)
    mesh = fem.read_mesh(path)
    assert mesh.cell_groups == {"4": 4, "6": 6}
    assert np.array_equal(in_file_order(mesh, mesh.cell_ids, mesh.cell_tags), [4, 6])


@pytest.mark.ranks(1, 2)
def test_newer_gmsh_with_several_groups(comm, directory):
    """Format 4.1: a line in two physical groups has both tags."""
    path = directory / "square.msh"
    if comm.rank == 0:
        path.write_text(GMSH_41)
    mesh = fem.read_mesh(path)
    assert mesh.facet_groups == {"bottom": 1, "all": 2}
    assert (mesh.facets("bottom").n_global, mesh.facets("all").n_global) == (1, 2)
    assert mesh.cell_groups == {"plate": 3}
    assert mesh.cells_with("plate").all()


GMSH_41 = """$MeshFormat
4.1 0 8
$EndMeshFormat
$PhysicalNames
3
1 1 "bottom"
1 2 "all"
2 3 "plate"
$EndPhysicalNames
$Entities
0 2 1 0
1 0 0 0 1 0 0 2 2 1 0
2 1 0 0 1 1 0 1 2 0
1 0 0 0 1 1 0 1 3 0
$EndEntities
$Nodes
1 5 1 5
2 1 0 5
1
2
3
4
5
0 0 0
1 0 0
1 1 0
0 1 0
0.5 0.5 0
$EndNodes
$Elements
3 6 1 6
1 1 1 1
1 1 2
1 2 1 1
2 2 3
2 1 2 4
3 1 2 5
4 2 3 5
5 3 4 5
6 4 1 5
$EndElements
"""


# Two triangles between x = 0 and 1. The lower one is in two groups of surfaces. The right side is a
# line in the groups 1 and 2, of which 2 has the name of a group of surfaces.
NAMES = """$PhysicalNames
6
0 8 "corner"
1 1 "right side"
1 2 "all"
1 9 "nothing"
2 3 "lower"
2 2 "all"
$EndPhysicalNames
"""
ENTITIES = (
    ((1, (1.0, 0.0, 0.0), [8]),),
    ((4, (0.0,) * 6, [1, -2]),),  # a tag is negative if the line goes in the other direction
    ((5, (0.0,) * 6, [3, 2, 7]), (6, (0.0,) * 6, [2])),
)
CORNERS = ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0))
LINE, LOWER, UPPER = (2, 3), (1, 2, 3), (1, 3, 4)


def gmsh_22(names=NAMES):
    """Each cell occurs once for each of its groups, as gmsh writes this format."""
    rows = [
        (1, tag, 4, LINE) for tag in (1, 2)
    ] + [(2, tag, 5, LOWER) for tag in (3, 2, 7)] + [(2, 2, 6, UPPER)]  # fmt: skip
    lines = ["$MeshFormat", "2.2 0 8", "$EndMeshFormat", names.strip(), "$Nodes", "4"]
    lines += [f"{i} {x} {y} {z}" for i, (x, y, z) in enumerate(CORNERS, 1)]
    lines += ["$EndNodes", "$Elements", str(len(rows))]
    for i, (kind, tag, entity, corners) in enumerate(rows, 1):
        lines.append(" ".join(map(str, (i, kind, 2, tag, entity, *corners))))
    return ("\n".join(lines) + "\n$EndElements\n").encode()


def gmsh_41(names=NAMES, binary=True):
    """Entities have several groups."""

    def put(kind, *values):
        if binary:
            return struct.pack(f"={len(values)}{kind}", *values)
        return " ".join(map(str, values)).encode() + b"\n"

    text = b"$MeshFormat\n4.1 %d 8\n" % binary
    text += (put("i", 1) + b"\n" if binary else b"") + b"$EndMeshFormat\n" + names.encode()
    text += b"$Entities\n" + put("Q", 1, 1, 2, 0)
    for dim, entities in enumerate(ENTITIES):
        for entity, box, tags in entities:
            text += put("i", entity) + put("d", *box) + put("Q", len(tags)) + put("i", *tags)
            text += put("Q", 0) if dim else b""
    text += b"\n$EndEntities\n$Nodes\n" + put("Q", 1, 4, 1, 4)
    text += put("i", 2, 5, 0) + put("Q", 4) + put("Q", 1, 2, 3, 4)
    text += put("d", *(x for corner in CORNERS for x in corner))
    text += b"\n$EndNodes\n$Elements\n" + put("Q", 3, 3, 1, 3)
    for number, (head, corners) in enumerate(
        (((1, 4, 1), LINE), ((2, 5, 2), LOWER), ((2, 6, 2), UPPER)), 1
    ):
        text += put("i", *head) + put("Q", 1) + put("Q", number, *corners)
    return text + b"\n$EndElements\n"


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("version", ["2.2", "4.1", "4.1 text", "vtu"])
def test_cells_have_all_their_groups(version, comm, directory):
    """Names of two dimensions may be equal, and a cell in three groups is one cell."""
    path = directory / ("m.vtu" if version == "vtu" else "m.msh")
    if comm.rank == 0:
        text = gmsh_41(binary=version == "4.1") if version.startswith("4.1") else gmsh_22()
        (directory / "m.msh").write_bytes(text)
        if version == "vtu":  # a converted file, without names
            meshio.read(directory / "m.msh").write(path)
    mesh = fem.read_mesh(path)
    cells = lambda tag: in_file_order(mesh, mesh.cell_ids, mesh.cells_with(tag)).tolist()
    assert mesh.n_cells_global == 2
    assert in_file_order(mesh, mesh.cell_ids, mesh.cell_tags).tolist() == [3, 2]
    assert (cells(3), cells(2), cells(7)) == ([True, False], [True, True], [True, False])
    assert [mesh.facets(tag).n_global for tag in (1, 2)] == [1, 1]
    if version == "vtu":
        assert mesh.unused_groups == {}
        return
    assert (mesh.cell_groups, mesh.facet_groups) == (
        {"lower": 3, "all": 2, "7": 7},
        {"right side": 1, "all": 2},
    )
    assert cells("all") == [True, True]
    assert mesh.facets("all").n_global == 1
    one = lambda on: fem.Energy(fem.Space(mesh), lambda p: 1.0 + 0 * p.u, on=on)
    space = fem.Space(mesh)
    area = one(mesh.cells_with("all"))().integral(np.zeros(space.shape))
    assert comm.mpi.allreduce(float(area)) == pytest.approx(1.0)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("version", ["2.2", "4.1"])
def test_names_without_members_are_errors(version, comm, directory):
    path = directory / "m.msh"
    if comm.rank == 0:
        path.write_bytes(gmsh_22() if version == "2.2" else gmsh_41())
    mesh = fem.read_mesh(path)
    for function, name, message in [
        (mesh.facets, "nothing", "'nothing' is a group of facets without members. Its tags are: "),
        (mesh.cells_with, "corner", "'corner' is a group of dimension 0 of the file"),
        (mesh.facets, "lower", r"It is a tag of cells\. .* or use Mesh\.cells_with"),
        (mesh.cells_with, "right side", r"It is a tag of facets\. .* or use Mesh\.facets"),
        (mesh.facets, 9, "no facets of this mesh have the tag 9"),
    ]:
        with pytest.raises(ValueError, match=message):
            function(name)
    # Names are those of physical groups, and not of other tags.
    mesh = fem.read_mesh(path, tags="gmsh:geometrical") if version == "4.1" else mesh
    if version == "4.1":
        assert mesh.cell_groups == {"5": 5, "6": 6}
        assert mesh.facet_groups == {"4": 4}


@pytest.mark.ranks(1, 2)
def test_rejects_groups_and_cells_that_are_not_unique(comm, directory):
    files = {
        "names.msh": gmsh_41(NAMES.replace('3 "lower"', '3 "all"')),
        "number.msh": gmsh_41(NAMES.replace("lower", "7")),
        "twice.msh": gmsh_22().replace(b"4 2 2 2 5 ", b"4 2 2 3 5 "),
        "parts.msh": gmsh_41(binary=False).replace(
            b"1 4 1\n", b"1 13 1\n"
        ) + b"$PartitionedEntities\n$EndPartitionedEntities\n",
        "some.msh": gmsh_41(binary=False).replace(b"1\n2\n0\n\n$EndE", b"0\n0\n\n$EndE"),
    }  # fmt: skip
    if comm.rank == 0:
        for name, text in files.items():
            (directory / name).write_bytes(text)
    for name, message in {
        "names.msh": "one group of dimension 2 with the name 'all' in .*, got the tags 3 and 2",
        "number.msh": "got '7' for the tag 3, and a tag 7 without a name",
        "twice.msh": r"got the corners \[0, 1, 2\] in the cells 0 and 1 \(3 cells have",
        "parts.msh": "partitioned by gmsh: save it without partitions",
        "some.msh": "others do not: give all of them a group, or save without Mesh.SaveAll",
    }.items():
        with pytest.raises(ValueError, match=message):
            fem.read_mesh(directory / name)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ending", ["inp", "med"])
def test_named_sets_of_other_programs(ending, comm, directory):
    """Abaqus has sets of cells, and MED has families with several names."""
    pytest.importorskip("h5py")
    path = directory / f"m.{ending}"
    if comm.rank == 0:
        content = meshio.Mesh(np.array(CORNERS, float), [("triangle", [[0, 1, 2], [0, 2, 3]])])
        if ending == "inp":
            content.cell_sets = {"lower": [np.array([0])], "all": [np.array([0, 1])]}
        else:
            content.cell_data = {"cell_tags": [np.array([-6, -7])]}
            content.cell_tags = {-6: ["lower", "all"], -7: ["all"]}
        content.write(path)
    mesh = fem.read_mesh(path)
    cells = lambda tag: in_file_order(mesh, mesh.cell_ids, mesh.cells_with(tag)).tolist()
    assert (cells("lower"), cells("all")) == ([True, False], [True, True])
    assert {"lower", "all"} <= set(mesh.cell_groups)


def test_wrong_files(comm, alone, directory):
    content, _ = contents("triangle", alone)
    cells = content.cells[-1].data
    files = {
        "mixed.vtu": [("triangle", cells[:4]), ("quad", [[0, 1, 2, 3]])],
        "curved.vtu": [("triangle6", [[0, 1, 2, 3, 4, 5]])],
        "lines.vtu": [("line", cells[:, :2])],
        "prisms.vtu": [("wedge", [[0, 1, 2, 3, 4, 5]])],
        "unused.vtu": [("triangle", cells[:5])],
    }
    if comm.rank == 0:
        for name, blocks in files.items():
            meshio.Mesh(content.points, blocks).write(directory / name)
        (directory / "text.msh").write_text("no mesh\n")
        (directory / "text.abc").write_text("no mesh\n")
    comm.mpi.Barrier()
    for name, message in {
        "mixed.vtu": "cells of one type, got quad and triangle",
        "curved.vtu": "straight edges, got triangle6",
        "lines.vtu": "cells of one type, got line .* give the surfaces one",
        "prisms.vtu": "got wedge",
        "unused.vtu": "without cells",
        "text.msh": "a mesh that meshio can read",
        "text.abc": "a mesh that meshio can read",
    }.items():
        with pytest.raises(ValueError, match=message):
            fem.read_mesh(directory / name)
    with pytest.raises(FileNotFoundError, match=r"the file .*nothing\.msh does not exist"):
        fem.read_mesh(directory / "nothing.msh")
    if comm.size > 1:
        with pytest.raises(ValueError, match="path must be the same on all ranks"):
            fem.read_mesh(directory / f"{comm.rank}.msh")


def read_pieces(path, comm):
    """The pieces of an index, as meshio reads them."""
    sources = re.findall(r'<Piece Source="([^"]*)"/>', path.read_text())
    assert len(sources) == comm.size
    return [meshio.read(path.parent / source) for source in sources]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_written_fields_are_read(kind, degree, comm, alone, directory):
    arrays = mixed_up(kind, alone)
    mesh = fem.distribute_mesh(**arrays, comm=comm)
    space = fem.Space(mesh, degree)
    path = directory / "u.pvtu"
    function = lambda x: np.sin(x[:, 0]) + x[:, 1] ** 2
    u = space.interpolate(function)
    vector = space.node_points[: space.nodes.n_local].astype(np.float32)
    ranks = np.full(mesh.n_cells, comm.rank)
    for _ in range(2):  # replaces the first files
        space.write(path, u=u, x=vector, cells={"tag": mesh.cell_tags, "a <b>": ranks})
    pieces = read_pieces(path, comm)
    assert len(list(directory.glob("u.vtu-pieces-*"))) == 1
    assert sum(len(piece.cells[0].data) for piece in pieces) == mesh.n_cells_global
    text = path.read_text()
    assert 'type="Float32" Name="x" NumberOfComponents="3"' in text
    assert 'Name="a &lt;b&gt;"' in text
    for rank, piece in enumerate(pieces):
        dim = mesh.dim
        assert (piece.cell_data["a <b>"][0] == rank).all()
        np.testing.assert_allclose(piece.point_data["u"], function(piece.points), atol=1e-14)
        np.testing.assert_allclose(piece.point_data["x"][:, :dim], piece.points[:, :dim], atol=1e-6)
        kinds = {
            1: {"quadrilateral": "quad", "tetrahedron": "tetra"},
            2: {"triangle": "triangle6", "quadrilateral": "quad9", "tetrahedron": "tetra10",
                "hexahedron": "hexahedron27"},
        }[degree]  # fmt: skip
        assert piece.cells[0].type == kinds.get(kind, kind)
    # This rank's piece has this rank's cells, with their nodes in VTK's places.
    own = pieces[comm.rank]
    corners = own.points[own.cells[0].data][:, : reference_cell(kind).n_corners, :dim]
    order = reference_cell(kind).names.vtk_order
    assert np.array_equal(corners, mesh.points[mesh.cells[:, order]])
    if degree == 2:
        middles = own.points[own.cells[0].data][..., :dim]
        np.testing.assert_allclose(middles[:, len(order)], middles[:, :2].mean(axis=1), atol=1e-14)
        if kind == "hexahedron":  # x = 0 has the corners 0, 3, 4 and 7, the last node is inside
            np.testing.assert_allclose(
                middles[:, 20], middles[:, [0, 3, 4, 7]].mean(axis=1), atol=1e-14
            )
            np.testing.assert_allclose(middles[:, 25], middles[:, 4:8].mean(axis=1), atol=1e-14)
        if kind in ("quadrilateral", "hexahedron"):
            np.testing.assert_allclose(
                middles[:, -1], middles[:, : len(order)].mean(axis=1), atol=1e-14
            )


def test_a_written_mesh_is_read_again(comm, alone, directory):
    arrays = mixed_up("tetrahedron", alone)
    mesh = fem.distribute_mesh(**arrays, comm=comm)
    mesh.write(directory / "m.pvtu", x=mesh.points[: mesh.vertices.n_local], tags=mesh.cell_tags)
    pieces = read_pieces(directory / "m.pvtu", comm)
    again = fem.read_mesh(directory / "m.vtu-pieces-0" / "0.vtu", partition="coordinates")
    assert again.n_cells_global == len(pieces[0].cells[0].data)
    tags = in_file_order(again, again.cell_ids, again.cell_tags)
    assert np.array_equal(tags, pieces[0].cell_data["tags"][0])
    assert len(facets_in_file(again, again.boundary_facets())) > 0


def test_wrong_fields(comm, directory):
    mesh = fem.box((4, 4), (1.0, 1.0), comm=comm)
    n = mesh.vertices.n_local
    path = directory / "u.pvtu"
    cases = [
        ({"u": np.zeros(n + 100)}, ValueError, "does not fit on all ranks"),
        ({"points": {"u": np.zeros(n + (comm.rank == 0))}}, ValueError, "one row for each own"),
        ({"cells": {"u": np.zeros(mesh.n_cells, complex)}}, TypeError, "got dtype complex128"),
        ({"cells": {"u/v": np.zeros(mesh.n_cells)}}, ValueError, "not a valid name"),
    ]
    for fields, kind, message in cases:
        with pytest.raises(kind, match=message):
            mesh.write(path, **fields)
    with pytest.raises(ValueError, match=r"ends with \.pvtu"):
        mesh.write(directory / "u.vtu", u=np.zeros(n))
    assert not list(directory.glob("u*"))
    if comm.size == 2:  # 2 x 4 bricks and 10 or 15 vertices
        mesh = fem.distribute_mesh([[0, 0], [1, 0], [0, 1], [1, 1]], [[0, 1, 2], [1, 3, 2]],
                                   "triangle", comm=comm)  # fmt: skip
        mesh.write(path, cells={"u": np.zeros(1)})
