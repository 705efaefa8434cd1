"""Leave out each hook of `_jax_repairs.py` in turn: the self-check or its test must fail.

    python tools/jax_hooks.py [name of a hook ...]

Run it with the Python of the environment whose JAX is examined, as `make test-jax` makes one. A
hook that nothing misses is not needed with this JAX, or is not tested. It is listed and the exit
code is 1, unless HOOKS says that this JAX does not need it.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax

from mpigrad.operations._jax_repairs import HOOKS

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECK = """
from mpigrad.operations import _jax_private, carrier
from mpigrad.autodiff import self_check as check
carrier.pending_checks.clear()
found = check.examine()
failed = {**found.failed, **found.errors, **_jax_private.missing()}
print("; ".join(failed) if failed else "", end="")
"""


def without(name: str) -> dict[str, str]:
    """An environment in which the hook is left out."""
    return {**os.environ, "MPIGRAD_WITHOUT_JAX_HOOK": name}


def main() -> int:
    """Examine the hooks, and print a line for each."""
    chosen = sys.argv[1:] or [hook.name for hook in HOOKS]
    unnoticed = 0
    print(f"JAX {jax.__version__}")
    for hook in (hook for hook in HOOKS if hook.name in chosen):
        check = subprocess.run(
            [sys.executable, "-c", CHECK],
            env=without(hook.name),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check.returncode or check.stdout:
            caught = f"the self-check ({check.stdout.strip() or 'an error'})"
        else:
            tests = subprocess.run(
                [sys.executable, "tests/run.py", "-n", "2", *hook.test.split(), "-x"],
                env={**without(hook.name), "MPIGRAD_TEST_BUILD": "build/jax-hooks"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=1500,
                check=False,
            )
            failed = [line for line in tests.stdout.splitlines() if line.startswith("FAILED")]
            caught = (failed or ["a test that does not end"])[0][:100] if tests.returncode else ""
        needed = not hook.until or jax.__version_info__ < hook.until
        unnoticed += needed and not caught
        print(f"{hook.name:>20}: {caught or ('not needed' if not needed else 'NOT NOTICED')}")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
