"""Random programs of 5 to 20 operations, against the same programs without messages.

`make fuzz` runs thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed

import mpigrad as mg
from helpers import trace_only
from message_order import mismatch, record
from mpigrad.communicator import Communicator
from random_operations import OPERATIONS, Operation, Step
from random_programs import Block, Program, check, count, programs, search, text

# Ten programs a part at 2 ranks, where compiling is cheap, and a few more at 3.
PARTS, EXAMPLES = {2: 5, 3: 1}, {2: 10, 3: 3}


def parts() -> list[Any]:
    """(number of ranks, seed), each for sessions of this many ranks."""
    pairs = [(size, seed) for size, n in PARTS.items() for seed in range(n)]
    marks = {2: pytest.mark.ranks(2), 3: pytest.mark.ranks(3)}
    return [pytest.param(seed, marks=marks[n], id=f"{n}-{seed}") for n, seed in pairs]


# Programs that have failed once, and exchanges of transforms.
FOUND = {
    "exchanges of transforms, batched and transposed": (
        Block("vmap", (Step("redistribute", target=1, tag=2, constant=(0,)),)),
        Block("adjoint", (Step("redistribute", x=1, target=2, rank=1, other=1),)),
    ),
    "second derivative of a loop whose result one rank does not use": (
        Block("grad", (Step("bcast", unused=(0,), wraps=((0, "scan"),)),)),
    ),
    "a loop in a loop under checkpoint that only sends": (
        Block("checkpoint", (Block("scan", (Step("chain", wraps=((0, "scan"),)),)),)),
    ),
}


@pytest.mark.full("it compiles many programs; test_a_few_random_programs compiles two")
@pytest.mark.parametrize("seed", parts())
def test_random_programs(seed: int, comm: Communicator) -> None:
    failing = search(comm, EXAMPLES[comm.size], seed)
    assert not failing, failing


@pytest.mark.ranks(2)
def test_a_few_random_programs(comm: Communicator) -> None:
    """Two programs whose messages stand in several blocks."""
    failing = search(comm, 2, 13)
    assert not failing, failing


@pytest.mark.ranks(1)
@pytest.mark.full("it tests the generator of programs only")
def test_long_programs_are_not_rare() -> None:
    """Of those that the tests above run on two ranks."""
    found: list[int] = []

    options: Any = settings(
        max_examples=EXAMPLES[2],
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for seed in range(PARTS[2]):
        draw = given(programs(2))(lambda program: found.append(count(program.steps)))
        options(with_seed(seed)(draw))()
    assert set(found) <= set(range(5, 21))
    assert 7 < sum(found) / len(found) < 9
    assert sum(n > 12 for n in found) > 7


@pytest.mark.ranks(2)
@pytest.mark.full("double precision runs the same rules")
def test_random_programs_in_single_precision(comm: Communicator) -> None:
    with jax.enable_x64(False):
        failing = search(comm, 5, 20)
    assert not failing, failing


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(name: str, comm: Communicator) -> None:
    assert not check(Program(comm.size, FOUND[name]), comm)


# What is done to a reduction, and how `check` calls that.
FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "value": (lambda y: y * (1 + 1e-6), "value differs"),
    "derivative": (lambda y: 2 * y - jax.lax.stop_gradient(y), "gradient differs"),
    "root": (lambda y: y, "root=1"),
}


@pytest.mark.ranks(2)
@pytest.mark.cases("derivative", "root", reason="values are compared as derivatives are")
@pytest.mark.parametrize("what", FAULTS)
def test_faults_are_found(what: str, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    right = OPERATIONS["reduce"]
    fault, said = FAULTS[what]

    def run(x: Any, old: Any, step: Step, group: Communicator) -> Any:
        step = Step("reduce", rank=comm.rank) if what == "root" else step
        return fault(right.run(x, old, step, group))

    monkeypatch.setitem(OPERATIONS, "reduce", Operation(run, right.simulate))
    steps = (Step("local", then="sin"), Step("reduce", x=1), Step("bcast", then="sin"))
    assert said in check(Program(2, steps), comm)


@pytest.mark.ranks(2)
def test_a_program_as_text_runs_again(
    comm: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (Step("ring", other=1, tag=3), Block("scan", (Step("tree", then="sin", unused=(1,)),)))
    program = Program(2, steps, silent=(0,))
    assert count(program.steps) == 2
    names: dict[str, Any] = {}
    exec(text(program, "what was wrong"), names)
    assert names["program"] == program
    assert capsys.readouterr().out == "right\n"


@pytest.mark.ranks(1)
def test_messages_of_several_ranks_are_compared_without_running_them() -> None:
    def messages(rank: int, grad: Any) -> Any:
        comm = trace_only(rank, 2)
        x = jnp.ones(3)
        f = lambda x: jnp.sum(mg.allreduce(x if rank == 0 else jnp.ones(3), comm=comm) ** 2)
        return record(jax.make_jaxpr(grad(f))(x), [x], {0: (0, 1)})

    assert [len(messages(rank, mg.grad)) for rank in (0, 1)] == [2, 2]
    assert mismatch([messages(0, mg.grad), messages(1, mg.grad)]) == ""
    # What the carrier is for: jax.grad leaves out the rank on which the operand is constant.
    said = mismatch([messages(0, jax.grad), messages(1, jax.grad)])
    assert said.startswith("nobody gets further: rank 0 is at adjoint allreduce([3], ")
    assert said.endswith("rank 1 is at the end")
