"""Analysis of traced programs: do they work elementwise on arrays that are sharded over ranks?

Every value of the program gets a mark: the index of the sharded array of which the value is an
elementwise function, or one of the three marks below. A primitive without a rule counts as mixing
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["REPLICATED", "UNIFORM", "join_marks", "propagate_marks"]

Mark = int | str
UNIFORM = "uniform"  # a scalar or a constant: fits any array
REPLICATED = "replicated"  # an array that each rank has whole, or that was made for one shape
MIXED = "mixed"  # depends on several elements of a sharded array

# fmt: off
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor",
}
# fmt: on
_RESHAPING = {"broadcast_in_dim", "reshape", "squeeze"}
_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}


def join_marks(*marks: Mark) -> Mark:
    """Return the mark of an elementwise function of values with these marks."""
    others = {mark for mark in marks if mark != UNIFORM}
    return MIXED if len(others) > 1 else others.pop() if others else UNIFORM


def propagate_marks(program: ClosedJaxpr | Jaxpr, marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks of a program's results, given those of its arguments."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    mark_of: dict[Any, Mark] = dict.fromkeys(jaxpr.constvars, UNIFORM)
    mark_of.update(zip(jaxpr.invars, marks, strict=True))

    def mark(atom: Any) -> Mark:
        return UNIFORM if isinstance(atom, Literal) else mark_of[atom]

    for equation in jaxpr.eqns:
        results = _marks_of_results(equation, [mark(atom) for atom in equation.invars])
        for variable, result in zip(equation.outvars, results, strict=True):
            scalar = getattr(variable.aval, "ndim", 0) == 0
            mark_of[variable] = UNIFORM if scalar and result == REPLICATED else result
    return [mark(atom) for atom in jaxpr.outvars]


def _marks_of_results(equation: Any, marks: list[Mark]) -> list[Mark]:
    name, results = equation.primitive.name, equation.outvars
    if name == "cond":
        branches = [propagate_marks(branch, marks[1:]) for branch in equation.params["branches"]]
        uniform = marks[0] == UNIFORM  # the branch index
        return [join_marks(*each) if uniform else MIXED for each in zip(*branches, strict=True)]
    if name in _CALLS:
        inner = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
        if len(inner) == 1:
            return propagate_marks(inner[0], marks)
    joined = join_marks(*marks)
    reshaping = name in _RESHAPING and (
        joined == UNIFORM or equation.invars[0].aval.shape == results[0].aval.shape
    )
    if reshaping or name in _ELEMENTWISE:
        return [joined] * len(results)
    return [REPLICATED if joined in (UNIFORM, REPLICATED) else MIXED] * len(results)
