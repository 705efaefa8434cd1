"""BoxMG on grid stencils: compared with dense solves and with PFMG, and its limits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stencils import CASES, Counter, System, every, faces
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import (
    GMRES,
    PCG,
    PFMG,
    BoxMG,
    Matrix,
    Multigrid,
    Pattern,
    Result,
    default_solver,
    hypre_available,
    solve,
)

SOLVER = PCG(preconditioner=BoxMG())
TIGHT = PCG(rtol=1e-12, preconditioner=BoxMG())


@pytest.mark.cases(
    "line", "one axis", "nine points", "twenty-seven points",
    reason="1 to 3 axes, with and without corners; the tests below solve on planes and boxes",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_solution_is_that_of_the_dense_matrix(comm, case):
    system = System(comm, *CASES[case])
    value = mg.jit(lambda A, b: solve(A, b, TIGHT).value)(system.matrix, system.b)
    close(value, system.solution(), 1e-9)


class Diffusion:
    """-div(kappa grad u) on cells of size 1, with kappa between cells from both of them."""

    def __init__(self, comm, shape, dims=None, anisotropy=1.0, boundary=True):
        self.grid = Grid(shape, (1.0,) * len(shape), comm, dims=dims)
        self.offsets = faces(len(shape))
        self.pattern = Pattern.from_stencil(self.grid, self.offsets)
        self.anisotropy, self.boundary = anisotropy, boundary
        rows = np.random.default_rng(5).standard_normal(self.grid.size)
        self.b = jnp.asarray(rows[self.grid.natural_ids().ravel()])

    def matrix(self, kappa):
        """Of kappa on the whole grid, the same on all ranks."""
        padded = jnp.pad(kappa, 1, mode="edge")
        tile = lambda v, step: v[
            tuple(
                slice(1 + part.start + s, 1 + part.stop + s)
                for part, s in zip(self.grid.slices, step, strict=True)
            )
        ]
        inside = np.pad(np.ones(kappa.shape), 1, constant_values=float(self.boundary))
        here = tile(padded, (0,) * kappa.ndim)
        links, diagonal = [], 0.0
        for offset in self.offsets[1:]:
            weight = self.anisotropy if offset[0] else 1.0
            link = weight * (here + tile(padded, offset)) / 2 * tile(inside, offset)
            links.append(-link)
            diagonal = diagonal + link
        return Matrix.assemble(self.pattern, [diagonal, *links])


def jumps(shape):
    """1 or 1000 in boxes of a quarter of the grid."""
    box = tuple(np.arange(n) * 4 // n for n in shape)
    return 10.0 ** (3 * (sum(np.ix_(*box)) % 2))


TILES = {
    1: {"planes": [(1, 1)], "boxes": [(1, 1, 1)]},
    2: {"planes": [(2, 1), (1, 2)], "boxes": [(1, 1, 2)]},
    3: {"planes": [(3, 1)], "boxes": [(1, 3, 1)]},
    4: {"planes": [(2, 2)], "boxes": [(2, 1, 2)]},
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.thin(4)
def test_iterations_on_tiles_of_several_levels(comm):
    """Few iterations, on distributed levels of odd sizes and of tiles that are not equal."""
    for dims in TILES[comm.size]["planes"]:
        system = Diffusion(comm, (131, 102), dims)
        for kappa, most in ((np.ones((131, 102)), 10), (jumps((131, 102)), 18)):
            found = solve(system.matrix(kappa), system.b, SOLVER)
            assert found.stats["num_steps"] <= most
            assert found.stats["relative_residual"] <= 1e-8
    for dims in TILES[comm.size]["boxes"]:
        system = Diffusion(comm, (19, 23, 26), dims)
        found = solve(system.matrix(np.ones((19, 23, 26))), system.b, SOLVER)
        assert found.stats["num_steps"] <= 14


@pytest.mark.ranks(1, 2)
@pytest.mark.cases("shape0", "shape3", reason="the first and the middle axis, of two and of three")
@pytest.mark.parametrize("shape", [(1, 4000), (4000, 1), (1, 30, 30), (30, 1, 30)])
def test_axes_with_one_cell(comm, shape):
    """Links along an axis with one cell lead past all cells, whose memory is not read."""
    problem = Diffusion(comm, shape, boundary=False)
    A = problem.matrix(jnp.full(shape, 1.0))
    b = A @ problem.b
    found = mg.jit(lambda A, b: solve(A, b, SOLVER))(A, b)
    assert found.result == Result.SUCCESSFUL
    close(A @ found.value, b, 1e-6)


def test_anisotropy_along_the_axes(comm):
    """Axes with weak links are not coarsened."""
    for anisotropy in (1e-3, 1e3):
        system = Diffusion(comm, (70, 90), anisotropy=anisotropy)
        found = solve(system.matrix(np.ones((70, 90))), system.b, SOLVER)
        assert found.stats["num_steps"] <= 14


@pytest.mark.ranks(1, 2, 3)
def test_a_singular_matrix_with_a_right_hand_side_in_its_range(comm):
    system = Diffusion(comm, (40, 31), boundary=False)
    b = system.b - mg.allreduce(jnp.sum(system.b)) / system.grid.size
    found = solve(system.matrix(jumps((40, 31))), b, SOLVER)
    assert found.stats["relative_residual"] <= 1e-8


@pytest.mark.ranks(1, 2, 3, 4)
def test_derivatives(comm):
    """With a level that is distributed, and against PFMG."""
    system = Diffusion(comm, (72, 64))
    start = jnp.asarray(jumps((72, 64)))

    def value(log_kappa, solver):
        kappa = start * jnp.exp(log_kappa)
        u = solve(system.matrix(kappa), system.b, solver).value
        return mg.allreduce(jnp.sum(u**2)) / 2

    zero = jnp.zeros((72, 64))
    loss, gradient = mg.jit(mg.value_and_grad(lambda k: value(k, TIGHT)))(zero)
    if hypre_available():
        pfmg = PCG(rtol=1e-12, preconditioner=PFMG())
        other, expected = mg.jit(mg.value_and_grad(lambda k: value(k, pfmg)))(zero)
        close(loss, other, 1e-9)
        close(gradient, expected, 1e-7)
    f = mg.jit(lambda k: solve(system.matrix(start * jnp.exp(k)), system.b, TIGHT).value)
    assert mg.dot_test(f, zero).error < 1e-8


@pytest.mark.full("test_derivatives has the gradient of PFMG, which has a Taylor test")
@pytest.mark.ranks(1, 2)
def test_taylor(comm):
    system = System(comm, (24, 20), faces(2))
    shift = jnp.asarray(np.random.default_rng(comm.rank).uniform(0.5, 2, system.grid.local_shape))

    def f(shift):
        """Along symmetric changes: a diagonal one."""
        A = Matrix.assemble(system.pattern, system.tile(system.whole).at[0].add(shift))
        return jnp.sum(jnp.sin(solve(A, system.b, TIGHT).value))

    mg.taylor_test(mg.jit(f), shift)


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
    for factor in (2.0, 3.0, 2.0):
        close(call(factor * system.values, system.b)[0], value / factor**2)
    assert count() == (3, 6)
    on_one_rank = system.tile(system.whole).at[0].add(1.0 if comm.rank == 0 else 0.0)
    call(system.pattern.assemble(on_one_rank), system.b)
    assert count() == (1, 2)


@pytest.mark.ranks(1, 2)
def test_set_ups_write_over_the_memory_of_earlier_ones(comm):
    """Bits do not depend on the values before, even if they coarsened other axes."""
    shape = (72, 64)
    isotropic, anisotropic = Diffusion(comm, shape), Diffusion(comm, shape, anisotropy=1e-3)
    b, ones = isotropic.b, np.ones(shape)
    call = mg.jit(lambda v: solve(Matrix(isotropic.pattern, v), b, SOLVER).value)
    first = call(isotropic.matrix(ones).values)
    call(anisotropic.matrix(ones).values)
    call(isotropic.matrix(jumps(shape)).values)
    np.testing.assert_array_equal(call(isotropic.matrix(ones).values), first)


def test_a_stale_hierarchy_is_kept_for_nearby_values(comm):
    system = System(comm, (16, 15), faces(2))
    solver = PCG(rtol=1e-12, preconditioner=BoxMG(reuse="stale"))
    call = mg.jit(lambda values: solve(Matrix(system.pattern, values), system.b, solver).value)
    expected, count = system.solution(), Counter()
    for factor in (1.0, 1.1, 0.9):
        close(call(factor * system.values), expected / factor, 1e-9)
    assert count() == (1, 3)


def test_a_refused_stale_hierarchy_costs_no_second_solve(comm):
    shape = (48, 40)
    problem = Diffusion(comm, shape)
    smooth, jumping = problem.matrix(jnp.ones(shape)), problem.matrix(jumps(shape))
    fresh = int(solve(jumping, problem.b, SOLVER).stats["num_steps"])
    stale = PCG(preconditioner=BoxMG(reuse="stale"))
    call = mg.jit(lambda v: solve(Matrix(problem.pattern, v), problem.b, stale).stats["num_steps"])
    limit = 2 * int(call(smooth.values)) + 5
    assert limit < int(call(jumping.values)) <= limit + fresh + 2


@pytest.mark.ranks(1, 2)
def test_several_right_hand_sides_first_guesses_and_scales(comm):
    system = System(comm, (12, 13), faces(2))
    expected = system.solution()
    both = solve(system.matrix, jnp.stack([system.b, 2 * system.b], 1), TIGHT).value
    close(both, np.stack([expected, 2 * expected], 1), 1e-9)
    again = solve(system.matrix, system.b, TIGHT, x0=jnp.asarray(expected) * (1 + 1e-9))
    assert again.stats["num_steps"] <= 4
    for scale in (1e-60, 1e60):  # beyond the range of single precision
        A = Matrix(system.pattern, scale * system.values)
        close(solve(A, scale * system.b, TIGHT).value, expected, 1e-9)
    nothing = solve(system.matrix, 0 * system.b, TIGHT)
    assert nothing.result == 0
    assert not np.any(nothing.value)


@pytest.mark.ranks(1, 2, 3, 4)
def test_asymmetry_is_found_wherever_it_is(comm):
    """In a tile, and across the border of two."""
    system = System(comm, (8, 6), faces(2), dims=(comm.size, 1))
    call = mg.jit(lambda A: solve(A, system.b, TIGHT, throw=False).result)
    for cell, offset in itertools.product([(1, 1), (3, 2), (5, 4)], [(1, 0), (0, -1)]):
        changed = system.whole.copy()
        changed[faces(2).index(offset)][cell] *= 1 + 1e-6
        A = Matrix.assemble(system.pattern, system.tile(changed))
        assert call(A) == Result.NOT_SYMMETRIC
        assert call(system.matrix) == 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="the matrix is not symmetric"):
        solve(A, system.b, TIGHT).value.block_until_ready()
    one_way = System(comm, (8, 6), [(0, 0), (0, 1)])
    result = solve(one_way.matrix, one_way.b, TIGHT, throw=False).result
    assert result == Result.NOT_SYMMETRIC


@pytest.mark.ranks(1, 2)
def test_failures_are_the_same_on_every_rank(comm):
    system = Diffusion(comm, (32, 27))
    A = system.matrix(np.ones((32, 27)))
    shifted = A.values - 2 * (np.arange(A.values.size) < system.grid.n_local)  # the diagonal
    with pytest.raises(jax.errors.JaxRuntimeError, match="not positive definite: PCG has found"):
        solve(Matrix(system.pattern, shifted), system.b, SOLVER).value.block_until_ready()
    last = comm.size - 1
    spoilt = system.b.at[0].set(np.nan if comm.rank == last else 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"holds such a value on rank {last}"):
        solve(A, spoilt, SOLVER).value.block_until_ready()
    few = PCG(max_steps=2, preconditioner=BoxMG())
    with pytest.raises(jax.errors.JaxRuntimeError, match="PCG with BoxMG did not converge"):
        solve(A, system.b, few).value.block_until_ready()
    assert solve(A, system.b, few, throw=False).result == Result.MAX_STEPS_REACHED


def test_rejects_what_it_cannot_take(comm):
    system = System(comm, (9, 8), every(2))
    with pytest.raises(TypeError, match=r"GMRES: BoxMG works in PCG, for.*PFMG"):
        solve(system.matrix, system.b, GMRES(preconditioner=BoxMG()))
    with pytest.raises(TypeError, match=r"the cycle must be BoomerAMG"):
        Multigrid(BoxMG())
    with pytest.raises(TypeError, match="BoxMG solves in float64"):
        A = Matrix(system.pattern, system.values.astype("float32"))
        solve(A, system.b.astype("float32"), TIGHT)
    with pytest.raises(ValueError, match=r"BoxMG cannot take this pattern: .*from_stencil"):
        other = grid_system(comm)
        solve(other.matrix, other.b, TIGHT)
    far = System(comm, (9, 8), [(0, 0), (0, 2), (0, -2)])
    with pytest.raises(ValueError, match=r"the stencil reaches \(0, 2\)"):
        solve(far.matrix, far.b, TIGHT)
    bare = Pattern.from_stencil(far.grid, [(0, 1)])
    with pytest.raises(ValueError, match="BoxMG needs a diagonal entry in every row"):
        solve(Matrix(bare, jnp.ones(bare.nnz)), far.b, TIGHT)
    with pytest.raises(ValueError, match="reuse must be one of"):
        BoxMG(reuse="never")  # type: ignore[arg-type]


def test_defaults_of_grid_problems(comm):
    system = System(comm, (12, 13), faces(2))
    assert default_solver(1e-6, system.pattern) == PCG(rtol=1e-6, preconditioner=BoxMG())
    solve(system.matrix, system.b)
    assert list(system.pattern.solver_systems) == [BoxMG()]
    far = Pattern.from_stencil(system.grid, [(0, 0), (0, 2)])
    assert default_solver(pattern=far) == default_solver()
    box = Pattern.from_stencil(Grid((4, 4, 4), (1.0,) * 3, comm), faces(3))
    expected = PFMG() if hypre_available() else BoxMG()
    assert default_solver(pattern=box).preconditioner == expected
