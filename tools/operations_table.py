"""The tables of docs/operations.md, made from the code: operations, reductions, communicators.

    python tools/operations_table.py           writes them
    python tools/operations_table.py --check   fails when they are not up to date

An operation is a function of mpigrad.operations: its signature, the first sentence of its
docstring, the adjoint that the docstring names, and the modes in which it can be traced. Dtypes
of a reduction are those with which an allreduce is traced. What communicators have is in their
docstrings.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg
from mpigrad import operations
from mpigrad.communicator import Cartesian, Communicator
from mpigrad.operations.reduce_operators import OPS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- {}: made by tools/operations_table.py -->\n", "<!-- end -->\n"
# Arguments with which an operation is traced, on one rank.
EXAMPLES: dict[str, Any] = {"counts": (1,), "dest": 0, "source": 0}
SPECIAL: dict[str, Callable[[Any], Any]] = {
    "neighbor_alltoallv": lambda x: operations.neighbor_alltoallv(x[:0], (), (), ()),
    "alltoallv": lambda x: mg.alltoallv(x, (1,), (1,)),
    "custom_operation": mg.custom_operation(lambda x, c: x, lambda ct, c: ct),
    "irecv": lambda x: mg.wait(mg.irecv(x, 0)),
    "isend": lambda x: mg.wait(mg.isend(x, 0)),
    "one_sided": lambda x: mg.one_sided(x, get=[(0, 0, 1)], accumulate=[(x, 0, 0)]),
    "wait": lambda x: mg.wait(mg.irecv(x, 0)),
    "wait_with_status": lambda x: mg.wait_with_status(mg.irecv(x, 0))[0],
    "waitall": lambda x: mg.waitall([mg.isend(x, 0)]),
}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The operations: what takes a communicator or a request, or makes what does.

    Checks of values and norms are left out.
    """
    for name in operations.__all__:
        f = getattr(operations, name)
        if not inspect.isfunction(f) or f.__module__.endswith((".checks", ".norms")):
            continue
        if {"comm", "request", "requests", "forward"} & set(inspect.signature(f).parameters):
            yield name, f


def signature(name: str, f: Callable[..., Any]) -> str:
    """The call as a user writes it, `comm` left out."""
    words = []
    for p in inspect.signature(f).parameters.values():
        if p.name == "comm":
            continue
        default = p.default
        constant = _mpi_name(p.name, default)
        value = f"MPI.{constant}" if constant else repr(default)
        words.append(p.name if default is p.empty else f"{p.name}={value}")
    call = "(x)" if name == "custom_operation" else ""  # what it gives is called
    return f"{name}({', '.join(words)}){call}"


def _mpi_name(argument: str, value: Any) -> str:
    if isinstance(value, MPI.Op):
        return next(n for n in ("SUM", "PROD", "MAX", "MIN") if getattr(MPI, n) == value)
    wildcard = {"source": "ANY_SOURCE", "tag": "ANY_TAG"}.get(argument, "")
    return wildcard if wildcard and value == getattr(MPI, wildcard) else ""


def result(f: Callable[..., Any]) -> str:
    """The first sentence of the docstring."""
    return first_paragraph(inspect.getdoc(f) or "")


def first_paragraph(text: str) -> str:
    return text.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def adjoint(f: Callable[..., Any]) -> str:
    """Return the adjoint as the docstring gives it."""
    text = " ".join((inspect.getdoc(f) or "").split())
    found = re.search(r"adjoint (?:is|posts) (.*?)[.;](?:\s|$)", text)
    return found[1].partition(": ")[0] if found else "none: it carries no values"


def example(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """The operation as a function of its operand (and of `op`)."""
    if name in SPECIAL:
        return SPECIAL[name]
    required = [
        p.name
        for p in inspect.signature(f).parameters.values()
        if p.default is p.empty or p.name == "source"
    ]
    return lambda x, **op: f(
        **{word: x if word in ("x", "like") else EXAMPLES[word] for word in required}, **op
    )


def modes(example: Callable[[Any], Any]) -> str:
    """The modes in which a function can be traced."""

    def total(x: Any) -> Any:
        floats = [y for y in jax.tree.leaves(example(x)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(map(jnp.sum, floats), jnp.sum(x))

    x = jnp.ones((1, 2))
    transformed = {
        "forward": lambda: mg.jvp(total, (x,), (x,)),
        "reverse": lambda: mg.grad(total)(x),
        "batched": lambda: mg.vmap(total)(x[None]),
    }
    found = []
    for mode, function in transformed.items():
        with contextlib.suppress(NotImplementedError):
            jax.make_jaxpr(function)()
            found.append(mode)
    return ", ".join(found)


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---")


def table() -> str:
    """The operations as Markdown."""
    rows = [
        (f"`{signature(name, f)}`", result(f), adjoint(f), modes(example(name, f)))
        for name, f in functions()
    ]
    return markdown(("operation", "what it gives", "its adjoint", "modes"), rows)


# ---- reductions ----

DTYPES = {
    "bool": ("bool",),
    "integers": tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16, bfloat16": ("float16", "bfloat16"),
    "float32/64": ("float32", "float64"),
    "complex64/128": ("complex64", "complex128"),
}


def takes(f: Callable[[Any], Any]) -> str:
    """Return the groups of dtypes with which a function can be traced: all of a group, or none."""

    def traced(dtype: str) -> bool:
        try:
            jax.eval_shape(f, jax.ShapeDtypeStruct((1, 2), dtype))
        except TypeError:
            return False
        return True

    found = {group: {traced(d) for d in dtypes} for group, dtypes in DTYPES.items()}
    assert all(len(answers) == 1 for answers in found.values()), found
    return ", ".join(group for group, (answer,) in found.items() if answer)


def own_derivative() -> str:
    """Return the text about `derivative` in the docstring of `reduction`."""
    found = re.search(r"^derivative\n(.*?)\n\n", inspect.getdoc(mg.reduction) or "", re.M | re.S)
    assert found
    return " ".join(found[1].split()).rstrip(".")


@functools.cache
def reductions() -> str:
    """Return the reductions as Markdown, with the modes of an allreduce."""
    ops = [(f"`MPI.{name}`", op, derivative) for op, name, _, derivative in OPS]
    own = ("`mpigrad.reduction(fn, derivative)`", mg.reduction(jnp.add), own_derivative())
    rows = []
    for name, op, derivative in (*ops, own):
        run = functools.partial(mg.allreduce, op=op)
        # Without floats forward and reverse are nothing but the absence of an error.
        integers = derivative.startswith("none")
        found = modes(lambda x, run=run: run((x > 0).astype(int))) if integers else modes(run)
        if integers:
            found = found.removeprefix("forward, reverse, ")
        rows.append((name, takes(run), derivative, found))
    return markdown(("`op`", "dtypes", "its derivative", "modes"), rows)


# ---- communicators ----


def attributes(kind: type) -> list[tuple[str, str]]:
    """(name, description) of a docstring's attributes."""
    section = (inspect.getdoc(kind) or "").partition("Attributes\n----------\n")[2]
    found = re.findall(r"^(\w+)\n((?: .*\n?)+)", section, re.M)
    return [(name, " ".join(text.split()).rstrip(".")) for name, text in found]


def communicators() -> str:
    """Return the methods of communicators and grids, as Markdown."""
    members = {
        "comm": (Communicator, "split dup free cartesian"),
        "grid": (Cartesian, "shift rank_at"),
    }
    made = first_paragraph(inspect.getdoc(Communicator) or "")
    rows = [("`comm = mpigrad.Communicator(mpi_comm)`", made)]
    rows += [("`with comm:`", result(Communicator.__enter__))]
    for variable, (kind, names) in members.items():
        for name in names.split():
            f = getattr(kind, name)
            call = (
                signature(f"{variable}.{name}", f).replace("(self, ", "(").replace("(self)", "()")
            )
            rows.append((f"`{call}`", result(f)))
    rows += [(f"`grid.{name}`", text) for name, text in attributes(Cartesian)]
    rows += [("`grid.neighbors`", result(Cartesian.neighbors.fget))]  # type: ignore[attr-defined]
    return markdown(("", "what it is"), rows)


# ---- the page ----

TABLES = {"operations": table, "reductions": reductions, "communicators": communicators}


def page() -> str:
    """The whole page with the tables of now."""
    text = PAGE.read_text()
    for name, made in TABLES.items():
        begin = BEGIN.format(name)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(END)
        assert found and closed, f"{PAGE} has no place for the table of {name}"
        text = f"{before}{begin}\n{made()}\n{END}{after}"
    return text


def main() -> int:
    """Write the page, or compare it."""
    if sys.argv[1:] == ["--check"]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
