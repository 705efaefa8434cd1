"""Make the tables of bench/, one command each, and a page of what they found.

bench/tables.toml says how each is run and what it is compared with. Other libraries are installed
into an environment of their own, on demand. One that cannot be installed is named and left out.

Only the standard library is imported: the programs import JAX and MPI.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence

from processor import processor

from mpigrad.launch.launcher import cores

__all__ = ["BenchError", "Peers", "Table", "run", "tables"]


PROGRAMS = pathlib.Path(__file__).resolve().parent


class BenchError(RuntimeError):
    """The tables cannot be made; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of bench/tables.toml.

    Attributes
    ----------
    about
        What is compared, in a line.
    command
        The program and its arguments; {json}, {picture} (the files that it writes) and {python}
        (which has the peers) are replaced. A first word "launch" stands for `mpigrad launch`.
    quick
        Further arguments, for a run of a minute or two.
    peers
        Groups of requirements, separated by spaces: what pip installs together.
    """

    name: str
    about: str
    command: tuple[str, ...]
    quick: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


def tables(directory: pathlib.Path) -> dict[str, Table]:
    """The tables of a directory, by name, in their order."""
    found = tomllib.loads((directory / "tables.toml").read_text())
    return {
        name: Table(
            name,
            row["about"],
            tuple(row["command"]),
            tuple(row.get("quick", ())),
            tuple(row.get("peers", ())),
        )
        for name, row in found.items()
    }


class Peers:
    """The environment of the other libraries: this one's packages, and what is added to them."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.log = directory / "install.log"
        self._tried: dict[str, str] = {}

    def install(self, requirements: str) -> str:
        """Install a group of requirements; returns why it was impossible, or ""."""
        if requirements not in self._tried:
            self._make()
            mark = self.directory / f"{'_'.join(requirements.split())}.installed"
            if not mark.exists():
                print(f"bench: installing {requirements} into {self.directory}", flush=True)
                command = [str(self.python), "-m", "pip", "install", *requirements.split()]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, env=self._without_cuda()
                )
                with self.log.open("a") as log:
                    log.write(f"{' '.join(command)}\n{done.stdout}{done.stderr}\n")
                if done.returncode:
                    self._tried[requirements] = f"{_cause(done.stderr)} (all output: {self.log})"
                    return self._tried[requirements]
                mark.touch()
            self._tried[requirements] = ""
        return self._tried[requirements]

    def _without_cuda(self) -> dict[str, str]:
        """The environment of a build for CPUs.

        mpi4jax builds its part for GPUs if nvcc is on the path, also if CUDA's headers are missing.
        An existing CUDA_PATH without headers turns this off.
        """
        empty = self.directory / "no-cuda"
        empty.mkdir(exist_ok=True)
        return os.environ | {"CUDA_PATH": str(empty)}

    def _make(self) -> None:
        if self.python.exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        venv.create(self.directory, with_pip=True, symlinks=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        host = pathlib.Path(sys.prefix) / "lib" / version / "site-packages"
        # What is installed here is there, too, editable installs included.
        line = f"import site; site.addsitedir({str(host)!r})\n"
        (self.directory / "lib" / version / "site-packages" / "host.pth").write_text(line)


def _cause(output: str) -> str:
    """Return the line of pip's output that says why an installation failed.

    The first error is the cause, for example of a compiler. Later lines say only that it failed.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line.lower()]
    return (errors or lines[-1:] or ["pip failed without a message"])[0]


def run(names: Sequence[str], out: pathlib.Path, *, quick: bool = False, peers: bool = True) -> int:
    """Make tables and a page of them in `out`; 0 when every program came to its end.

    Parameters
    ----------
    names
        Of tables; none for all.
    out
        Directory for NAME.json, NAME.txt (what was printed), machine.json and report.html.
    quick
        With the shorter arguments.
    peers
        Install other libraries. Without, those are measured that are here already.

    Raises
    ------
    BenchError
        Before the first table: there is no such table.
    """
    directory = PROGRAMS
    known = tables(directory)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(
            f"bench: there is no table {', '.join(unknown)}; it has {', '.join(known)}"
        )
    out.mkdir(parents=True, exist_ok=True)
    environment = Peers(directory.parent / "build" / "peers")
    machine_file = out / "machine.json"
    machine_file.write_text(json.dumps(machine(), indent=1) + "\n")
    failed, missing = [], {}
    for name in names or known:
        table = known[name]
        for group in table.peers if peers else ():
            why = environment.install(group)
            if why:
                missing[group] = why
                print(f"bench: without {group}: {why}", flush=True)
        python = environment.python if environment.python.exists() else pathlib.Path(sys.executable)
        print(f"bench: {name}: {table.about}", flush=True)
        if _make(table, directory, out, python, quick):
            failed.append(name)
            print(f"bench: {name} failed; the other tables go on", flush=True)
    (out / "missing.json").write_text(json.dumps(missing, indent=1) + "\n")
    page = subprocess.run(
        [sys.executable, str(directory / "report_page.py"), str(out)], check=False, env=_plain()
    )
    if failed:
        print(f"bench: failed: {', '.join(failed)}", flush=True)
    print(f"bench: {out / 'report.html'}", flush=True)
    return 1 if failed or page.returncode else 0


def _make(
    table: Table, directory: pathlib.Path, out: pathlib.Path, python: pathlib.Path, quick: bool
) -> int:
    """Run a table's program from the root of the sources; its output is shown and kept."""
    replaced = {
        # Relative to the working directory of the programs, so that output has no machine's paths.
        "json": os.path.relpath(out / f"{table.name}.json", directory.parent),
        "picture": os.path.relpath(out / f"{table.name}.png", directory.parent),
        "python": str(python),
    }
    words = [word.format(**replaced) for word in (*table.command, *(table.quick if quick else ()))]
    launch = ["-m", "mpigrad", *words] if words[0] == "launch" else words
    process = subprocess.Popen(
        [str(python), *launch],
        cwd=directory.parent,
        env=_plain(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with (out / f"{table.name}.txt").open("w") as kept:
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
    return process.wait()


def _plain() -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": "1"}


def machine() -> Mapping[str, object]:
    """Describe the machine and the time of the measurement."""
    memory = 0
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal"):
                memory = int(line.split()[1]) // 2**20
    except (OSError, ValueError):
        pass  # not Linux
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor(),
        "cores": cores(),
        "memory, GiB": memory,
        "load when it began": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }
