"""`make test-hosts`: the tests of this directory, in a network that nobody else sees.

They run in namespaces of their own: other processes, mounts and interfaces of this machine are out
of their reach, and the kernel removes all of theirs with the last process, however it ends. What
follows goes to pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
_prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork only the call is left
NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def main() -> int:
    """Run the tests. Return 0 if all passed."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        print(
            f"test-hosts: there is no {', '.join(missing)}: "
            "apt-get install util-linux iproute2 (Debian, Ubuntu)",
            file=sys.stderr,
        )
        return 1
    apart = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *NAMESPACES]
    if subprocess.run([*apart, "true"], check=False).returncode != 0:
        print(
            "test-hosts: no namespaces of one's own here: run it as root, or allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1)",
            file=sys.stderr,
        )
        return 1
    pytest = [sys.executable, "-m", "pytest", "-q", f"--confcutdir={HERE}", str(HERE)]
    environment = dict(os.environ) | {"MPIGRAD_TEST_HOSTS": "1"}
    # MPI needs an interface, also in the process that starts others.
    words = [*apart, "sh", "-c", 'ip link set lo up && exec "$@"', "up", *pytest, *sys.argv[1:]]
    # unshare is deaf to signals: let it end with this process, and the namespaces with it.
    tests = subprocess.Popen(
        words,
        cwd=HERE.parent.parent,
        env=environment,
        preexec_fn=lambda: _prctl(1, int(signal.SIGKILL), 0, 0, 0),  # noqa: PLW1509
    )
    with contextlib.suppress(KeyboardInterrupt):
        return tests.wait()
    return tests.wait()


if __name__ == "__main__":
    sys.exit(main())
