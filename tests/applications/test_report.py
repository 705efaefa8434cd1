"""Reports and pictures."""

import numpy as np
import pytest

from mpigrad_apps.report import (
    Panel,
    Table,
    curve,
    maps,
    points,
    versions,
    write_report,
)

pytestmark = pytest.mark.ranks(1)


def test_report_holds_its_pictures_and_escapes_text(tmp_path):
    values = np.arange(12.0).reshape(4, 3)
    values[0, 0] = np.nan
    pictures = [
        maps("map", "a < b & c", [Panel("one", values), Panel("two", values, diverging=True)]),
        curve("curve", "down", {"loss": ([0, 1, 2], [1.0, 0.1, 0.01])}),
        points("points", "here", "u", np.random.default_rng(0).random((5, 2)), np.arange(5.0)),
    ]
    path = write_report(
        tmp_path / "new", "T & U", "all <well>", pictures, [Table("Numbers", {"<n>": 3})]
    )
    page = path.read_text()
    assert path.name == "report.html"
    for text in ("T &amp; U", "all &lt;well&gt;", "a &lt; b &amp; c", "&lt;n&gt;", "<td>3</td>"):
        assert text in page
    assert page.count('<img src="data:image/png;base64,') == 3
    assert "http" not in page  # nothing is loaded from elsewhere
    for name in ("map", "curve", "points"):
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_versions_name_what_computed():
    found = versions()
    assert {"mpigrad", "Python", "JAX", "mpi4py", "MPI", "hypre"} <= set(found)
    assert all(str(value).strip() for value in found.values())
