"""The table of operations in docs/operations.md, made from the code.

    python tools/operations_table.py           writes it
    python tools/operations_table.py --check   fails when it is not up to date

A row is a function of mpigrad.operations: its signature, the first sentence of its docstring, the
adjoint that the docstring names, and the modes in which it can be traced.
"""

from __future__ import annotations

import contextlib
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

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- made by tools/operations_table.py -->\n", "<!-- end -->\n"
# Arguments with which an operation is traced, on one rank.
EXAMPLES: dict[str, Any] = {"counts": (1,), "dest": 0, "source": 0}
SPECIAL: dict[str, Callable[[Any], Any]] = {
    "neighbor_alltoallv": lambda x: operations.neighbor_alltoallv(x[:0], (), (), ()),
    "alltoallv": lambda x: mg.alltoallv(x, (1,), (1,)),
    "irecv": lambda x: mg.wait(mg.irecv(x, 0)),
    "isend": lambda x: mg.wait(mg.isend(x, 0)),
    "one_sided": lambda x: mg.one_sided(x, get=[(0, 0, 1)], accumulate=[(x, 0, 0)]),
    "wait": lambda x: mg.wait(mg.irecv(x, 0)),
    "waitall": lambda x: mg.waitall([mg.isend(x, 0)]),
}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The operations: what takes a communicator or a request, checks of values left out."""
    for name in operations.__all__:
        f = getattr(operations, name)
        if not inspect.isfunction(f) or f.__module__.endswith(".checks"):
            continue
        if {"comm", "request", "requests"} & set(inspect.signature(f).parameters):
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
    return f"{name}({', '.join(words)})"


def _mpi_name(argument: str, value: Any) -> str:
    if isinstance(value, MPI.Op):
        return next(n for n in ("SUM", "PROD", "MAX", "MIN") if getattr(MPI, n) == value)
    wildcard = {"source": "ANY_SOURCE", "tag": "ANY_TAG"}.get(argument, "")
    return wildcard if wildcard and value == getattr(MPI, wildcard) else ""


def result(f: Callable[..., Any]) -> str:
    """The first sentence of the docstring."""
    return inspect.getdoc(f).split("\n\n")[0].replace("\n", " ").rstrip(".")  # type: ignore[union-attr]


def adjoint(f: Callable[..., Any]) -> str:
    """What the docstring says the adjoint is."""
    text = " ".join((inspect.getdoc(f) or "").split())
    found = re.search(r"adjoint (?:is|posts) (.*?)[.;](?:\s|$)", text)
    return found[1].partition(": ")[0] if found else "none: it carries no values"


def modes(name: str, f: Callable[..., Any]) -> str:
    """The modes in which the operation can be traced."""

    def example(x: Any) -> Any:
        if name in SPECIAL:
            return SPECIAL[name](x)
        required = [
            p.name
            for p in inspect.signature(f).parameters.values()
            if p.default is p.empty or p.name == "source"
        ]
        return f(**{word: x if word in ("x", "like") else EXAMPLES[word] for word in required})

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


def table() -> str:
    """The table as Markdown."""
    lines = ["| operation | what it gives | its adjoint | modes |", "|---|---|---|---|"]
    for name, f in functions():
        lines.append(f"| `{signature(name, f)}` | {result(f)} | {adjoint(f)} | {modes(name, f)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page with the table of now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Write the page, or compare it."""
    if sys.argv[1:] == ["--check"]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
