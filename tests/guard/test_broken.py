"""Broken programs end in seconds, with a message that names rank, operation and source line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from launching import PROGRAMS, idling, mpiexec, mpigrad, no_orphans

pytestmark = pytest.mark.launcher


@dataclasses.dataclass(frozen=True)
class Broken:
    """The expected end of a program of tests/programs/broken.py on 2 ranks."""

    says: tuple[str, ...]
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    code: int | None = None
    last: str = ""  # in the last line
    bare: bool = False  # under mpiexec, without `mpigrad launch`
    hosts: int = 1  # each of which says it
    full: str = ""  # the reason why make test leaves it out


VARIANT = "a job of several seconds that is a variant of another case"
REFUSED = "test_refused.py has it with the guard, which reads the same board"
ON_RANKS = "a test on two ranks has the same error without a job of its own: "
GUARD = {"MPIGRAD_GUARD": "1"}
SHORT = {"MPIGRAD_TIMEOUT": "3"}
FAILED = "rank 1 of 2 failed; ending all ranks"
ORDER = "Call the same operations in the same order on every rank of the communicator."

BROKEN = {
    "one_rank_raises": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty",), code=1, last=FAILED
    ),
    "one_rank_raises under mpiexec": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty", FAILED), bare=True, full=VARIANT
    ),
    "one_rank_raises with the guard": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty",), GUARD, code=1, last=FAILED, full=VARIANT
    ),
    "one_rank_raises_inside_jit": Broken(
        ("check at ", "broken.py:", "x is 2, not negative"),
        last=FAILED,
        full=ON_RANKS + "autodiff/test_transforms.py",
    ),
    "one_rank_runs_out_of_memory": Broken(
        ("MemoryError",), last=FAILED, full=ON_RANKS + "operations/test_exceptions.py"
    ),
    "one_rank_has_no_memory_for_threads": Broken(
        ("MemoryError: Unable to",), code=1, last=FAILED, full=VARIANT
    ),
    "an_error_in_words_of_no_encoding": Broken(
        ("ValueError: no mesh ",), code=1, last=FAILED, full=VARIANT
    ),
    "longer_message_on_a_communicator_in_another_order": Broken(
        (
            "rank 1 of 2 (rank 0 of the job): recv at ",
            "but rank 0 (rank 1 of the job) sent more. Make the receive expect the shape",
        ),
        last="rank 0 of 2 failed; ending all ranks",
    ),
    "one_rank_raises_under_another_hook": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty",), code=1, last=FAILED, full=VARIANT
    ),
    "one_rank_raises_under_another_hook under mpiexec": Broken(
        ("ArithmeticError: the mesh of rank 1 is empty", FAILED), bare=True
    ),
    "longer_message_than_expected": Broken(
        ("rank 1 of 2: recv at ", "Make the receive expect the shape"), last=FAILED, full=VARIANT
    ),
    "halos_of_another_dtype": Broken(
        (": halo_exchange(width=1) at ", " sends int32[1] by halo_exchange(width=1) at "),
        full="message_of_other_leaves has the comparison",
    ),
    "message_of_other_leaves": Broken(
        (
            "rank 1 of 2: recv at ",
            "(pytree: float32[2], float32[2]), but rank 0 sends float32[4] by send at ",
            "(pytree: float32[3], float32[1]). Make the receive",
        ),
        last=FAILED,
    ),
    # Without the guard: proved deadlocks.
    "one_rank_leaves_out_an_allreduce": Broken(
        ("rank 0: in allreduce(op=SUM) of float32[3] at ", "rank 1: in sendrecv of "),
        last=ORDER,
        full=REFUSED,
    ),
    "another_operation_that_mpi_takes_for_this": Broken(
        ("rank 0: allreduce(op=SUM) of float32[3] at ", "rank 1: bcast(root=1) of float32[3] at "),
        last=ORDER,
    ),
    "both_receive_first": Broken(
        ("rank 0: in recv of float32[3] from rank 1 (any tag) at ", "rank 1: in recv of "),
        last="send first and the other receive first, or use sendrecv",
        full=REFUSED,
    ),
    "wrong_tag": Broken(
        ("rank 0: in barrier at", "rank 0: sent float32[3] to rank 1 (tag 1) by send at"),
        last="Pass each receive the source rank and the tag of the send",
        full=REFUSED,
    ),
    "plain_jax_grad_with_a_constant_on_one_rank": Broken(
        (
            "deadlock: ranks wait for a rank that is gone",
            "rank 0: in allreduce(op=SUM) of float32[3] at the adjoint of ",
            "rank 1: has ended; last operation: allreduce(op=SUM) of float32[3] at ",
        ),
        last="replace them by mpigrad.grad or mpigrad.vjp.",
    ),
    "one_rank_makes_no_communicator": Broken(
        ("rank 0: Split at ", "rank 1: barrier at "), last=ORDER, full=VARIANT
    ),
    "pull_back_on_one_rank_only": Broken(
        (
            "rank 0: allreduce(op=SUM) of float32[3] at the adjoint of ",
            "rank 1: barrier at ",
            ORDER,
        ),
        last="replace them by mpigrad.grad or mpigrad.vjp.",
        full=REFUSED,
    ),
    "one_rank_fails_and_meets_the_others_in_finally": Broken(
        (
            "rank 0: allreduce(op=SUM) of float32[3] at ",
            ", while handling ArithmeticError: the mesh of rank 1 is empty at broken.py:",
        ),
        last=ORDER,
    ),
    "ends_while_a_thread_sends": Broken(
        (" ends while another of its threads is in allreduce(op=SUM) of float32[3] at ",),
        code=1,
        last="Join the thread before the program ends.",
    ),
    "a_refused_thread_beside_one_that_waits": Broken(
        (
            ": allreduce at tests/programs/broken.py:",
            ": another thread of this rank is in an operation",
            "rank 0: has waited 3 s in allreduce(op=SUM) of float32[3] at tests/programs/",
        ),
        SHORT,
        code=1,
        last="set MPIGRAD_TIMEOUT",
        full=REFUSED,
    ),
    "windows_with_rows_of_other_lengths": Broken(
        ("rank 0: one_sided(row=12", "rank 1: one_sided(row=16", "Pass the same row"),
        last="of 2 failed; ending all ranks",  # both ranks find it, and the first one reports
    ),
    "a_request_that_nobody_posts": Broken(
        ("rank 0: in wait of float32[3] from rank 1 (tag 0) at ", "rank 1: in barrier at "),
        last=ORDER,
        full=REFUSED,
    ),
    "a_send_request_that_nobody_receives": Broken(
        (
            "rank 0: in wait of a message to rank 1 (tag 0) at tests/programs/broken.py:",
            "rank 1: in barrier at ",
        ),
        last=ORDER,
        full=VARIANT,
    ),
    "a_wildcard_request_that_nobody_posts": Broken(
        ("rank 0: in wait of float32[3] from any rank (any tag) at ", "rank 1: in barrier at "),
        last=ORDER,
        full=VARIANT,
    ),
    "tangents_of_opposite_long_sends": Broken(
        (
            "rank 0: in send of float32[20000] to rank 1 (tag 0) at the tangent of tests/",
            "rank 1: in send of float32[20000] to rank 0 (tag 0) at the tangent of ",
        ),
        last="send first and the other receive first, or use sendrecv",
    ),
    "waits_in_another_order_than_posts": Broken(
        (
            "rank 0 of 2: wait at the adjoint of tests/programs/broken.py:",
            "or wait in the order of the posts (as waitall does)",
        ),
        last="rank 0 of 2 failed; ending all ranks",
        full=ON_RANKS + "operations/test_nonblocking.py",
    ),
    "requests_of_other_shapes": Broken(
        ("rank 1 of 2: wait at ", "Make the receive expect the shape"), last=FAILED, full=VARIANT
    ),
    "requests_of_other_shapes with the guard": Broken(
        (
            "rank 0: isend of float32[5] to rank 1 (tag 0) at tests/programs/broken.py:",
            "rank 1: wait of float32[3] from rank 0 (tag 0) at tests/programs/broken.py:",
        ),
        GUARD,
        last="of 2 failed; ending all ranks",
        full=VARIANT,
    ),
    "requests_waited_for_before_what_they_wait_for": Broken(
        ("rank 0: in wait of float32[3] from rank 1 (tag 0) at ", "rank 1: in wait of float32[3] "),
        last="send first and the other receive first, or use sendrecv",
        full=VARIANT,
    ),
    "requests_and_blocking_messages_in_another_order": Broken(
        (
            "rank 0: in recv of float32[3] from rank 1 (tag 2) at ",
            "rank 1: in wait of float32[3] from rank 0 (tag 3) at ",
        ),
        last="each receive a send with the same tag on its source rank",
        full=VARIANT,
    ),
    "more_rows_than_the_root_counts": Broken(
        ("rank 0 of 2: gatherv at ",),
        last="rank 0 of 2 failed",
        full=VARIANT,
    ),
    "alltoallv_with_other_counts": Broken(
        ("rank 0 of 2: alltoallv at ",), last="rank 0 of 2 failed", full=VARIANT
    ),
    "custom_that_raises_on_one_rank": Broken(
        (
            "rank 1 of 2: custom_operation at tests/programs/broken.py:",
            "ValueError: not here\n",
            "in forward: raise ValueError(",
        ),
        last=FAILED,
        full=ON_RANKS + "operations/test_custom.py",
    ),
    "messages_of_two_kinds_in_a_loop": Broken(
        ("rank 0: in barrier at ", "rank 1: in sendrecv of "), last=ORDER, full=VARIANT
    ),
    "one_rank_ends": Broken(
        ("rank 0: in allreduce", "rank 1: has ended; last operation: barrier at "),
        last="before it ends",
        full=VARIANT,
    ),
    "one_rank_ends under mpiexec": Broken(
        ("rank 0: in allreduce", "rank 1: has ended; last operation: barrier at "),
        bare=True,
        full=VARIANT,
    ),
    "one_rank_exits": Broken(
        (), code=3, last="failed with exit code 3: rank 1 was the first to exit with it"
    ),
    "one_rank_exits under mpiexec": Broken(
        ("rank 0: in barrier at ", "rank 1: has ended; last operation: barrier at "),
        bare=True,
        full=VARIANT,
    ),
    "killed": Broken(
        (),
        last="was ended by signal SIGKILL",
        full="test_launcher.py, test_kills.py and test_chaos.py kill ranks",
    ),
    "killed under mpiexec": Broken(("signal 9",), bare=True, full=VARIANT),
    "terminated": Broken((), last="mpigrad: the job was ended by signal SIGTERM", full=VARIANT),
    "terminated under mpiexec": Broken(("signal 15",), bare=True, full=VARIANT),
    # With the guard, but not caught: said once.
    "another_root with the guard": Broken(
        ("rank 0: bcast(root=0)", "rank 1: bcast(root=1)", "Pass the same root on every rank."),
        GUARD,
        code=1,
        last="of 2 failed; ending all ranks",
        full=VARIANT,
    ),
    "another_root with the guard under mpiexec": Broken(
        ("rank 0: bcast(root=0)", "rank 1: bcast(root=1)", "Pass the same root on every rank."),
        GUARD,
        bare=True,
        full=VARIANT,
    ),
    "both_receive_first with the guard": Broken(
        ("rank 0: in recv of float32[3] from rank 1 (any tag) at ", "rank 1: in recv of "),
        GUARD,
        full=VARIANT,
    ),
    "a_message_that_nobody_receives with the guard": Broken(
        ("rank 0: 1 message to rank 1 (tag 0), float32[3] by send at ", "broken.py:"),
        GUARD,
        code=1,
        last="Receive each of these messages",
        full="test_unreceived.py leaves a message without the guard",
    ),
    "output_that_nobody_takes": Broken(
        ("rank 0: in recv of ", "rank 1: in recv of "), GUARD, code=1, full=VARIANT
    ),
    "one_rank_exits_with_256": Broken(
        (), code=1, last="exit code 1: rank 1 was the first to exit with it", full=VARIANT
    ),
    # What nobody can prove: the time limit.
    "one_rank_computes_for_ever": Broken(
        (
            "an operation has waited 3 s (MPIGRAD_TIMEOUT=3)",
            "rank 0: has waited 3 s in allreduce(op=SUM) of float32[3] at ",
            "rank 1: has not called an operation for ",
            " (now at tests/programs/broken.py:",
            "last operation: barrier at ",
        ),
        SHORT,
        code=1,
        last="set MPIGRAD_TIMEOUT",
    ),
    "one_rank_never_ends": Broken(
        (
            "the program has ended on some ranks, which have waited 3 s for the others",
            "rank 1: has not called an operation for ",
            " (now at tests/programs/broken.py:",
        ),
        SHORT,
        code=1,
        last="Find the thread that never ends",
    ),
    "one_rank_is_stopped_at_the_end": Broken(
        (
            "The job goes on, because the other ranks may still have work to do",
            "Ending all ranks: the process of a rank is stopped",
        ),
        SHORT,
        code=1,
        last="(kill -CONT), or start the job again",
    ),
    "grids_of_ranks_that_differ": Broken(
        (
            "ValueError: cartesian: dims and periods must be the same on all ranks, got dims=(2,) "
            "and periods=(False,) on rank 0, dims=(2,) and periods=(True,) on rank 1.",
        ),
        code=1,
        last=" of 2 failed; ending all ranks",
        full=ON_RANKS + "test_wrong_on_all_ranks.py",
    ),
    "an_operation_in_a_custom_operation": Broken(
        ("custom_operation: expected forward and transpose to send by mpi4py",),
        last=" of 2 failed; ending all ranks",
        full=ON_RANKS + "test_wrong_on_all_ranks.py",
    ),
    "an_operation_after_the_end_of_mpi": Broken(
        ("RuntimeError: mpigrad: expected a running MPI", "Remove the call"), hosts=2
    ),
    "one_rank_is_stopped": Broken(
        (
            "rank 0: has waited 3 s in allreduce(op=SUM) of float32[3] at ",
            "rank 1: has not called an operation for ",
            ", and its process is stopped (SIGSTOP)",
        ),
        SHORT,
        full="test_watchdog.py has the state of a stopped process",
    ),
    "in_a_solver_written_with_mpi4py": Broken(
        ("rank 0: has waited 3 s in recv at ", "rank 1: has waited 3 s in barrier at "),
        SHORT,
        full=VARIANT,
    ),
    "custom_that_receives_what_nobody_sends": Broken(
        (" has waited 3 s in custom_operation at tests/programs/broken.py:",), SHORT, full=VARIANT
    ),
    "custom_on_one_rank_only with the guard": Broken(
        (
            "rank 0: has waited 3 s in custom_operation at tests/programs/broken.py:",
            "rank 1: has waited 3 s in barrier at tests/programs/broken.py:",
        ),
        GUARD | SHORT,
        full=VARIANT,
    ),
    "in_a_reduction_of_objects": Broken(
        (
            "rank 0: has waited 3 s in custom_operation at tests/programs/broken.py:",
            "rank 1: has not called an operation for ",
        ),
        SHORT,
        full=VARIANT,
    ),
    # As on two hosts, of which each sees its own ranks only.
    "another_root with the guard and without a board": Broken(
        ("rank 0: bcast(root=0) of float32[3] at", "rank 1: bcast(root=1)", "Pass the same root"),
        {**GUARD, "MPIGRAD_BOARD": "0"},
        hosts=2,
    ),
    "longer_message_than_expected with the guard and without a board": Broken(
        (
            "rank 1 of 2: recv at tests/programs/broken.py:",
            "rank 0 sends float32[5] by send at tests/programs/broken.py:",
            "expected float32[3] at ",
        ),
        {**GUARD, "MPIGRAD_BOARD": "0"},
        last="rank 1 of 2 on ",
    ),
    "leaves_of_other_lengths with the guard and without a board": Broken(
        (
            "rank 1 of 2: recv at tests/programs/broken.py:",
            "expected float32[5] at ",
            "leaf by leaf",
        ),
        {**GUARD, "MPIGRAD_BOARD": "0"},
        last="rank 1 of 2 on ",
        full=VARIANT,
    ),
    "requests_of_other_shapes with the guard and without a board": Broken(
        ("rank 1 of 2: wait at ", "rank 0 sends float32[5] by isend at tests/programs/broken.py:"),
        {**GUARD, "MPIGRAD_BOARD": "0"},
        last="rank 1 of 2 on ",
        full=VARIANT,
    ),
    "both_receive_first without a board": Broken(
        ("rank 0: has waited 3 s in recv of float32[3]", "rank 1: has waited 3 s in recv of float"),
        {**SHORT, "MPIGRAD_BOARD": "0"},
        last="set MPIGRAD_TIMEOUT",
    ),
}


def run_broken(name: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program. Return its result and its time in seconds."""
    case = BROKEN[name]
    words = (PROGRAMS / "broken.py", name.partition(" ")[0])
    with no_orphans() as mark:
        settings = {**idling(), **case.settings, **mark}
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
    """Run all selected programs, five at a time, because they mostly wait."""
    items = [item for item in request.session.items if "ended" in item.fixturenames]  # type: ignore[attr-defined]
    names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    idling()  # made once, before the threads
    with ThreadPoolExecutor(5) as pool:
        yield {name: pool.submit(run_broken, name) for name in names}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full(c.full)) if c.full else n for n, c in BROKEN.items()],
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
    said = re.sub(r"waited ([24-9]|\d to \d) s", "waited 3 s", done.stderr)
    # A process says nothing when it is killed: there the launcher has the last word, MPICH's on
    # stdout.
    said = said or (done.stdout if case.bare else "")
    for text in case.says:
        assert 1 <= said.count(text) <= case.hosts, said
    assert case.last in said.splitlines()[-1], said
