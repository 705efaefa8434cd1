"""Where a program of one rank starts: environments of sites, simulated by their variables.

`python tests/sites.py [PYTHON ...]` prints the table of docs/installing.md. PYTHON: other
interpreters with mpigrad, each with the MPI that its mpi4py finds.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys

_SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOBID": "5", "SLURM_NNODES": "1", "SLURM_NTASKS": "1"}
_SLURM |= {"SLURM_NODELIST": socket.gethostname(), "SLURM_TASKS_PER_NODE": "1"}
_STEP = {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_NOBODY = "127.0.0.1:9"  # a port that takes no connections
_PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.5.0", "PMIX_SECURITY_MODE": "native"}
_PMIX |= {f"PMIX_SERVER_URI{n}": f"pmix-server.1;tcp4://{_NOBODY}" for n in ("2", "21", "41")}


@dataclasses.dataclass(frozen=True)
class Site:
    """A place where Python is started without `mpiexec` or `srun`, and its variables."""

    name: str
    variables: dict[str, str]


SITES = (
    Site("laptop, login node, notebook, documentation build", {}),
    Site("shell in an allocation (`salloc`)", _SLURM | {"SLURM_NTASKS": "4"}),
    Site("`srun --pty` without PMI", _SLURM | _STEP | {"SLURM_STEP_NUM_TASKS": "1"}),
    Site(
        "interactive step of Slurm", _SLURM | _STEP | {"SLURM_STEP_ID": "4294967290"}
    ),
    Site("container with the variables of PMIx, without its server", _SLURM | _STEP | _PMIX),
    Site("child with the variables of PMI-2, without its socket",
         {"PMI_FD": "99", "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_JOBID": "5.0"}),
    Site("shell with the variables of a job that has ended",
         {"PMI_PORT": _NOBODY, "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_ID": "0"}),
    Site("shell with the variables of PALS, without its directory",
         {"PALS_RANKID": "0", "PALS_SPOOL_DIR": "/nonexistent", "PALS_APID": "a"}),
    Site("shell with the variables of Open MPI's `mpiexec -n 1`",
         {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", **_PMIX}),
    Site("no MPI on the machine", {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}),
)  # fmt: skip

_USED = """
import sys
import mpigrad as mg
assert not {"mpi4py.MPI", "jax"} & {*sys.modules}, "the import starts MPI"
from mpi4py import MPI
import jax, jax.numpy as jnp
def energy(x):
    return jnp.sum(mg.sendrecv(x**2, dest=0, source=0)) + mg.allreduce(x[0], op=MPI.MAX)
gradient = mg.grad(energy, loss="replicated")(jnp.arange(3.0))
version = MPI.Get_library_version().replace(" Version:     ", "").splitlines()[0]
print(mg.default_communicator().size, gradient.tolist(), version.split(",")[0])
"""
_BARE = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"


def start_and_use(site: Site, python: str = sys.executable) -> tuple[bool, str]:
    """Return whether the gradient of a message is right at a site, and the text of the MPI."""
    text = start(site, _USED, python)
    expected = "1 [1.0, 2.0, 4.0] "
    return text.startswith(expected), text.removeprefix(expected)


def start(site: Site, code: str, python: str = sys.executable) -> str:
    """Return what a Python program prints at a site, or the first line of its errors."""
    prefixes = ("OMPI_", "PMI", "SLURM_", "PALS_", "MPIGRAD_", "MPI4PY_")
    plain = {name: v for name, v in os.environ.items() if not name.startswith(prefixes)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [python, "-c", code],
        env=plain | root | site.variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.strip(" -")]
    return done.stdout.strip() if done.returncode == 0 else f"({(errors or ['no text'])[0]})"


def main(pythons: list[str]) -> None:
    """Print the table."""
    names, columns = [], []
    for python in pythons:
        names.append(start_and_use(SITES[0], python)[1])
        column = []
        for site in SITES:
            works, name = start_and_use(site, python)
            which = "" if name == names[-1] else ", on that of one rank"
            text = f"starts{which}" if works else name
            bare = start(site, _BARE, python)
            column.append(text + ("" if bare.endswith("1") else " *"))
        columns.append(column)
    print("| where Python is started | " + " | ".join(names) + " |")
    print("|---" * (1 + len(names)) + "|")
    for site, *texts in zip(SITES, *columns, strict=True):
        print(f"| {site.name} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
