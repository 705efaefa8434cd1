"""A mismatch is one error with all call sites on every rank, and the program continues."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable

import pytest

from launching import PROGRAMS, idling, mpigrad

pytestmark = [pytest.mark.launcher, pytest.mark.waits]

ORDER = "Call the same operations in the same order on every rank of the communicator."
SAME_ON_ALL = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Refused:
    """The error of a program of tests/programs/refused.py, and the ranks that get it."""

    says: tuple[str, ...]
    ranks: tuple[int, ...] = SAME_ON_ALL


AT = " at tests/programs/refused.py:"
REFUSED = {
    "another_operation": Refused(("ranks 0, 2: allreduce(op=SUM)", "rank 1: bcast(root=0)", ORDER)),
    "another_root": Refused(("ranks 0-1: reduce(root=0", "rank 2: reduce(root=1", "same root")),
    "another_dtype": Refused(("float32[3]" + AT, "int32[3]" + AT, "the same dtype")),
    "another_shape": Refused(("float32[2,3]" + AT, "float32[3,2]" + AT, "the same shape")),
    "another_reduction": Refused(
        ("ranks 0, 2: allgather(op=PROD) of float32[3]", "rank 1: allgather(op=MAX)", "same op")
    ),
    "another_location": Refused(
        ("ranks 0-1: allgather(op=MAXLOC)", "rank 2: allgather(op=MINLOC)")
    ),
    "another_reduction_of_rows": Refused(
        ("rank 0: alltoallv(op=MAX, sendcounts=", "rank 1: alltoallv(op=MIN, sendcounts=")
    ),
    "another_function": Refused(
        ("rank 0: gather(root=0, op=reduction(larger", "ranks 1-2: gather(root=0, op=reduction(")
    ),
    "another_root_of_a_product": Refused(
        ("ranks 0-1: allreduce(op=PROD, root=0)", "rank 2: allreduce(op=PROD, root=1)", "same root")
    ),
    "another_order": Refused(("ranks 0-1: allreduce", "rank 2: barrier" + AT, ORDER)),
    "left_out_by_one_rank": Refused(("ranks 0, 2: allreduce", "rank 1: barrier" + AT)),
    "while_a_rank_is_elsewhere": Refused(("rank 2: has not called it yet", "rank 0: allreduce")),
    "mixed_with_messages": Refused(("rank 0: in recv of", "ranks 1-2: in barrier" + AT)),
    "of_mpi4py": Refused(("rank 0: allreduce" + AT, "ranks 1-2: barrier" + AT)),
    "making_a_communicator_on_some_ranks_only": Refused(
        ("rank 0: Split" + AT, "ranks 1-2: barrier" + AT)
    ),
    "duplicating_a_communicator_on_some_ranks_only": Refused(
        ("rank 0: Dup" + AT, "ranks 1-2: barrier" + AT)
    ),
    "another_leaf_deep_in_a_tree": Refused(
        (
            "(pytree: [0] float32[2, 2], [1] float32[2, 2], [2] float32[2, 2], [3] float32[2, 2], "
            "… 6 more), leaf 10: [9] float32[4]\n",
            "… 6 more), leaf 10: [9] float32[1, 4]\n",
            "ranks 1-2: allreduce",
        )
    ),
    "other_leaves_of_the_same_length": Refused(
        (
            "ranks 0-1: bcast(root=0) of float32[5]" + AT,
            "(pytree: [0] float32[3], [1] float32[2])",
            "rank 2: bcast(root=0) of float32[5]" + AT,
            "Pass pytrees with the same structure and shapes on every rank.",
        )
    ),
    "other_names_of_leaves": Refused(
        ("(pytree: ['a'] float32[3], ['c'] float32[3])", "Pass pytrees with the same structure")
    ),
    "another_name_of_one_leaf": Refused(("(pytree: ['a'] float32[3])", "the same structure")),
    "another_dtype_in_the_twentieth_sum": Refused(("ranks 0, 2: allreduce", "the same dtype")),
    "message_of_other_leaves": Refused(
        ("(pytree: float32[3], float32[1])", "(pytree: float32[2], float32[2])", "leaf by leaf")
    ),
    "request_of_other_leaves": Refused(
        ("rank 2: isend of float32[4]", "rank 0: wait of float32[4]", "leaf by leaf")
    ),
    "window_of_other_leaves": Refused(
        ("rank 0: one_sided(", "(pytree: [0] float32[3], [1] float32[1])", "Pass pytrees with")
    ),
    "message_of_another_dtype": Refused(
        ("rank 0: send of float32[3] to rank 1 (tag 0)" + AT, "rank 1: recv of int32[3] from")
    ),
    "tagged_message_of_another_dtype": Refused(
        ("rank 0: send of float32[3] to rank 1 (tag 7)" + AT, "rank 1: recv of int32[3] from")
    ),
    "message_of_another_shape": Refused(("a message does not match its receive", "sendrecv")),
    "message_with_another_tag": Refused(
        (
            "rank 0: sent float32[3] to rank 1 (tag 1) by send" + AT,
            ", not received",
            "rank 0 (tag 2)" + AT,
        )
    ),
    "message_to_another_rank": Refused(("rank 1: in recv of float32[3] from rank 0 (any tag)",)),
    "message_left_out": Refused(("rank 1: in recv of float32[3] from rank 0 (any tag)",)),
    "all_receive_first": Refused(
        ("rank 0: in recv of float32[3] from rank 2", "rank 2: in recv", "or use sendrecv")
    ),
    "all_send_long_messages_first": Refused(
        ("rank 0: in send of float32[100000] to rank 1", "rank 2: in send", "or use sendrecv")
    ),
    "a_ring_with_a_wrong_source": Refused(
        ("rank 0: in sendrecv of float32[3] to rank 1 (tag 0), float32[3] from rank 1 (tag 0)",)
    ),
    "to_itself_without_a_send": Refused(("rank 0: in recv of float32[3] from rank 0 (any tag)",)),
    "from_anyone_another_length": Refused(
        ("send of float32[4] to rank 0 (tag 5)", "recv of float32[3] from any rank")
    ),
    "neighbors_with_other_counts": Refused(
        ("neighbor_alltoallv of float32[2,3] to rank 1", "float32[3,3] from rank 0")
    ),
    "from_anyone_whose_partner_waits": Refused(
        ("ranks wait for each other", "in recv of float32[1,20000] from any rank", "rank 2: ")
    ),
    "inside_scan": Refused(("ranks 0, 2: barrier" + AT, "rank 1: allreduce(op=SUM)")),
    "inside_cond": Refused(("rank 0: bcast(root=0)", "ranks 1-2: bcast(root=1)", "same root")),
    "after_jit_cache_hits": Refused(("float32[3]" + AT, "rank 1: allreduce(op=SUM) of float32[4]")),
    "under_vmap": Refused(("rank 0: allreduce(op=SUM) of float32[3,3]", "float32[2,3]" + AT)),
    "on_a_part_of_the_ranks": Refused(
        ("rank 0: bcast(root=0)", "rank 1: bcast(root=1)"), ranks=(0, 1)
    ),
    "two_communicators_in_another_order": Refused(
        ("rank 0: on communicator 2, in allreduce", "ranks 1-2: on communicator 1, in allreduce")
    ),
    "pulled_back_on_one_rank_only": Refused(
        ("of float32[3] at the adjoint of tests/programs/refused.py:", "ranks 1-2: barrier" + AT)
    ),
    "pulled_back_in_another_order": Refused(
        ("rank 0: reduce(root=0, op=SUM) of float32[3] at the adjoint of", "ranks 1-2: allreduce")
    ),
    "plain_grad_with_a_constant_on_one_rank": Refused(
        ("rank 0: allreduce(op=SUM) of float32[3] at the adjoint of", "ranks 1-2: barrier" + AT)
    ),
    "adjoint_message_left_out": Refused(
        ("in recv of float32[3] from rank 1 (tag 0) at the adjoint of",)
    ),
    "second_derivative_on_one_rank_only": Refused(
        ("ranks 0-1: barrier" + AT, "rank 2: allreduce(op=SUM) of float32[3] at the adjoint of")
    ),
    "adjoint_inside_scan": Refused(
        ("rank 0: barrier" + AT, "ranks 1-2: allreduce(op=SUM) of float32[3] at the adjoint of")
    ),
    "gatherv_with_other_counts": Refused(
        (
            "rank 0: gatherv(root=0, counts=(1, 1, 2))",
            "ranks 1-2: gatherv(root=0, counts=(1, 1, 1))",
            "Pass the same counts on every rank.",
        )
    ),
    "scatterv_with_other_counts": Refused(
        (
            "ranks 0-1: scatterv(root=0, counts=(1, 1, 2))",
            "rank 2: scatterv(root=0, counts=(1, 2, 1)",
        )
    ),
    "allgatherv_with_other_counts": Refused(
        ("ranks 0-1: allgatherv(counts=(2, 2, 2))", "rank 2: allgatherv(counts=(2, 1, 2))")
    ),
    "alltoallv_with_other_counts": Refused(
        (
            "rank 0: alltoallv(sendcounts=(1, 1, 1), recvcounts=(1, 2, 1))",
            "ranks 1-2: alltoallv(sendcounts=(1, 1, 1), recvcounts=(1, 1, 1))",
            "Let recvcounts[i] on rank j be sendcounts[j] on rank i, for every pair of ranks.",
        )
    ),
    "reduce_scatterv_with_other_counts": Refused(
        (
            "rank 0: reduce_scatterv(op=SUM, counts=(1, 1, 2))",
            "ranks 1-2: reduce_scatterv(op=SUM, c",
        )
    ),
    "request_of_another_shape": Refused(
        ("rank 2: isend of float32[3] to rank 0 (tag 0)" + AT, "rank 0: wait of float32[2] from")
    ),
    "request_whose_partner_posts_none": Refused(
        ("rank 0: in wait of float32[3] from rank 1 (tag 0)" + AT, "ranks 1-2: in barrier" + AT)
    ),
    "requests_waited_for_before_the_send": Refused(
        ("rank 0: in wait of float32[3] from rank 2", "rank 2: in wait", "or use sendrecv")
    ),
    "after_a_custom_operation_on_one_rank": Refused(
        ("rank 0: allreduce(op=SUM)", "ranks 1-2: allreduce(op=MAX)", "Pass the same op")
    ),
    "from_a_forked_process": Refused(("was forked from a rank", "subprocess")),
    "from_two_threads": Refused(
        ("rank 0 of 3: allreduce" + AT, "another thread", "from one thread"), ranks=(0,)
    ),
    "waiting_in_a_second_thread": Refused(
        ("rank 0 of 3: wait" + AT, "another thread", "from one thread"), ranks=(0,)
    ),
}


Told = dict[str, list[tuple[str, float]]]  # for each program the error and the seconds of each rank


def told(names: Iterable[str], **settings: str) -> Told:
    program = PROGRAMS.relative_to(pathlib.Path.cwd()) / "refused.py"
    done = mpigrad("launch", "-n", 3, program, *names, **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def texts(errors: list[tuple[str, float]]) -> list[str]:
    """Return the errors without the type of the exception and a word in front, which are JAX's."""
    return [text.partition("mpigrad: ")[2] for text, _ in errors]


@pytest.fixture(scope="module")
def refusals(request: pytest.FixtureRequest) -> Told:
    items = [item for item in request.session.items if "refusals" in item.fixturenames]  # type: ignore[attr-defined]
    names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    return told(names, **idling(), MPIGRAD_GUARD="1", MPIGRAD_TIMEOUT="60")


@pytest.mark.long("one job of three ranks runs all programs, in the first case")
@pytest.mark.cases(
    "another_operation",
    "another_root",
    "another_dtype",
    "another_shape",
    "another_reduction",
    "another_function",
    "left_out_by_one_rank",
    "of_mpi4py",
    "while_a_rank_is_elsewhere",
    "other_leaves_of_the_same_length",
    "other_names_of_leaves",
    "message_of_other_leaves",
    "message_of_another_shape",
    "message_with_another_tag",
    "all_receive_first",
    "from_anyone_another_length",
    "neighbors_with_other_counts",
    "on_a_part_of_the_ranks",
    "two_communicators_in_another_order",
    "adjoint_message_left_out",
    "gatherv_with_other_counts",
    "alltoallv_with_other_counts",
    "request_whose_partner_posts_none",
    "from_a_forked_process",
    "from_two_threads",
    reason="each thing that the guard compares once, in an adjoint, and processes and threads",
)
@pytest.mark.parametrize("name", REFUSED)
def test_the_guard_refuses(name: str, refusals: Told) -> None:
    case, errors = REFUSED[name], refusals[name]
    said = texts(errors)
    assert [r for r in SAME_ON_ALL if said[r]] == list(case.ranks), errors
    assert len({said[r] for r in case.ranks}) == 1, errors
    for text in case.says:
        assert text in said[case.ranks[0]], errors
    assert max(seconds for _, seconds in errors) < 20


FIRST = (
    "another_root",
    "another_dtype",
    "another_shape",
    "other_leaves_of_the_same_length",
    "other_names_of_leaves",
    "another_name_of_one_leaf",
    "window_of_other_leaves",
    "under_vmap",
    "alltoallv_with_other_counts",
)
TWENTIETH = "another_dtype_in_the_twentieth_sum"  # compared with the next power of two


@pytest.mark.long("two jobs of three ranks: one host, and messages as between hosts")
@pytest.mark.parametrize("board", ["1", "0"])
def test_new_collectives_are_compared_without_the_guard(board: str) -> None:
    names = FIRST if board == "1" else (*FIRST, TWENTIETH)
    errors = told(names, **idling(), MPIGRAD_BOARD=board, MPIGRAD_TIMEOUT="60")
    for name in names:
        said = texts(errors[name])
        assert len(set(said)) == 1, (name, errors[name])
        range_ = ("one of the operations 17 to 24 ", "MPIGRAD_GUARD=1")
        for text in range_ if name == TWENTIETH else REFUSED[name].says:
            assert text in said[0], (name, errors[name])


def test_all_refused_programs_are_checked() -> None:
    program = (PROGRAMS / "refused.py").read_text()
    assert set(re.findall(r"^@case\ndef (\w+)", program, re.MULTILINE)) == set(REFUSED)


@pytest.mark.full(
    "a job of its own for a long path: while_a_rank_is_elsewhere, native/test_utf8.py"
)
def test_a_rank_that_was_elsewhere_gets_the_error_once(tmp_path: pathlib.Path) -> None:
    """The others get three errors meanwhile, in a file whose path is too long for the board."""
    directory = tmp_path / ("long" * 50) / ("longer" * 30)
    directory.mkdir(parents=True)
    program = directory / "elsewhere.py"
    program.write_text(
        "import time, jax.numpy as jnp, mpigrad as mg\n"
        "rank = mg.default_communicator().rank\n"
        "time.sleep(3 * (rank == 2))\n"
        "for _ in range(1 if rank == 2 else 3):\n"
        "    try:\n"
        "        mg.allreduce(jnp.ones(3 + rank))\n"
        "    except Exception as error:\n"
        "        assert 'mpigrad: the ranks do not agree' in str(error)\n"
        "        assert 'rank 2: has not called it yet' in str(error), error\n"
        "        assert 'longer/elsewhere.py:6\\n' in str(error), error\n"
        "        print(f'rank {rank} refused\\n', end='', flush=True)\n"
        "time.sleep(3 * (rank != 2))\n"
        "assert mg.allreduce(1.0) == 3\n"
    )
    done = mpigrad("launch", "-n", 3, "--timeout", 60, program, **idling(), MPIGRAD_GUARD="1")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"rank {r} refused") for r in range(3)] == [3, 3, 1]
