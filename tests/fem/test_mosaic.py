"""The entries of the benchmark Mosaic in examples/mosaic: values, derivatives, and large boxes.

Published values are compared if the reference data are in the directory MPIGRAD_MOSAIC_DATA, or in
shared/data/mosaic next to the repository.
"""

from __future__ import annotations

import os
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(
    os.environ.get("MPIGRAD_MOSAIC_DATA", ROOT.parent / "shared" / "data" / "mosaic")
)
sys.path.insert(0, str(ROOT / "examples" / "mosaic"))

from cases import beam, bell, noise, slab
from entries import ElasticEntry, HeatEntry
from forward import forward_cases
from gradients import check, with_target
from inversion import invert
from large import large
from topopt import optimize

from mpigrad import sparse

needs_data = pytest.mark.skipif(not DATA.exists(), reason="the data of Mosaic are not here")


def padded(request):
    """The same request with arrays that are longer than the mesh."""
    longer = {k: np.concatenate([request[k], np.full(3, 7, "f4")]) for k in ("rho", "source")}
    mesh = dict(request["hex_mesh"])
    mesh["points"] = np.concatenate([mesh["points"], np.zeros((2, 3), "f4")])
    mesh["faces"] = np.concatenate([mesh["faces"], np.zeros((4, 8), "i4")])
    return request | longer | {"hex_mesh": mesh}


@pytest.mark.thin(1)
def test_compliance_of_a_uniform_slab():
    """C = Q² nx / k. Padding changes nothing, and no source may be given."""
    entry, k = HeatEntry(), 1e-3 + (1 - 1e-3) * 0.5**3
    request = slab(6, flux=2.0)
    for given in (request, padded(request), request | {"source": np.zeros(1, "f4")}):
        value = entry.apply(given)["thermal_compliance"]
        assert value.dtype == np.float32
        assert abs(float(value) * k / 24 - 1) < 1e-6
    assert abs(float(entry.apply(request | {"k_max": 2.0})["thermal_compliance"]) * k / 12 - 1) < (
        1e-6
    )


@pytest.mark.thin(1)
def test_derivatives_of_an_entry():
    """Reverse mode, forward mode and differences agree, in all inputs and outputs."""
    entry = HeatEntry()
    request = padded(with_target(entry, 6, 0.2)) | {"rho": np.append(noise(18), [7, 7, 7])}
    weights = {"thermal_compliance": 0.3, "identification_error": 2e-3}
    names = ("rho", "source")
    found = entry.vector_jacobian_product(request, names, entry.outputs, weights)
    cells = np.arange(21)
    directions = {"rho": np.cos(cells).astype("f4"), "source": np.sin(cells).astype("f4")}
    moved = entry.jacobian_vector_product(request, names, entry.outputs, directions)
    slope = sum(float(np.vdot(found[k].astype(float), directions[k])) for k in names)
    assert abs(sum(weights[k] * float(moved[k]) for k in weights) / slope - 1) < 1e-6
    assert found["rho"].shape == (21,)
    assert not found["rho"][18:].any()
    one = entry.vector_jacobian_product(
        request, {"source"}, {"identification_error"}, {"identification_error": 1.0}
    )
    assert set(one) == {"source"}
    _, error, angle = check(entry, request, "source", "identification_error", 2)
    assert error < 1e-3
    assert angle < 1e-6


def test_gradient_of_elasticity():
    _, error, angle = check(
        ElasticEntry(), beam((4, 2, 2), noise(16), corner=True), "rho", "compliance", 2
    )
    assert error < 1e-3
    assert angle < 1e-6


@pytest.mark.ranks(1)
def test_beams_with_voids():
    """Near-null vectors make empty rows on coarse grids of such small beams."""
    entry, alone = ElasticEntry(), ElasticEntry()
    for seed in (11, 12):
        rho = np.random.default_rng(seed).normal(0.5, 0.6, 64)
        request = beam((8, 2, 4), np.clip(rho, 0, 1), corner=True)
        alone.problem(request).solver = sparse.PCG(preconditioner=sparse.Jacobi(), max_steps=5000)
        values = [float(e.apply(request)["compliance"]) for e in (entry, alone)]
        assert abs(values[0] / values[1] - 1) < 1e-6


@pytest.mark.full("the slab of another test is the same problem on a mesh of a file")
def test_large_boxes_have_the_same_values():
    assert large(8, lambda _: None) < 1e-6


@needs_data
@pytest.mark.full("many solves; test_fem_equations.py has values of both benchmarks")
def test_values_of_mosaic():
    """All references on small meshes, within rounding of float32."""
    entries = {"heat": HeatEntry(), "elastic": ElasticEntry()}
    count = 0
    for name, (kind, output, build) in forward_cases().items():
        known = np.load(DATA / f"{name}.npz")
        for i, swept in enumerate(known["sweep_values"]):
            small = "baseline" not in name or swept in (4, 6)
            if f"reference_{i}" in known and small:
                value = float(entries[kind].apply(build(swept))[output])
                assert abs(value / float(known[f"reference_{i}"]) - 1) < 1e-6, (name, swept)
                count += 1
    assert count == 23


@needs_data
@pytest.mark.full("compiles a line search")
def test_optimizations_begin_as_published():
    errors = invert(HeatEntry(), 16, 1.0, 3)
    published = np.genfromtxt(
        DATA / "published_conductivity_recovery.csv", delimiter=",", names=True
    )
    np.testing.assert_allclose(errors, published["torchfem"][:3], rtol=1e-4)
    trace = optimize(ElasticEntry(), (16, 2, 8), 5)
    rows = np.genfromtxt(DATA / "published_topopt.csv", delimiter=",", names=True)
    np.testing.assert_allclose([c for c, _ in trace], rows["compliance_JAXFEM"][:5], rtol=1e-5)


@pytest.mark.ranks(1)
def test_entries_are_tesseracts():
    core = pytest.importorskip("tesseract_core", reason="needs tesseract-core[runtime]")
    folder = ROOT / "examples" / "mosaic"
    heat = core.Tesseract.from_tesseract_api(folder / "thermal_mesh" / "tesseract_api.py")
    elastic = core.Tesseract.from_tesseract_api(folder / "structural_mesh" / "tesseract_api.py")
    for caller, entry, given in (
        (heat, HeatEntry(), slab(4, source=bell(4))),
        (elastic, ElasticEntry(), beam((4, 2, 2))),
    ):
        expected = entry.apply(given)
        assert {k: float(v) for k, v in caller.apply(given).items()} == expected
        weights = dict.fromkeys(entry.outputs, 1.0)
        reverse = (given, ["rho"], list(weights), weights)
        np.testing.assert_allclose(
            caller.vector_jacobian_product(*reverse)["rho"],
            entry.vector_jacobian_product(*reverse)["rho"],
        )
        forward = (given, ["rho"], list(weights), {"rho": np.ones_like(given["rho"])})
        expected = entry.jacobian_vector_product(*forward)
        moved = caller.jacobian_vector_product(*forward)
        np.testing.assert_allclose([moved[k] for k in weights], [expected[k] for k in weights])
        caller.abstract_eval(given)
