"""Repairs of JAX's rules that drop or move messages: one hook for each.

JAX splits a program into a known and an unknown part when it linearizes, rematerializes or hoists
constants out of loops. A message must stay at its place in the program, on every rank. But JAX

* executes a message early if its operands are known (and moves it out of a `scan`),
* forgets the effects of `checkpoint` and `cond` if none of their results is unknown.

Two rules mend this, for programs with messages only. Messages are always staged, never executed
early (`_jax_staging.py`). `checkpoint` and `cond` get one more unknown result, so that their
unknown part survives. Each change of JAX is an entry of `HOOKS`. If a hook cannot be installed, the
feature that needs it is refused and everything else works. `autodiff/self_check.py` finds hooks
that no longer have an effect. Functions with custom rules are in `_jax_staging.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import batching
from mpi4py import MPI

from mpigrad.operations._jax_compat import ad, has_messages
from mpigrad.operations._jax_private import (
    UnsupportedJAXError,
    module_of,
    private,
    refuse,
    require,
)
from mpigrad.operations._jax_staging import (
    CHANGES,
    always_stage,
    check_while_loops,
    has_messages_inside,
    is_hoisting,
    is_in_place,
    mark_hoisting,
    partial_eval,
    partial_eval_rules,
    run_in_place,
    stage,
    wrap_call,
)

__all__ = [
    "HOOKS",
    "Hook",
    "always_stage",
    "guard_features",
    "install_repairs",
    "register_branch_mark",
    "run_piecewise",
]

# ---- calls of functions: checkpoint, cond, scan, jit ----

ExtraResult = Callable[[dict[str, Any], int], dict[str, Any] | None]


def _repair(
    feature: str, name: str, with_extra_result: ExtraResult | None = None
) -> Callable[[], None]:
    """Make a hook that keeps calls with messages of one primitive when JAX splits them."""

    def install() -> None:
        primitive = getattr(jax_primitives, name)

        def default(trace: Any, *tracers: Any, **params: Any) -> Any:
            return trace.default_process_primitive(primitive, tracers, params)

        plain = partial_eval_rules.get(primitive, default)

        def rule(trace: Any, *tracers: Any, **params: Any) -> Any:
            if not has_messages_inside(params):
                return plain(trace, *tracers, **params)
            require(feature)
            if is_in_place(trace, tracers):
                return default(trace, *tracers, **params)
            if not tracers:
                return _split_without_operands(plain, trace, params)
            unknown = [i for i, t in enumerate(tracers) if not t.is_known()]
            if not unknown or is_hoisting():
                return stage(primitive, trace, *tracers, **params)
            with _refuse_on_change(feature):
                extended = with_extra_result(params, unknown[-1]) if with_extra_result else None
            if extended is None:
                return plain(trace, *tracers, **params)
            *results, extra = plain(trace, *tracers, **extended)
            with _refuse_on_change(feature):
                _keep_alive(trace, extra)
            return results

        partial_eval_rules[primitive] = rule

    return install


def _split_without_operands(plain: Any, trace: Any, params: dict[str, Any]) -> Any:
    """Split an equation without operands, which JAX takes to be known and moves out of loops."""
    body = params.get("jaxpr")
    if isinstance(body, Jaxpr):  # of a checkpoint: without operands it recomputes nothing
        with private("core.set_current_trace")(trace):
            return jaxpr_as_fun(ClosedJaxpr(body, []))()
    return plain(trace, **params)


@contextlib.contextmanager
def _refuse_on_change(feature: str) -> Iterator[None]:
    """Refuse the feature if this JAX has other parameters or tracers than expected."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, UnsupportedJAXError) as error:
        refuse(feature, f"{type(error).__name__}: {error}")
        require(feature)


def _keep_alive(trace: Any, tracer: Any) -> None:
    """Keep the equation that makes `tracer`, even if nothing depends on it."""
    recipe = tracer.recipe
    is_equation = isinstance(recipe, private("interpreters.partial_eval.JaxprEqnRecipe"))
    if is_equation and has_messages(recipe.effects):
        handle = private("interpreters.partial_eval.EffectHandle")
        trace.effect_handles.append(handle(recipe.in_tracers, recipe))


def _checkpoint_extra_result(params: dict[str, Any], operand: int) -> dict[str, Any]:
    jaxpr = params["jaxpr"]
    outvars = [*jaxpr.outvars, jaxpr.invars[operand]]
    return {**params, "jaxpr": jaxpr.replace(outvars=outvars)}


def _cond_extra_result(params: dict[str, Any], operand: int) -> dict[str, Any] | None:
    if operand == 0:  # the branch index itself is unknown: JAX stages the whole `cond`
        return None
    branches = []
    for branch in params["branches"]:
        outvars = [*branch.jaxpr.outvars, branch.jaxpr.invars[operand - 1]]
        branches.append(ClosedJaxpr(branch.jaxpr.replace(outvars=outvars), branch.consts))
    return {**params, "branches": tuple(branches)}


def _keep_linear_solves_in_place() -> None:
    _repair("jax.lax.custom_linear_solve", "linear_solve_p")()
    plain = ad.primitive_jvps[jax_primitives.linear_solve_p]

    def in_place(*args: Any, **params: Any) -> Any:
        with run_in_place():
            return plain(*args, **params)

    ad.primitive_jvps[jax_primitives.linear_solve_p] = in_place


def _keep_calls() -> None:
    calls = {getattr(jax_primitives, name): name for name in ("call_p", "closed_call_p")}
    for primitive, name in calls.items():  # the two are one primitive since JAX 0.11
        if primitive in partial_eval_rules:
            _repair("nested jax.jit", name)()
        else:
            _inline_call(primitive)


def _inline_call(primitive: Any) -> None:
    """Split a call with messages into known and unknown equations one by one.

    `checkpoint` turns scans into calls. All results of a call that only sends are known. Split as a
    whole, it would be forgotten.
    """
    JaxprTrace = private("interpreters.partial_eval.JaxprTrace")

    def around(trace: Any, functions: Any, args: Any, equation: Any, proceed: Any) -> Any:
        if equation is not None and isinstance(trace, JaxprTrace) and has_messages_inside(equation):
            with private("core.set_current_trace")(trace):
                return functions[0].call_wrapped(*args)
        return proceed(functions)

    wrap_call(primitive, 1, around)


def _keep_messages_in_loops() -> None:
    name = "lax.control_flow.loops._scan_known_hoisting"
    module_of(name)._scan_known_hoisting = mark_hoisting(private(name))
    custom_rules = partial_eval.partial_eval_jaxpr_custom_rules
    custom_rules[jax_primitives.scan_p] = mark_hoisting(custom_rules[jax_primitives.scan_p])


def _keep_checkpoints_without_results() -> None:
    """Keep a checkpoint with messages that JAX drops because its results are not used."""
    plain = partial_eval.dce_rules[jax_primitives.remat_p]

    def rule(used_outputs: list[bool], *rest: Any) -> Any:
        used_inputs, new_eqn = plain(used_outputs, *rest)
        eqn = rest[-1]  # since JAX 0.12 it follows a list of the live operands
        if new_eqn is not None or not has_messages_inside(eqn.params):
            return used_inputs, new_eqn
        with _refuse_on_change("jax.checkpoint"):
            jaxpr, used_inputs = partial_eval.dce_jaxpr(eqn.params["jaxpr"], used_outputs)
            one_for_all = not isinstance(eqn.params["prevent_cse"], tuple)
            params = {**eqn.params, "jaxpr": jaxpr}
            params = params if one_for_all else {**params, "prevent_cse": ()}
            new_eqn = eqn.replace(invars=[], outvars=[], params=params, effects=jaxpr.effects)
        return used_inputs, new_eqn

    partial_eval.dce_rules[jax_primitives.remat_p] = rule


def _round_real_residuals_only() -> None:
    """Let `checkpoint` round its real residuals only: its rounding refuses complex numbers."""
    name = "ad_checkpoint._insert_reduce_precision"
    plain = private(name)

    def rounded(jaxpr: Any, residuals: int) -> Any:
        first = len(jaxpr.outvars) - residuals
        dtypes = [str(getattr(v.aval, "dtype", "")) for v in jaxpr.outvars]
        complex_ones = [i for i, d in enumerate(dtypes) if i >= first and d.startswith("complex")]
        order = [i for i in range(len(jaxpr.outvars)) if i not in complex_ones]
        order[first:first] = complex_ones
        moved = plain(
            jaxpr.replace(outvars=[jaxpr.outvars[i] for i in order]), residuals - len(complex_ones)
        )
        back = [order.index(i) for i in range(len(order))]
        return moved.replace(outvars=[moved.outvars[i] for i in back])

    module_of(name)._insert_reduce_precision = rounded


def _print_once_in_checkpoints() -> None:
    """Print in the forward pass only, if the backward pass does not have the printed values.

    The results of messages are such values. JAX forgets to keep them, and raises
    `KeyError: Var(id=...)`.
    """
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    for primitive in [p for p in rules if p.name in ("debug_callback", "debug_print")]:
        rules[primitive] = functools.partial(_print_once, rules[primitive])


def _print_once(
    plain: Callable[..., Any], saveable: Any, unknown: Any, available: Sequence[bool], eqn: Any
) -> Any:
    forward, backward, *rest = plain(saveable, unknown, available, eqn)
    if forward is not None and not all(available):
        backward = None
    return forward, backward, *rest


# ---- branches and loops that cannot be repaired ----

_branch_marks: set[Primitive] = set()


def register_branch_mark(primitive: Primitive) -> None:
    """Let `primitive` mark a branch that all ranks take at the same time."""
    _branch_marks.add(primitive)


def _refuse_batched_conds() -> None:
    batchers = batching.fancy_primitive_batchers
    plain = batchers[jax_primitives.cond_p]
    batchers[jax_primitives.cond_p] = functools.partial(_batched_cond, plain)


def _batched_cond(plain: Callable[..., Any], axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    """Batch a cond, or raise an error if it has messages and ranks may choose different branches.

    JAX turns a batched cond into a selection, so every rank evaluates all branches. A message in a
    branch would then meet the message in the same branch of another rank, which may have chosen
    another branch.
    """
    equations = [e for branch in params["branches"] for e in branch.jaxpr.eqns]
    sends = any(has_messages(e.effects) for e in equations)
    is_common = any(e.primitive in _branch_marks for e in equations)
    if dims[0] is not None and "branches_platforms" not in params and sends and not is_common:
        raise ValueError(
            "jax.lax.cond: the predicate of a cond or switch with messages in its branches must "
            "not be batched, got a batched one (from vmap, or from jacobian(mode='reverse')). All "
            "ranks would evaluate all branches, and messages would meet those of branches that "
            "other ranks have not chosen. Send outside of the branches and select by jnp.where, "
            "or loop over the batch by jax.lax.map. For a Jacobian take mode='forward'."
        )
    if is_common:  # the mark belongs to this cond, not to an enclosing one
        branches = tuple(_without_marks(branch) for branch in params["branches"])
        params = {**params, "branches": branches} if dims[0] is not None else params
    return plain(axis, args, dims, **params)


def _without_marks(branch: Any) -> Any:
    equations = [e for e in branch.jaxpr.eqns if e.primitive not in _branch_marks]
    return ClosedJaxpr(branch.jaxpr.replace(eqns=equations), branch.consts)


def _refuse_reverse_while_loops() -> None:
    plain = partial_eval_rules[jax_primitives.while_p]
    partial_eval_rules[jax_primitives.while_p] = functools.partial(_partial_while, plain)


def _partial_while(plain: Callable[..., Any], trace: Any, *tracers: Any, **params: Any) -> Any:
    if has_messages_inside(params) and is_in_place(trace, tracers):
        return trace.default_process_primitive(jax_primitives.while_p, tracers, params)
    if has_messages_inside(params) and not all(t.is_known() for t in tracers):
        raise ValueError(
            "jax.lax.while_loop: a while_loop (or a fori_loop with traced bounds) with messages "
            "can't be differentiated in reverse mode or by linearize. Use jax.lax.scan or a "
            "fori_loop with constant bounds, or differentiate by jvp or jacobian(mode='forward')."
        )
    return plain(trace, *tracers, **params)


# ---- programs that JAX would run without tokens, or twice ----


def _keep_tokens_ahead_of_time() -> None:
    executable = private("interpreters.pxla.MeshExecutable")
    fast_call = executable.create_cpp_call

    def create_cpp_call(self: Any, params: Any) -> Any:
        try:  # the fast call does not pass tokens
            fast = not has_messages(self.unsafe_call.ordered_effects)
        except AttributeError:  # unknown: the slow call is always right
            fast = False
        return fast_call(self, params) if fast else None

    executable.create_cpp_call = create_cpp_call


def _run_once_with_debug_nans() -> None:
    """Refuse the second run by which jax_debug_nans looks for a NaN, on one rank alone."""
    name = "api_util.maybe_recursive_nan_check"
    plain = private(name)

    def not_again(error: Any, f: Any, args: Any, kwargs: Any) -> Any:
        _refuse_second_run(jax.make_jaxpr(lambda: f(*args, **kwargs))())
        return plain(error, f, args, kwargs)

    module_of(name).maybe_recursive_nan_check = not_again


def _refuse_second_run(jaxpr: Any) -> None:
    """Raise an error if JAX would run a program with messages again to find a NaN in it."""
    if has_messages(jaxpr.effects):
        raise FloatingPointError(
            "mpigrad: the result of a compiled function with messages has a NaN (jax_debug_nans) "
            "or an infinity (jax_debug_infs). The function is not run again on this rank alone to "
            "find the place. Compile its parts without messages separately, or call it without "
            "jit on all ranks."
        ) from None


def run_piecewise(jaxpr: Any, *operands: Any) -> list[Any]:
    """Run a program without messages one equation at a time, so that JAX finds a NaN in it."""
    _refuse_second_run(jaxpr)
    return jax.core.eval_jaxpr(jaxpr, (), *operands)


# ---- the table of hooks ----

# The environment variable by which tools/jax_hooks.py leaves out a hook.
_LEFT_OUT = "MPIGRAD_WITHOUT_JAX_HOOK"


@dataclass(frozen=True)
class Hook:
    """One change of JAX, the feature that needs it, and a test that fails without it.

    If the feature is empty, its use cannot be refused, and a warning is written if this JAX lacks
    what the hook needs. From JAX version `until` on the hook is not needed.
    """

    name: str
    feature: str
    install: Callable[[], None]
    test: str
    upstream: str = ""
    until: tuple[int, ...] = ()


_DIVERGENT = "tests/operations/test_divergent.py"
_CALLS = "tests/operations/test_known_calls.py"
_OTHER = "tests/autodiff/test_transforms.py"

HOOKS = (
    Hook(
        "split checkpoint",
        "jax.checkpoint",
        _repair("jax.checkpoint", "remat_p", _checkpoint_extra_result),
        _DIVERGENT,
        "jax#5134",
    ),
    Hook(
        "split cond",
        "jax.lax.cond",
        _repair("jax.lax.cond", "cond_p", _cond_extra_result),
        _DIVERGENT,
    ),
    Hook("split calls", "nested jax.jit", _keep_calls, _CALLS, until=(0, 11)),
    Hook(
        "split linear solves",
        "jax.lax.custom_linear_solve",
        _keep_linear_solves_in_place,
        _CALLS,
        "jax#26087",
    ),
    Hook("hoist", "jax.lax.scan", _keep_messages_in_loops, _CALLS, "jax#16637"),
    Hook(
        "dead checkpoint",
        "jax.checkpoint",
        _keep_checkpoints_without_results,
        _DIVERGENT,
        "jax#5134",
        until=(0, 12),
    ),
    Hook(
        "complex checkpoint",
        "",
        _round_real_residuals_only,
        "tests/operations/test_operations.py",
        "jax#22244",
    ),
    Hook(
        "debug print",
        "",
        _print_once_in_checkpoints,
        "tests/operations/test_jax_versions.py",
    ),
    Hook("batched cond", "jax.lax.cond", _refuse_batched_conds, _CALLS),
    Hook(
        "reverse while_loop",
        "jax.lax.while_loop",
        _refuse_reverse_while_loops,
        "tests/autodiff/test_jacobian.py",
    ),
    Hook(
        "while_loop conditions",
        "",
        check_while_loops,
        "tests/operations/test_while_loops.py",
    ),
    Hook(
        "ahead of time",
        "",
        _keep_tokens_ahead_of_time,
        _CALLS,
        "jax#10295",
    ),
    Hook("debug_nans", "jax_debug_nans", _run_once_with_debug_nans, _OTHER, "jax#10251"),
)

# The primitives whose derivatives are refused with a feature.
_PRIMITIVES = {
    "jax.checkpoint": ("remat_p",),
    "jax.lax.cond": ("cond_p",),
    "jax.lax.scan": ("scan_p",),
    "jax.lax.while_loop": ("while_p",),
    "nested jax.jit": ("jit_p", "call_p", "closed_call_p"),
    "jax.lax.custom_linear_solve": ("linear_solve_p",),
}


@functools.cache
def install_repairs() -> None:
    """Install all hooks. Refuse the features of hooks that cannot be installed, or warn."""
    guard_features()
    for hook in HOOKS:
        if os.environ.get(_LEFT_OUT) == hook.name:
            continue
        try:
            hook.install()
        except CHANGES as error:
            why = f"{type(error).__name__}: {error}"
            if hook.feature:
                refuse(hook.feature, why)
            elif MPI.COMM_WORLD.rank == 0:
                sys.stderr.write(
                    f"mpigrad: JAX {jax.__version__} lacks what the repair {hook.name!r} needs "
                    f"({why}). Programs that need it may fail, or be wrong. Install a JAX that "
                    "mpigrad was tested with.\n"
                )


def guard_features() -> None:
    """Let derivatives of calls with messages first check that this JAX has what they need."""
    linearizations = private("interpreters.ad.primitive_linearizations")
    for feature, names in _PRIMITIVES.items():
        for primitive in {getattr(jax_primitives, n) for n in names if hasattr(jax_primitives, n)}:
            for rules in (ad.primitive_jvps, linearizations):
                if primitive in rules:
                    rules[primitive] = _checking(feature, rules[primitive])


def _checking(feature: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def rule(*args: Any, **params: Any) -> Any:
        if has_messages_inside(params):
            require(feature)
        return plain(*args, **params)

    return rule
