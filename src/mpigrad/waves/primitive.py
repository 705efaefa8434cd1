"""The native time loops of waves as JAX primitives: a run, its tangent, its adjoint.

Each is one operation in the order of the program's messages. It does all steps of all shots and
exchanges the halos. The operands of a run are the models, the amplitudes of the sources, the state
(no operands for waves at rest) and the carrier. The results are this rank's share of the gathers,
a ticket and the last state. The ticket is the id of the history that the run stores for its adjoint
in this process. Memory is limited: if the history was dropped, the adjoint computes the run
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching
from mpigrad.operations.carrier import CARRIER, carrier, opaque_zero
from mpigrad.operations.native_targets import register_target
from mpigrad.operations.primitive import run_eagerly
from mpigrad.runtime.call_sites import call_site
from mpigrad.waves.native_run import Run, library

__all__ = ["propagate"]

_Zero: Any = ad.Zero
_TICKET = ShapedArray((), np.dtype("int32"))


def propagate(
    run: Run, models: Sequence[Any], amplitudes: Any, state: Sequence[Any] | None
) -> tuple[Any, list[Any]]:
    """Return this rank's share of the gathers and the last state.

    The sum of the shares over all ranks is the gathers.

    Parameters
    ----------
    models
        This rank's tiles without absorbing layers, of the same dtype as all other arrays.
    amplitudes
        Amplitudes of the sources, shape (n_shots, n_sources, steps).
    state
        Fields of the shapes `run.shapes`. None for waves at rest.
    """
    gathers, _, *last = run_p.bind(
        *models,
        amplitudes,
        *(state or ()),
        carrier(),
        run=run,
        models=len(models),
        rest=state is None,
        save=False,
        site=call_site(),
    )
    return gathers, last


def _primitive(name: str, shapes: Callable[..., list[ShapedArray]]) -> Primitive:
    primitive = Primitive(f"mpigrad_waves_{name}")
    target = register_target(f"mpigrad_waves_{name}", library())

    def attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
        return {
            "site": params["site"],
            "setup": params["run"].id,
            "rest": int(params["rest"]),
            "save": int(params["save"]),
        }

    def lower(ctx: Any, *values: Any, **params: Any) -> Any:
        return compat.lowering(target, len(values) - 1, attributes=attributes)(
            ctx, *values, **params
        )

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        # Each member is a separate run, because it may have its own model.
        n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
        members = [
            primitive.bind(
                *(
                    v if d is None else jax.lax.index_in_dim(v, i, d, keepdims=False)
                    for v, d in zip(args, dims, strict=True)
                ),
                **params,
            )
            for i in range(n)
        ]
        stacked = [jnp.stack(results) for results in zip(*members, strict=True)]
        return stacked, [0] * len(stacked)

    compat.make_effectful(primitive, shapes)
    run_eagerly(primitive, lambda params: params["run"].programs)
    compat.register_lowering(primitive, lower)
    repairs.always_stage(primitive)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _run_shapes(*avals: Any, run: Run, **_: Any) -> list[ShapedArray]:
    dtype = avals[0].dtype
    return [
        ShapedArray(run.gathers, dtype),
        _TICKET,
        *(ShapedArray(shape, dtype) for shape in run.shapes),
    ]


def _tangent_shapes(*avals: Any, run: Run, **_: Any) -> list[ShapedArray]:
    dtype = avals[0].dtype
    return [ShapedArray(shape, dtype) for shape in (run.gathers, *run.shapes)]


def _adjoint_shapes(*avals: Any, run: Run, models: int, rest: bool, **_: Any) -> list[ShapedArray]:
    operands = avals[: models + 1 + (0 if rest else len(run.shapes))]
    return [ShapedArray(x.shape, x.dtype) for x in operands]


# (models, amplitudes, state, carrier) -> gathers, ticket, last state
run_p = _primitive("forward", _run_shapes)
# (models, amplitudes, state, ticket, their tangents, carrier) -> tangents of gathers, last state
tangent_p = _primitive("tangent", _tangent_shapes)
# (models, amplitudes, state, ticket, cotangents of gathers, last state, carrier) -> cotangents
adjoint_p = _primitive("adjoint", _adjoint_shapes)


def _apply(residuals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Return the tangents of all results. Residuals are the operands, ticket and carrier."""
    *operands, ticket, link = residuals
    *moved, ta = tangents
    filled = []
    for x, tx in zip(operands, moved, strict=True):
        # The operand may be active on other ranks: this rank takes part in any case.
        aval = jax.typeof(x)
        if type(tx) is not _Zero:
            filled.append(tx if type(ta) is _Zero else tx + opaque_zero(ta, aval))
        else:
            filled.append(
                jnp.zeros(aval.shape, aval.dtype) if type(ta) is _Zero else opaque_zero(ta, aval)
            )
    gathers, *last = tangent_p.bind(*operands, ticket, *filled, link, **params)
    return [gathers, _Zero(compat.tangent_aval(ticket)), *last]


def _differentiate(primals: Sequence[Any], params: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the results and the residuals of the tangent map."""
    *operands, a = primals
    gathers, ticket, *last = run_p.bind(*primals, **params)
    # The tangent's carrier depends on the results, so it is active whenever they are.
    return [gathers, ticket, *last], [*operands, ticket, a + opaque_zero(gathers, CARRIER)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    results, residuals = _differentiate(primals, params)
    return results, _apply(residuals, tangents, params)


def _linearize(is_vjp: Any, nonzeros: Any, *primals: Any, **params: Any) -> Any:
    results, residuals = _differentiate(primals, {**params, "save": bool(is_vjp)})
    active = [True, False, *(True for _ in results[2:])]

    def tangent(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        return _apply(residuals, tangents, params)

    return results, active, residuals, tangent


def _transpose(cotangents: Any, *args: Any, run: Run, models: int, **params: Any) -> list[Any]:
    n = (len(args) - 2) // 2
    operands, ticket, moved, a = args[:n], args[n], args[n + 1 : -1], args[-1]
    cts = [ad.instantiate_zeros(ct) for ct in cotangents]
    params = {**params, "site": -abs(params["site"])}
    back = adjoint_p.bind(*operands, ticket, *cts, a, run=run, models=models, **params)
    back = [ct if ad.is_undefined_primal(x) else None for ct, x in zip(back, moved, strict=True)]
    return [None] * (n + 1) + back + [None]


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "mpigrad.waves: second derivatives of the native kernels (method='native') are not "
        "available. Use method='xla'."
    )


ad.primitive_jvps[run_p] = _jvp
compat.set_linearization(run_p, _linearize)
for _p in (tangent_p, adjoint_p):
    ad.primitive_jvps[_p] = _refuse
    compat.set_linearization(_p, _refuse)
ad.primitive_transposes[tangent_p] = _transpose
