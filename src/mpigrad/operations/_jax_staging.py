"""Keep messages at their place in programs that JAX splits, in custom rules, and in while loops."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import linear_util, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import mlir
from jax.interpreters import partial_eval as _partial_eval
from mpi4py import MPI

from mpigrad.guard.settings import guard_enabled
from mpigrad.operations._jax_compat import (
    allow_in_custom_rules,
    has_messages,
    lowering,
    make_effectful,
    register_lowering,
)
from mpigrad.operations._jax_private import VERSION, UnsupportedJAXError, private, refuse, require
from mpigrad.operations.native_targets import register_target
from mpigrad.runtime.call_sites import call_site_of, describe

__all__ = [
    "CHANGES",
    "always_stage",
    "check_while_loops",
    "has_messages_inside",
    "is_hoisting",
    "is_in_place",
    "mark_hoisting",
    "partial_eval",
    "partial_eval_rules",
    "run_in_place",
    "stage",
    "surround_custom_rules",
    "wrap_call",
]

# ---- Keep messages at their place when JAX splits a program into a known and an unknown part
#
# JAX does so to linearize a program, and executes the known part early. Messages, and calls with
# messages, belong to the unknown part even if all their operands are known (`stage`).


partial_eval: Any = _partial_eval
partial_eval_rules = partial_eval.custom_partial_eval_rules
_trace_context = private("core.trace_ctx")
# Errors of code for private parts of JAX that a new release has changed.
CHANGES = (UnsupportedJAXError, AttributeError, ImportError, KeyError, TypeError, ValueError)


def has_messages_inside(params: dict[str, Any]) -> bool:
    """Return True if a jaxpr among the parameters of an equation has messages."""
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (Jaxpr, ClosedJaxpr)) and has_messages(part.effects):
                return True
    return False


# The traces in which a jvp rule is linearized. The rule runs at its place in the program, so its
# known part (the primals) is executed there. In a loop the primals may be loop invariants, which
# other traces would move out of the loop.
_in_place: list[Any] = []


@contextlib.contextmanager
def run_in_place() -> Iterator[None]:
    """Execute the known part of a jvp rule in the current trace."""
    _in_place.append(_trace_context.trace)
    try:
        yield
    finally:
        _in_place.pop()


def is_in_place(trace: Any, tracers: Sequence[Any]) -> bool:
    """Return True if an equation belongs to the known part of such a rule.

    This includes the bodies of loops and branches of the rule, which JAX splits by other traces.
    """
    inside = bool(_in_place) and not _hoisting
    return (inside or any(trace is t for t in _in_place)) and all(t.is_known() for t in tracers)


def stage(primitive: Any, trace: Any, *tracers: Any, **params: Any) -> Any:
    """Put an equation into the unknown part of a program."""
    if is_in_place(trace, tracers):
        return trace.default_process_primitive(primitive, tracers, params)
    unknown = [trace.instantiate_const(t) for t in tracers]
    return trace.default_process_primitive(primitive, unknown, params)


def always_stage(primitive: Primitive) -> None:
    """Never execute `primitive` in the known part of a program, even if all operands are known."""
    partial_eval_rules[primitive] = functools.partial(stage, primitive)


# ---- calls of functions ----

# Not empty while JAX looks for loop invariants. During that time a call with messages is staged as
# a whole. At other times its known part is executed.
_hoisting: list[None] = []


def mark_hoisting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of JAX that looks for loop invariants."""

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _hoisting.append(None)
        try:
            return plain(*args, **kwargs)
        finally:
            _hoisting.pop()

    return wrapped


def is_hoisting() -> bool:
    """Return True while JAX looks for loop invariants."""
    return bool(_hoisting)


def wrap_call(primitive: Any, n: int, around: Callable[..., Any]) -> None:
    """Let `around(trace, functions, args, equation, proceed)` process the calls of a primitive.

    `functions` are the `n` functions of the call, and `equation` are the parameters of the
    equation that is evaluated (None if the call is not read from a jaxpr). `proceed(functions)` is
    the original processing of JAX.
    """
    bind, plain = primitive.bind_with_trace, primitive.get_bind_params

    def bind_with_trace(trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        params = dict(params)
        equation = params.pop("equation", None)

        def proceed(parts):
            return bind(trace, args, avals, {**params, "subfuns": tuple(parts)})

        return around(trace, params["subfuns"], args, equation, proceed)

    def bind_functions_and_args(trace: Any, args: Any, params: Any, /) -> Any:
        params = dict(params)
        equation = params.pop("equation", None)
        functions, args = args[:n], args[n:]

        def proceed(parts):
            return bind(trace, (*parts, *args), params)

        return around(trace, functions, args, equation, proceed)

    def get_bind_params(params: Any) -> Any:
        bind_params = plain(params)
        if isinstance(bind_params, dict):
            return {**bind_params, "equation": params}
        functions, rest = bind_params  # JAX 0.8
        return functions, {**rest, "equation": params}

    takes = len(inspect.signature(bind).parameters)
    if takes not in (3, 4):
        raise UnsupportedJAXError(f"{primitive}.bind_with_trace takes {takes} arguments")
    # In JAX 0.8 the functions stand before the arguments.
    primitive.bind_with_trace = bind_with_trace if takes == 4 else bind_functions_and_args
    primitive.get_bind_params = get_bind_params


# ---- Messages in functions of jax.custom_jvp and jax.custom_vjp ----
#
# Their parts are evaluated by primitives without a rule of abstract evaluation. A function with
# messages is staged as a whole. Its parts run in contexts that allow or forbid messages.


@linear_util.transformation2
def _inside(f: Callable[..., Any], around: Callable[[], Any], rule: bool, *args: Any) -> Any:
    with around(), run_in_place() if rule else contextlib.nullcontext():
        return f(*args)


_CUSTOM_RULES = "custom rules"


def surround_custom_rules(
    function: Callable[[], Any], jvp_rule: Callable[[], Any], vjp_rule: Callable[[], Any]
) -> None:
    """Run the parts of jax.custom_jvp and jax.custom_vjp in these contexts.

    Parameters
    ----------
    function
        The context of the function itself.
    jvp_rule
        The context of the rule of jax.custom_jvp.
    vjp_rule
        The context of the backward rule of jax.custom_vjp.
    """
    rules = {
        jax_primitives.custom_jvp_call_p: (function, jvp_rule),
        jax_primitives.custom_vjp_call_p: (function, None, vjp_rule),
    }
    try:
        for primitive, contexts in rules.items():
            _surround(primitive, contexts, jvp_rule)
        allow_in_custom_rules()  # only now: JAX itself refuses messages in rules without contexts
    except CHANGES as error:
        refuse(_CUSTOM_RULES, f"{type(error).__name__}: {error}")


def _surround(primitive: Any, contexts: Any, jvp_rule: Any) -> None:
    JaxprTrace = private("interpreters.partial_eval.JaxprTrace")

    def around(trace: Any, functions: Any, args: Any, equation: Any, proceed: Any) -> Any:
        if equation is not None and isinstance(trace, JaxprTrace) and has_messages_inside(equation):
            require(_CUSTOM_RULES)
            tracers = [trace.to_jaxpr_tracer(x) for x in args]
            if not is_in_place(trace, tracers):
                return _stage_call(primitive, trace, tracers, equation)
        return proceed(
            part if context is None else _inside(part, context, context is jvp_rule)
            for part, context in zip(functions, contexts, strict=True)
        )

    wrap_call(primitive, len(contexts), around)


def _stage_call(primitive: Any, trace: Any, tracers: Any, params: dict[str, Any]) -> Any:
    """Stage a call without a rule of abstract evaluation, as `stage` does."""
    inputs = [trace.instantiate_const(t) for t in tracers]
    jaxpr, unknown = params["call_jaxpr"], partial_eval.PartialVal.unknown
    outputs = [partial_eval.JaxprTracer(trace, unknown(a), None) for a in jaxpr.out_avals]
    stack = trace._current_truncated_name_stack()
    source = source_info_util.current().replace(name_stack=stack)
    # In JAX 0.10.0 and older all effects are positional.
    has_others = VERSION >= (0, 10, 1)
    kinds = private("core.positional_effects")(jaxpr) if has_others else jaxpr.effects
    new_recipe = private("interpreters.partial_eval.new_eqn_recipe")
    recipe = new_recipe(trace, inputs, outputs, primitive, params, kinds, source)
    handle = private("interpreters.partial_eval.EffectHandle")
    trace.effect_handles.append(handle(inputs, recipe))
    for output in outputs:
        output.recipe = recipe
    return outputs


# ---- Find while loops in which each rank would take steps of its own ----
#
# The condition of a `while_loop` with messages must be the same on all ranks. Solvers and
# adaptive integrators of other libraries compute it from this rank's part of a vector, and the
# result is then silently wrong. Two checks find this when a loop is compiled:
#
# * If the condition depends on received halos, without a reduction in between, the user is warned.
# * With the guard, every step passes the numbers that the condition reads to the native library,
#   and messages carry a digest of them, which the ranks compare.


_HALOS = "mpigrad_neighbor_alltoallv"
_MOST = 64  # numbers of a condition that are compared

_LOCAL = (
    "the condition of the while_loop at {} depends on received halos, without a reduction over the "
    "ranks in between. Ranks would take steps of their own, and the result would be wrong. Compute "
    "the condition over all ranks: with norm=mpigrad.rms_norm in an adaptive integrator or a "
    "solver, or with mpigrad.allreduce."
)
_KRYLOV = (
    "jax.scipy.sparse.linalg at {}: expected an operator without halo exchanges, got one that has "
    "them. JAX computes inner products of this rank's part alone, so the result would be wrong. "
    "Use mpigrad.sparse.solve with PCG, GMRES or BiCGStab."
)
_KRYLOV_FILE = "jax/_src/scipy/sparse/linalg.py"


def check_while_loops() -> None:
    """Check every while_loop with messages when it is compiled."""
    if MPI.COMM_WORLD.size == 1:
        return
    plain = private("lax.control_flow.loops._while_lowering")
    rule = functools.partial(_lower, plain)
    # JAX does not tell a rule whose results it caches at which line the loop is.
    parameters = inspect.signature(mlir.register_lowering).parameters
    options: dict[str, Any] = {"cacheable": False} if "cacheable" in parameters else {}
    mlir.register_lowering(jax_primitives.while_p, rule, **options)


def _lower(plain: Callable[..., Any], ctx: Any, *args: Any, **params: Any) -> Any:
    body = params["body_jaxpr"]
    # JAX lowers a loop with messages in its condition as one with a condition without messages.
    if has_messages(body.effects) and not has_messages(params["cond_jaxpr"].effects):
        places = _places(ctx)
        site = call_site_of(places)
        if _depends_on_halos(**params):
            _complain(site, places)
        if guard_enabled() and (numbers := _numbers_read(params["cond_jaxpr"], params)):
            params["body_jaxpr"] = _with_numbers(body, numbers, site)
    return plain(ctx, *args, **params)


def _places(ctx: Any) -> list[tuple[str, int]]:
    """Return the files and lines that wrote the loop, innermost first ([]: unknown)."""
    frames = getattr(getattr(ctx, "traceback", None), "frames", [])
    return [(frame.file_name, frame.line_num) for frame in frames]


def _complain(site: int, places: Sequence[tuple[str, int]]) -> None:
    if any(file.endswith(_KRYLOV_FILE) for file, _ in places):
        raise ValueError(_KRYLOV.format(describe(site)))
    if MPI.COMM_WORLD.rank == 0:
        file, _, line = describe(site).rpartition(":")
        text = f"mpigrad: {_LOCAL.format(describe(site))}"
        warnings.warn_explicit(text, RuntimeWarning, file, int(line) if line.isdecimal() else 0)


# ---- does the condition depend on halos? ----


def _depends_on_halos(
    cond_jaxpr: ClosedJaxpr, body_jaxpr: ClosedJaxpr, cond_nconsts: int, body_nconsts: int
) -> bool:
    carry = _repeated(body_jaxpr.jaxpr, [False] * body_nconsts, len(body_jaxpr.jaxpr.outvars))
    return any(_local(cond_jaxpr.jaxpr, [*[False] * cond_nconsts, *carry]))


def _repeated(
    body: Jaxpr, constants: list[bool], n: int, carry: Sequence[bool] = (), xs: Sequence[bool] = ()
) -> list[bool]:
    """Return which of the n carried values of a loop are local, after any number of steps."""
    now = list(carry) or [False] * n
    while True:
        after = _local(body, [*constants, *now, *xs])[:n]
        merged = [a or b for a, b in zip(now, after, strict=True)]
        if merged == now:
            return now
        now = merged


def _local(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return which results depend on halos or on local inputs without a reduction in between."""
    local = {v for v, is_local in zip(jaxpr.invars, inputs, strict=True) if is_local}

    def marks(variables: Any) -> list[bool]:
        return [not isinstance(v, Literal) and v in local for v in variables]

    for eqn in jaxpr.eqns:
        results = _results(eqn, marks(eqn.invars))
        local.update(v for v, is_local in zip(eqn.outvars, results, strict=True) if is_local)
    return marks(jaxpr.outvars)


def _results(eqn: Any, inputs: list[bool]) -> list[bool]:
    """Return which results of an equation are local."""
    name, params, n = eqn.primitive.name, eqn.params, len(eqn.outvars)
    if name == _HALOS:
        return [bool(params["neighbors"])] * n
    is_message = name.startswith("mpigrad_") and name != "mpigrad_in_order"
    if is_message or "callback" in name:
        return [False] * n  # a reduction, or unknown
    if name == "is_finite" or (name == "ne" and eqn.invars[0] is eqn.invars[1]):
        return [False] * n  # a loop that ends if a number is not finite is meant to go on
    if name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        constants, carry = inputs[first : first + second], inputs[first + second :]
        carry = _repeated(params["body_jaxpr"].jaxpr, constants, n, carry)
        decides = any(_local(params["cond_jaxpr"].jaxpr, [*inputs[:first], *carry]))
        return [decides or is_local for is_local in carry]
    if name == "scan":
        body = params["jaxpr"].jaxpr
        first, carried = _scan_sizes(params)
        end = first + carried
        carry = _repeated(body, inputs[:first], end - first, inputs[first:end], inputs[end:])
        return [*carry, *_local(body, [*inputs[:first], *carry, *inputs[end:]])[end - first :]]
    if name == "cond":
        branches = [_local(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [inputs[0] or any(marks) for marks in zip(*branches, strict=True)]
    for inner in map(params.get, ("jaxpr", "call_jaxpr", "fun_jaxpr")):
        jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        if isinstance(jaxpr, Jaxpr) and len(jaxpr.invars) == len(inputs):
            return _local(jaxpr, inputs)
    return [any(inputs)] * n


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan."""
    if "num_consts" in params:  # before JAX 0.11
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


# ---- with the guard: compare the numbers that the condition reads ----


def _marker(name: str, operands: int) -> Primitive:
    primitive = Primitive(f"mpigrad_{name}")
    make_effectful(primitive, lambda *avals, **params: [])
    register_lowering(primitive, lowering(register_target(f"mpigrad_{name}"), operands))
    return primitive


_enter_p = _marker("enter_loop", 1)
_leave_p = _marker("leave_loop", 0)


def _numbers_read(cond: ClosedJaxpr, params: dict[str, Any]) -> list[int]:
    """Return the operands of the body that are floating-point numbers read by the condition."""
    shape = cond.out_avals[0].shape  # () or that of a batch
    _, used = partial_eval.dce_jaxpr(cond.jaxpr, [True])
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carried = zip(used[first:], cond.in_avals[first:], strict=True)
    return [
        second + i
        for i, (is_read, aval) in enumerate(carried)
        if is_read
        and aval.shape == shape
        and aval.size <= _MOST
        and jnp.issubdtype(aval.dtype, jnp.floating)
    ]


def _with_numbers(body: ClosedJaxpr, numbers: Sequence[int], site: int) -> ClosedJaxpr:
    """Return the body of a loop that first passes these operands to the native library."""

    def watched(*operands: Any) -> Any:
        with jax.enable_x64(True):  # the handler's type in any precision of the program
            read = [jnp.ravel(operands[i]).astype("float64") for i in numbers]
            _enter_p.bind(jnp.concatenate(read), site=site)
        results = jaxpr_as_fun(body)(*operands)
        _leave_p.bind()
        return results

    return jax.make_jaxpr(watched)(
        *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in body.in_avals)
    )
