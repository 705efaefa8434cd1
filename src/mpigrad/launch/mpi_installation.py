"""Find the MPI library that mpi4py loads, and the launcher that belongs to it.

Only the standard library is imported, because this must work before MPI is loaded, and with no MPI
or two MPIs installed.
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

from mpigrad.runtime import mpi_library as mpi_library_file
from mpigrad.runtime.world import MPIError

__all__ = ["Family", "Launcher", "Library", "families", "find_launcher", "mpi_library"]

_SETTINGS = pathlib.Path(__file__).with_name("launch_settings.toml")

# Load MPI without initialising it: MPI_Init would start a separate world here.
_PROBE = """
import json, runpy, sys, mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
version = MPI.Get_library_version()
path, others = runpy.run_path(sys.argv[1])["find_mpi_libraries"](version)
print(json.dumps({"mpi4py": mpi4py.__version__, "version": version, "path": path,
                  "others": others, "threads": mpi4py.rc.thread_level}))
"""


@dataclasses.dataclass(frozen=True)
class Family:
    """MPI libraries and launchers with the same options (a table of the settings file)."""

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
    """The MPI library that mpi4py loads, and other MPI libraries in the same process."""

    version: str
    path: str
    mpi4py: str
    family: Family | None
    others: tuple[str, ...] = ()
    thread_level: str = "multiple"


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
    """Return the variables that are set for the ranks of every family."""
    return dict(_settings()["environment"])


def forwarded_prefixes() -> tuple[str, ...]:
    """Return the prefixes of the user's variables that ranks on other machines get."""
    return tuple(_settings()["forward"]["prefixes"])


@functools.cache
def families() -> tuple[Family, ...]:
    """Return the MPI families of the settings file."""
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
    """Return the family whose pattern matches the text of MPI_Get_library_version, or None."""
    return next((f for f in families() if f.library and re.search(f.library, version)), None)


def mpi_library(python: str = sys.executable) -> Library:
    """Return the MPI library that `import mpi4py.MPI` loads in `python`, found in a new process.

    Raises
    ------
    MPIError
        If mpi4py is missing or finds no MPI library.
    """
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE, mpi_library_file.__file__],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=dict(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise MPIError(
            "mpigrad: `import mpi4py.MPI` did not end within 60 s.\n"
            "  Check the file system and MPI's settings, then try it in Python."
        ) from None
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines()
        cause = lines[-1] if lines else f"exit code {probe.returncode}"
        if "No module named 'mpi4py'" in cause:
            raise MPIError("mpigrad: mpi4py is not installed.\n  Run: pip install mpi4py")
        raise MPIError(mpi_library_file.no_mpi_text(cause))
    answer = json.loads(probe.stdout.splitlines()[-1])
    version = answer["version"].replace("\0", "").strip()
    return Library(
        version=re.sub(r"\s+(Version:\s+)?", " ", version.splitlines()[0]).split(", package")[0],
        path=os.path.realpath(answer["path"]) if answer["path"] else "",
        mpi4py=answer["mpi4py"],
        family=family_of_library(version),
        others=tuple(answer["others"]),
        thread_level=answer["threads"],
    )


def identify(path: str) -> Launcher:
    """Identify the launcher at `path` by its version text."""
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
    """Iterate over launchers that may belong to `library`, the most likely first.

    Launchers installed with the library come first (`prefix/lib/libmpi.so` → `prefix/bin/mpiexec`,
    as in PyPI wheels, conda and cluster modules), then launchers on PATH.
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
    """Return the launcher that belongs to the MPI library which mpi4py loads.

    MPIGRAD_MPIEXEC selects a launcher, which must be of the same family.

    Raises
    ------
    MPIError
        If a launcher is missing, or all launchers belong to another MPI.
    """
    wanted = os.environ.get("MPIGRAD_MPIEXEC")
    if wanted:
        path = shutil.which(wanted)
        if path is None:
            raise MPIError(
                f"mpigrad: MPIGRAD_MPIEXEC={wanted}: there is no such program.\n"
                "  Set it to the path of an mpiexec, or unset it."
            )
        chosen = identify(path)
        if _fits(chosen, library):
            return chosen
        raise MPIError(_other_mpi(library, [chosen], "MPIGRAD_MPIEXEC is"))
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
        raise MPIError(_other_mpi(library, others, "the only launcher found is"))
    install = library.family.install if library.family else "its own mpiexec"
    raise MPIError(
        f"mpigrad: no mpiexec found for {library.version} ({library.path}).\n"
        f"  Install it ({install}), or set MPIGRAD_MPIEXEC=/path/to/mpiexec."
    )


def _fits(launcher: Launcher, library: Library) -> bool:
    if launcher.family is None:
        return False
    if library.family is None or launcher.family.key == "slurm":
        return True  # cannot be checked here: the ranks compare their number at start
    return launcher.family.key == library.family.key


def _other_mpi(library: Library, candidates: list[Launcher], verb: str) -> str:
    install = library.family.install if library.family else "its own mpiexec"
    return (
        f"mpigrad: mpi4py runs on {library.version} ({library.path}), but {verb} "
        f"{', '.join(map(str, candidates))}, which belongs to another MPI: every rank would be "
        f"alone in its world.\n  Install the launcher of this MPI ({install}), or set "
        "MPIGRAD_MPIEXEC=/path/to/mpiexec."
    )
