"""PFMG on grid stencils: compared with dense solves and BoomerAMG, and its limits."""

import itertools
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stencils import CASES, Counter, System, every, faces
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad.sparse import (
    GMRES,
    PCG,
    PFMG,
    BiCGStab,
    BoomerAMG,
    Jacobi,
    Matrix,
    Multigrid,
    Pattern,
    Result,
    default_solver,
    hypre_available,
    solve,
)
from mpigrad.sparse.matrix.products import transpose_values, transposed
from mpigrad.sparse.solvers import libraries as hypre_library

pytestmark = pytest.mark.skipif(not hypre_available(), reason="no hypre")

TIGHT = PCG(rtol=1e-12, preconditioner=PFMG())
ANY_MATRIX = (
    GMRES(rtol=1e-12, preconditioner=PFMG()),
    BiCGStab(rtol=1e-12, preconditioner=PFMG()),
    Multigrid(PFMG(), rtol=1e-12),
)


@pytest.mark.cases(
    "line", "one axis", "nine points", "box", reason="1 to 3 axes, with faces and with corners"
)
@pytest.mark.parametrize("case", CASES)
def test_solution_is_that_of_the_dense_matrix(comm, case):
    system = System(comm, *CASES[case])
    amg = PCG(rtol=1e-12, preconditioner=BoomerAMG())
    solvers = (TIGHT, amg) if len(CASES[case][0]) != 2 else (TIGHT, amg, *ANY_MATRIX)
    values = mg.jit(lambda A, b: [solve(A, b, s).value for s in solvers])(system.matrix, system.b)
    expected = system.solution()
    for value in values:
        close(value, expected, 1e-9)


@pytest.mark.parametrize("settings", [{"relaxation": "jacobi"}, {"sweeps": 2, "max_levels": 3}])
def test_settings(comm, settings):
    system = System(comm, (12, 9), faces(2))
    solver = PCG(rtol=1e-12, preconditioner=PFMG(skip_relaxation=False, **settings))
    close(solve(system.matrix, system.b, solver).value, system.solution(), 1e-9)


@pytest.mark.ranks(1, 2, 3, 4)
def test_iterations_do_not_depend_on_the_tiles(comm):
    system = System(comm, (32, 27), faces(2))
    assert solve(system.matrix, system.b, PCG(preconditioner=PFMG())).stats["num_steps"] == 9


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "cycle",
    [PFMG(), pytest.param(BoomerAMG(), marks=pytest.mark.full("PFMG runs the same iterations"))],
)
def test_pcg_ends_with_the_first_residual_that_is_small(comm, cycle):
    """Not an iteration earlier or later, for tolerances next to a residual and sizes of b."""
    system = System(comm, (32, 27), faces(2))
    for steps in (2, 5, 9):
        same = solve(  # the same iterations without an end
            system.matrix,
            system.b,
            PCG(rtol=1e-15, preconditioner=cycle, max_steps=steps),
            throw=False,
        )
        residual = float(same.stats["relative_residual"])
        for rtol, more in ((residual * (1 + 1e-6), 0), (residual * (1 - 1e-6), 1)):
            found = solve(system.matrix, system.b, PCG(rtol=rtol, preconditioner=cycle))
            assert found.stats["num_steps"] == steps + more
            assert found.stats["relative_residual"] <= rtol
            if more == 0:
                np.testing.assert_array_equal(same.value, found.value)
    for method in (PCG, GMRES, BiCGStab):
        solver = method(rtol=1e-6, preconditioner=cycle)
        steps = {
            size: int(solve(system.matrix, size * system.b, solver).stats["num_steps"])
            for size in (1.0, 2.0**40, 2.0**-40)
        }
        assert len(set(steps.values())) == 1, steps


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("cycle", [PFMG(), BoomerAMG()])
def test_an_indefinite_matrix_ends_pcg_at_once(comm, cycle):
    """One with a positive diagonal, which is only found out by a direction."""
    system = System(comm, (32, 27), faces(2))
    offsets = system.pattern.stencil.offsets
    entries = [jnp.full(system.pattern.stencil.grid.local_shape, -1.0) for _ in offsets]
    matrix = Matrix.assemble(
        system.pattern, [2 + e if not any(o) else e for o, e in zip(offsets, entries, strict=True)]
    )
    found = solve(matrix, system.b, PCG(preconditioner=cycle), throw=False)
    assert found.result == Result.NOT_POSITIVE_DEFINITE
    assert found.stats["num_steps"] < 10
    assert np.isnan(found.value).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="not positive definite: PCG has found"):
        solve(matrix, system.b, PCG(preconditioner=cycle))


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(ANY_MATRIX[0], marks=pytest.mark.ranks(1, 2, 3, 4)),
        pytest.param(ANY_MATRIX[1], marks=pytest.mark.ranks(2, 3)),
        pytest.param(ANY_MATRIX[2], marks=pytest.mark.ranks(2)),
    ],
    ids=lambda s: type(s).__name__,
)
def test_matrices_without_symmetry(comm, solver):
    """Values and adjoints: the transposed solve is PFMG's, too, on the opposite offsets."""
    system = System(comm, (7, 6), faces(2), skew=0.5)
    f = mg.jit(lambda values, b: solve(Matrix(system.pattern, values), b, solver).value)
    close(f(system.values, system.b), system.solution(), 1e-9)
    assert mg.dot_test(f, system.values, system.b).error < 1e-8


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_transpose_of_a_stencil_is_a_stencil(comm):
    system = System(comm, (5, 7), [(0, 0), (1, 0), (-1, 1), (0, -1)], skew=0.5)
    back = transposed(system.pattern)
    assert back.stencil.offsets == ((0, 0), (-1, 0), (1, -1), (0, 1))
    assert transposed(back) is system.pattern
    values = mg.jit(lambda v: transpose_values(system.pattern, v))(system.values)
    got = Matrix(back, values).local_scipy().toarray()
    np.testing.assert_array_equal(got, system.dense().T[system.mine])
    np.testing.assert_array_equal(transpose_values(back, values), system.values)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((8, 7), marks=pytest.mark.ranks(1, 2, 3, 4)),
        pytest.param(
            (4, 5, 4),
            marks=[pytest.mark.ranks(3), pytest.mark.full("derivatives do not depend on the axes")],
        ),
    ],
    ids=str,
)
def test_derivatives(comm, shape):
    system = System(comm, shape, faces(len(shape)))
    links = jnp.asarray(np.random.default_rng(comm.rank).uniform(0.5, 2, system.grid.local_shape))

    def solution(kappa):
        """Along symmetric changes: a diagonal one, as PCG takes the matrix for its transpose."""
        coefficients = system.tile(system.whole)
        A = Matrix.assemble(system.pattern, coefficients.at[0].add(kappa))
        return solve(A, kappa.ravel() * system.b, TIGHT).value

    assert mg.dot_test(mg.jit(solution), links).error < 1e-8
    mg.taylor_test(mg.jit(lambda kappa: jnp.sum(jnp.sin(solution(kappa)))), links)


@pytest.mark.ranks(1, 2, 3, 4)
def test_set_ups_follow_the_values(comm):
    system = System(comm, (9, 10), faces(2))
    f = lambda values, b: jnp.sum(solve(Matrix(system.pattern, values), b, TIGHT).value ** 2)
    call = mg.jit(mg.value_and_grad(f, argnums=(0, 1)))
    expected = system.solution()
    count = Counter()
    value = comm.mpi.allreduce(float(np.sum(expected**2)))
    close(call(system.values, system.b)[0], value)
    assert count() == (1, 2)  # the adjoint does none
    close(call(system.values, 2 * system.b)[0], 4 * value)
    assert count() == (0, 2)
    for factor in (2.0, 3.0, 2.0):  # the matrix is filled again each time
        close(call(factor * system.values, system.b)[0], value / factor**2)
    assert count() == (3, 6)
    on_one_rank = system.tile(system.whole).at[0].add(1.0 if comm.rank == 0 else 0.0)
    call(system.pattern.assemble(on_one_rank), system.b)
    assert count() == (1, 2)
    solve(system.matrix, system.b, PCG(preconditioner=BoomerAMG()))
    solve(system.matrix, system.b, GMRES(preconditioner=PFMG()))
    assert count() == (2, 2)


def test_a_stale_hierarchy_is_kept_for_nearby_values(comm):
    system = System(comm, (16, 15), faces(2))
    solver = PCG(rtol=1e-12, preconditioner=PFMG(reuse="stale"))
    call = mg.jit(lambda values: solve(Matrix(system.pattern, values), system.b, solver).value)
    expected, count = system.solution(), Counter()
    for factor in (1.0, 1.1, 0.9):
        close(call(factor * system.values), expected / factor, 1e-9)
    assert count() == (1, 3)


@pytest.mark.ranks(1, 2, 3, 4)
def test_asymmetry_is_found_wherever_it_is(comm):
    """In a tile, and across the border of two."""
    system = System(comm, (8, 6), faces(2), dims=(comm.size, 1))
    call = mg.jit(lambda A: solve(A, system.b, TIGHT, throw=False).result)
    for cell, offset in itertools.product([(1, 1), (3, 2), (5, 4)], [(1, 0), (0, -1)]):
        changed = system.whole.copy()
        changed[faces(2).index(offset)][cell] *= 1 + 1e-6
        A = Matrix.assemble(system.pattern, system.tile(changed))
        assert call(A) == 4
        assert call(system.matrix) == 0
    with pytest.raises(Exception, match="the matrix is not symmetric"):
        solve(A, system.b, TIGHT).value.block_until_ready()


def test_a_stencil_without_opposite_offsets_is_not_symmetric(comm):
    system = System(comm, (6, 6), [(0, 0), (0, 1)])
    assert solve(system.matrix, system.b, TIGHT, throw=False).result == 4
    close(solve(system.matrix, system.b, ANY_MATRIX[0]).value, system.solution(), 1e-9)


def test_rejects_other_patterns(comm, monkeypatch):
    system = grid_system(comm)
    with pytest.raises(
        ValueError, match=r"PFMG cannot take this pattern: .*Pattern\.from_stencil.*BoomerAMG"
    ):
        solve(system.matrix, system.b, TIGHT)
    far = System(comm, (9, 8), [(0, 0), (0, 2), (0, -2)])
    with pytest.raises(ValueError, match=r"the stencil reaches \(0, 2\)"):
        solve(far.matrix, far.b, ANY_MATRIX[0])
    wide = System(comm, (9, 8), every(2))
    with pytest.raises(ValueError, match=r'Take PFMG\(relaxation="jacobi"\)'):
        solve(wide.matrix, wide.b, PCG(preconditioner=PFMG(relaxation="red-black")))
    with pytest.raises(TypeError, match="hypre solves in float64"):
        A = Matrix(wide.pattern, wide.values.astype("float32"))
        solve(A, wide.b.astype("float32"), TIGHT)
    bare = Pattern.from_stencil(far.grid, [(0, 1)])
    with pytest.raises(ValueError, match="PFMG needs a diagonal entry in every row"):
        solve(Matrix(bare, jnp.ones(bare.nnz)), far.b, TIGHT)
    missing = lambda: (None, "it is not there.")
    monkeypatch.setattr(hypre_library, "_load", missing)
    with pytest.raises(RuntimeError, match=r"PFMG needs hypre: it is not there\."):
        solve(wide.matrix, wide.b, TIGHT)
    assert default_solver().preconditioner == Jacobi()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"relaxation": "sor"}, "relaxation must be one of .* got relaxation='sor'"),
        ({"reuse": "never"}, "reuse must be one of .* got reuse='never'"),
        ({"sweeps": 0}, "sweeps must be at least 1, got sweeps=0"),
        ({"max_levels": -1}, "max_levels must be at least 0, got max_levels=-1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        PFMG(**settings)


@pytest.mark.ranks(2)
def test_memory_stays_flat(comm):
    """Set-ups leave nothing behind, and systems go with their pattern."""
    system = System(comm, (64, 60), faces(2))
    call = mg.jit(
        lambda values: (
            solve(Matrix(system.pattern, values), system.b, PCG(preconditioner=PFMG())).value
        )
    )

    def many(count):
        for k in range(count):
            call((1 + k) * system.values).block_until_ready()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = many(30)
    assert many(300) - before < 8_000  # kilobytes: a set-up makes about 700
