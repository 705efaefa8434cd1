"""A self-check: do messages stay in programs that this JAX differentiates?

A hook that is installed may no longer have an effect, because a new JAX decides elsewhere. Then a
message would be dropped on one rank, and the job would wait for it. So small programs are
differentiated the first time that a message is traced. They are only traced, not compiled, and
nothing is sent. Each program has a message that is easily lost, since no result depends on it,
inside one of JAX's constructs. After linearization and dead-code elimination the message and its
adjoint must be there, and ranks that differ in their constants must have the same messages. A
construct that fails is refused.

The result is kept in the user's cache directory for each version of JAX and of this code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval
from mpi4py import MPI

from mpigrad._version import __version__
from mpigrad.operations import (
    _jax_compat,
    _jax_private,
    _jax_repairs,
    _jax_staging,
)
from mpigrad.operations._jax_private import FEATURES, missing, refuse
from mpigrad.operations.carrier import before_first_message

__all__ = ["Findings", "examine", "run"]

_Program = Callable[[Any], Any]
_SHAPE = (2,)
_LENGTH = 2


def _scan(f: _Program) -> _Program:
    return lambda x: jax.lax.scan(lambda s, _: (s + f(x), None), 0.0, None, length=_LENGTH)[0]


def _cond(f: _Program) -> _Program:
    return lambda x: jax.lax.cond(jnp.sum(x) > 0, f, jnp.sum, x)


def _custom_vjp(f: _Program) -> _Program:
    from mpigrad.autodiff.custom_rules import custom_vjp

    g = custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, ct: _vjp(f, x, ct))
    return g


def _vjp(f: _Program, x: Any, ct: Any) -> Any:
    from mpigrad.autodiff.transforms import vjp

    return vjp(f, x)[1](ct)


def _custom_jvp(f: _Program) -> _Program:
    from mpigrad.autodiff.custom_rules import custom_jvp
    from mpigrad.autodiff.transforms import jvp

    g = custom_jvp(f)
    g.defjvp(lambda primals, tangents: jvp(f, primals, tangents))
    return g


def _value_again(f: _Program) -> _Program:
    """Compute the value in the rule by a compiled loop, as a rule of a user may."""
    from mpigrad.autodiff.custom_rules import custom_jvp
    from mpigrad.autodiff.transforms import jvp

    g = custom_jvp(f)
    mean = jax.jit(lambda x: _scan(f)(x) / _LENGTH)
    g.defjvp(lambda primals, tangents: (mean(*primals), jvp(f, primals, tangents)[1]))
    return g


_CHECKPOINT, _COND, _SCAN = "jax.checkpoint", "jax.lax.cond", "jax.lax.scan"
_JIT, _CUSTOM_RULES = "nested jax.jit", "custom rules"

# (feature, a construct that needs it, other features in the construct)
_CONSTRUCTS: tuple[tuple[str, Callable[[_Program], _Program], tuple[str, ...]], ...] = (
    (_JIT, jax.jit, ()),
    (_CHECKPOINT, jax.checkpoint, ()),
    (_CHECKPOINT, lambda f: jax.jit(jax.checkpoint(f)), (_JIT,)),
    (_COND, _cond, ()),
    (_COND, lambda f: jax.checkpoint(_cond(f)), (_CHECKPOINT,)),
    (_SCAN, _scan, ()),
    (_SCAN, lambda f: _scan(jax.checkpoint(f)), (_CHECKPOINT,)),
    (_SCAN, lambda f: jax.checkpoint(_scan(jax.checkpoint(_scan(f)))), (_CHECKPOINT,)),
    (_COND, lambda f: _scan(_cond(f)), (_SCAN,)),
    (_CUSTOM_RULES, _custom_vjp, ()),
    (_CUSTOM_RULES, _custom_jvp, ()),
    (_CUSTOM_RULES, lambda f: _scan(_custom_jvp(f)), (_SCAN,)),
    (_CUSTOM_RULES, _value_again, (_SCAN, _JIT)),
)


def _programs() -> list[_Program]:
    """Return programs with the same message, of ranks that differ in constants and used results."""
    from mpigrad.operations.carrier import carrier
    from mpigrad.operations.point_to_point import recv_p, send_p

    where = {"comm": 0, "tag": 0, "site": 1}

    def sends(x: Any) -> Any:
        send_p.bind(jnp.sin(x), carrier(), dest=1, **where)
        return jnp.sum(x)

    def sends_a_constant(x: Any) -> Any:
        send_p.bind(jnp.ones(_SHAPE, np.float32), carrier(), dest=1, **where)
        return jnp.sum(x)

    def receives_for_nothing(x: Any) -> Any:
        recv_p.bind(jnp.zeros(_SHAPE, np.float32), carrier(), source=0, **where)
        return jnp.float32(0)

    return [sends, sends_a_constant, receives_for_nothing]


def _messages(jaxpr: Any) -> list[Any]:
    """Return the messages of a program, nested as its loops and calls are."""
    tree: list[Any] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("mpigrad_send", "mpigrad_recv"):
            partner = eqn.params["dest" if name == "mpigrad_send" else "source"]
            # Rank 1 receives what rank 0 sends, and the adjoint goes the other way.
            tree.append("forth" if (name == "mpigrad_send") == (partner == 1) else "back")
            continue
        parts = [
            part
            for value in eqn.params.values()
            for part in (value if isinstance(value, (tuple, list)) else (value,))
            if isinstance(part, (Jaxpr, ClosedJaxpr))
        ]
        inner = [_messages(getattr(part, "jaxpr", part)) for part in parts]
        if name == "cond":
            if any(inner):
                tree.append(sorted(map(str, inner)))
        elif name in ("scan", "while"):
            tree += [["loop", *messages] for messages in inner if messages]
        else:
            tree += [m for messages in inner for m in messages]
    return tree


def _of_gradient(program: _Program) -> list[Any]:
    from mpigrad.operations.carrier import with_carrier

    gradient = jax.grad(with_carrier(program), (0, 1))
    closed = jax.make_jaxpr(gradient)(np.float32(0), np.ones(_SHAPE, np.float32))
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), True)
    return _messages(jaxpr)


@dataclass
class Findings:
    """The result of the self-check.

    An error proves nothing: a program of the user with this construct would raise it as well.

    Attributes
    ----------
    failed
        Features that are refused, and the reasons.
    errors
        Features whose programs raised an error, and the errors.
    """

    failed: dict[str, str]
    errors: dict[str, str]


def examine() -> Findings:
    """Differentiate the programs by tracing alone."""
    from mpigrad.operations.carrier import without_carriers

    findings = Findings({}, {})
    with without_carriers(), jax.check_tracer_leaks(False):
        for feature, construct, others in _CONSTRUCTS:
            refused = {**missing(), **findings.failed}
            if feature in refused or any(other in refused for other in others):
                continue
            try:
                why = _verdict(construct)
            except Exception as error:
                findings.errors[feature] = f"{type(error).__name__}: {error}"
            else:
                if why:
                    findings.failed[feature] = why
        for feature, holds, why in (
            (_CHECKPOINT, _keeps_dead_checkpoint, "a checkpoint without results is dropped"),
            (_CUSTOM_RULES, _refuses_custom_gradient, "jax.custom_gradient is not recognized"),
        ):
            if feature not in missing() and not holds():
                findings.failed.setdefault(feature, f"in the self-check, {why}")
    return findings


def _verdict(construct: Callable[[_Program], _Program]) -> str:
    """Return the reason why the construct is refused, or ""."""
    orders = [_of_gradient(construct(program)) for program in _programs()]
    if any(order != orders[0] for order in orders[1:]):
        return "in the self-check, ranks differ in their messages"
    text = str(orders[0])
    if "forth" not in text or "back" not in text:
        return "in the self-check, a message or its adjoint is dropped"
    return ""


def _keeps_dead_checkpoint() -> bool:
    """Check a checkpoint with messages that depends on nothing, and whose result is not used."""
    receives = _programs()[-1]

    def dead(x: Any) -> Any:
        jax.checkpoint(lambda: receives(jnp.ones(_SHAPE)))()
        return x

    closed = jax.make_jaxpr(dead)(1.0)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True], True)
    return _messages(jaxpr) == ["forth"]


def _refuses_custom_gradient() -> bool:
    """Check that a message in the rule of a jax.custom_gradient is found at its evaluation."""
    sends = _programs()[0]
    f = jax.custom_gradient(lambda x: (jnp.sum(x), lambda ct: (ct * (sends(x) + 0 * x),)))
    try:
        jax.make_jaxpr(jax.grad(f))(np.ones(_SHAPE, np.float32))
    except ValueError:
        return True
    return False


def run() -> bool:
    """Run the check once in a process, or read its result, and refuse features that fail.

    Returns
    -------
    bool
        False if the check cannot run here.
    """
    if not jax.make_jaxpr(lambda: jnp.sin(np.float32(0)))().eqns:
        return False  # jax.ensure_compile_time_eval: the programs would be run, not traced
    kept = _cache_file()
    failed = _read(kept) if kept else None
    if failed is None:
        findings = examine()
        failed = findings.failed
        # An error may have its cause at the place of the first message, a deep recursion for
        # example.
        if kept and not findings.errors and MPI.COMM_WORLD.rank == 0:
            _write(kept, failed)
    for feature, why in failed.items():
        refuse(feature, why + (f"; this result is kept in {kept}" if kept else ""))
    return True


def _cache_file() -> pathlib.Path | None:
    """Return the file for this JAX and this code, or None without a cache directory."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the specification of XDG_CACHE_HOME ignores relative paths
        if not os.path.isabs(os.environ.get("HOME", "")):
            return None
        home = os.path.join(os.environ["HOME"], ".cache")
    digest = hashlib.sha256()
    for module in (_jax_private, _jax_compat, _jax_staging, _jax_repairs):
        digest.update(pathlib.Path(module.__file__ or "").read_bytes())
    digest.update(pathlib.Path(__file__).read_bytes())
    digest.update(json.dumps(missing(), sort_keys=True).encode())
    digest.update(os.environ.get("MPIGRAD_WITHOUT_JAX_HOOK", "").encode())
    name = f"jax-{jax.__version__}-mpigrad-{__version__}-{digest.hexdigest()[:16]}.json"
    return pathlib.Path(home) / "mpigrad" / name


def _read(path: pathlib.Path) -> dict[str, str] | None:
    try:
        reasons = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_result = isinstance(reasons, dict) and all(f in FEATURES for f in reasons)
    return {f: str(why) for f, why in reasons.items()} if is_result else None


def _write(path: pathlib.Path, failed: dict[str, str]) -> None:
    # Without a cache the check costs some tenths of a second in each process.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(failed, file)
        os.replace(temporary, path)


before_first_message(run)
