"""Programs in examples/ run on two ranks; make test-full runs all of them, on one rank, too."""

from __future__ import annotations

import os
import pathlib
import re
import runpy

import jax
import pytest

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
# What make test leaves out because it takes long, and where the same parts are tested.
LONG = {
    "battery": "tests/ode",
    "born": "tests/grid/test_apply_stencil.py and test_loops.py",
    "drum": "tests/sparse/matrix/test_ghost_exchange.py",
    "echoes": "tests/waves/acoustic",
    "gray_scott": "tests/ode",
    "hyperelastic_block": "tests/fem/test_laws.py and test_fem_derivatives.py",
    "leak": "tests/ode",
    "learned_law": "tests/fem/test_laws.py and test_fem_derivatives.py",
    "lynx_hare": "tests/jobs and tests/applications/population",
    "moving_source": "tests/fem/test_stepping.py and test_observation.py",
    "nonlinear_diffusion": "tests/sparse/nonlinear/test_newton.py",
    "obstacle_flow": "tests/fem/test_mixed.py",
    "particle_mesh": "tests/fft/test_particle_mesh.py, which runs its functions",
    "perforated_plate": "tests/fem/test_mesh_files.py",
    "plate_frequencies": "tests/sparse/test_eigenpairs.py and tests/fem/test_fem_derivatives.py",
    "reaction_diffusion": "test_loops.py and tests/grid/test_halo_exchange.py",
    "sinking_spheres": "tests/fem/test_mixed.py",
    "taylor_green": "tests/fft/test_taylor_green.py, which runs its functions",
    "topology_optimization": "tests/fem/test_fem_derivatives.py",
}


def marks(path: pathlib.Path) -> list[pytest.MarkDecorator]:
    counts = (1, 2) if os.environ.get("MPIGRAD_ALL_TESTS") == "1" else (2,)
    needs_torch = re.search(r"^(import|from) (mpigrad\.)?torch\b", path.read_text(), re.M)
    return [
        pytest.mark.ranks(*counts),
        *[pytest.mark.full(f"takes long; see {LONG.get(path.stem)}")] * (path.stem in LONG),
        *[pytest.mark.torch] * bool(needs_torch),
    ]


CASES = [pytest.param(path, id=path.stem, marks=marks(path)) for path in EXAMPLES]


@pytest.mark.parametrize("path", CASES)
def test_example(path: pathlib.Path) -> None:
    assert path.exists()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_mpigrad_is_imported_before_blackjax(path: pathlib.Path) -> None:
    """Importing blackjax computes. Here, unlike in a program, mpigrad is imported already."""
    order = re.findall(r"^(?:import|from) (mpigrad|blackjax)\b", path.read_text(), re.MULTILINE)
    assert order[0] == "mpigrad"
