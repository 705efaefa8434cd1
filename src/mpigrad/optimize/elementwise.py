"""Whether a traced program works number by number on arrays that are shared out over ranks.

Every value of the program gets a mark: the number of the shared-out array of which it is a function
number by number, or one of the three below. What no rule is known for counts as mixing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["COMMON", "UNIFORM", "follow", "join"]

Mark = int | str
UNIFORM = "uniform"  # a number, or constants: fits any array
COMMON = "common"  # an array that each rank has whole, or that was made for a shape
MIXED = "mixed"  # numbers of several places of a shared-out array

# fmt: off
_NUMBER_BY_NUMBER = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor",
}
# fmt: on
_SHAPING = {"broadcast_in_dim", "reshape", "squeeze"}
_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}


def join(*marks: Mark) -> Mark:
    """The mark of what is made of values of these marks, place by place."""
    found = {mark for mark in marks if mark != UNIFORM}
    return MIXED if len(found) > 1 else found.pop() if found else UNIFORM


def follow(program: ClosedJaxpr | Jaxpr, marks: Sequence[Mark]) -> list[Mark]:
    """The marks of a program's results, by those of its arguments."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    known: dict[Any, Mark] = dict.fromkeys(jaxpr.constvars, UNIFORM)
    known.update(zip(jaxpr.invars, marks, strict=True))

    def mark(atom: Any) -> Mark:
        return UNIFORM if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        found = _through(equation, [mark(atom) for atom in equation.invars])
        for variable, result in zip(equation.outvars, found, strict=True):
            number = getattr(variable.aval, "ndim", 0) == 0
            known[variable] = UNIFORM if number and result == COMMON else result
    return [mark(atom) for atom in jaxpr.outvars]


def _through(equation: Any, marks: list[Mark]) -> list[Mark]:
    name, results = equation.primitive.name, equation.outvars
    if name == "cond":
        branches = [follow(branch, marks[1:]) for branch in equation.params["branches"]]
        decided = marks[0] == UNIFORM
        return [join(*each) if decided else MIXED for each in zip(*branches, strict=True)]
    if name in _CALLS:
        inner = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
        if len(inner) == 1:
            return follow(inner[0], marks)
    together = join(*marks)
    shaping = name in _SHAPING and (
        together == UNIFORM or equation.invars[0].aval.shape == results[0].aval.shape
    )
    if shaping or name in _NUMBER_BY_NUMBER:
        return [together] * len(results)
    return [COMMON if together in (UNIFORM, COMMON) else MIXED] * len(results)
