import gc
import pathlib
import resource

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad.runtime.processor import hypre_built_with
from mpigrad.sparse import (
    GMRES,
    PCG,
    BoomerAMG,
    Jacobi,
    Matrix,
    Pattern,
    Result,
    default_solver,
    hypre_available,
    local_range,
    solve,
    solver_seconds,
    why_no_hypre,
)
from mpigrad.sparse.solvers import libraries as hypre_library

needs_hypre = pytest.mark.skipif(not hypre_available(), reason="no hypre")


def _loss(system, solver):
    return lambda values, b: jnp.sum(solve(Matrix(system.pattern, values), b, solver).value ** 2)


class Counter:
    """Set-ups and solves since it was made or asked."""

    def __init__(self):
        self.before = solver_seconds()

    def __call__(self):
        now, before = solver_seconds(), self.before
        self.before = now
        return now["setups"] - before["setups"], now["solves"] - before["solves"]


@needs_hypre
@pytest.mark.cases("jit", reason="outside jit the same primitives run")
@pytest.mark.parametrize("jit", [lambda f: f, mg.jit], ids=["eager", "jit"])
def test_the_adjoint_does_no_set_up(comm, jit):
    system = grid_system(comm)
    call = jit(mg.value_and_grad(_loss(system, PCG()), argnums=(0, 1)))
    count = Counter()
    call(system.values, system.b)
    assert count() == (1, 2)
    call(system.values, 2 * system.b)  # same matrix
    assert count() == (0, 2)
    call(2 * system.values, system.b)
    assert count() == (1, 2)
    spent = solver_seconds()
    assert spent["setup"] > 0 < spent["solve"]


@needs_hypre
@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(PCG(), id="pcg"),
        pytest.param(
            GMRES(), id="gmres", marks=pytest.mark.full("PCG runs the same code of values' ids")
        ),
    ],
)
def test_an_adjoint_solves_with_the_values_of_its_own_run(comm, solver):
    """The id of the values shows that they are the latest ones, or that they no longer are."""
    system = grid_system(comm)
    f = _loss(system, solver)
    scaled = [(1 + k) * system.values for k in range(3)]
    gradient, compiled = mg.jit(mg.grad(f)), mg.jit(f)
    expected = [gradient(values, system.b) for values in scaled]
    backs = [mg.vjp(compiled, values, system.b)[1] for values in scaled]
    bad = Matrix(system.pattern, jnp.nan * system.values)
    assert solve(bad, system.b, solver, throw=False).result == Result.NOT_FINITE
    for k in (2, 0, 1, 1):
        close(backs[k](jnp.ones(()))[0], expected[k], 1e-6)
    # One of a batch: a matrix for each, told of none.
    each = mg.vmap(mg.grad(f), in_axes=(0, None))(jnp.stack(scaled), system.b)
    close(each, jnp.stack(expected), 1e-6)


@needs_hypre
def test_only_some_ranks_have_a_start(comm):
    system = grid_system(comm)
    x = solve(system.matrix, system.b, PCG(rtol=1e-12)).value
    starts = (x, None) if comm.rank % 2 == 0 else (None, x)
    for x0 in starts:
        close(solve(system.matrix, system.b, PCG(rtol=1e-10), x0=x0).value, x, 1e-8)


@needs_hypre
def test_one_rank_with_new_values_is_a_new_matrix(comm):
    system = grid_system(comm)
    call = mg.jit(lambda values: solve(Matrix(system.pattern, values), system.b, PCG()).value)
    call(system.values)
    on_diagonal = system.rows[system.entries] == system.columns[system.entries]
    changed = system.values + (on_diagonal if comm.rank == 0 else 0)
    count = Counter()
    x = call(changed)
    assert count() == (1, 1)
    close(Matrix(system.pattern, changed) @ x, system.b, 1e-6)


@needs_hypre
def test_batches_keep_the_hierarchy(comm):
    system = grid_system(comm)
    batch = jnp.stack([system.b, 2 * system.b, 3 * system.b])
    loss = _loss(system, PCG(rtol=1e-12))
    call = mg.jit(mg.vmap(lambda b: mg.grad(loss, argnums=1)(system.values, b)))
    count = Counter()
    got = call(batch)
    assert count() == (1, 6)
    close(got, jnp.arange(1.0, 4.0)[:, None] * got[0], 1e-9)


@needs_hypre
def test_settings_have_hierarchies_of_their_own(comm):
    system = grid_system(comm)
    plain, chebyshev = PCG(), PCG(preconditioner=BoomerAMG(relaxation="chebyshev"))
    count = Counter()
    for solver in (plain, chebyshev, plain, PCG(rtol=1e-4), chebyshev):
        solve(system.matrix, system.b, solver)
    assert count() == (2, 5)
    assert solve(system.matrix, system.b, plain).stats["setups"] == 1


@needs_hypre
@pytest.mark.cases(
    "PMIS *", "* multipass *", "* chebyshev *", "* 3", reason="one of each kind of setting"
)
@pytest.mark.parametrize(
    "amg",
    [
        *(BoomerAMG(coarsening=name) for name in ("HMIS", "PMIS", "Falgout", "CLJP")),
        *(
            BoomerAMG(relaxation=name)
            for name in ("l1-jacobi", "chebyshev", "symmetric-gauss-seidel")
        ),
        *(BoomerAMG(interpolation=name) for name in ("standard", "classical", "multipass")),
        BoomerAMG(aggressive_levels=1, max_row_elements=0, max_levels=3, strong_threshold=0.5),
    ],
    ids=lambda amg: f"{amg.coarsening} {amg.interpolation} {amg.relaxation} {amg.max_levels}",
)
def test_every_setting_agrees_with_own_cg(comm, amg):
    system = grid_system(comm, (16, 15))
    got = solve(system.matrix, system.b, PCG(rtol=1e-12, preconditioner=amg))
    close(
        got.value,
        solve(system.matrix, system.b, PCG(rtol=1e-12, preconditioner=Jacobi())).value,
        1e-9,
    )


@needs_hypre
def test_multigrid_needs_few_iterations(comm):
    system = grid_system(comm, (60, 50))
    assert solve(system.matrix, system.b, PCG()).stats["num_steps"] <= 15


@needs_hypre
def test_patterns_come_and_go(comm):
    for k in range(3):
        system = grid_system(comm, (4 + k, 3))
        x = mg.jit(lambda A, b: solve(A, b, PCG(rtol=1e-12)).value)(system.matrix, system.b)
        close(system.matrix @ x, system.b, 1e-9)


@pytest.mark.full("it clears JAX's caches, so that the tests after it compile again")
@needs_hypre
@pytest.mark.ranks(2)
def test_systems_are_freed_with_their_pattern(comm):
    """Compiled programs keep their patterns. Without programs, the patterns are freed."""
    jax.clear_caches()
    gc.collect()
    before = solver_seconds()["systems"]

    def use():
        system = grid_system(comm)
        solve(system.matrix, system.b, PCG())
        mg.jit(mg.grad(lambda b: jnp.sum(solve(system.matrix, b, GMRES()).value)))(system.b)

    for _ in range(2):
        use()
    assert solver_seconds()["systems"] == before + 4  # of the matrices and of their transposes
    jax.clear_caches()
    gc.collect()
    assert solver_seconds()["systems"] == before


@needs_hypre
@pytest.mark.ranks(1)
def test_memory_stays_flat_over_two_thousand_solves(comm):
    """Each call sets up a hierarchy of its own for the matrix and one for its transpose."""
    system = grid_system(comm)
    call = mg.jit(mg.grad(_loss(system, GMRES()), argnums=(0, 1)))
    megabytes = []
    for k in range(1001):
        jax.block_until_ready(call((1 + 1e-3 * k) * system.values, system.b))
        if k in (200, 1000):
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            megabytes.append(pages * resource.getpagesize() / 2**20)
    assert megabytes[1] - megabytes[0] < 2


@needs_hypre
def test_rejects_single_precision(comm):
    system = grid_system(comm)
    A = Matrix(system.pattern, system.values.astype("float32"))
    with pytest.raises(TypeError, match="PCG: hypre solves in float64, got float32"):
        solve(A, system.b.astype("float32"), PCG())
    x = solve(A, system.b.astype("float32"), PCG(rtol=1e-5, preconditioner=Jacobi())).value
    assert x.dtype == jnp.float32
    close(A @ x, system.b, 1e-3)
    with pytest.raises(TypeError, match="it solves real systems"):
        solve(Matrix(system.pattern, system.values + 0j), system.b, PCG(preconditioner=Jacobi()))


def test_rejects_sizes_beyond_hypre_integers():
    hypre_library.check_size(2**31 - 1, 10, 32)
    hypre_library.check_size(2**40, 10, 64)
    with pytest.raises(ValueError, match="2147483648 rows are more than this hypre can number"):
        hypre_library.check_size(2**31, 10, 32)
    with pytest.raises(ValueError, match="entries on one rank"):
        hypre_library.check_size(10, 2**31, 64)


@pytest.mark.parametrize(
    ("built_with", "vendor", "version", "runs"),
    [
        ("Open MPI 4.1.4", "Open MPI", (4, 1, 6), True),
        ("Open MPI 4.1.4", "Open MPI", (5, 0, 11), False),
        ("Open MPI 4.1.4", "MPICH", (4, 3, 0), False),
        ("MPICH 4.0.2", "MPICH", (4, 0, 2), True),
        ("an unknown MPI", "Open MPI", (4, 1, 4), False),
        ("any MPI", "MPICH", (5, 0, 2), True),
    ],
)
def test_rejects_another_mpi_and_names_both(built_with, vendor, version, runs):
    problem = hypre_library._mpi_mismatch(built_with, vendor, version)
    assert (problem == "") == runs
    if not runs:
        assert built_with in problem
        assert f"{vendor} {version[0]}" in problem


@needs_hypre
def test_module_names_the_mpi_it_was_built_with():
    path = next(
        p for d in mg.__path__ if (p := pathlib.Path(d, "_native", "libmpigrad_hypre.so")).exists()
    )
    vendor, version = MPI.get_vendor()
    own = f"{vendor} {'.'.join(map(str, version))}"
    assert hypre_built_with(path) in ("any MPI", own)
    assert hypre_library.hypre_version().startswith("hypre ")
    assert why_no_hypre() == ""


def test_switched_off(monkeypatch):
    monkeypatch.setenv("MPIGRAD_HYPRE", "0")
    lib, reason = hypre_library._load.__wrapped__()
    assert lib is None
    assert "MPIGRAD_HYPRE=0" in reason


def test_not_built(monkeypatch, tmp_path):
    monkeypatch.delenv("MPIGRAD_HYPRE", raising=False)
    monkeypatch.setattr(mg, "__path__", [str(tmp_path)])
    lib, reason = hypre_library._load.__wrapped__()
    assert lib is None
    assert "HYPRE_SOURCE=" in reason


def test_built_for_another_mpi(monkeypatch, tmp_path):
    """Such a module is not even loaded: it need not be a library."""
    monkeypatch.delenv("MPIGRAD_HYPRE", raising=False)
    (tmp_path / "_native").mkdir()
    marker = b"\x7fELF mpigrad-hypre-built-with:Other MPI 9.9\0more"
    (tmp_path / "_native" / "libmpigrad_hypre.so").write_bytes(marker)
    monkeypatch.setattr(mg, "__path__", [str(tmp_path)])
    lib, reason = hypre_library._load.__wrapped__()
    assert lib is None
    assert "built with Other MPI 9.9, but mpi4py runs on" in reason


def test_without_hypre_the_own_solver_takes_over(comm, monkeypatch):
    monkeypatch.setattr(hypre_library, "_load", lambda: (None, "it is not there."))
    system = grid_system(comm)
    assert default_solver() == PCG(max_steps=10_000, preconditioner=Jacobi())
    close(system.matrix @ solve(system.matrix, system.b).value, system.b, 1e-6)
    single = jax.tree.map(
        lambda v: v.astype(jnp.float32), system.matrix
    )  # multigrid is for float64
    found = solve(single, system.b.astype(jnp.float32), throw=False).value
    close(system.matrix @ found, system.b, 1e-4)
    by_boxmg = solver_seconds()
    with pytest.raises(RuntimeError, match=r"needs hypre: it is not there\. .*PCG\(precond"):
        solve(system.matrix, system.b, PCG())
    assert solver_seconds() == by_boxmg
    assert hypre_library.hypre_version() == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coarsening": "best"}, "coarsening must be one of HMIS, PMIS.*got coarsening='best'"),
        ({"interpolation": 6}, "got interpolation=6"),
        ({"relaxation": "sor"}, "got relaxation='sor'"),
        ({"strong_threshold": 2}, "must lie between 0 and 1, got strong_threshold=2"),
        ({"reuse": "always"}, "must be one of equal, stale, got reuse='always'"),
        ({"max_levels": 0}, "max_levels must be at least 1, got max_levels=0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        BoomerAMG(**settings)


@needs_hypre
def test_rows_have_numbers_past_32_bits():
    """The same system, with rows numbered from beyond 2**31."""
    if hypre_library.library().mpigrad_hypre_bigint_bits() < 64:
        pytest.skip("this hypre numbers rows with 32 bits")
    n = 40
    own = local_range(n)
    rows = jnp.repeat(jnp.arange(own.start, own.stop), 3)
    columns = rows + jnp.tile(jnp.array([-1, 0, 1]), len(own))
    inside = (columns >= 0) & (columns < n)
    values = jnp.tile(jnp.array([-1.0, 2.5, -1.0]), len(own))[inside]
    near, far = (Pattern.from_coo(rows[inside], columns[inside], len(own)) for _ in range(2))
    far.offset += 2**31 + 12345
    far.columns += 2**31 + 12345
    solver = PCG(preconditioner=BoomerAMG())
    x, y = (solve(Matrix(p, values), jnp.ones(len(own)), solver).value for p in (near, far))
    assert jnp.array_equal(x, y)
