"""Random programs: the same text read twice, with messages on ranks, and without on their stack.

A program is data: steps that read and write a few registers, each a vector of three numbers on
every rank. `run` reads it with messages. `simulate` reads it on the stack of all ranks' registers,
with plain JAX and with Python's own loops and branches for every control flow, so that it shares
nothing with what it checks. `check` compares values, tangents and gradients.

Operations are in random_operations.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

import mpigrad as mg
from message_order import mismatch, record
from mpigrad.communicator import Communicator
from random_operations import LENGTH, OPERATIONS, Step

REGISTERS = 3
FLAGS = (True, False, True)  # what conditions read; the last is always true


@dataclass(frozen=True)
class Block:
    """Steps under a control flow or transformation of BLOCKS.

    `kind` is a name in BLOCKS, "cond", or a name in WRAPS, which the ranks in `plain` leave out.
    `flag` and `otherwise` are for "cond".
    """

    kind: str
    body: tuple[Step | Block, ...]
    otherwise: tuple[Step | Block, ...] = ()
    flag: int = 0
    plain: tuple[int, ...] = ()


Steps = tuple[Step | Block, ...]


@dataclass(frozen=True)
class Program:
    """Steps for `size` ranks; the losses of the ranks in `silent` are constant."""

    size: int
    steps: Steps
    silent: tuple[int, ...] = ()


# ---- what stands around messages ----

LOCAL: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda y, old: y,
    "sin": lambda y, old: jnp.sin(y),
    "tanh": lambda y, old: jnp.tanh(2 * y),
    "product": lambda y, old: y * jnp.cos(old),
    "mean": lambda y, old: (y + old) / 2,
    "square": lambda y, old: y**2 / (1 + y**2),
}

State = tuple[Any, ...]
Map = Callable[[Any], Any]


def _cos(s: Any) -> Any:
    return jax.tree.map(jnp.cos, s)


def _cond(f: Map, flags: Any) -> Map:
    return lambda x: jax.lax.cond(flags[-1], f, _cos, x)


def _switch(f: Map, flags: Any) -> Map:
    return lambda x: jax.lax.switch(flags[-1].astype(int), (_cos, f), x)


def _once(f: Map, flags: Any) -> Map:
    return lambda x: jax.lax.scan(lambda s, _: (f(s), None), x, None, length=1)[0]


# A wrapper changes nothing but how JAX sees the function inside.
WRAPS: dict[str, Callable[[Map, Any], Map]] = {
    "jit": lambda f, flags: mg.jit(f),
    "jax.jit": lambda f, flags: jax.jit(f),
    "checkpoint": lambda f, flags: jax.checkpoint(f),
    "checkpoint that keeps products": lambda f, flags: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "cond": _cond,
    "switch": _switch,
    "scan": _once,
    "checkpoint in a scan": lambda f, flags: _once(jax.checkpoint(f), flags),
    "checkpoint in a scan in a checkpoint": lambda f, flags: jax.checkpoint(
        _once(jax.checkpoint(f), flags)
    ),
}


def _twice(f: Map, **how: Any) -> Map:
    return lambda s: jax.lax.scan(lambda s, _: (f(s), None), s, None, length=2, **how)[0]


def _invariant(f: Map) -> Map:
    """The messages in the loop do not depend on the loop."""

    def summed(s: Any) -> Any:
        add = lambda total, w: (jax.tree.map(lambda a, b: a + w * b, total, f(s)), None)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, s), jnp.array([0.75, 0.25]))[0]

    return summed


def _batch(f: Map, vmap: Callable[..., Any]) -> Map:
    def mapped(s: Any) -> Any:
        out = vmap(f)(jax.tree.map(lambda x: jnp.stack([x, x / 2]), s))
        return jax.tree.map(lambda x: x.mean(0), out)

    return mapped


def _squares(s: Any) -> Any:
    return sum(jnp.sum(x**2) for x in s) / 2


def _mean_of_two(F: Map) -> Map:
    half = lambda S: jax.tree.map(lambda x: x / 2, S)
    return lambda S: jax.tree.map(lambda a, b: (a + b) / 2, F(S), F(half(S)))


def _derivative(f: Map, jvp: Callable[..., Any]) -> Map:
    return lambda s: jvp(f, (s,), (_cos(s),))[1]


def _adjoint(f: Map, vjp: Callable[..., Any]) -> Map:
    return lambda s: vjp(f, s)[1](_cos(s))[0]


def _gradient(f: Map, grad: Callable[..., Any]) -> Map:
    return lambda s: jax.tree.map(jnp.sin, grad(lambda s: _squares(f(s)))(s))


# name -> (the block with messages, the same on the stack)
BLOCKS: dict[str, tuple[Callable[[Map], Map], Callable[[Map], Map]]] = {
    "scan": (_twice, lambda F: lambda S: F(F(S))),
    "unrolled scan": (
        lambda f: _twice(jax.checkpoint(f), unroll=2, reverse=True),
        lambda F: lambda S: F(F(S)),
    ),
    "sum": (_invariant, lambda F: F),
    "vmap": (lambda f: _batch(f, mg.vmap), _mean_of_two),
    "map": (lambda f: _batch(f, lambda f: lambda s: jax.lax.map(f, s)), _mean_of_two),
    # All ranks take the derivative, and leave it out.
    "linearize": (lambda f: lambda s: mg.linearize(f, s)[0], lambda F: F),
    "vjp": (lambda f: lambda s: mg.vjp(f, s)[0], lambda F: F),
    "jvp": (lambda f: _derivative(f, mg.jvp), lambda F: _derivative(F, jax.jvp)),
    "adjoint": (lambda f: _adjoint(f, mg.vjp), lambda F: _adjoint(F, jax.vjp)),
    "grad": (lambda f: _gradient(f, mg.grad), lambda F: _gradient(F, jax.grad)),
}


DERIVATIVES = ("linearize", "vjp", "jvp", "adjoint", "grad")
KINDS = tuple(dict.fromkeys((*WRAPS, *BLOCKS)))


# ---- with messages ----


@functools.cache
def communicators(comm: Communicator) -> dict[str, Communicator]:
    """The communicators that steps name (collective)."""
    return {
        "world": comm,
        "dup": comm.dup(),
        "parity": comm.split(comm.rank % 2, key=-comm.rank),
        "self": comm.split(comm.rank),
    }


def constant(rank: int) -> Any:
    return np.array([0.5, -0.25, 0.75]) + 0.125 * rank


def run(steps: Steps, state: State, flags: Any, comms: dict[str, Communicator]) -> State:
    """The state after `steps`, with messages."""
    rank = comms["world"].rank
    for step in steps:
        if isinstance(step, Block):
            body = lambda s, b=step.body: run(b, s, flags, comms)
            if step.kind == "cond":
                other = lambda s, b=step.otherwise: run(b, s, flags, comms)
                state = jax.lax.cond(flags[step.flag], body, other, state)
            elif step.kind in BLOCKS:
                state = BLOCKS[step.kind][0](body)(state)
            elif rank in step.plain:
                state = body(state)
            else:
                state = WRAPS[step.kind](body, flags)(state)
            continue
        x = jnp.asarray(constant(rank)) if rank in step.constant else state[step.x]
        old = state[step.target]
        group = comms[step.comm]
        message = lambda x, o=old, s=step, g=group: OPERATIONS[s.operation].run(x, o, s, g)
        wrap = dict(step.wraps).get(rank)
        y = (WRAPS[wrap](message, flags) if wrap else message)(x)
        y = LOCAL[step.then](y, old)
        if rank not in step.unused:
            state = (*state[: step.target], y, *state[step.target + 1 :])
    return state


# ---- without ----


def groups(kind: str, size: int) -> list[tuple[int, ...]]:
    """The ranks of each communicator that `communicators` makes."""
    match kind:
        case "parity":
            down = range(size - 1, -1, -1)
            parts = [tuple(r for r in down if r % 2 == color) for color in (0, 1)]
            return [part for part in parts if part]
        case "self":
            return [(r,) for r in range(size)]
    return [tuple(range(size))]


def _on_ranks(ranks: Sequence[int], size: int) -> Any:
    return jnp.asarray(np.isin(np.arange(size)[:, None], ranks) & np.ones(LENGTH, bool))


def simulate(steps: Steps, state: State) -> State:
    """The state after `steps` of registers that are stacks over ranks, without messages."""
    for step in steps:
        if isinstance(step, Block):
            if step.kind == "cond":
                state = simulate(step.body if FLAGS[step.flag] else step.otherwise, state)
                continue
            body = lambda s, b=step.body: simulate(b, s)
            state = (BLOCKS[step.kind][1](body) if step.kind in BLOCKS else body)(state)
            continue
        X, old = state[step.x], state[step.target]
        size = len(X)
        if step.constant:
            constants = jnp.asarray([constant(r) for r in range(size)])
            X = jax.lax.select(_on_ranks(step.constant, size), constants, X)
        parts = groups(step.comm, size)
        simulated = OPERATIONS[step.operation].simulate
        if parts == [tuple(range(size))]:
            Y = simulated(X, old, step)
        else:
            Y = jnp.zeros_like(X)
            for part in parts:
                take = jnp.asarray(np.eye(size)[list(part)])
                y = simulated(jax.lax.dot(take, X), jax.lax.dot(take, old), step)
                Y = Y + jax.lax.dot(take.T, y)
        Y = LOCAL[step.then](Y, old)
        if step.unused:
            Y = jax.lax.select(_on_ranks(step.unused, size), old, Y)
        state = (*state[: step.target], Y, *state[step.target + 1 :])
    return state


# ---- both ----


def derivatives(program: Program, comms: dict[str, Communicator]) -> Callable[..., Any]:
    """(x, tangents, cotangents, flags) -> the value, its tangent, and the gradient."""

    def all_of_them(x: State, t: State, w: State, flags: Any) -> Any:
        f = lambda x: run(program.steps, x, flags, comms)

        def loss(x: State) -> Any:
            out = f(x)
            if comms["world"].rank in program.silent:
                return jnp.asarray(5.0)
            return sum(jnp.vdot(a, b) for a, b in zip(out, w, strict=True))

        y, y_dot = mg.jvp(f, (x,), (t,))
        return y, y_dot, mg.grad(loss)(x)

    return all_of_them


def _simulated(steps: Steps, X: State, T: State, W: State, comm: Communicator) -> list[Any]:
    """This rank's share of (values and tangents of all ranks, the gradient), None for the rest.

    What takes long is compiling: one rank does the values and tangents, another one the gradient.
    """
    f = functools.partial(simulate, steps)
    forward = lambda: jax.jit(lambda X, T: jax.jvp(f, (X,), (T,)))(X, T)
    backward = lambda: jax.jit(lambda X, W: jax.vjp(f, X)[1](W)[0])(X, W)
    parts = ((0, forward), (comm.size - 1, backward))
    return [jax.device_get(part()) if comm.rank == root else None for root, part in parts]


def _difference(got: Sequence[Any], expected: Sequence[Any], rank: int) -> float:
    """The largest difference from row `rank`, relative to the size of the numbers."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
        gap = np.abs(np.asarray(a) - np.asarray(b)[rank]) / scale
        worst = max(worst, float(np.max(np.where(np.isfinite(gap), gap, np.inf), initial=0.0)))
    return worst


def check(program: Program, comm: Communicator) -> str:
    """What is wrong with the program's value, tangent or gradient; the same on every rank.

    In double precision, or in single where JAX has no other (`jax_enable_x64`).

    Errors in tracing and messages that do not match are found before the program runs: nobody
    waits, and a smaller program can be looked for.
    """
    if program.size != comm.size:
        return f"the program is for {program.size} ranks, not {comm.size}"
    comms, tolerance = communicators(comm), 1e-9 if _double() else 2e-3
    generator = np.random.default_rng(11)
    shape = (REGISTERS, comm.size, LENGTH)
    X, T, W = (tuple(jnp.asarray(generator.uniform(-1, 1, shape))) for _ in range(3))
    W = tuple(
        jnp.asarray([np.zeros(LENGTH) if r in program.silent else row for r, row in enumerate(w)])
        for w in W
    )
    mine = lambda stacks: tuple(v[comm.rank] for v in stacks)

    operands = (mine(X), mine(T), mine(W), jnp.array(FLAGS))
    trouble, compiled, messages, simulated = "", None, [], []
    try:
        traced = jax.jit(derivatives(program, comms)).trace(*operands)
        members = {
            group.slot: next(g for g in groups(name, comm.size) if comm.rank in g)
            for name, group in comms.items()
        }
        messages = record(traced.jaxpr, jax.tree.leaves(operands), members)
        compiled = traced.lower().compile()
        simulated = _simulated(program.steps, X, T, W, comm)
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    everybody = comm.mpi.allgather((trouble, messages, simulated))  # first here do ranks meet
    troubles, all_messages, parts = zip(*everybody, strict=True)
    trouble = _listed(troubles) or mismatch(list(all_messages))
    if trouble or compiled is None:
        return trouble
    y, y_dot, x_bar = compiled(*operands)

    (Y, Y_dot), X_bar = parts[0][0], parts[-1][1]
    pairs = {"value": (y, Y), "jvp": (y_dot, Y_dot), "gradient": (x_bar, X_bar)}
    for name, (got, expected) in pairs.items():
        gap = _difference(got, expected, comm.rank)
        if not gap <= tolerance:
            trouble += f"{name} differs by {gap:.1e}; "
    products = np.array([[np.vdot(a, b) for a, b in zip(u, v, strict=True)]
                         for u, v in ((y_dot, mine(W)), (mine(T), x_bar))])  # fmt: skip
    forward, reverse = comm.mpi.allreduce(products.sum(1))
    scale = max(1.0, float(comm.mpi.allreduce(np.abs(products).sum())))
    if not abs(forward - reverse) <= tolerance * scale:
        trouble += f"dot test: {forward} is not {reverse}"
    return _shared(trouble, comm)


def _double() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def _shared(trouble: str, comm: Communicator) -> str:
    return _listed(comm.mpi.allgather(trouble))


def _listed(troubles: Sequence[str]) -> str:
    return "\n".join(f"rank {r}: {text}" for r, text in enumerate(troubles) if text)


def count(steps: Steps) -> int:
    """The number of operations, those in blocks included."""
    return sum(
        count(s.body) + count(s.otherwise) if isinstance(s, Block) else 1 for s in steps
    )  # fmt: skip


def has_messages(steps: Steps) -> bool:
    return any(
        has_messages(s.body) if isinstance(s, Block) else s.operation != "local" for s in steps
    )


def text(program: Program, trouble: str = "") -> str:
    """A program to be started on `program.size` ranks that runs this check again."""

    def words(item: Any, indent: str) -> str:
        fields = [(f.name, f.default, getattr(item, f.name)) for f in dataclasses.fields(item)]
        parts = [
            f"{name}={listed(value, indent)}"
            for name, default, value in fields
            if default is dataclasses.MISSING or value != default
        ]
        return f"{type(item).__name__}({', '.join(parts)})"

    def listed(value: Any, indent: str) -> str:
        if not isinstance(value, tuple) or not any(isinstance(v, Step | Block) for v in value):
            return repr(value)
        inner = indent + "    "
        lines = "".join(f"\n{inner}{words(v, inner)}," for v in value)
        return f"({lines}\n{indent})"

    remarks = "".join(f"# {line}\n" for line in trouble.splitlines())
    return (
        f"{remarks}# mpigrad launch -n {program.size} THIS_FILE, with PYTHONPATH=tests\n"
        "import jax\nfrom mpigrad.communicator import default_communicator\n\n"
        "from random_programs import Block, Program, Step, check\n\n"
        f'jax.config.update("jax_enable_x64", {_double()})\n'
        f"program = {words(program, '')}\n"
        "print(check(program, default_communicator()) or 'right')\n"
    )


# ---- the draw ----


@st.composite
def programs(draw: st.DrawFn, size: int) -> Program:
    """Programs of 5 to 20 operations for `size` ranks, three in four of up to 7."""
    rank = st.integers(0, size - 1)
    some = st.one_of(
        st.just(()), st.lists(rank, unique=True, max_size=size).map(lambda r: tuple(sorted(r)))
    )
    register = st.integers(0, REGISTERS - 1)
    names = list(OPERATIONS)

    def step() -> Step:
        wrapped = draw(some)
        return Step(
            operation=draw(st.sampled_from(names)),
            x=draw(register),
            target=draw(register),
            rank=draw(rank),
            other=draw(st.integers(0, 3)),
            tag=draw(st.integers(0, 9)),
            comm=draw(st.sampled_from(("world", "world", "world", "parity", "dup", "self"))),
            then=draw(st.sampled_from(list(LOCAL))),
            constant=draw(some),
            unused=draw(some),
            wraps=tuple((r, draw(st.sampled_from(list(WRAPS)))) for r in wrapped),
        )

    def steps(total: int, depth: int, kinds: Sequence[str] = KINDS) -> Steps:
        found: list[Step | Block] = []
        while (left := total - count(tuple(found))) > 0:
            if depth == 0 or not draw(st.integers(0, 3).map(lambda n: n == 3)):
                found.append(step())
                continue
            kind = draw(st.sampled_from(kinds))
            # A derivative inside a derivative doubles what is compiled.
            within = (
                tuple(k for k in kinds if k not in DERIVATIVES) if kind in DERIVATIVES else kinds
            )
            body = steps(draw(st.integers(1, min(4, left))), depth - 1, within)
            left -= count(body)
            otherwise: Steps = ()
            if kind == "cond" and left > 0:
                otherwise = steps(draw(st.integers(1, min(2, left))), depth - 1, within)
            found.append(Block(kind, body, otherwise, draw(st.integers(0, 1)), draw(some)))
        return tuple(found)

    # The number is drawn first, and by its place in a list: of numbers, small ones come more often.
    number = draw(st.sampled_from((*range(5, 21), *(14 * (5, 6, 7)))))
    program = Program(size, steps(number, 3), draw(some))
    assume(has_messages(program.steps))
    return program


def search(
    comm: Communicator,
    examples: int,
    seed: int,
    shown: Callable[[Program, int], None] = lambda program, number: None,
    smaller: bool = False,
) -> str:
    """Check `examples` random programs; on rank 0 the first that fails, as text, or nothing.

    Rank 0 draws, and tells the others; so it alone decides how to look for a smaller program that
    fails, too. The same seed gives the same programs.

    Parameters
    ----------
    shown
        Called on rank 0 with each program and its number before it runs.
    smaller
        Whether to look for a smaller program that fails, which may take minutes.
    """
    if comm.rank > 0:
        while (program := comm.mpi.bcast(None)) is not None:
            check(program, comm)
        return ""
    number, failing = 0, ""

    @given(programs(comm.size))
    def one(program: Program) -> None:
        nonlocal number, failing
        number += 1
        shown(program, number)
        trouble = check(comm.mpi.bcast(program), comm)
        if trouble:
            failing = text(program, trouble)
        assert not trouble

    phases = [Phase.generate, Phase.shrink] if smaller else [Phase.generate]
    options: Any = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    one = options(with_seed(seed)(one))
    try:
        one()
    except AssertionError:
        return failing
    finally:
        comm.mpi.bcast(None)
    return ""
