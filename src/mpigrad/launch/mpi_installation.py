"""Which MPI library mpi4py loads, and which launcher belongs to it.

Only the standard library is imported: this is asked before there is any MPI, also where there is
none, or two.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from mpigrad.runtime.world import MPIError

__all__ = ["Family", "Launcher", "Library", "families", "find_launcher", "mpi_library"]

_SETTINGS = pathlib.Path(__file__).with_name("launch_settings.toml")

# MPI is loaded, not initialised: an MPI_Init here would be a world of its own.
_PROBE = """
import json, re, mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    paths = dict.fromkeys(line.split()[-1] for line in maps if "/" in line)
found = [path for path in paths if re.search(r"/libmpi(_abi|ch|_cray|_intel)?\\.so", path)]
print(json.dumps({"mpi4py": mpi4py.__version__, "version": MPI.Get_library_version(),
                  "path": found[0] if found else ""}))
"""


@dataclasses.dataclass(frozen=True)
class Family:
    """Launchers that are told the same things in the same way (a table of the settings file)."""

    key: str
    name: str
    library: str
    launcher: str
    names: tuple[str, ...]
    count: tuple[str, ...]
    forward: tuple[str, ...]
    hosts: tuple[str, ...]
    srun: tuple[str, ...]
    install: str
    environment: Mapping[str, str]
    root: Mapping[str, str]
    oversubscribed: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads."""

    version: str
    path: str
    mpi4py: str
    family: Family | None


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A program that starts ranks."""

    path: str
    version: str
    family: Family | None

    def __str__(self) -> str:
        return f"{self.path} ({self.family.name if self.family else self.version or 'unknown'})"


@functools.cache
def _settings() -> dict[str, Any]:
    return tomllib.loads(_SETTINGS.read_text())


def common_environment() -> dict[str, str]:
    """What is set for the ranks of every family."""
    return dict(_settings()["environment"])


def forwarded_prefixes() -> tuple[str, ...]:
    """How the user's variables begin which ranks on other machines get, too."""
    return tuple(_settings()["forward"]["prefixes"])


@functools.cache
def families() -> tuple[Family, ...]:
    """The MPI families of the settings file."""
    return tuple(
        Family(
            key=key,
            name=table["name"],
            library=table.get("library", ""),
            launcher=table["launcher"],
            names=tuple(table["names"]),
            count=tuple(table["count"]),
            forward=tuple(table["forward"]),
            hosts=tuple(table.get("hosts", ())),
            srun=tuple(table.get("srun", ())),
            install=table["install"],
            environment=table.get("environment", {}),
            root=table.get("root", {}),
            oversubscribed=table.get("oversubscribed", {}),
        )
        for key, table in _settings()["family"].items()
    )


def family_of_library(version: str) -> Family | None:
    """The family whose pattern is in MPI_Get_library_version's text."""
    return next((f for f in families() if f.library and re.search(f.library, version)), None)


def mpi_library(python: str = sys.executable) -> Library:
    """The MPI library that `import mpi4py.MPI` loads in `python`, asked in a process of its own.

    Raises
    ------
    MPIError
        mpi4py is missing, or finds no MPI library.
    """
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=dict(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise MPIError("mpigrad: loading MPI through mpi4py did not end within 60 s") from None
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines()
        cause = lines[-1] if lines else f"exit code {probe.returncode}"
        if "No module named 'mpi4py'" in cause:
            raise MPIError("mpigrad: mpi4py is not installed: pip install mpi4py")
        raise MPIError(
            f"mpigrad: mpi4py cannot load an MPI library ({cause}).\n"
            "  Install one: apt-get install openmpi-bin libopenmpi-dev (Debian, Ubuntu), or "
            "pip install mpich (any Linux, no root needed; without hypre)"
        )
    found = json.loads(probe.stdout.splitlines()[-1])
    version = found["version"].replace("\0", "").strip()
    return Library(
        version=re.sub(r"\s+(Version:\s+)?", " ", version.splitlines()[0]).split(", package")[0],
        path=os.path.realpath(found["path"]) if found["path"] else "",
        mpi4py=found["mpi4py"],
        family=family_of_library(version),
    )


def identify(path: str) -> Launcher:
    """What the launcher at `path` says it is."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return Launcher(path, "", None)
    text = f"{answer.stdout}\n{answer.stderr}".strip()
    family = next((f for f in families() if re.search(f.launcher, text)), None)
    return Launcher(path, text.splitlines()[0].strip() if text else "", family)


def launchers(library: Library) -> Iterator[Launcher]:
    """Launchers that may belong to `library`, the likeliest first.

    Those installed with the library come first (`prefix/lib/libmpi.so` → `prefix/bin/mpiexec`, as
    in PyPI's wheels, conda and modules of clusters), then those on PATH.
    """
    names = library.family.names if library.family else ("mpiexec", "mpirun")
    every = dict.fromkeys((*names, *(n for f in families() for n in f.names)))
    parents = pathlib.Path(library.path).parents if library.path else ()
    directories = [str(prefix / "bin") for prefix in list(parents)[1:4]]
    directories.append(os.path.dirname(sys.executable))
    directories += os.environ.get("PATH", os.defpath).split(os.pathsep)
    seen: set[str] = set()
    for directory in directories:
        for name in every:
            path = shutil.which(name, path=directory) if directory else None
            if path is None or os.path.realpath(path) in seen:
                continue
            seen.add(os.path.realpath(path))
            yield identify(path)


def find_launcher(library: Library) -> Launcher:
    """The launcher that belongs to the MPI library which mpi4py loads.

    MPIGRAD_MPIEXEC names one to be taken; it has to be of the same family.

    Raises
    ------
    MPIError
        There is none, or only those of another MPI, with which every rank would be alone.
    """
    wanted = os.environ.get("MPIGRAD_MPIEXEC")
    if wanted:
        path = shutil.which(wanted)
        if path is None:
            raise MPIError(f"mpigrad: MPIGRAD_MPIEXEC={wanted}: there is no such program")
        chosen = identify(path)
        if _fits(chosen, library):
            return chosen
        raise MPIError(_other_mpi(library, [chosen], "MPIGRAD_MPIEXEC names"))
    others: list[Launcher] = []
    for launcher in launchers(library):
        if launcher.family is None or launcher.family.key == "slurm":
            continue
        if _fits(launcher, library):
            return launcher
        others.append(launcher)
    srun = shutil.which("srun")
    if srun and "SLURM_JOB_ID" in os.environ:
        return identify(srun)
    if others:
        raise MPIError(_other_mpi(library, others, "found only"))
    install = library.family.install if library.family else "the mpiexec of this MPI"
    raise MPIError(
        f"mpigrad: no mpiexec found for {library.version} ({library.path}).\n"
        f"  Install it: {install}; or name it: MPIGRAD_MPIEXEC=/path/to/mpiexec"
    )


def _fits(launcher: Launcher, library: Library) -> bool:
    if launcher.family is None:
        return False
    if library.family is None or launcher.family.key == "slurm":
        return True  # nothing is known against it; the ranks compare their number at start
    return launcher.family.key == library.family.key


def _other_mpi(library: Library, found: list[Launcher], verb: str) -> str:
    install = library.family.install if library.family else "its own mpiexec"
    return (
        f"mpigrad: mpi4py runs on {library.version} ({library.path}), but {verb} "
        f"{', '.join(map(str, found))}, which belongs to another MPI: every rank would be a world "
        f"of its own.\n  Install the launcher of this MPI: {install}; or name it: "
        "MPIGRAD_MPIEXEC=/path/to/mpiexec"
    )
