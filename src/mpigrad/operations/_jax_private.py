"""The table of private names of JAX, and the features that are refused if a name is missing.

This is the only module that reads `jax._src`. Everything else that mpigrad takes from JAX is public
(`jax.core`, `jax.extend`, `jax.interpreters`, `jax.ffi`). docs/jax_versions.md explains how to
support a new release of JAX.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Any

import jax

from mpigrad._version import NEWEST_TESTED, OLDEST

__all__ = [
    "ATTRIBUTES",
    "FEATURES",
    "PRIVATE",
    "VERSION",
    "Private",
    "UnsupportedJAXError",
    "available",
    "check_version",
    "is_anything_missing",
    "missing",
    "module_of",
    "optional",
    "private",
    "refuse",
    "require",
]

VERSION: tuple[int, ...] = jax.__version_info__

if VERSION < OLDEST:
    raise ImportError(
        f"mpigrad: expected JAX {OLDEST[0]}.{OLDEST[1]} or newer, got {jax.__version__}. Install a "
        "newer release: pip install --upgrade jax"
    )


def check_version(rank: int) -> None:
    """Write one line of warning, on rank 0, if JAX is newer than the newest tested release."""
    if VERSION[:2] > NEWEST_TESTED and rank == 0:
        newest = ".".join(map(str, NEWEST_TESTED))
        sys.stderr.write(
            f"mpigrad: JAX {jax.__version__} is newer than {newest}, the newest release that this "
            "mpigrad was tested with. Missing features are refused by name: see `mpigrad doctor`.\n"
        )


class UnsupportedJAXError(NotImplementedError):
    """The error of a feature that needs a private part of JAX which this release lacks."""


@dataclass(frozen=True)
class Private:
    """One private attribute of JAX.

    Attributes
    ----------
    name
        Its path below `jax._src`.
    use
        Its use in mpigrad.
    test
        A test that fails without it.
    versions
        The releases of JAX that have it.
    upstream
        The issue of JAX that makes it necessary.
    """

    name: str
    use: str
    test: str
    versions: str = "0.8 on"
    upstream: str = ""


_ORDER = "tests/autodiff/test_transforms.py"
_DIVERGENT = "tests/operations/test_divergent.py"
_CALLS = "tests/operations/test_known_calls.py"
_RULES = "tests/autodiff/test_custom_rules.py"

PRIVATE = (
    # The ordered effect of a message, and the constructs in which JAX allows it.
    Private("effects.ordered_effects", "messages keep the order of the program", _ORDER),
    Private("effects.lowerable_effects", "messages are compiled", _ORDER),
    Private(
        "effects.control_flow_allowed_effects", "messages in scan, cond and while_loop", _ORDER
    ),
    Private(
        "effects.custom_derivatives_allowed_effects",
        "messages in functions with custom rules",
        _RULES,
    ),
    Private("effects.remat_allowed_effects", "messages in jax.checkpoint", _DIVERGENT),
    Private(
        "effects.partial_eval_kept_effects",
        "grad of a receive whose result is unused",
        _DIVERGENT,
        upstream="jax#5134",
    ),
    Private("core.abstract_token", "the token between the messages of a compiled program", _ORDER),
    # Which trace is active.
    Private("core.trace_ctx", "whether a message is outside of any transformation", _ORDER),
    Private("core.eval_trace", "whether a message is outside of any transformation", _ORDER),
    Private(
        "core.set_current_trace",
        "calls with messages are split equation by equation, up to JAX 0.10",
        _CALLS,
    ),
    Private(
        "core.positional_effects",
        "effects of a call that is staged as a whole",
        _RULES,
        "0.10.1 on",
    ),
    Private("interpreters.batching.BatchTracer", "a batched pull-back is refused", _ORDER),
    # Derivatives.
    Private(
        "interpreters.ad.primitive_linearizations",
        "messages are linearized without being split",
        _DIVERGENT,
    ),
    Private(
        "interpreters.partial_eval.JaxprTrace",
        "the trace that splits a program into known and unknown",
        _CALLS,
    ),
    Private(
        "interpreters.partial_eval.EffectHandle",
        "messages stay although nothing depends on them",
        _DIVERGENT,
        upstream="jax#5134",
    ),
    Private(
        "interpreters.partial_eval.JaxprEqnRecipe",
        "messages stay although nothing depends on them",
        _DIVERGENT,
        upstream="jax#5134",
    ),
    Private(
        "interpreters.partial_eval.new_eqn_recipe",
        "a custom rule with messages is staged as a whole",
        _CALLS,
    ),
    Private(
        "interpreters.partial_eval.convert_constvars_jaxpr",
        "constants of a compiled program are operands",
        _ORDER,
    ),
    Private(
        "interpreters.partial_eval.lower_jaxpr2",
        "mpigrad.jit of programs that JAX lowers in two steps",
        "tests/operations/test_jax_versions.py",
        "0.10 on",
    ),
    # Memory and speed of dispatch.
    Private(
        "util.weakref_cache_key_types",
        "patterns of matrices are freed",
        "tests/sparse/matrix/test_csr.py",
    ),
    Private(
        "array.ArrayImpl",
        "an eager message is dispatched in microseconds",
        "tests/operations/test_operations.py",
    ),
    Private(
        "xla_bridge.backends_are_initialized",
        "an import after the first computation is refused",
        "tests/guard/test_startup_barrier.py",
    ),
    Private(
        "lax.control_flow.loops._while_lowering",
        "while loops in which ranks take steps of their own are found",
        "tests/operations/test_while_loops.py",
    ),
    Private(
        "compilation_cache.get_cache_key",
        "ranks and jobs find programs that are compiled",
        "tests/compilation/test_compiler.py",
    ),
    # Functions that mpigrad replaces (_jax_repairs.py).
    Private(
        "lax.control_flow.loops._scan_known_hoisting",
        "messages are not taken out of loops",
        _CALLS,
        upstream="jax#16637",
    ),
    Private(
        "compiler.compile_or_get_cached",
        "one rank of a host compiles a program for all, and `mpigrad run` stores it",
        "tests/compilation/test_compiler.py",
        upstream="jax#25848",
    ),
    Private(
        "ad_checkpoint._insert_reduce_precision",
        "complex messages in jax.checkpoint",
        "tests/operations/test_operations.py",
        upstream="jax#22244",
    ),
    Private(
        "interpreters.pxla.MeshExecutable",
        "programs compiled ahead of time keep the order of messages",
        _CALLS,
        upstream="jax#10295",
    ),
    Private(
        "api_util.maybe_recursive_nan_check",
        "a program with messages is not run twice with jax_debug_nans",
        "tests/autodiff/test_transforms.py",
        upstream="jax#10251",
    ),
)

_TABLE = {entry.name: entry for entry in PRIVATE}


# Attributes of JAX's objects that are not public, and that mpigrad reads or sets.
ATTRIBUTES = {
    "trace.parent_trace, tracer._trace": "whether a carrier belongs to an enclosing transformation",
    "trace.default_process_primitive, trace.instantiate_const, tracer.is_known": (
        "messages are staged, never executed early"
    ),
    "trace.effect_handles, tracer.recipe, recipe.in_tracers, recipe.effects": (
        "messages stay although nothing depends on them"
    ),
    "trace.to_jaxpr_tracer, trace._current_truncated_name_stack": (
        "a custom rule with messages is staged as a whole"
    ),
    "primitive.bind_with_trace, primitive.get_bind_params": "calls and custom rules with messages",
    "primitive.to_lojax": "mpigrad.jit of programs that JAX lowers in two steps",
    "executable.unsafe_call.ordered_effects": "programs compiled ahead of time keep their tokens",
    "parameters jaxpr, call_jaxpr, branches, prevent_cse of equations": "calls with messages",
    "the code of jax.custom_gradient (custom_gradient.<locals>.bwd)": "its rule is refused",
}


@functools.cache
def private(name: str) -> Any:
    """Return the attribute `name` below `jax._src`, or raise an error that names JAX's version."""
    assert name in _TABLE, name
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(f"jax._src.{module}"), attribute)
    except (ImportError, AttributeError) as error:
        raise UnsupportedJAXError(
            f"mpigrad: expected jax._src.{name} ({_TABLE[name].use}), which JAX {jax.__version__} "
            f"does not have. {_remedy()}"
        ) from error


def optional(name: str) -> Any:
    """Return `private(name)`, or None if it is gone: for names that only save time or memory."""
    try:
        return private(name)
    except UnsupportedJAXError:
        return None


def _remedy() -> str:
    newest = ".".join(map(str, NEWEST_TESTED))
    return f"Install a JAX that mpigrad was tested with: pip install 'jax<={newest}.*'"


def module_of(name: str) -> Any:
    """Return the module that holds `name`, to replace a function in it."""
    private(name)
    return importlib.import_module(f"jax._src.{name.rpartition('.')[0]}")


# ---- features that a release of JAX may lack ----

# The construct that a user writes -> the feature that is refused if this JAX cannot support it.
FEATURES = {
    "jax.checkpoint": "derivatives of messages in jax.checkpoint",
    "jax.lax.cond": "derivatives of messages in jax.lax.cond",
    "jax.lax.scan": "derivatives of messages in jax.lax.scan",
    "jax.lax.while_loop": "derivatives of messages in jax.lax.while_loop",
    "nested jax.jit": "derivatives of messages in a nested jax.jit",
    "jax.lax.custom_linear_solve": "derivatives of messages in jax.lax.custom_linear_solve",
    "custom rules": "mpigrad.custom_vjp and mpigrad.custom_jvp",
    "jax_debug_nans": "messages with jax_debug_nans or jax_debug_infs",
}
_missing: dict[str, str] = {}


def refuse(feature: str, why: str) -> None:
    """Let `require(feature)` raise an error from now on."""
    assert feature in FEATURES, feature
    _missing.setdefault(feature, why)


def missing() -> dict[str, str]:
    """Return the features that are refused with this JAX, and the reasons."""
    return dict(_missing)


def is_anything_missing() -> bool:
    """Return True if any feature is refused."""
    return bool(_missing)


def available(feature: str) -> bool:
    """Return True if this JAX supports the feature."""
    return feature not in _missing


def require(feature: str) -> None:
    """Raise an error if this JAX does not support the feature."""
    if feature in _missing:
        raise UnsupportedJAXError(
            f"{FEATURES[feature]}: not supported with JAX {jax.__version__} "
            f"({_missing[feature]}). {_remedy()}"
        )
