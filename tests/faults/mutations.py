"""One-line faults in a copy of src/, each of which a named test must catch.

    python tests/faults/mutations.py            all of them
    python tests/faults/mutations.py 3 17       some, by their numbers

A mutation that no test catches shows a gap: write the test, and name it here.
"""

# ruff: noqa: E501 (lines of the sources)

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutations"
LIMIT = 240.0  # seconds of a test. A mutation that makes it hang is caught
# The import of an editable package finds ROOT/src before PYTHONPATH.
CUSTOM = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
"""


class Mutation(NamedTuple):
    """A line to change, and the test that fails then, on this many ranks (0: it starts MPI)."""

    file: str
    old: str
    new: str
    ranks: int
    test: str


SAVES, OWNERS = "tests/checkpoint/test_checkpoint.py::", "tests/checkpoint/test_owner.py::"
PARSERS, FAULTS = "tests/faults/test_parsers.py::", "tests/faults/test_faults.py::"
GRAPH, REDUCTIONS = "tests/guard/test_wait_graph.py::", "tests/operations/test_reductions.py::"
SHARED = "tests/compilation/test_shared_programs.py::"
VALUES = "tests/operations/test_operations.py::test_values_and_derivatives"
KRYLOV, SOLVE = "tests/sparse/solvers/test_krylov.py::", "tests/sparse/solvers/test_solve.py::"
OTHERS = "tests/sparse/solvers/test_nonsymmetric.py::"
OPERATOR = "tests/sparse/solvers/test_operator_solve.py::"
WAVES, DENSITY = "tests/waves/", "tests/waves/acoustic/test_acoustic_density.py::"

MUTATIONS = [
    # ---- saves ----
    Mutation("checkpoint/store.py", "[-self.keep :]", "[1 - self.keep :]",
             2, SAVES + "test_saves_that_cannot_be_read_are_neither_skipped_nor_removed"),
    Mutation("checkpoint/manifest.py", "!= expected.sha256:", '== "":',
             2, SAVES + "test_damaged_saves_are_rejected_by_name"),
    Mutation("checkpoint/manifest.py", "foreign = line !=", "foreign = False and line !=",
             2, SAVES + "test_files_of_ranks_are_not_exchanged"),
    Mutation("checkpoint/manifest.py", 'if _digest(body) != whole.get("sha256"):',
             'if not whole.get("sha256"):', 2, SAVES + "test_damaged_saves_are_rejected_by_name"),
    Mutation("checkpoint/manifest.py",
             "except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as",
             "except OSError as",
             2, SAVES + "test_saves_that_cannot_be_read_are_neither_skipped_nor_removed"),
    Mutation("checkpoint/manifest.py", "len(given) == ranks and cover_once(given, tuple(shape))",
             "len(given) == ranks",
             1, PARSERS + "test_boxes_with_a_gap_and_an_overlap_are_rejected"),
    Mutation("checkpoint/manifest.py", "valid = file.name == file_name(rank) and",
             "valid = bool(file.name) and", 1, PARSERS + "test_a_manifest_is_not_believed"),
    Mutation("checkpoint/store.py", "(lives or (lives is None and self._owns))", "lives is None",
             2, OWNERS + "test_two_jobs_that_live_do_not_share_a_directory"),
    Mutation("checkpoint/store.py", "return lives is False or (", "return lives is not None or (",
             2, OWNERS + "test_only_what_nobody_writes_is_removed"),
    Mutation("checkpoint/store.py", "for number in call_on_root(self.comm, self._newest_first):",
             "for number in self._newest_first():",
             0, FAULTS + "test_twenty_faults"),
    Mutation("checkpoint/layout.py", "boxes[1:, 0, first.axis] = ends[:-1]",
             "boxes[1:, 0, first.axis] = ends[1:]",
             3, SAVES + "test_everything_comes_back_bit_for_bit_on_any_ranks"),
    Mutation("checkpoint/store.py", "nobody = False if self._follows_a_dead_owner else None",
             "nobody = None", 2, OWNERS + "test_a_save_without_an_owner_goes_if_the_last_owner_has_died"),
    # ---- the guard ----
    Mutation("guard/wait_graph.py", 'if int(entry["sequence"]) < number:',
             'if int(entry["sequence"]) <= number:',
             1, GRAPH + "test_different_operation_root_dtype_shape_or_count"),
    Mutation("guard/wait_graph.py", 'int(channel["sent"]) < int(part["ordinal"])',
             'int(channel["sent"]) <= int(part["ordinal"])',
             1, GRAPH + "test_a_message_on_its_way"),
    Mutation("guard/wait_graph.py", 'if int(x["dtype"]) != int(y["dtype"]):', "if False:",
             1, GRAPH + "test_different_operation_root_dtype_shape_or_count"),
    Mutation("guard/wait_graph.py", "if r not in waits and not gone(r)}", "if r not in waits}",
             1, GRAPH + "test_a_rank_that_has_ended_is_a_deadlock"),
    Mutation("guard/wait_graph.py", 'channel["posted"]) >= int(part["ordinal"])',
             'channel["posted"]) > int(part["ordinal"])', 1, GRAPH + "test_a_ring_is_not_a_deadlock"),
    Mutation("guard/watchdog.py", 'in {"", "Z", "X"}', 'in {"", "X"}',
             2, "tests/guard/test_watchdog.py::test_a_zombie_has_died"),
    Mutation("guard/lifecycle.py", 'int(channel["sent"]) - received)',
             'int(channel["sent"]) - received - 1)',
             0, "tests/guard/test_unreceived.py::test_a_message_that_nobody_receives_is_an_error"),
    # ---- compiled programs ----
    Mutation("compilation/program_store.py", "digest == _digest(key, content)", "len(digest) > 0",
             1, SHARED + "test_programs_are_published_and_read"),
    Mutation("compilation/compiler.py", "<= (_BLIND if used is None else _STALLED)", "< 1e9",
             1, SHARED + "test_a_rank_that_works_is_awaited_and_one_that_is_stopped_is_not"),
    Mutation("compilation/compiler.py", "0 if value.is_splat else 8 * len(value)", "0",
             1, SHARED + "test_arrays_that_a_program_closes_over_are_counted"),
    # ---- operations ----
    Mutation("operations/collectives.py", "ct, a, backward=1 - backward, **params\n    )[0],\n)\nexscan_p",
             "ct, a, backward=backward, **params\n    )[0],\n)\nexscan_p", 2, VALUES + "[scan-jit]"),
    Mutation("operations/reduce_operators.py", "rows[:own], rows[own + 1 :]", "rows[:own], rows[own:]",
             3, REDUCTIONS + "test_product_with_zeros"),
    Mutation("operations/collectives.py", "is_extremum.astype(x.dtype) / ties.astype(x.dtype)",
             "is_extremum.astype(x.dtype)", 3, REDUCTIONS + "test_ties_share_the_derivative"),
    Mutation("operations/collectives.py", "return fold(op, rows[: comm.rank])",
             "return fold(op, rows[: comm.rank + 1])", 2, VALUES + "[exscan not of sums-jit]"),
    Mutation("operations/sendrecv.py", 'sendtag=p["recvtag"], source=p["dest"], recvtag=p["sendtag"]',
             'sendtag=p["sendtag"], source=p["dest"], recvtag=p["recvtag"]',
             3, VALUES + "[sendrecv ring with tags-jit]"),
    Mutation("operations/v_collectives.py", "v_p.bind(ct, a, sendcounts=recvcounts, recvcounts=sendcounts",
             "v_p.bind(ct, a, sendcounts=sendcounts, recvcounts=recvcounts",
             2, VALUES + "[neighbor_alltoallv-jit]"),
    Mutation("operations/one_sided.py", "clear=clear + put,", "clear=clear,",
             2, VALUES + "[one_sided put and get-jit]"),
    # ---- solvers ----
    Mutation("sparse/solvers/krylov.py", "curvature = zaz - beta * rz / i.alpha",
             "curvature = zaz - rz / i.alpha",
             2, KRYLOV + "test_all_methods_from_a_first_guess"),
    Mutation("sparse/solvers/krylov.py",
             "state = jnp.where(i.check, s.verdict(rr, goal, i.last, i.steps), going)",
             "state = jnp.where(rr <= goal, Result.SUCCESSFUL, going)",
             2, KRYLOV + "test_single_precision_ends_where_rounding_does"),
    Mutation("sparse/solvers/krylov.py", "w -= again @ i.basis", "w -= 0 * again @ i.basis",
             2, KRYLOV + "test_a_basis_stays_orthogonal"),
    Mutation("sparse/solvers/krylov.py", "(steps >= s.max_steps) | broken",
             "(steps >= s.max_steps)", 2, KRYLOV + "test_breakdowns_end"),
    Mutation("sparse/solvers/krylov.py", "differs = defect > jnp.finfo(size.dtype).eps * product",
             "differs = defect < 0", 2, OPERATOR + "test_faults_are_errors_on_all_ranks"),
    Mutation("sparse/solvers/operator_solve.py", "rhs = rhs - eval_jaxpr(moved",
             "rhs = rhs + eval_jaxpr(moved",
             2, OPERATOR + "test_value_gradient_and_hessian_vector_product"),
    Mutation("sparse/solvers/solve.py", "rhs = -moved if rhs is None else rhs - moved",
             "rhs = -moved if rhs is None else rhs + moved",
             2, SOLVE + "test_hessian_times_vector"),
    Mutation("sparse/solvers/solve.py", "values = transpose_values(pattern, values.T).T",
             "values = values + 0 * transpose_values(pattern, values.T).T",
             2, OTHERS + "test_dot_and_transposed_solves"),
    # ---- the grid ----
    Mutation("grid/particles.py", "i * most + number", "i + number",
             3, "tests/grid/test_particles.py::test_particles_arrive_at_their_owners_with_all_their_arrays"),
    Mutation("grid/particles.py", "free = jnp.argsort(stays)", "free = jnp.argsort(~stays)",
             3, "tests/grid/test_particles.py::test_particles_arrive_at_their_owners_with_all_their_arrays"),
    Mutation("grid/particles.py", "rank = rank * grid.dims[axis] + tile",
             "rank = rank + grid.dims[axis] * tile",
             4, "tests/grid/test_particles.py::test_positions_belong_to_the_tile_around_them"),
    Mutation("grid/halo_exchange.py", "steps = reversed(list(self.tile_ranks))",
             "steps = list(self.tile_ranks)",
             2, "tests/grid/test_halo_exchange.py::test_periodic_axes_with_any_number_of_tiles"),
    Mutation("grid/stencil.py", "slice(k - before - after - 1, k), slice(k - after - 1, k)",
             "slice(k - before - after - 1, k), slice(k - after - 2, k - 1)",
             2, "tests/grid/test_apply_stencil.py::test_the_same_as_on_exchanged_tiles"),
    # ---- multigrid and matrices ----
    Mutation("sparse/solvers/boxmg.py", "(tuple(-s for s in offset) for offset in offsets) if o not in",
             "(tuple(s for s in offset) for offset in offsets) if o not in",
             2, "tests/sparse/solvers/test_boxmg.py::test_asymmetry_is_found_wherever_it_is"),
    Mutation("sparse/solvers/boxmg.py", 'preconditioner.reuse == "stale"', 'preconditioner.reuse != "stale"',
             2, "tests/sparse/solvers/test_boxmg.py::test_a_stale_hierarchy_is_kept_for_nearby_values"),
    Mutation("sparse/matrix/products.py", "TrilinearContraction.selection(b.order[going], b.nnz)",
             "TrilinearContraction.selection(going, b.nnz)",
             2, "tests/sparse/matrix/test_product.py::test_derivatives"),
    Mutation("sparse/matrix/matrix.py", "b - eliminated.reshape(b.shape)", "b + eliminated.reshape(b.shape)",
             2, "tests/sparse/matrix/test_boundary.py::test_prescribes_the_solution"),
    Mutation("sparse/matrix/products.py", "self.recvcounts, self.sendcounts, send, source)",
             "self.sendcounts, self.recvcounts, send, source)",
             2, "tests/sparse/matrix/test_transpose.py::test_any_matrix"),
    Mutation("sparse/matrix/products.py", "return plan.pattern, left + right if sign > 0 else left - right",
             "return plan.pattern, left + right",
             2, "tests/sparse/matrix/test_addition.py::test_sums_and_differences"),
    # ---- finite elements ----
    Mutation("fem/numbering.py", "combine.at(result, self._send_index, received)",
             "result[self._send_index] = combine(result[self._send_index], received)",
             3, "tests/fem/test_meshes.py::test_ghosts_are_read_and_added"),
    Mutation("fem/observation.py", "np.flatnonzero(best & (own_ids == lowest))", "np.flatnonzero(best)",
             3, "tests/fem/test_observation.py::test_cells_and_values_are_those_of_one_rank"),
    Mutation("fem/integrals.py", '"eqji,ej->eqi", inverses', '"eqij,ej->eqi", inverses',
             2, "tests/fem/test_fem_equations.py::test_forms_on_some_cells_add_up"),
    Mutation("fem/integrals.py", '"eqciC,eqai,eqb->eacbC"', '"eqciC,eqbi,eqa->eacbC"',
             3, "tests/fem/test_fem_equations.py::test_residual_and_jacobian_over_all_ranks"),
    Mutation("fem/stepping.py", "(1 - theta) * (before or equation).residual(u)",
             "(1 - theta) * equation.residual(u)",
             2, "tests/fem/test_stepping.py::test_order_of_the_theta_scheme"),
    # ---- transforms ----
    Mutation("fft/local.py", "_weights(lengths, 2.0, ct.dtype)", "_weights(lengths, 1.0, ct.dtype)",
             2, "tests/fft/test_fourier.py::test_transforms_are_transposed_exactly"),
    Mutation("fft/transforms.py", '"ortho": 0.5,', '"ortho": -0.5,',
             2, "tests/fft/test_fourier.py::test_axes_and_norms_are_those_of_numpy[ortho]"),
    Mutation("fft/local.py", "back = tuple(int(i) for i in np.argsort(order))", "back = order",
             2, "tests/fft/test_fourier.py::test_transforms_are_transposed_exactly"),
    # ---- waves ----
    Mutation("waves/absorbing.py", "(behind, place - tile.grid.shape[axis])",
             "(behind, place - tile.shape[axis])",
             1, WAVES + "test_interpolation.py::test_layers_begin_at_the_model_and_grow"),
    Mutation("waves/survey.py", "(local < tile.shape[axis])", "(local <= tile.shape[axis])",
             2, WAVES + "test_interpolation.py::test_points_of_a_smooth_field"),
    Mutation("waves/arguments.py", '"precision of the history": history.precision,',
             '"precision of the history": None,',
             2, WAVES + "test_wave_history.py::test_ranks_with_different_histories"),
    Mutation("waves/relaxation.py", "(size + real) / (2 * size**2)", "(size + real) / (2 * size)",
             1, WAVES + "test_relaxation.py::test_velocities"),
    Mutation("waves/acoustic/reference.py", "line = _cells(line, other, reach, tile.shape[other])",
             "line = _cells(line, other, 0, tile.shape[other])",
             1, DENSITY + "test_the_largest_step_is_safe_for_any_contrast"),
    Mutation("waves/absorbing.py", "0 if face.step < 0 else f.shape[face.axis - axes] - width,",
             "0,", 2, DENSITY + "test_values_agree_with_one_rank"),
]  # fmt: skip


def prepare() -> dict[str, str]:
    """Copy src/ and return the environment in which Python imports the copy."""
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "src", BUILD / "src", ignore=shutil.ignore_patterns("__pycache__"))
    native = pathlib.Path(sysconfig.get_path("platlib")) / "mpigrad" / "_native"
    if not (BUILD / "src/mpigrad/_native").exists():
        (BUILD / "src/mpigrad/_native").symlink_to(native)
    (BUILD / "src/sitecustomize.py").write_text(CUSTOM)
    return {
        **os.environ,
        "PYTHONPATH": str(BUILD / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPIGRAD_TEST_BUILD": "build/mutations/tests",
        "MPIGRAD_TIMEOUT": "20",
    }


def fails(tests: list[str], ranks: int, environment: dict[str, str]) -> str:
    """Return how the tests fail, or nothing."""
    words = [sys.executable, "tests/run.py", "-n", str(ranks), "--limit", f"{LIMIT - 10:g}"]
    try:
        done = subprocess.run(
            [*words, *tests, "-x"],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "time limit"
    return "" if done.returncode == 0 else done.stdout[-3000:]


def not_run(tests: list[str]) -> list[str]:
    """Return those of the tests that the last sessions have not run: another number of ranks."""
    ran: set[str] = set()
    for diary in (BUILD / "tests" / "test-logs").glob("*/rank0.jsonl"):
        entries = map(json.loads, diary.read_text().splitlines())
        ran |= {entry["test"] for entry in entries if entry.get("outcome") == "passed"}
    return [t for t in tests if not any(name == t or name.startswith(f"{t}[") for name in ran)]


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    chosen = [(n, MUTATIONS[n - 1]) for n in numbers]
    environment = prepare()
    for ranks in sorted({m.ranks for _, m in chosen}):
        tests = sorted({m.test for _, m in chosen if m.ranks == ranks})
        if problem := fails(tests, ranks, environment):
            print(f"these tests fail without a mutation:\n{problem}")
            return 2
        if missing := not_run(tests):
            print(f"make test does not run these tests on {ranks} ranks: {', '.join(missing)}")
            return 2
    survived = []
    for number, mutation in chosen:
        path = BUILD / "src/mpigrad" / mutation.file
        before = path.read_text()
        if before.count(mutation.old) != 1:
            raise SystemExit(f"{number}: {mutation.file} does not have this once: {mutation.old}")
        path.write_text(before.replace(mutation.old, mutation.new))
        start = time.monotonic()
        how = fails([mutation.test], mutation.ranks, environment)
        path.write_text(before)
        if not how:
            survived.append(number)
        result = "caught" if how else "SURVIVED"
        print(
            f"{number:2} {result:8} {time.monotonic() - start:4.0f} s  {mutation.file}: "
            f"{mutation.new.strip()[:60]}  [{mutation.test.partition('::')[2]}]",
            flush=True,
        )
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations were caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
