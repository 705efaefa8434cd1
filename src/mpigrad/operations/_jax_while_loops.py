"""Find while loops in which each rank would take steps of its own.

The condition of a `while_loop` with messages must be the same on all ranks. Solvers and adaptive
integrators of other libraries compute it from this rank's part of a vector, and the result is then
silently wrong. Two checks find this when a loop is compiled:

* If the condition depends on received halos, without a reduction in between, the user is warned.
* With the guard, every step passes the numbers that the condition reads to the native library,
  and messages carry a digest of them, which the ranks compare.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import mlir
from mpi4py import MPI

from mpigrad.guard.settings import guard_enabled
from mpigrad.operations._jax_compat import has_messages, lowering, make_effectful, register_lowering
from mpigrad.operations._jax_private import private
from mpigrad.operations._jax_staging import partial_eval
from mpigrad.operations.native_targets import register_target
from mpigrad.runtime.call_sites import call_site_of, describe

__all__ = ["check_while_loops"]

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
