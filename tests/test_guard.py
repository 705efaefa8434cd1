"""Broken programs end in seconds, with a message that names rank, operation and source line."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from launching import PROGRAMS, mpigrad, no_orphans, run
from mpigrad.guard import timeout_seconds
from mpigrad.launcher import rank_environment
from mpigrad.mpi_installation import find_launcher, mpi_library

pytestmark = pytest.mark.launcher


def mpiexec(ranks: int, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Ranks under the bare launcher of this MPI, as a user's own script would start them."""
    launcher = find_launcher(mpi_library())
    started = [launcher.path, "-n", str(ranks), sys.executable, *map(str, words)]
    return run(started, **rank_environment(launcher, ranks), **environment)


# ---- programs that end ----


@dataclasses.dataclass(frozen=True)
class Broken:
    """What becomes of a program of tests/programs/broken.py on 2 ranks."""

    says: tuple[str, ...]
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    code: int | None = None
    last: str = ""  # in the last line
    bare: bool = False  # under mpiexec, without `mpigrad launch`
    hosts: int = 1  # each of which says it
    full: bool = False  # in make test-full only


GUARD = {"MPIGRAD_GUARD": "1"}
SHORT = {"MPIGRAD_TIMEOUT": "3"}
FAILED = "rank 1 of 2 failed; ending all ranks"
ORDER = "Every rank of a communicator must call the same operations in the same order."

BROKEN = {
    "one_rank_raises": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty",), code=1, last=FAILED
    ),
    "one_rank_raises under mpiexec": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty", FAILED), bare=True
    ),
    "one_rank_raises with the guard": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty",), GUARD, code=1, last=FAILED, full=True
    ),
    "one_rank_raises_inside_jit": Broken(
        ("check at ", "broken.py:", "x is 2, not negative"), last=FAILED
    ),
    "one_rank_runs_out_of_memory": Broken(("MemoryError",), last=FAILED),
    "longer_message_than_expected": Broken(
        ("rank 1 of 2: recv at ", "give the receiver the shape"), last=FAILED
    ),
    "shorter_message_than_expected": Broken(
        ("rank 1 of 2: recv at ", "8 bytes where 12", "give the"), last=FAILED
    ),
    # Without the guard: proved to wait for ever.
    "one_rank_leaves_out_an_allreduce": Broken(
        ("rank 0: in allreduce(op=SUM) of float32[3] at ", "rank 1: in sendrecv of "), last=ORDER
    ),
    "both_receive_first": Broken(
        ("rank 0: in recv of float32[3] from rank 1 (any tag) at ", "rank 1: in recv of "),
        last="Let one of them send first",
    ),
    "wrong_tag": Broken(
        ("rank 0: in barrier at", "rank 0: has sent float32[3] to rank 1 with tag 1, not received"),
        last="A receive names the sender and the tag of the send",
    ),
    "plain_jax_grad_with_a_constant_on_one_rank": Broken(
        (
            "ranks wait for one that is gone",
            "rank 0: in allreduce(op=SUM) of float32[3] at the adjoint of ",
            "rank 1: has ended, after allreduce(op=SUM) of float32[3] at ",
        ),
        last="before it ends",
    ),
    "one_rank_makes_no_communicator": Broken(
        ("rank 0: Split at ", "rank 1: barrier at "), last=ORDER
    ),
    "pull_back_on_one_rank_only": Broken(
        ("rank 0: allreduce(op=SUM) of float32[3] at the adjoint of ", "rank 1: barrier at "),
        last=ORDER,
    ),
    "one_rank_fails_and_meets_the_others_in_finally": Broken(
        (
            "rank 0: allreduce(op=SUM) of float32[3] at ",
            ", while it handles ArithmeticError: the mesh of rank 1 is empty at broken.py:",
        ),
        last=ORDER,
    ),
    "ends_while_a_thread_sends": Broken(
        (" ends while another of its threads is in allreduce(op=SUM) of float32[3] at ",),
        code=1,
        last="Join the thread before the program ends.",
    ),
    "windows_with_rows_of_other_lengths": Broken(
        (" of 2: one_sided at ", "has another length or dtype"),
        last="of 2 failed; ending all ranks",  # both see it; the first one says it
    ),
    "a_request_that_nobody_posts": Broken(
        ("rank 0: in wait of float32[3] from rank 1 (tag 0) at ", "rank 1: in barrier at "),
        last=ORDER,
    ),
    "a_send_request_that_nobody_receives": Broken(
        (
            "rank 0: in wait of a message to rank 1 (tag 0) at tests/programs/broken.py:",
            "rank 1: in barrier at ",
        ),
        last=ORDER,
    ),
    "requests_of_other_shapes": Broken(
        ("rank 1 of 2: wait at ", "give the receiver the shape"), last=FAILED
    ),
    "requests_of_other_shapes with the guard": Broken(
        (
            "rank 0: isend of float32[5] to rank 1 (tag 0) at tests/programs/broken.py:",
            "rank 1: wait of float32[3] from rank 0 (tag 0) at tests/programs/broken.py:",
        ),
        GUARD,
        last="of 2 failed; ending all ranks",
        full=True,
    ),
    "requests_waited_for_before_what_they_wait_for": Broken(
        ("rank 0: in wait of float32[3] from rank 1 (tag 0) at ", "rank 1: in wait of float32[3] "),
        last="Let one of them send first",
        full=True,
    ),
    "requests_and_blocking_messages_in_another_order": Broken(
        (
            "rank 0: in recv of float32[3] from rank 1 (tag 2) at ",
            "rank 1: in wait of float32[3] from rank 0 (tag 3) at ",
        ),
        last="each receive needs a send of the same tag on the rank that it names",
        full=True,
    ),
    "more_rows_than_the_root_counts": Broken(
        ("rank 0 of 2: gatherv at ",),
        last="rank 0 of 2 failed",
        full=True,
    ),
    "alltoallv_with_other_counts": Broken(
        ("rank 0 of 2: alltoallv at ",), last="rank 0 of 2 failed", full=True
    ),
    "custom_that_raises_on_one_rank": Broken(
        (
            "rank 1 of 2: custom_operation at tests/programs/broken.py:",
            "ValueError: not here\n",
            "in forward: raise ValueError(",
        ),
        last=FAILED,
    ),
    "messages_of_two_kinds_in_a_loop": Broken(
        ("rank 0: in barrier at ", "rank 1: in sendrecv of "), last=ORDER, full=True
    ),
    "one_rank_ends": Broken(
        ("rank 0: in allreduce", "rank 1: has ended, after barrier at "), last="before it ends"
    ),
    "one_rank_ends under mpiexec": Broken(
        ("rank 0: in allreduce", "rank 1: has ended, after barrier at "), bare=True
    ),
    "one_rank_exits": Broken(
        (), code=3, last="failed with exit code 3: rank 1 was the first to leave with it"
    ),
    "one_rank_exits under mpiexec": Broken(
        ("rank 0: in barrier at ", "rank 1: has ended, after barrier at "), bare=True, full=True
    ),
    "killed": Broken((), last="was ended by signal SIGKILL"),
    "killed under mpiexec": Broken(("signal 9",), bare=True),
    "terminated": Broken((), last="mpigrad: the job "),
    # With the guard, but not caught: said once.
    "another_root with the guard": Broken(
        ("rank 0: bcast(root=0)", "rank 1: bcast(root=1)", "Give the same root on every rank."),
        GUARD,
        code=1,
        last="of 2 failed; ending all ranks",
    ),
    "another_root with the guard under mpiexec": Broken(
        ("rank 0: bcast(root=0)", "rank 1: bcast(root=1)", "Give the same root on every rank."),
        GUARD,
        bare=True,
        full=True,
    ),
    "both_receive_first with the guard": Broken(
        ("rank 0: in recv of float32[3] from rank 1 (any tag) at ", "rank 1: in recv of "), GUARD
    ),
    "a_message_that_nobody_receives with the guard": Broken(
        ("rank 0: 1 message to rank 1 (tag 0), float32[3] by send at ", "broken.py:"),
        GUARD,
        code=1,
        last="Receive each of them",
    ),
    # What nobody can prove: the time limit.
    "one_rank_computes_for_ever": Broken(
        (
            "an operation has waited 3 s (MPIGRAD_TIMEOUT=3)",
            "rank 0: has waited 3 s in allreduce(op=SUM) of float32[3] at ",
            "rank 1: never came: it is in Python since ",
            "after barrier at ",
        ),
        SHORT,
        code=1,
        last="set MPIGRAD_TIMEOUT",
    ),
    "in_a_solver_written_with_mpi4py": Broken(
        ("rank 0: has waited 3 s in recv at ", "rank 1: has waited 3 s in barrier at "), SHORT
    ),
    "custom_that_receives_what_nobody_sends": Broken(
        (" has waited 3 s in custom_operation at tests/programs/broken.py:",), SHORT
    ),
    "custom_on_one_rank_only with the guard": Broken(
        (
            "rank 0: has waited 3 s in custom_operation at tests/programs/broken.py:",
            "rank 1: has waited 3 s in barrier at tests/programs/broken.py:",
        ),
        GUARD | SHORT,
        full=True,
    ),
    "in_a_reduction_of_objects": Broken(
        (
            "rank 0: has waited 3 s in custom_operation at tests/programs/broken.py:",
            "rank 1: never came: it is in Python since ",
        ),
        SHORT,
    ),
    # As on two hosts, of which each sees its own ranks only.
    "another_root with the guard and without a board": Broken(
        ("rank 0: bcast(root=0) of float32[3] at", "rank 1: bcast(root=1)", "Give the same root"),
        {**GUARD, "MPIGRAD_BOARD": "0"},
        hosts=2,
    ),
    "both_receive_first without a board": Broken(
        ("rank 0: has waited 3 s in recv of float32[3]", "rank 1: has waited 3 s in recv of float"),
        {**SHORT, "MPIGRAD_BOARD": "0"},
        last="set MPIGRAD_TIMEOUT",
    ),
}


def run_broken(name: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The program's end, and its time."""
    case = BROKEN[name]
    words = (PROGRAMS / "broken.py", name.partition(" ")[0])
    # Several such jobs at a time: ranks that wait give their cores away.
    family = find_launcher(mpi_library()).family
    yielding = family.oversubscribed if family else {}
    with no_orphans() as mark:
        settings = {**yielding, **case.settings, **mark}
        done = (
            mpiexec(2, *words, **settings)
            if case.bare
            else mpigrad("launch", "-n", 2, *words, **settings)
        )
        return done, time.monotonic()


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest,
) -> Iterator[dict[str, Future[tuple[subprocess.CompletedProcess[str], float]]]]:
    """All that are wanted, five at a time: most of their time they wait."""
    items = [item for item in request.session.items if "ended" in item.fixturenames]  # type: ignore[attr-defined]
    names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(5) as pool:
        yield {name: pool.submit(run_broken, name) for name in names}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if c.full else n for n, c in BROKEN.items()]
)
def test_broken_programs_end(
    name: str, ended: dict[str, Future[tuple[subprocess.CompletedProcess[str], float]]]
) -> None:
    case = BROKEN[name]
    done, end = ended[name].result()
    fault = float(done.stdout.split()[0])
    assert end - fault < 20
    assert done.returncode != 0
    assert case.code in (None, done.returncode), done.stderr
    # On a busy machine the watchdog may look seconds late.
    said = re.sub(r"waited [24-9] s", "waited 3 s", done.stderr)
    # A process says nothing when it is killed: there the launcher has the last word, MPICH's on
    # stdout.
    said = said or done.stdout
    for text in case.says:
        assert 1 <= said.count(text) <= case.hosts, said
    assert case.last in said.splitlines()[-1], said


# ---- programs that are told ----

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
    "mixed_with_messages": Refused(("rank 0: in recv of", "ranks 1-2: in barrier" + AT)),
    "of_mpi4py": Refused(("rank 0: allreduce" + AT, "ranks 1-2: barrier" + AT)),
    "making_a_communicator_on_some_ranks_only": Refused(
        ("rank 0: Split" + AT, "ranks 1-2: barrier" + AT)
    ),
    "message_of_another_dtype": Refused(
        ("rank 0: send of float32[3] to rank 1 (tag 0)" + AT, "rank 1: recv of int32[3] from")
    ),
    "tagged_message_of_another_dtype": Refused(
        ("rank 0: send of float32[3] to rank 1 (tag 7)" + AT, "rank 1: recv of int32[3] from")
    ),
    "message_of_another_shape": Refused(("a message is not what its receiver expects", "sendrecv")),
    "message_with_another_tag": Refused(
        ("rank 0: has sent float32[3] to rank 1 with tag 1, not received", "rank 0 (tag 2)" + AT)
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
            "Give the same counts on every rank.",
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
            "What a rank receives from another must be what that one sends to it.",
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
        ("rank 0: allreduce(op=SUM)", "ranks 1-2: allreduce(op=MAX)", "Give the same op")
    ),
    "from_a_forked_process": Refused(("was forked from a rank", "'spawn'")),
    "from_two_threads": Refused(
        ("rank 0 of 3: allreduce" + AT, "another thread", "from one thread"), ranks=(0,)
    ),
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[tuple[str, float]]]:
    """Of each program, what each rank was told and after how many seconds."""
    program = PROGRAMS.relative_to(pathlib.Path.cwd()) / "refused.py"
    done = mpigrad("launch", "-n", 3, program, MPIGRAD_GUARD="1", MPIGRAD_TIMEOUT="60")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", REFUSED)
def test_the_guard_refuses(name: str, refusals: dict[str, list[tuple[str, float]]]) -> None:
    case, told = REFUSED[name], refusals[name]
    # The type of the exception, and a word in front, are JAX's.
    texts = [text.partition("mpigrad: ")[2] for text, _ in told]
    assert [r for r in SAME_ON_ALL if texts[r]] == list(case.ranks), told
    assert len({texts[r] for r in case.ranks}) == 1, told
    for text in case.says:
        assert text in texts[case.ranks[0]], told
    assert max(seconds for _, seconds in told) < 20


def test_all_refused_programs_are_checked(refusals: dict[str, list[tuple[str, float]]]) -> None:
    assert set(refusals) == set(REFUSED)


def test_a_rank_without_messages_keeps_nobody_waiting() -> None:
    done = mpigrad("launch", "-n", 3, PROGRAMS / "bystander.py", MPIGRAD_TIMEOUT="20")
    assert done.returncode == 0, done.stderr
    # Lines of two ranks may meet in the launcher's pipe.
    assert sorted(re.findall(r"rank \d: \d\.\d", done.stdout)) == ["rank 0: 2.0", "rank 2: 2.0"]


@pytest.mark.parametrize("guard", ["0", "1"])
def test_correct_programs_are_let_go(guard: str) -> None:
    program = PROGRAMS / "correct.py"
    done = mpigrad("launch", "-n", 2, program, MPIGRAD_TIMEOUT="30", MPIGRAD_GUARD=guard)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all let go\n"
    assert "mpigrad" not in done.stderr


def test_a_message_that_nobody_receives_is_named_without_the_guard_too() -> None:
    done = mpigrad("launch", "-n", 2, PROGRAMS / "broken.py", "a_message_that_nobody_receives")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 0: 1 message to rank 1 (tag 0), float32[3] by send at ") == 1


@pytest.mark.full
def test_counts_that_disagree_keep_nobody_waiting_without_the_guard() -> None:
    """MPI may take the shorter message: no error, wrong numbers; with the guard it is refused."""
    program = PROGRAMS / "broken.py"
    done = mpigrad("launch", "-n", 2, program, "fewer_rows_than_others_count", MPIGRAD_TIMEOUT="10")
    assert done.returncode == 0, done.stderr
    assert "has waited" not in done.stderr


def test_timeout_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIGRAD_TIMEOUT", raising=False)
    assert timeout_seconds() == 300
    monkeypatch.setenv("MPIGRAD_TIMEOUT", "2.5")
    assert timeout_seconds() == 2.5
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("MPIGRAD_TIMEOUT", wrong)
        with pytest.raises(ImportError, match="MPIGRAD_TIMEOUT"):
            timeout_seconds()


def test_import_after_jax_has_computed() -> None:
    """With several ranks, messages could overtake each other: refused at import."""
    code = "import jax.numpy as jnp; jnp.ones(2).sum(); import mpigrad; print('imported')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    alone = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert alone.stdout == "imported\n", alone.stderr
    done = mpiexec(2, PROGRAMS / "late_import.py")
    assert done.returncode != 0
    assert "Import mpigrad before the first JAX computation" in done.stderr
