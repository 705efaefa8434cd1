"""Private parts of JAX: what is there, what is missing, and what is refused then."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from launching import mpigrad
from mpigrad.autodiff import self_check
from mpigrad.communicator import Communicator
from mpigrad.launch import launcher
from mpigrad.operations import _jax_private, _jax_repairs

SOURCES = pathlib.Path(mg.__file__).parent


def python(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, on one rank."""
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**launcher.os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.ranks(1)
def test_a_repair_without_a_feature_warns(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def install() -> None:
        raise AttributeError("MeshExecutable has no create_cpp_call")

    hook = _jax_repairs.Hook("ahead of time", "", install, "tests/operations/test_known_calls.py")
    monkeypatch.setattr(_jax_repairs, "HOOKS", (hook,))
    monkeypatch.setattr(_jax_repairs, "guard_features", lambda: None)
    _jax_repairs.install_repairs.__wrapped__()
    assert "lacks what the repair 'ahead of time' needs (AttributeError" in capfd.readouterr().err


# ---- the table ----


def _has(versions: str) -> bool:
    """Whether the table says that this JAX has the name: "0.8 on", "0.8 to 0.10"."""
    first, _, last = versions.replace(" on", "").partition(" to ")
    numbers = lambda text: tuple(int(n) for n in text.split("."))
    here = _jax_private.VERSION
    return numbers(first) <= here and (not last or here[: len(numbers(last))] <= numbers(last))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("entry", _jax_private.PRIVATE, ids=lambda entry: entry.name)
def test_private_names_are_there_in_the_versions_of_the_table(entry: _jax_private.Private) -> None:
    if _has(entry.versions):
        assert _jax_private.private(entry.name) is not None
    else:
        with pytest.raises(_jax_private.UnsupportedJAXError, match=r"JAX .* does not have"):
            _jax_private.private(entry.name)


@pytest.mark.ranks(1)
def test_private_names_stand_in_the_table_alone() -> None:
    found = [
        path.name
        for path in SOURCES.rglob("*.py")
        if re.search(r"^\s*(from|import) jax\._src", path.read_text(), re.MULTILINE)
    ]
    assert found == []
    readers = [p.name for p in SOURCES.rglob("*.py") if '"jax._src' in p.read_text()]
    assert readers in ([], ["_jax_private.py"]) and len(_jax_private.PRIVATE) <= 30


@pytest.mark.ranks(1)
def test_tests_of_the_table_exist() -> None:
    tests = SOURCES.parent.parent if (SOURCES.parent / "mpigrad").exists() else SOURCES
    root = pathlib.Path(__file__).parents[2]
    for entry in (*_jax_private.PRIVATE, *_jax_repairs.HOOKS):
        for test in entry.test.split():
            assert (root / test).exists(), (tests, entry.name)


@pytest.mark.ranks(1)
def test_the_page_has_the_tables() -> None:
    tables = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "tools" / "jax_tables.py"))
    page = tables["PAGE"].read_text()
    assert tables["written"](page) == page, "run tools/jax_tables.py"


# ---- the self-check ----


@pytest.mark.ranks(1, 2)
def test_nothing_is_refused_with_this_jax() -> None:
    found = self_check.examine()
    assert found.failed == found.errors == {}
    assert _jax_private.missing() == {}


_PROGRAM = """
import jax, jax.numpy as jnp, mpigrad as mg
def tried(name, f):
    try:
        g = mg.grad(lambda x: f(x).sum())(jnp.ones(2))
        print(name, "is right" if (g == 1).all() else "is wrong")
    except Exception as error:
        print(name, type(error).__name__, error)
message = lambda x: mg.allreduce(x)
tried("plain", message)
tried("scan", lambda x: jax.lax.scan(lambda c, _: (message(c), None), x, length=2)[0])
tried("jit", jax.jit(message))
tried("checkpoint", jax.checkpoint(message))
tried("without messages", jax.checkpoint(lambda x: x))
"""


@pytest.mark.launcher
@pytest.mark.parametrize("how", ["no effect", "gone"])
def test_a_hook_that_fails_refuses_one_feature_by_name(how: str, tmp_path: pathlib.Path) -> None:
    if how == "no effect":  # JAX no longer asks: found by the self-check
        done = python(
            _PROGRAM,
            MPIGRAD_WITHOUT_JAX_HOOK="split checkpoint",
            XDG_CACHE_HOME=str(tmp_path),
        )
        (kept,) = (tmp_path / "mpigrad").iterdir()
        assert "jax.checkpoint" in kept.read_text()
    else:
        gone = "import jax.interpreters.partial_eval as pe, jax.extend.core.primitives as p\n"
        gone += "del pe.dce_rules[p.remat_p]\n"
        done = python(gone + _PROGRAM, XDG_CACHE_HOME=str(tmp_path))
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert lines.get("plain") == lines.get("scan") == lines.get("jit") == "is right", (
        done.stdout + done.stderr
    )
    assert lines["without"] == "messages is right"
    assert lines["checkpoint"].startswith(
        "UnsupportedJAXError derivatives of messages in jax.checkpoint: not supported with "
        f"JAX {jax.__version__}"
    ), lines["checkpoint"]
    assert "pip install 'jax<=" in lines["checkpoint"]


@pytest.mark.launcher
def test_the_result_of_the_self_check_is_kept(tmp_path: pathlib.Path) -> None:
    program = """
import jax, mpigrad as mg
from mpigrad.autodiff import self_check as check
examine, made = check.examine, []
check.examine = lambda: made.append(1) or examine()
jax.make_jaxpr(mg.grad(mg.allreduce))(1.0)
print("made", len(made))
"""
    for times in (1, 0):
        done = python(program, XDG_CACHE_HOME=str(tmp_path))
        assert done.stdout.split() == ["made", str(times)], done.stderr
    (kept,) = (tmp_path / "mpigrad").iterdir()
    assert kept.name.startswith(f"jax-{jax.__version__}-mpigrad-")
    # What cannot be read or written is no error.
    assert self_check._read(kept) == {}
    kept.write_text("not JSON")
    assert self_check._read(kept) is None
    self_check._write(kept / "below a file", {})


@pytest.mark.launcher
@pytest.mark.long("a whole check of JAX in a process of its own; the stored check is short")
@pytest.mark.cases(
    *("deep", "at compile time"),
    reason="an error in the check, and no check; the others have a check without errors",
)
@pytest.mark.parametrize("around", ["leaks", "deep", "at compile time", "no home"])
def test_a_first_message_in_an_odd_place(around: str, tmp_path: pathlib.Path) -> None:
    """What is odd is neither kept for other processes, nor are messages of the check sent."""
    program = """
import contextlib, os, sys, jax, jax.numpy as jnp, mpigrad as mg
def gradient():
    return mg.grad(lambda x: jax.checkpoint(lambda x: mg.allreduce(x))(x))(1.0)
around = {"leaks": jax.checking_leaks, "at compile time": jax.ensure_compile_time_eval}
def deep(n):
    return deep(n - 1) if n else gradient()
case = sys.argv[-1]
with around.get(case, contextlib.nullcontext)():
    try:
        deep(600 if case == "deep" else 0)
    except RecursionError:
        pass
os.write(1, f"{float(gradient())} ".encode())
"""
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    if around == "no home":
        home = {"HOME": "", "XDG_CACHE_HOME": ""}
    if around == "at compile time":  # programs with messages would run, not be traced
        file = tmp_path / "program.py"
        file.write_text(program)
        done = mpigrad("launch", "-n", 2, file, around, **home)
        assert done.stdout.split() == ["2.0", "2.0"], done.stderr
    else:
        done = python(program, around, **home)
        assert done.stdout.split() == ["1.0"], done.stderr
    done = python(program, "nothing", **home)
    assert done.stdout.split() == ["1.0"], done.stderr
    kept = tmp_path / "mpigrad"
    assert around == "no home" or [f.read_text() for f in kept.iterdir()] == ["{}"]


@pytest.mark.launcher
def test_versions_outside_of_the_range() -> None:
    newer = "import jax; jax.__version__, jax.__version_info__ = '99.1.0', (99, 1, 0)\n"
    done = python(newer + "import mpigrad; mpigrad.grad")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("mpigrad: JAX 99.1.0 is newer than 0.")
    older = "import jax; jax.__version__, jax.__version_info__ = '0.7.2', (0, 7, 2)\n"
    done = python(older + "import mpigrad; mpigrad.grad")
    assert "mpigrad: expected JAX 0.8 or newer, got 0.7.2" in done.stderr


@pytest.mark.launcher
def test_the_warning_comes_from_rank_0_alone(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "newer.py"
    program.write_text(
        "import jax; jax.__version__, jax.__version_info__ = '99.1.0', (99, 1, 0)\nimport mpigrad\n"
    )
    done = mpigrad("launch", "-n", 2, program)
    assert done.returncode == 0 and done.stderr.count("is newer than") == 1, done.stderr


# ---- messages in more of JAX ----


@pytest.mark.cases("jit", "scan", reason="jit traces what eager runs")
@pytest.mark.parametrize("where", ["eager", "jit", "scan"])
def test_debug_prints_beside_messages_in_a_checkpoint(where: str, comm: Communicator) -> None:
    """JAX lost the value that is printed: KeyError: Var(id=...)."""

    def step(x: Any) -> Any:
        y = mg.allreduce(jnp.sin(x))
        jax.debug.callback(seen.append, y)
        jax.debug.print("{y}", y=y)
        return y

    def f(x: Any) -> Any:
        g = jax.checkpoint(step)
        if where == "scan":
            return jax.lax.scan(lambda s, _: (s + g(x), None), jnp.zeros_like(x), length=2)[0].sum()
        return g(x).sum()

    seen: list[Any] = []
    x = jnp.arange(3.0) + comm.rank
    gradient = mg.grad(f)
    got = (mg.jit(gradient) if where == "jit" else gradient)(x)
    jax.effects_barrier()
    times = 2 if where == "scan" else 1
    close(got, times * comm.size * np.cos(np.asarray(x)))
    assert len(seen) == times  # in the forward pass alone
    close(seen[0], sum(np.sin(np.arange(3.0) + r) for r in range(comm.size)))


@pytest.mark.parametrize("transform", [jax.grad, mg.grad], ids=["jax.grad", "mpigrad.grad"])
@pytest.mark.parametrize("around", ["nothing", "jit", "scan", "checkpoint"])
def test_messages_in_the_rule_of_custom_gradient_are_refused(around: str, transform: Any) -> None:
    """Its adjoint is left out where the operand is constant: wrong gradients in every step."""

    @jax.custom_gradient
    def total(x: Any) -> Any:
        return mg.allreduce(x), lambda ct: (mg.allreduce(ct),)

    wraps = {
        "nothing": lambda f: f,
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "scan": lambda f: lambda x: jax.lax.scan(lambda s, _: (f(s), None), x, length=2)[0],
    }
    f = wraps[around](total)
    with pytest.raises(ValueError, match=r"jax\.custom_gradient .* mpigrad\.custom_vjp"):
        transform(lambda x: f(x).sum())(jnp.ones(2))


def test_messages_in_an_operator_of_lineax_are_refused() -> None:
    lineax = pytest.importorskip("lineax")
    shape = jax.ShapeDtypeStruct((2,), jnp.float64)
    tag = lineax.positive_semidefinite_tag
    operator = lineax.FunctionLinearOperator(lambda x: 3 * x + mg.allreduce(x), shape, tag)
    solve = lambda b: lineax.linear_solve(operator, b, lineax.CG(1e-6, 1e-6)).value
    for transformed in (solve, jax.jit(solve), mg.jit(solve), mg.grad(lambda b: solve(b).sum())):
        with pytest.raises(KeyError, match=r"lineax\.linear_solve.* Use mpigrad\.sparse\.solve"):
            transformed(jnp.ones(2))


@pytest.mark.launcher
def test_an_adjoint_that_a_rank_leaves_out_names_the_remedy(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "plain.py"
    program.write_text(
        "import jax, jax.numpy as jnp, mpigrad as mg\n"
        "from mpi4py import MPI\n"
        "x = jnp.ones(2)\n"
        "rank = MPI.COMM_WORLD.rank\n"
        "jax.grad(lambda x: jnp.sum(mg.allreduce(x if rank == 0 else jnp.ones(2)) * x))(x)\n"
        "mg.barrier()\n"
    )
    done = mpigrad("launch", "-n", 2, program, MPIGRAD_GUARD="1")
    assert done.returncode != 0
    assert "at the adjoint of" in done.stderr and "replace them by mpigrad.grad" in done.stderr, (
        done.stderr
    )


def test_programs_that_jax_lowers_in_two_steps(comm: Communicator) -> None:
    """Since JAX 0.12 expm is made of primitives of a higher level."""

    def f(x: Any) -> Any:
        return jnp.sum(
            jax.scipy.linalg.expm(mg.allreduce(x) * jnp.array([[0.0, 1.0], [-1.0, 0.0]]))
        )

    total = comm.size * 0.3
    close(mg.jit(f)(0.3), 2 * np.cos(total))
    _, slope = mg.jit(lambda x: mg.jvp(f, (x,), (1.0,)))(0.3)
    close(slope, -2 * comm.size * np.sin(total))
    close(mg.jit(mg.grad(f))(0.3), -2 * comm.size * np.sin(total))


# ---- flags ----


@pytest.mark.launcher
def test_the_users_xla_flags_are_kept_and_have_an_effect(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "flags.py"
    program.write_text(
        "import os, jax, mpigrad\n"
        "os.write(1, f\"{os.environ['XLA_FLAGS']}|{os.environ['NPROC']}\\n\".encode())\n"
        "jax.jit(lambda x: x + 1)(1.0)\n"
    )
    own = "--xla_dump_to=" + str(tmp_path / "dump")
    done = mpigrad("launch", "-n", 2, program, XLA_FLAGS=own)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        flags, _, threads = line.partition("|")
        assert threads == "2"  # of XLA's pools, on a node of any size
        words = flags.split()
        assert own in words and "--xla_cpu_multi_thread_eigen=false" in words
        # XLA stops reading at the first word without dashes.
        dashed = [word.startswith("--") for word in words]
        assert dashed == sorted(dashed, reverse=True), line
    assert list((tmp_path / "dump").iterdir())
